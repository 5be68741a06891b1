"""The host plans the next step while the device runs this one, and no answer changes.

The device is the host in disguise (``StrictDevice``): copies are as late as they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.accelerators.onnx.device_plan import open_on_device
from outrider.engines.accelerators.pair import open_together
from outrider.engines.base import EngineError, FloatArray, Span
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.pair import DEVICE, HOST, Pair
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import Draining
from outrider.runtime.core.events import Event, Failed, Progressed
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.core.request import Request
from outrider.runtime.loop import prefill as prompts
from outrider.runtime.loop.device_step import TREES

from tests.emulation.kernels.host import HostKernels
from tests.engines.accelerators.device.strict_device import StrictDevice
from tests.runtime.markov import feed_all_but_last_tokens, spec
from tests.runtime.pair import PairHarness

CHUNK = 16
GENERATOR = np.random.default_rng(3)
# Of one chunk or less, and of many.
SHORT, LONG = (3, 1, 12), (120, 75, 50)
PROMPTS = {length: tuple(GENERATOR.integers(2, 500, length).tolist()) for length in (*SHORT, *LONG)}


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def pairs(tiny_bundle: Path) -> Iterator[dict[str, Pair]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engines.accelerators.device.base.HostDevice", StrictDevice)
        device = PairHarness(tiny_bundle, DEVICE)
    harnesses = {DEVICE: device, HOST: PairHarness(tiny_bundle, HOST)}
    yield {place: harness.pair for place, harness in harnesses.items()}
    for harness in harnesses.values():
        harness.close()


@pytest.fixture
def device(pairs: dict[str, Pair], bundle: Bundle) -> PairHarness:
    return PairHarness.over(pairs[DEVICE], bundle, max_running=4, prefill_chunk=CHUNK)


@pytest.fixture
def host(pairs: dict[str, Pair], bundle: Bundle) -> PairHarness:
    return PairHarness.over(pairs[HOST], bundle, max_running=4, prefill_chunk=CHUNK)


def request(name: str, length: int, **options: object) -> RequestSpec:
    """Seed-stable, so that its tokens do not depend on which sampler drew them."""
    asked = {"max_tokens": 40, "drafter": "model", "gamma": 3, "temperature": 1.0} | options
    return spec(name, PROMPTS[length], seed=length, mode=ExactnessMode.SEED_STABLE, **asked)


def decoding_beside_a_prompt(device: PairHarness, name: str) -> tuple[RequestSpec, RequestSpec]:
    """A stream that has begun, and a long prompt of which one chunk is computed."""
    stream, prompt = request(f"{name}-stream", 12), request(f"{name}-prompt", 120, max_tokens=5)
    device.submit(stream)
    while not device.tokens(stream.request_id):
        device.worker.run_step()
    device.submit(prompt)
    device.worker.run_step()
    return stream, prompt


def live(device: PairHarness, one: RequestSpec) -> Request:
    return next(r for r in device.worker._rows.requests if r.spec is one)


class Log:
    """What a step does, in words, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, device: PairHarness) -> None:
        self.words: list[str] = []
        memory = device.pair.rounds.device
        self._note(patch, onnxruntime.InferenceSession, "run_with_iobinding", "run")
        self._note(patch, HostKernels, "launch", "launch")
        for name in ("upload", "download", "wait"):
            self._note(patch, memory, name, name)
        self._note(patch, device.worker._event_queue, "send", "hand over")
        self._note(patch, device.worker, "_admit", "admit")
        self._note(patch, prompts, "plan_prefill", "plan")
        self._note(patch, Request, "commit", "commit")

    def _note(self, patch: pytest.MonkeyPatch, owner: object, name: str, word: str) -> None:
        original = getattr(owner, name)

        def noting(*given: object, **options: object) -> object:
            self.words.append(word)
            return original(*given, **options)

        patch.setattr(owner, name, noting)


def test_a_step_is_launch_then_planning_then_the_one_wait_then_commit(
    device: PairHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, prompt = decoding_beside_a_prompt(device, "order")
    traffic = device.pair.rounds.device.traffic
    log = Log(monkeypatch, device)
    # What the sampler reads. Three draft steps and their draws, the target, the judgement.
    model = ["upload", "run"]
    launch = ["upload", *[*model, "launch"] * 3, *model, "launch", "launch"]
    for _ in range(3):
        log.words.clear()
        before, num_computed = replace(traffic), live(device, prompt).cache.num_computed
        assert device.worker.run_step()
        assert log.words == [
            "admit",
            *launch,
            "download",
            "hand over",
            "admit",
            "plan",
            *model,
            "wait",
            "commit",
        ]
        assert traffic.num_waits - before.num_waits == 1
        assert traffic.num_to_host - before.num_to_host == 1
        assert live(device, prompt).cache.num_computed == num_computed + CHUNK
    monkeypatch.undo()
    device.run()
    assert len(device.tokens(stream.request_id)) == 40
    assert len(device.tokens(prompt.request_id)) == 5


def test_without_a_prompt_to_feed_nothing_follows_the_round(
    device: PairHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request("alone", 3)
    device.submit(one)
    while not device.tokens("alone"):
        device.worker.run_step()
    log = Log(monkeypatch, device)
    assert device.worker.run_step()
    assert log.words[-6:] == ["download", "hand over", "admit", "plan", "wait", "commit"]
    monkeypatch.undo()
    device.run()


def run_with_arrivals(harness: PairHarness, name: str, drafters: tuple[str, ...]) -> list[object]:
    """Answers and figures of requests that arrive one per step, more than there are slots."""
    asked = [
        request(f"{name}-{index}", length, drafter=drafters[index % len(drafters)], max_tokens=9)
        for index, length in enumerate((*LONG, *SHORT, *LONG))
    ]
    for one in asked:
        harness.submit(one)
        harness.worker.run_step()
    harness.run()
    return [(harness.tokens(r.request_id), harness.finished(r.request_id).report) for r in asked]


@pytest.mark.parametrize("drafters", [("model",), ("none", "lookup"), ("model", "none")])
def test_answers_and_figures_are_those_of_the_host(
    host: PairHarness, device: PairHarness, drafters: tuple[str, ...]
) -> None:
    name = "-".join(drafters)
    feed_all_but_last_tokens(host.worker)
    assert run_with_arrivals(device, name, drafters) == run_with_arrivals(host, name, drafters)
    assert set(device.worker.snapshot().host_fallback_reasons) == {""}


@pytest.mark.parametrize("place", [HOST, DEVICE])
def test_prompts_fed_together_leave_every_answer_as_it_is_alone(
    pairs: dict[str, Pair], bundle: Bundle, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some beside a stream that runs, on the device behind its round."""
    harness = PairHarness.over(pairs[place], bundle, max_running=4, prefill_chunk=48)
    asked = [
        replace(request(f"together-{index}", length, max_tokens=9), seed=index)
        for index, length in enumerate((50, 12, 3, 12))
    ]
    alone = [
        harness.answers([replace(one, request_id="alone", internal_id="alone")])[0] for one in asked
    ]
    calls: list[int] = []
    extend = harness.pair.target.extend

    def counting(spans: Sequence[Span]) -> FloatArray:
        if any(span.num_logits < len(span.tokens) for span in spans):
            calls.append(len(spans))
        return extend(spans)

    monkeypatch.setattr(harness.pair.target, "extend", counting)
    harness.submit(asked[0])
    while not harness.tokens("together-0"):
        harness.worker.run_step()
    harness.answers(asked[1:])
    assert [harness.tokens(one.request_id) for one in asked] == alone
    assert calls == [1, 1, 3]


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("place", [HOST, DEVICE])
def test_completions_of_one_prompt_are_those_of_their_own_seeds(
    pairs: dict[str, Pair],
    bundle: Bundle,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_beside: bool,
) -> None:
    """On the device, beside a stream: fed behind rounds, and copied when the round has gone well."""
    harness = PairHarness.over(pairs[place], bundle, max_running=4, prefill_chunk=CHUNK)
    asked = request("group", 50, max_tokens=9, num_logprobs=1, drafter="none")
    specs = replace(asked, num_samples=3).samples()
    if is_beside:
        harness.submit(request("stream", 12))
        harness.worker.run_step()
    copies: list[tuple[int, ...]] = []
    move_slot = harness.pair.target.move_slot

    def noting(source: int, destination: int, length: int) -> None:
        copies.append((source, destination, length))
        move_slot(source, destination, length)

    monkeypatch.setattr(harness.pair.target, "move_slot", noting)
    told: list[list[Event]] = [[] for _ in specs]
    harness.worker.submit_group(specs, [events.append for events in told])
    while not all(told):
        harness.worker.run_step()
    leader, length = int(is_beside), 49 if place == DEVICE else 50
    assert copies == [(leader, leader + index, length) for index in (1, 2)]
    harness.run()
    for one, events in zip(specs, told, strict=True):
        alone = replace(one, internal_id="alone", request_id="alone")
        harness.answers([alone])
        expected = [token for event in harness.events["alone"][:-1] for token in event.tokens]
        found = [token for event in events[:-1] for token in event.tokens]
        assert [token.token for token in found] == [token.token for token in expected]
        for ours, theirs in zip(found, expected, strict=True):
            # The host promises the bits.
            error = 0.0 if place == HOST else 1e-5
            assert abs(ours.logprobs.logprob - theirs.logprobs.logprob) <= error
    assert harness.worker.snapshot().num_free_slots == 4


def submitting(device: PairHarness, following: RequestSpec) -> Callable[[Event], None]:
    """A receiver that asks for more when it hears its first tokens: while the device runs."""
    heard: list[Event] = []

    def receive(event: Event) -> None:
        heard.append(event)
        if len(heard) == 1:
            assert isinstance(event, Progressed)
            device.submit(following)

    return receive


def test_who_asks_while_the_device_runs_is_let_in_and_fed_before_the_wait(
    host: PairHarness, device: PairHarness
) -> None:
    first, following = request("first", 12), request("following", 75, max_tokens=6)
    device.worker.submit(first, submitting(device, following))
    device.worker.run_step()
    assert "following" not in device.events, "the first step's events have not been handed over"
    device.worker.run_step()
    assert device.worker.snapshot().num_running == 2
    assert live(device, following).cache.num_computed == CHUNK
    device.run()
    assert device.tokens("following") == host.answers([following])[0]


def test_who_asks_as_the_server_drains_is_not_let_in(device: PairHarness) -> None:
    first, following = request("before", 12), request("too-late", 75)

    def receive(event: Event) -> None:
        if "too-late" not in device.events:
            device.submit(following)
            device.worker.drain()

    device.worker.submit(first, receive)
    device.run()
    ending = device.events["too-late"][-1]
    assert isinstance(ending, Failed)
    assert isinstance(ending.error, Draining)
    assert ending.num_output == 0


def test_a_slot_that_moves_takes_what_was_fed_ahead_along(
    host: PairHarness, device: PairHarness
) -> None:
    """The stream before it ends in the very step behind which the chunk was fed."""
    stream, prompt = decoding_beside_a_prompt(device, "moving")
    device.worker.cancel(stream.internal_id, EngineError("enough"))
    short = request("short", 3, max_tokens=1)
    device.submit(short)
    device.run()
    assert device.tokens(prompt.request_id) == host.answers([prompt])[0]
    ending = [request("ending", 12, max_tokens=3), request("lasting", 120, max_tokens=5)]
    assert device.answers(ending) == host.answers(ending)


def test_a_failed_round_forgets_what_was_fed_behind_it(
    host: PairHarness, device: PairHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, prompt = decoding_beside_a_prompt(device, "failing")
    memory = device.pair.rounds.device

    def broken(mark: int | None = None) -> None:
        raise EngineError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "wait", broken)
        device.worker.run_step()
    assert live(device, prompt).cache.num_computed == 0
    device.run()
    assert isinstance(device.events[stream.request_id][-1], Failed)
    assert device.tokens(prompt.request_id) == host.answers([prompt])[0]


def test_a_prompt_that_cannot_be_fed_ahead_begins_anew(
    host: PairHarness, device: PairHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, prompt = decoding_beside_a_prompt(device, "broken")
    extend = PlanEngine.extend

    def breaking(engine: PlanEngine, spans: object) -> object:
        if engine is device.pair.target:
            raise EngineError("broken")
        return extend(engine, spans)

    with monkeypatch.context() as patch:
        patch.setattr(PlanEngine, "extend", breaking)
        num_tokens = len(device.tokens(stream.request_id))
        device.worker.run_step()
    device.run()
    assert len(device.tokens(stream.request_id)) == 40 > num_tokens
    assert device.tokens(prompt.request_id) == host.answers([prompt])[0]
    assert device.tokens(stream.request_id) == host.answers([stream])[0]
    assert device.worker.snapshot().num_free_slots == 4


def test_what_is_fed_ahead_leaves_the_logits_of_the_round_alone(
    host: PairHarness, device: PairHarness
) -> None:
    """Log-probabilities are read from them after the prompt's chunk was enqueued."""
    for harness in (host, device):
        decoding = request("probable", 12, max_tokens=12, num_logprobs=2)
        harness.submit(decoding)
        while not harness.tokens("probable"):
            harness.worker.run_step()
        harness.submit(request("beside", 120, max_tokens=2))
        harness.run()
    found, expected = (
        [token.logprobs for event in harness.events["probable"][:-1] for token in event.tokens]
        for harness in (device, host)
    )
    assert device.tokens("probable") == host.tokens("probable")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.fixture
def with_trees(bundle: Bundle) -> Iterator[PairHarness]:
    """Engines on the device that take trees, and drafters that may propose them anywhere."""
    memory, manifest = StrictDevice(), bundle.manifest
    pair = open_together(
        bundle,
        memory,
        lambda entry, part: open_on_device(bundle, entry, memory, max_batch=4, with_trees=True),
        lambda: DeviceSampler(
            HostKernels(),
            max_batch=4,
            max_gamma=manifest.max_gamma,
            vocab_size=manifest.target.vocab_size,
            device=memory,
        ),
        max_batch=4,
        reason="",
    )
    drafting = DraftingConfig(trees_may_round_differently=True)
    harness = PairHarness.over(pair, bundle, max_running=4, drafting=drafting)
    yield harness
    harness.close()


def test_trees_are_verified_on_the_device_and_judged_on_the_host(
    host: PairHarness, with_trees: PairHarness
) -> None:
    """And rows that draft none stay on the device in steps without them."""
    assert with_trees.pair.target.limits.max_tree_nodes > 0
    kept: list[tuple[int, ...]] = []
    keep_path = with_trees.pair.target.keep_path
    with_trees.pair.target.keep_path = lambda slot, path: (
        kept.append(tuple(path)),
        keep_path(slot, path),
    )
    asked = [
        request(f"tree-{drafter}", length, drafter=drafter, temperature=0.0, gamma=4)
        for drafter, length in (("suffix", 3), ("lookahead", 12), ("model", 50))
    ]
    assert with_trees.answers(asked) == host.answers(
        [replace(one, speculation=SpeculationParams(drafter="none")) for one in asked]
    )
    assert any(path != tuple(range(len(path))) for path in kept), "no side branch was ever kept"
    reasons = with_trees.worker.snapshot().host_fallback_reasons
    assert set(reasons) <= {TREES, ""}
    assert reasons[TREES] > 3
    before = reasons.get("", 0)
    with_trees.answers([request("chain", 12, temperature=0.0)])
    assert with_trees.worker.snapshot().host_fallback_reasons[""] > before
