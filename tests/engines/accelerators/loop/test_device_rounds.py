"""Steps whose drafts, verification and judgement stay on the device, through the worker.

The device is the host in disguise (``StrictDevice``): copies are as late as they may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.sampling.kernels.launches import Launches
from outrider.engines.accelerators.device.sampling.lists import NGRAMS
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.accelerators.pair import open_together
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_pair
from outrider.engines.pair import DEVICE, HOST, choose_place
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.events import Failed
from outrider.runtime.core.params import GrammarKind, GrammarParams, RequestSpec, SpeculationParams
from outrider.runtime.core.request import Request, Speculation
from outrider.runtime.loop.device_step import (
    BLOCKS,
    DRAFT_FAILED,
    GRAMMARS,
    HOST_SERVES,
    host_fallback_reason,
)
from outrider.runtime.oracle.sampling import adjusted_probs
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.verify.chi_square import goodness_of_fit

from tests.emulation.kernels.host import HostKernels, sample_on_host
from tests.engines.accelerators.device.strict_device import StrictDevice
from tests.engines.contract import extend_one
from tests.runtime.markov import feed_all_but_last_tokens, spec
from tests.runtime.pair import PairHarness, SilentDecoder

STABLE, MAX_ACCEPT = ExactnessMode.SEED_STABLE, ExactnessMode.MAX_ACCEPT
GENERATOR = np.random.default_rng(0)
# The third repeats itself, so that lookup drafts.
PROMPTS = [
    *(tuple(GENERATOR.integers(2, 500, length).tolist()) for length in (5, 1)),
    (7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8),
    *(tuple(GENERATOR.integers(2, 500, length).tolist()) for length in (30, 9, 3)),
]


@pytest.fixture(scope="module")
def host(tiny_bundle: Path) -> Iterator[PairHarness]:
    harness = PairHarness(tiny_bundle, HOST)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def alike(tiny_bundle: Path, host: PairHarness) -> PairHarness:
    """The host in as many passes as the device, whose prompts' last tokens decode."""
    harness = PairHarness.over(host.pair, load_bundle(tiny_bundle), max_running=4)
    feed_all_but_last_tokens(harness.worker)
    return harness


@pytest.fixture(scope="module")
def device(tiny_bundle: Path) -> Iterator[PairHarness]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engines.accelerators.device.base.HostDevice", StrictDevice)
        harness = PairHarness(tiny_bundle, DEVICE)
    yield harness
    harness.close()


def memory_of(harness: PairHarness) -> StrictDevice:
    device = harness.pair.target._device
    assert isinstance(device, StrictDevice)
    return device


def requests(name: str, **options: object) -> list[RequestSpec]:
    """Six requests for four slots, with prompts, lengths and gammas of their own."""
    gamma = options.pop("gamma", 3)
    drafters = options.pop("drafters", ("model",))
    return [
        spec(
            f"{name}-{index}",
            prompt,
            seed=index,
            max_tokens=9 + index,
            drafter=drafters[index % len(drafters)],
            gamma=min(gamma, 2) if index == 1 else gamma,
            **options,
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def reports(harness: PairHarness, asked: list[RequestSpec]) -> list[object]:
    return [harness.finished(one.request_id).report for one in asked]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "drafters",
    [("model",), ("lookup",), ("model", "none", "lookup"), ("model", "model/lookup")],
    ids="-".join,
)
def test_answers_and_figures_are_those_of_the_host(
    host: PairHarness,
    alike: PairHarness,
    device: PairHarness,
    drafters: tuple[str, ...],
    temperature: float,
) -> None:
    before = Counter(device.worker.snapshot().host_fallback_reasons)
    for gamma in (1, 4):
        name = f"{drafters}-{temperature}-{gamma}"
        options = {"drafters": drafters, "temperature": temperature, "gamma": gamma}
        asked = requests(name, mode=STABLE, **options)
        assert device.answers(asked) == host.answers(asked) == alike.answers(asked)
        assert reports(device, asked) == reports(alike, asked)
        assert sum(report.num_drafted for report in reports(device, asked)) > 0
    places = Counter(device.worker.snapshot().host_fallback_reasons) - before
    composed = "drafter model/lookup reads the draft model's tokens on the host"
    assert places[""] > 0
    assert (places[composed] > 0) == ("model/lookup" in drafters)
    assert set(host.worker.snapshot().host_fallback_reasons) == {HOST_SERVES}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, presence_penalty=2.0, bad_words=((7, 8),)),
    ],
    ids=["sampled", "greedy"],
)
def test_processors_and_logprobs_are_those_of_the_host(
    host: PairHarness, device: PairHarness, params: SamplingParams
) -> None:
    asked = requests(f"law-{params.temperature}", mode=STABLE, params=params, num_logprobs=2)
    assert device.answers(asked) == host.answers(asked)
    for one in asked:
        found, expected = (
            [
                token.logprobs
                for event in harness.events[one.request_id][:-1]
                for token in event.tokens
            ]
            for harness in (device, host)
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_tokens_are_masked_on_the_host(device: PairHarness) -> None:
    """Those of a request with a grammar, once it decodes."""
    parts = device.worker._parts
    reasons = []
    for grammar in (GrammarParams(kind=GrammarKind.REGEX, text="a"), None):
        request = Request(
            spec("form", PROMPTS[0], grammar=grammar),
            speculation=Speculation(drafter="model", gamma=3, off_reason=None),
            max_context=32,
            decoder=SilentDecoder(),
            submitted_at=0.0,
        )
        for gamma in (0, 3, None):
            asked = parts.rounds, parts.drafters, [request], [gamma], parts.rules
            reasons.append(host_fallback_reason(*asked))
    assert reasons == [GRAMMARS, GRAMMARS, "", "", "", ""]


def test_repeated_ngrams_are_looked_for_on_the_host(host: PairHarness, device: PairHarness) -> None:
    params = SamplingParams(temperature=0.0, no_repeat_ngram_size=2)
    asked = requests("n-grams", mode=STABLE, params=params)
    before = device.worker.snapshot().host_fallback_reasons.get(NGRAMS, 0)
    answers = device.answers(asked)
    assert answers == host.answers(asked)
    assert device.worker.snapshot().host_fallback_reasons[NGRAMS] > before
    for one, tokens in zip(asked, answers, strict=True):
        pairs = list(pairwise(tokens))
        assert len(set(pairs)) == len(pairs), one.request_id


def test_a_draft_ends_where_the_answer_does(
    host: PairHarness, alike: PairHarness, device: PairHarness
) -> None:
    """The device drafts on behind an end token; nobody hears of it."""
    options = {"mode": STABLE, "temperature": 1.0, "gamma": 6}
    plain = host.answers(requests("whole", **options))
    ends = tuple({tokens[at] for tokens in plain for at in (2, 5)})
    asked = requests("cut", end_tokens=ends, **options)
    assert device.answers(asked) == host.answers(asked) == alike.answers(asked)
    assert reports(device, asked) == reports(alike, asked)
    assert any(len(device.tokens(one.request_id)) < one.max_tokens for one in asked)


def place_laws(
    harness: PairHarness, prompt: tuple[int, ...], params: SamplingParams, num_places: int
) -> list[np.ndarray]:
    """[V] float64 law of each output token of plain decoding, by the oracle over every context."""
    contexts = {(): 1.0}
    laws = []
    for _ in range(num_places):
        following: dict[tuple[int, ...], float] = {}
        total = np.zeros(512)
        for tokens, weight in contexts.items():
            history = np.array([*prompt, *tokens])
            logits = extend_one(harness.pair.target, 0, 0, history.tolist())[-1]
            probs = weight * adjusted_probs(logits, params, history, len(prompt))
            total += probs
            following |= {(*tokens, int(token)): probs[token] for token in np.flatnonzero(probs)}
        contexts = following
        laws.append(total)
    return laws


def test_max_accept_has_the_law_of_plain_decoding(host: PairHarness, device: PairHarness) -> None:
    """Every place of 160 completions; chance of a false alarm 1e-6, seeds fixed."""
    params = SamplingParams(temperature=1.5, allowed_token_ids=(3, 14, 159, 265, 358))
    asked = [
        spec(
            f"law-{seed}",
            PROMPTS[0],
            seed=seed,
            max_tokens=3,
            params=params,
            mode=MAX_ACCEPT,
            drafter="model",
            gamma=2,
        )
        for seed in range(160)
    ]
    answers = device.answers(asked)
    figures = reports(device, asked)
    share = sum(one.num_accepted for one in figures) / sum(one.num_drafted for one in figures)
    assert 0.2 < share < 0.9, "the ratio test must both keep and reject"
    for place, probs in enumerate(place_laws(host, PROMPTS[0], params, 3)):
        counts = Counter(tokens[place] for tokens in answers)
        assert goodness_of_fit(counts, probs) > 1e-6 / 3


@pytest.mark.parametrize("drafter", ["model/lookup", "model"])
def test_a_neighbour_that_the_host_must_see_changes_no_token(
    device: PairHarness, drafter: str
) -> None:
    """Whole blocks, and drafters that read the draft model's tokens: sampled, one seed a row."""
    options = {"temperature": 1.0, "mode": MAX_ACCEPT}
    alone = device.answers(requests(f"alone-{drafter}", **options)[:3])
    before = Counter(device.worker.snapshot().host_fallback_reasons)
    seen = SpeculationParams(drafter=drafter, gamma=3, verifies_block=drafter == "model")
    beside = spec(
        f"beside-{drafter}",
        PROMPTS[3],
        seed=9,
        max_tokens=30,
        speculation=seen,
        temperature=1.0,
    )
    together = device.answers([beside, *requests(f"together-{drafter}", **options)[:3]])
    assert together[1:] == alone
    assert len(together[0]) == 30
    places = Counter(device.worker.snapshot().host_fallback_reasons) - before
    read = "drafter model/lookup reads the draft model's tokens on the host"
    assert places[BLOCKS if drafter == "model" else read] > 5


class Library:
    """Counts what ONNX Runtime and the kernels are asked for, and holds every address against the device."""

    # Each of these waits for the device, or copies over its border.
    CROSSING = (
        (onnxruntime.OrtValue, "numpy"),
        (onnxruntime.OrtValue, "update_inplace"),
        (onnxruntime.OrtValue, "ortvalue_from_numpy"),
        (onnxruntime.IOBinding, "bind_cpu_input"),
        (onnxruntime.IOBinding, "copy_outputs_to_cpu"),
        (onnxruntime.IOBinding, "synchronize_inputs"),
        (onnxruntime.IOBinding, "synchronize_outputs"),
        (onnxruntime.InferenceSession, "run"),
    )

    def __init__(self, patch: pytest.MonkeyPatch, memory: StrictDevice) -> None:
        self.num_runs = self.num_launches = 0
        for owner, name in self.CROSSING:
            patch.setattr(owner, name, self._refuse(name))
        run, bind = (
            onnxruntime.InferenceSession.run_with_iobinding,
            onnxruntime.IOBinding.bind_input,
        )

        def counted_run(session, binding, options=None):
            self.num_runs += 1
            key = "disable_synchronize_execution_providers"
            assert options is not None and options.get_run_config_entry(key) == "1"
            run(session, binding, options)

        def checked_bind(binding, name, kind, index, dtype, shape, pointer):
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            assert memory.owns(pointer, num_bytes), f"{name} is not on the device"
            bind(binding, name, kind, index, dtype, shape, pointer)

        run_stage, launch = Launches.run, HostKernels.launch

        def checked_stage(launches, stage, tensors):
            for name, tensor in tensors.items():
                assert memory.owns(tensor.pointer, tensor.num_bytes), f"{name} is not on the device"
            run_stage(launches, stage, tensors)

        def counted_launch(kernels, *arguments):
            self.num_launches += 1
            launch(kernels, *arguments)

        patch.setattr(Launches, "run", checked_stage)
        patch.setattr(HostKernels, "launch", counted_launch)
        patch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", counted_run)
        patch.setattr(onnxruntime.IOBinding, "bind_input", checked_bind)

    @staticmethod
    def _refuse(name: str):
        def refuse(*args, **kwargs):
            raise AssertionError(f"{name} crosses the border of the device")

        return refuse


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        (SamplingParams(temperature=0.0), MAX_ACCEPT),
        (SamplingParams(), MAX_ACCEPT),
        (SamplingParams(top_p=0.9, frequency_penalty=0.5), MAX_ACCEPT),
        (SamplingParams(), STABLE),
    ],
    ids=["greedy", "plain", "full", "race"],
)
@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_a_step_is_one_copy_to_the_host_and_one_wait(
    device: PairHarness,
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    mode: str,
    gamma: int,
) -> None:
    memory = memory_of(device)
    drafters = ("model", "lookup") if gamma else ("none",)
    name = f"count-{gamma}-{mode}-{params}"
    asked = requests(name, params=params, mode=mode, drafters=drafters, gamma=gamma)[:4]
    # Long enough that no draft is cut by an answer's end.
    asked = [replace(one, max_tokens=60) for one in asked]
    for one in asked:
        device.submit(one)
    while any(len(device.tokens(one.request_id)) == 0 for one in asked):
        device.worker.run_step()
    library = Library(monkeypatch, memory)
    for _ in range(3):
        before = replace(memory.traffic)
        num_runs, num_launches = library.num_runs, library.num_launches
        num_tokens = len(device.tokens(asked[3].request_id))
        assert device.worker.run_step()
        assert len(device.tokens(asked[3].request_id)) > num_tokens
        assert memory.traffic.num_waits - before.num_waits == 1
        assert memory.traffic.num_to_host - before.num_to_host == 1
        # A pass of the draft model and a launch per draft token, the target, and two launches that judge. Each pass of
        # a model has an upload, and all of the sampler's calls have one together. Penalties are a launch before each.
        assert library.num_runs - num_runs == gamma + 1
        num_processed = gamma + 1 if params.has_processors else 0
        assert library.num_launches - num_launches == gamma + 2 + num_processed
        assert memory.traffic.num_to_device - before.num_to_device == gamma + 2
    monkeypatch.undo()
    device.run()


def test_what_ends_is_told_though_no_step_follows(device: PairHarness) -> None:
    one = spec("last", (5, 6), max_tokens=1, drafter="none", gamma=0)
    device.submit(one)
    assert device.worker.run_step()
    assert len(device.tokens("last")) == 1
    assert device.finished("last").num_output == 1


def test_a_cancelled_request_is_told_its_tokens_first(device: PairHarness) -> None:
    """Events wait in one line: an ending never overtakes tokens that were ready before it."""
    one, other = (spec(name, (5, 6), max_tokens=40, drafter="none", gamma=0) for name in "xy")
    device.submit(one)
    device.submit(other)
    while not device.tokens("x"):
        device.worker.run_step()
    device.worker.run_step()
    waiting = len(device.tokens("x"))
    device.worker.cancel("internal-x", EngineError("enough"))
    device.run()
    assert isinstance(device.events["x"][-1], Failed)
    assert len(device.tokens("x")) == device.events["x"][-1].num_output > waiting
    assert len(device.tokens("y")) == 40


def test_a_prompt_is_fed_without_a_wait(device: PairHarness) -> None:
    memory = memory_of(device)
    device.submit(spec("long", range(2, 252), max_tokens=1, drafter="none"))
    before = replace(memory.traffic)
    device.run()
    assert len(device.tokens("long")) == 1
    assert memory.traffic.num_waits - before.num_waits == 1
    assert memory.traffic.num_to_host - before.num_to_host == 1


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_failing_draft_model_degrades_and_fails_nobody(
    host: PairHarness,
    device: PairHarness,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
) -> None:
    asked = requests(
        f"broken-{failing}", mode=STABLE, temperature=1.0, drafters=("model", "lookup")
    )
    calls = iter(range(1, 1000))
    extend = PlanEngine.extend_on_device

    def breaking(engine: PlanEngine, *arguments: object) -> object:
        if engine is device.pair.draft and next(calls) == failing:
            raise EngineError("broken")
        return extend(engine, *arguments)

    monkeypatch.setattr(PlanEngine, "extend_on_device", breaking)
    before = device.worker.snapshot().host_fallback_reasons.get(DRAFT_FAILED, 0)
    found = device.answers(asked)
    assert device.worker.snapshot().host_fallback_reasons[DRAFT_FAILED] == before + 1
    assert {report.off_reason for report in reports(device, asked)} >= {None, "DEGRADED"}
    monkeypatch.undo()
    assert found == host.answers(asked)


def test_a_failing_target_ends_its_requests_and_no_others(
    device: PairHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests("lost")
    for one in asked:
        device.submit(one)
    device.worker.run_step()

    def broken(engine: PlanEngine, *arguments: object) -> object:
        raise EngineError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(PlanEngine, "extend_on_device", broken)
        patch.setattr(PlanEngine, "extend", broken)
        device.worker.run_step()
    device.run()
    endings = [device.events[one.request_id][-1] for one in asked]
    assert any(isinstance(ending, Failed) for ending in endings)
    again = requests("found", mode=STABLE)
    assert all(device.answers(again))
    snapshot = device.worker.snapshot()
    assert (snapshot.num_running, snapshot.num_free_slots) == (0, 4)


def test_everything_is_kept_where_the_draft_is_the_target(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    from outrider.engines.accelerators.onnx.device_plan import open_on_device

    memory = StrictDevice()
    pair = open_together(
        bundle,
        memory,
        lambda entry, part: open_on_device(bundle, bundle.manifest.target, memory, max_batch=2),
        lambda: DeviceSampler(
            HostKernels(),
            max_batch=2,
            max_gamma=bundle.manifest.max_gamma,
            vocab_size=bundle.manifest.target.vocab_size,
            device=memory,
        ),
        max_batch=2,
        reason="",
    )
    harness = PairHarness.over(pair, bundle, max_running=2)
    for temperature in (0.0, 1.0):
        asked = [
            spec(
                f"{temperature}-{seed}",
                PROMPTS[seed],
                seed=seed,
                max_tokens=20,
                gamma=4,
                drafter="model",
                temperature=temperature,
                mode=STABLE,
            )
            for seed in range(2)
        ]
        harness.answers(asked)
        for one in asked:
            report = harness.finished(one.request_id).report
            assert report.num_accepted == report.num_drafted > 10
    harness.close()


def test_where_rounds_are_sampled_is_chosen_by_rule(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_place("auto", is_accelerator=False, missing="") == (
        HOST,
        "it is the device, and its own sampler is faster",
    )
    assert choose_place("auto", is_accelerator=True, missing="") == (DEVICE, "an accelerator")
    assert choose_place("auto", is_accelerator=True, missing="no kernels") == (HOST, "no kernels")
    assert choose_place("host", is_accelerator=True, missing="") == (HOST, "asked for")
    with pytest.raises(EngineError, match="sampler device: no kernels"):
        choose_place("device", is_accelerator=False, missing="no kernels")
    with pytest.raises(ConfigError, match="sampler"):
        ServerConfig(sampler="moon")
    pair = open_pair(load_bundle(tiny_bundle))
    assert pair.rounds is None
    assert pair.place == "on the host: it is the device, and its own sampler is faster"
    pair.close()
    config = ServerConfig(sampler="device", default_gamma=2, max_running=2)
    with pytest.raises(EngineError, match="sampler device: the sampler's kernels are for GPUs"):
        load_model(tiny_bundle, ServeOptions(device="cpu", config=config))
    sample_on_host(monkeypatch)
    serving = load_model(tiny_bundle, ServeOptions(device="cpu", config=config))
    assert serving.worker._parts.rounds is not None
    with pytest.raises(EngineError, match=r"device 'gpu'|device gpu"):
        open_pair(load_bundle(tiny_bundle), device="gpu")
