"""Ray Serve's choice of a replica, by session or prefix; it runs in Ray's proxies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from outrider.runtime.addons.ray.affinity import groups, key_of
from ray.serve.request_router import RequestRouter

log = logging.getLogger(__name__)


class AffinityRouter(RequestRouter):
    """Sends requests of one session, or with one prefix, to one replica while it has room."""

    async def choose_replicas(
        self, candidate_replicas: Sequence[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas in the order to try them; of a group, Ray takes the one with the fewest requests."""
        # What is raised here is logged by Ray, and the call then hangs until its deadline.
        try:
            if pending_request is None:
                return [[*candidate_replicas]]
            metadata = pending_request.metadata
            context = metadata.grpc_context
            shown = () if context is None else context.invocation_metadata()
            names = [one.replica_id.unique_id for one in candidate_replicas]
            order = groups(key_of(metadata.session_id, shown), names)
            return [[candidate_replicas[index] for index in group] for group in order]
        except Exception:
            log.exception("a request is sent to any replica")
            return [[*candidate_replicas]]
