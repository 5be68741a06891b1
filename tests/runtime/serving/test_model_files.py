"""A real bundle behind a real server: what is served stays what was checked, and claims about bits hold."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider import Client, build_request
from outrider.engines.base import BundleError
from outrider.engines.bundle import mapped_files
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import W8A8, write_manifest
from outrider.engines.determinism import BitEquality, has_equal_bits
from outrider.engines.devices import OVERFLOW
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.opening import judge_bits, open_pair
from outrider.errors import decode_error
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving import factory
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.v1.service import SERVICE
from outrider.v1 import inference_pb2 as wire
from outrider.v1.inference_pb2_grpc import InferenceStub

from tests.runtime.served import begin, server_of

CONFIG = ServerConfig(default_gamma=2, lb_delay_s=0.0, drain_timeout_s=0.0)
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


@pytest.fixture
def root(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def overwrite(root: Path) -> None:
    path = root / "target" / "model.onnx.data"
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


@asynccontextmanager
async def served(root: Path) -> AsyncIterator[tuple[Client, str]]:
    serving = replace(load_model(root, ServeOptions(config=CONFIG)), file_watch_s=0.01)
    server = server_of(serving)
    address = f"127.0.0.1:{await begin(server, serving)}"
    try:
        async with Client(address, options=(("grpc.enable_retries", 0),)) as client:
            yield client, address
    finally:
        server.hurry()
        await server.drain()


async def answer(client: Client) -> list[int]:
    asked = client.generate("the quick", max_tokens=24, temperature=0.0)
    return [token.id async for response in asked for token in response.tokens]


async def test_answers_stay_the_same_when_the_weights_are_overwritten(root: Path):
    async with served(root) as (client, _):
        info = (await client.info()).engine
        assert info.weights_are_private
        assert info.bit_equality == wire.BIT_EQUALITY_CERTIFIED
        before = await answer(client)
        overwrite(root)
        assert await answer(client) == before


def test_changed_weights_are_refused_whatever_engines_make_of_them(root: Path):
    overwrite(root)
    with pytest.raises(BundleError, match=r"target/model\.onnx\.data: content differs"):
        load_model(root, ServeOptions(config=CONFIG))


async def test_a_change_of_mapped_weights_ends_serving(root: Path, monkeypatch):
    monkeypatch.setattr(mapped_files, "free_bytes", lambda: 0)
    async with served(root) as (client, address), aio.insecure_channel(address) as channel:
        assert not (await client.info()).engine.weights_are_private
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(request))
        assert (await anext(watch)).status == SERVING
        assert await answer(client)
        os.utime(root / "draft" / "model.onnx.data")
        assert (await anext(watch)).status == NOT_SERVING
        # The client would ask another replica: its channel follows the server's health.
        with pytest.raises(aio.AioRpcError) as refused:
            await InferenceStub(channel).Generate(build_request("the quick")).read()
        error = decode_error(refused.value)
        assert (error.code.name, error.reason) == ("UNAVAILABLE", "MODEL_INTEGRITY")


async def test_another_version_of_the_library_is_compared_and_said(root: Path, caplog):
    manifest = load_bundle(root).manifest
    write_manifest(root, replace(manifest, versions={**manifest.versions, "onnxruntime": "1.2.3"}))
    caplog.set_level(logging.INFO)
    async with served(root) as (client, _):
        assert (await client.info()).engine.bit_equality == wire.BIT_EQUALITY_CONFIRMED
    assert "certified with 1.2.3: a row's bits were compared and are the same" in caplog.text


@pytest.mark.parametrize("overflows", [False, True])
def test_integer_sums_that_overflow_are_told_of_w8a8_alone(
    root: Path, monkeypatch, caplog, overflows: bool
):
    monkeypatch.setattr(factory, "integer_sums_overflow", lambda: overflows)
    load_model(root, ServeOptions(config=CONFIG)).close()
    assert OVERFLOW not in caplog.text
    manifest = load_bundle(root).manifest
    write_manifest(root, replace(manifest, target=replace(manifest.target, weights=W8A8)))
    load_model(root, ServeOptions(config=CONFIG)).close()
    assert (OVERFLOW in caplog.text) == overflows


async def test_a_bundle_of_an_older_release_says_what_another_export_would_bring(root: Path):
    manifest = load_bundle(root).manifest
    async with served(root) as (client, _):
        assert not (await client.info()).gained_by_export
    target = replace(manifest.target, device_precision="float16")
    write_manifest(root, replace(manifest, target=target, versions={}))
    async with served(root) as (client, _):
        assert (await client.info()).gained_by_export == [
            "long prompts read faster on the CPU, where heads of queries share those of the cache",
            "half of the launches on CUDA",
        ]


def one_bit_off(when):
    """``OnnxEngine.extend`` whose first logit is one bit off in calls for which ``when`` holds."""
    extend = OnnxEngine.extend

    def wrong(self, spans):
        logits = extend(self, spans)
        if when(spans):
            logits = logits.copy()
            logits[0, 0, 0] = np.nextafter(logits[0, 0, 0], np.float32(np.inf))
        return logits

    return wrong


@pytest.mark.parametrize(
    "when",
    [
        lambda spans: len(spans) == 3,
        lambda spans: len(spans[0].tokens) == 5,
        lambda spans: len(spans[0].tokens) == 64,
        lambda spans: spans[0].parents is not None,
        lambda spans: len(spans) == 1 and len(spans[0].tokens) == 1,
    ],
    ids=["beside others", "in a span", "in a chunk", "in a tree", "alone"],
)
def test_a_claim_that_does_not_hold_is_withdrawn(root: Path, monkeypatch, when):
    bundle = load_bundle(root)
    versions = {**bundle.manifest.versions, "onnxruntime": "1.2.3"}
    bundle = replace(bundle, manifest=replace(bundle.manifest, versions=versions))
    pair = open_pair(bundle, with_trees=True)
    try:
        assert has_equal_bits(pair.target)
        monkeypatch.setattr(OnnxEngine, "extend", one_bit_off(when))
        claim, line = judge_bits(bundle, pair)
        assert claim is BitEquality.WITHDRAWN and "differ between shapes" in line
    finally:
        pair.close()
