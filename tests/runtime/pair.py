"""Workers over the engines of a bundle, with rounds on the host or on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.opening import open_pair
from outrider.engines.pair import DEVICE, Pair
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Event, Finished, Progressed
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker

from tests.addons import sample_on_host


class SilentDecoder:
    """Tokens as dots: answers are compared by their tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "." * len(ids)


class PairHarness:
    """A worker without a thread over an open pair, and all that its requests were told."""

    def __init__(self, root: Path, place: str, *, max_running: int = 4) -> None:
        bundle = load_bundle(root)
        with pytest.MonkeyPatch.context() as patch:
            if place == DEVICE:
                sample_on_host(patch)
            pair = open_pair(bundle, sampler=place, max_batch=max_running)
        self._serve(pair, bundle, max_running)

    @classmethod
    def over(cls, pair: Pair, bundle: Bundle, *, max_running: int, **settings: Any) -> PairHarness:
        """A worker over a pair that is open already, with further settings of its server."""
        harness = cls.__new__(cls)
        harness._serve(pair, bundle, max_running, **settings)
        return harness

    def _serve(self, pair: Pair, bundle: Bundle, max_running: int, **settings: Any) -> None:
        self.pair = pair
        self.worker = Worker(
            ServedEngines(
                target=self.pair.target,
                draft=self.pair.draft,
                sampler=self.pair.sampler,
                rounds=self.pair.rounds,
                max_gamma=bundle.manifest.max_gamma,
            ),
            config=ServerConfig(
                max_running=max_running, max_queued=4096, queue_timeout_s=math.inf, **settings
            ),
            decoder=SilentDecoder(),
        )
        self.events: dict[str, list[Event]] = {}

    def submit(self, request: RequestSpec) -> None:
        received = self.events[request.request_id] = []
        self.worker.submit(request, received.append)

    def run(self) -> None:
        while self.worker.run_step():
            pass

    def answers(self, requests: Sequence[RequestSpec]) -> list[tuple[int, ...]]:
        """Tokens of requests served together."""
        for request in requests:
            self.submit(request)
        self.run()
        return [self.tokens(request.request_id) for request in requests]

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(
            emitted.token
            for event in self.events[name]
            if isinstance(event, Progressed)
            for emitted in event.tokens
        )

    def finished(self, name: str) -> Finished:
        ending = self.events[name][-1]
        assert isinstance(ending, Finished), ending
        return ending

    def close(self) -> None:
        self.pair.close()
