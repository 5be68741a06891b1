"""``build_app``, which a Ray Serve config file names in ``import_path``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from outrider.runtime.addons.ray.options import parse_args
from outrider.runtime.addons.ray.replica import Replica, open_process
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

SLOTS_IN_USE = 0.75
"""Share of a replica's slots from which on there is to be another replica."""
STOP_S = 15.0
"""Beside the time that running requests get: to notice a shutdown, to deliver last answers, to end a step."""
HEALTH_EVERY_S = 2.0


def build_app(args: Mapping[str, object]) -> serve.Application:
    """Return the application; ``args`` are those of ``outrider.runtime.addons.ray.options``.

    Raises:
        ConfigError: an argument cannot be used.
    """
    options, served = parse_args(args)
    slots = served.config.max_running
    deployment = serve.deployment(Replica).options(
        name="Outrider",
        max_ongoing_requests=slots,
        max_queued_requests=served.config.max_queued,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests or SLOTS_IN_USE * slots,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class="outrider.runtime.addons.ray.router:AffinityRouter"
        ),
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        health_check_period_s=HEALTH_EVERY_S,
        graceful_shutdown_timeout_s=served.config.drain_timeout_s + STOP_S,
    )
    open_model = partial(open_process, Path(options.bundle), served)
    return deployment.bind(open_model, trusts_tenants=options.trusts_tenants)
