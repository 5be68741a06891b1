"""The configurations that docs/replicas.md gives: what of them can be held against code is."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider.affinity import PREFIX_KEY, SESSION_KEY, affinity_metadata
from outrider.channel import CHANNEL_OPTIONS, SERVICE, SERVICE_CONFIG
from outrider.runtime.addons.ray import affinity
from outrider.runtime.addons.ray.options import parse_args

from tests.environments import Environments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replicas.md").read_text(encoding="utf-8")
XDS = ("xds-protos==1.85.0", "PyYAML==6.0.3")
PARSE = """
import sys, yaml
from google.protobuf.json_format import ParseDict
from envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
ParseDict(yaml.safe_load(sys.stdin), Bootstrap())
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


def config_with(key: str) -> tuple[str, dict[str, Any]]:
    """Return the YAML block that has a key, as text and as values."""
    (found,) = [one for one in blocks("yaml") if one.startswith(f"{key}:")]
    return found, yaml.safe_load(found)


def test_the_service_config_is_the_clients_own() -> None:
    (config,) = blocks("json")
    assert json.loads(config) == SERVICE_CONFIG
    options = dict(CHANNEL_OPTIONS)
    for name, value in re.findall(r"`(grpc\.\w*backoff_ms)` (\d+)", PAGE):
        assert options.pop(name) == int(value)
    assert not [name for name in options if "backoff" in name]


def test_the_ray_config_names_what_there_is() -> None:
    _, config = config_with("proxy_location")
    for name in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    file = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert f"def {function}(" in file.read_text(encoding="utf-8")
    options, served = parse_args(application["args"])
    assert options.max_replicas > options.min_replicas and served.config.max_running == 16


def test_client_balancers_and_router_call_affinity_by_the_same_names() -> None:
    _, envoy = config_with("static_resources")
    text = json.dumps(envoy)
    assert f'"header_name": "{SESSION_KEY}"' in text and f'"header_name": "{PREFIX_KEY}"' in text
    assert PREFIX_KEY == affinity.PREFIX_KEY
    assert f'"service_name": "{SERVICE}"' in text and f'"prefix": "/{SERVICE}/"' in text
    assert set(affinity_metadata(session="a", prefix="b")) == {SESSION_KEY, PREFIX_KEY}


@pytest.mark.long
def test_the_envoy_config_is_one_by_envoys_own_definitions(environments: Environments) -> None:
    text, _ = config_with("static_resources")
    python = environments.python(*XDS)

    def parse(given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-c", PARSE], input=given, text=True, capture_output=True)

    assert (done := parse(text)).returncode == 0, done.stderr[-500:]
    assert parse(text.replace("hash_policy", "hash_polixy")).returncode != 0
