"""The server's side of an isolated engine, over real pipes whose other ends the tests speak for: no process starts."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import TEXT, EncoderDecoder
from outrider.engines.determinism import BitEquality
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.runtime.core import events
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import (
    Cancelled,
    Draining,
    DuplicateRequestId,
    EngineRestart,
    Overloaded,
    ServingError,
)
from outrider.runtime.core.events import Event, Failed, Finished, Progressed
from outrider.runtime.serving.chat.files import ChatFiles
from outrider.runtime.serving.engine_process import child
from outrider.runtime.serving.engine_process.child import PipedWorker
from outrider.runtime.serving.engine_process.messages import (
    Beat,
    Declined,
    FromChild,
    Opened,
    Refused,
    ScoredPiece,
    Start,
    StepEvents,
    Submit,
)
from outrider.runtime.serving.engine_process.process import MOST_FAILED, Engines
from outrider.runtime.serving.engine_process.worker import IsolatedWorker, open_isolated
from outrider.runtime.serving.loaded_model import describe
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS, RequestDefaults
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.supervision.watchdog import Watchdog
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec

from tests.conftest import write_tokenizer
from tests.runtime.markov import PAIRS, Clock, Harness, limits, spec
from tests.runtime.served import begin, server_of, supervisor_of

PROCESS = "outrider.runtime.serving.engine_process.process"
LONG_S = 20.0
HANG_S = 10.0
Message = TypeVar("Message")

HARNESS = Harness("F3", max_batch=1)
HARNESS.submit("a", max_tokens=2)
HARNESS.run()
FINISHED = HARNESS.finished("a")
PROGRESSED = next(event for event in HARNESS.events["a"] if isinstance(event, Progressed))


CONFIG = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0)


def opened(tokenizer: bytes = b"") -> Opened:
    """What a child says whose engine has one slot."""
    return Opened(
        model=ServedModel(
            name="m", vocab_size=3, max_context=9, max_gamma=1, eos_token_ids=(), drafters=("none",)
        ),
        config=CONFIG,
        limits=RequestLimits(),
        defaults=NO_DEFAULTS,
        tokenizer=tokenizer,
        source_tokenizer=None,
        text2text=None,
        certificate={},
        bit_equality=BitEquality.NOT_CLAIMED,
        weights_are_private=False,
        speculation=HARNESS.worker.default_speculation,
        snapshot=HARNESS.worker.snapshot(),
    )


class ScriptedProcess:
    """In place of ``subprocess.Popen``: holds the child's end of the pipe, and hangs until it is killed."""

    pid = 0

    def __init__(self, descriptor: int, answer: FromChild | None) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._connection = Connection(os.dup(descriptor))
        self.returncode: int | None = None
        if answer is not None:
            self.tell(answer)

    def tell(self, message: FromChild) -> None:
        self._connection.send(message)

    def until(self, kind: type[Message]) -> Message:
        """Return the next message of a kind."""
        while self._connection.poll(LONG_S):
            if isinstance(message := self._connection.recv(), kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
            self._socket.shutdown(socket.SHUT_RDWR)

    def send_signal(self, number: int) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("scripted", timeout or 0.0)
        return self.returncode

    def close(self) -> None:
        self._socket.close()
        self._connection.close()


class Scripts:
    """The processes that were started, and what each of them answers first; None for nothing."""

    def __init__(self) -> None:
        self.answer: FromChild | None = opened()
        self.all: list[ScriptedProcess] = []
        self._new: queue.Queue[ScriptedProcess] = queue.Queue()

    def __call__(self, command: object, *, pass_fds: list[int], stdin: int) -> ScriptedProcess:
        process = ScriptedProcess(pass_fds[0], self.answer)
        self.all.append(process)
        self._new.put(process)
        return process

    def next(self) -> ScriptedProcess:
        return self._new.get(timeout=LONG_S)


class Answers:
    """Events of requests, in the order in which they came."""

    def __init__(self) -> None:
        self._events: queue.Queue[tuple[str, Event]] = queue.Queue()

    def of(self, name: str) -> Callable[[Event], None]:
        return lambda event: self._events.put((name, event))

    def next(self) -> tuple[str, Event]:
        return self._events.get(timeout=LONG_S)

    def error(self, name: str) -> ServingError:
        whose, event = self.next()
        assert whose == name and isinstance(event, Failed)
        assert isinstance(event.error, ServingError)
        return event.error


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    scripts = Scripts()
    monkeypatch.setattr(f"{PROCESS}.subprocess.Popen", scripts)
    monkeypatch.setattr(f"{PROCESS}.FIRST_PAUSE_S", 0.0)
    yield scripts
    for process in scripts.all:
        process.close()


@pytest.fixture
def worker(scripts: Scripts) -> Iterator[IsolatedWorker]:
    worker = IsolatedWorker(Engines(Path("bundle"), ServeOptions()))
    worker.start()
    yield worker
    worker.drain()
    for process in scripts.all:
        process.kill()
    worker.stop(0.0)


@pytest.fixture
def answers() -> Answers:
    return Answers()


def submit(worker: IsolatedWorker, answers: Answers, *names: str) -> None:
    for name in names:
        worker.submit(spec(name), answers.of(name))


NOTHING = Declined("nobody", DuplicateRequestId())
STEPPED = StepEvents([], None, True)


def has_hung(
    worker: IsolatedWorker,
    answers: Answers,
    engine: ScriptedProcess,
    message: FromChild = NOTHING,
    first: FromChild = STEPPED,
) -> bool:
    """Return whether a step counts as hung during which the engine says something every two seconds."""
    clock = Clock()
    watchdog = Watchdog(worker.heartbeat, HANG_S, clock)
    submit(worker, answers, "a")
    engine.tell(first)
    for _ in range(8):
        clock.now += 2.0
        submit(worker, answers, "b")
        engine.tell(message)
        engine.tell(Declined("internal-b", DuplicateRequestId()))
        assert isinstance(answers.error("b"), DuplicateRequestId)
        complaint = watchdog.complaint()
    return complaint is not None


@pytest.mark.parametrize("is_recovering", [False, True])
def test_a_refusal_is_no_sign_of_life_and_a_beat_is_one(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers, is_recovering: bool
) -> None:
    message = Beat() if is_recovering else NOTHING
    assert has_hung(worker, answers, scripts.next(), message) is not is_recovering


@pytest.mark.parametrize("has_stepped", [False, True])
def test_an_engine_that_looked_for_work_in_vain_has_the_time_of_a_first_step(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers, has_stepped: bool
) -> None:
    message = StepEvents([], None, has_stepped)
    assert has_hung(worker, answers, scripts.next(), first=message) is has_stepped


def test_a_refusal_of_the_only_request_leaves_the_worker_idle(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers
) -> None:
    submit(worker, answers, "a")
    scripts.next().tell(Declined("internal-a", DuplicateRequestId()))
    assert isinstance(answers.error("a"), DuplicateRequestId)
    with worker._lock:
        assert not worker.heartbeat.is_stepping and not worker.heartbeat.reads_prompt


def test_a_step_that_goes_on_says_so_over_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        piped = PipedWorker(theirs)
        monkeypatch.setattr(child, "BEAT_EVERY_S", LONG_S)
        vocab_size, logits_of, _ = PAIRS["F3"]
        target = ScriptedEngine(logits_of, limits(vocab_size), failing_extends=[6])
        harness = Harness("F3", target=target, on_beat=piped._beat)
        for name in ("a", "b"):
            harness.submit(name, gamma=0)
        harness.run()
        assert isinstance(ours.recv(), Beat)
        # Another row was fed again at once.
        assert not ours.poll(0.0)
        monkeypatch.setattr(child, "BEAT_EVERY_S", 0.0)
        piped._beat()
        assert isinstance(ours.recv(), Beat)


@pytest.mark.parametrize("error", [ModuleNotFoundError("gone", name="onnxruntime"), MemoryError()])
def test_what_hinders_opening_is_said_as_in_one_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch, scripts: Scripts
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(child, "load_model", broken)
    ours, theirs = Pipe()
    with ours, theirs:
        PipedWorker(theirs).run(Path("bundle"), ServeOptions())
        scripts.answer = ours.recv()
    with pytest.raises(type(error)) as raised:
        IsolatedWorker(Engines(Path("bundle"), ServeOptions()))
    assert getattr(raised.value, "name", None) == getattr(error, "name", None)


def submit_group(worker: IsolatedWorker, answers: Answers, name: str) -> None:
    specs = spec(name, num_samples=2).samples()
    worker.submit_group(specs, [answers.of(f"{name}.{one.sample}") for one in specs])


def test_a_group_is_given_to_the_next_engine_as_one(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers
) -> None:
    first = scripts.next()
    submit(worker, answers, "a")
    submit_group(worker, answers, "g")
    submit_group(worker, answers, "h")
    worker.cancel("internal-h", Cancelled("abort"))
    sent = [[one.internal_id for one in first.until(Submit).specs] for _ in range(3)]
    assert sent == [
        ["internal-a"],
        ["internal-g", "internal-g.1"],
        ["internal-h", "internal-h.1"],
    ]
    first.kill()
    assert answers.error("h.0").reason == "ABORTED_BY_RPC"
    second = scripts.next()
    sent = [[one.internal_id for one in second.until(Submit).specs] for _ in range(3)]
    assert sent == [["internal-a"], ["internal-g", "internal-g.1"], ["internal-h.1"]]
    for name in ("g", "g.1"):
        second.tell(Declined(f"internal-{name}", Draining()))
    assert [answers.error(name).reason for name in ("g.0", "g.1")] == ["DRAINING"] * 2


def test_a_queue_of_groups_is_full_when_the_engines_is(
    worker: IsolatedWorker, answers: Answers
) -> None:
    """The engine has one slot, and its queue counts a group as one request."""
    submit(worker, answers, "runs")
    for number in range(CONFIG.max_queued - 1):
        submit_group(worker, answers, f"g{number}")
    worker.check_room(1, 1)
    submit_group(worker, answers, "last")
    with pytest.raises(Overloaded):
        worker.check_room(1, 1)


def test_a_child_queues_a_group_or_declines_all_of_it() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        piped = PipedWorker(theirs)
        piped._worker = Harness("F3", max_batch=2).worker
        piped._worker.after_step(piped._tell)
        piped._submit(spec("g", num_samples=2, max_tokens=1).samples())
        piped._submit(spec("wide", num_samples=3).samples())
        while piped._worker.run_step():
            pass
        declined = [ours.recv() for _ in range(3)]
        assert [one.internal_id for one in declined] == [
            "internal-wide",
            "internal-wide.1",
            "internal-wide.2",
        ]
        told = []
        while ours.poll(0.0):
            told += [(name, type(event)) for name, event in ours.recv().events]
        assert told.count(("internal-g", Finished)) == told.count(("internal-g.1", Finished)) == 1


def test_a_cancelled_request_is_not_given_to_another_engine(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers
) -> None:
    first = scripts.next()
    submit(worker, answers, "a", "b")
    worker.cancel("internal-a", Cancelled("abort"))
    worker.cancel("internal-a", Cancelled("client"))
    first.kill()
    assert answers.error("a").reason == "ABORTED_BY_RPC"
    second = scripts.next()
    assert second.until(Submit).specs[0].request_id == "b"
    second.tell(StepEvents([("internal-b", FINISHED)], None, True))
    assert answers.next() == ("b", FINISHED)


def test_a_cancellation_between_two_engines_is_told_at_once(
    scripts: Scripts, answers: Answers
) -> None:
    worker = IsolatedWorker(Engines(Path("bundle"), ServeOptions()))
    told = threading.Semaphore(0)
    worker.after_step(told.release)
    worker.start()
    submit(worker, answers, "a")
    scripts.answer = None
    scripts.next().kill()
    scripts.next()
    # The worker has said that the first engine ended.
    assert told.acquire(timeout=LONG_S)
    worker.cancel("internal-a", Cancelled("abort"))
    assert answers.error("a").reason == "ABORTED_BY_RPC"
    assert told.acquire(blocking=False)
    assert worker.stop(0.0)


def test_who_waits_for_a_slot_is_queued_while_a_step_hangs(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers
) -> None:
    """One slot. Which of two has it is known once it has emitted something: the other may have overtaken it."""
    engine = scripts.next()
    submit(worker, answers, "a", "b")
    assert not worker.is_queued("internal-a") and not worker.is_queued("internal-b")
    engine.tell(StepEvents([("internal-b", PROGRESSED)], None, True))
    assert answers.next() == ("b", PROGRESSED)
    assert worker.is_queued("internal-a")
    assert not worker.is_queued("internal-b")
    assert not worker.is_queued("internal-c")


def test_a_source_takes_room_in_the_queue(worker: IsolatedWorker, answers: Answers) -> None:
    """One slot; of what waits behind it, the tokens of the source and of the answer's beginning count."""
    most = worker.opened.config.max_queued_tokens
    submit(worker, answers, "a")
    source, prefix = (0,) * 100, (0,) * 3
    worker.submit(replace(spec("b", prefix), source_tokens=source), answers.of("b"))
    worker.check_room(1, most - 103)
    with pytest.raises(Overloaded):
        worker.check_room(1, most - 102)


def test_whoever_is_left_is_told_how_much_it_had(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    engine = scripts.next()
    submit(worker, answers, "a")
    engine.tell(StepEvents([("internal-a", PROGRESSED)], None, True))
    assert answers.next() == ("a", PROGRESSED)
    # Tokens are no queue's business any more, even where no engine is there.
    worker.restart("it hangs")
    assert not worker.is_queued("internal-a")
    engine.tell(StepEvents(None, None, True))  # type: ignore[arg-type]
    error = answers.error("a")
    assert isinstance(error, EngineRestart) and error.num_output == len(PROGRESSED.tokens)
    assert "the engine's listener ended" in caplog.text
    assert worker.heartbeat.has_died


def test_an_engine_with_an_encoder_brings_its_texts_limits_and_defaults(
    scripts: Scripts, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    answers = (tmp_path / "tokenizer.json").read_bytes()
    write_tokenizer(tmp_path, vocab_size=300)
    sources = (tmp_path / "tokenizer.json").read_bytes()
    texts = EncoderDecoder(
        decoder_prefix=(0,),
        source_template=(TEXT, 1),
        has_source_tokenizer=True,
        generation_defaults={"num_beams": 2},
    )
    plain = opened(answers)
    scripts.answer = replace(
        plain,
        model=replace(plain.model, max_source=7, source_vocab_size=300),
        source_tokenizer=sources,
        text2text=texts,
        limits=RequestLimits(default_max_tokens=3),
        defaults=RequestDefaults(search={"num_beams": 2}),
    )
    serving = open_isolated(Path("bundle"), ServeOptions(applies_generation_defaults=True))
    info = describe(serving)
    assert (info.limits.max_source_tokens, info.limits.default_max_tokens) == (7, 3)
    assert info.text_to_text.applies_generation_defaults
    assert isinstance(serving.codec, EncoderDecoderCodec)
    text = "the quick brown fox"
    source = serving.codec.encode_source(text)
    assert source == (*TokenizersCodec(sources).encode(text, False), 1)
    assert serving.codec.encode_prefix(text) == TokenizersCodec(answers).encode(text, False)
    assert source[:-1] != serving.codec.encode_prefix(text)
    assert serving.worker.stop(0.0)


@pytest.mark.parametrize("answer", [None, Refused(BundleError("the bundle is gone"))])
async def test_engines_that_hang_or_fail_as_they_open_end_the_server(
    scripts: Scripts, answer: FromChild | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PROCESS}.LEAST_OPEN_S", 0.0)
    monkeypatch.setattr(f"{PROCESS}.MANY_FIRST", 0.0)
    write_tokenizer(tmp_path)
    scripts.answer = opened((tmp_path / "tokenizer.json").read_bytes())
    serving = open_isolated(Path("bundle"), ServeOptions())
    assert not describe(serving).engine.weights_are_private
    server = server_of(serving)
    await begin(server, serving)
    scripts.answer = answer
    scripts.next().kill()
    worker = serving.worker
    assert isinstance(worker, IsolatedWorker) and worker._thread is not None
    worker._thread.join(LONG_S)
    await supervisor_of(server).look()
    assert server.has_failed.is_set()
    assert len(scripts.all) == MOST_FAILED
    with pytest.raises(EngineRestart):
        worker.submit(spec("late"), Answers().of("late"))
    await server.drain()


@pytest.mark.parametrize("how", ["lives long", "serves searches"])
def test_an_engine_that_served_or_lived_long_has_not_failed(
    worker: IsolatedWorker,
    scripts: Scripts,
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    if how == "lives long":
        monkeypatch.setattr(f"{PROCESS}.LONG_LIFE_S", 0.0)
    for _ in range(2 * MOST_FAILED):
        engine = scripts.next()
        engine.until(Start)
        if how == "serves searches":
            with worker._lock:
                submit(worker, answers, "a")
            engine.tell(StepEvents([("internal-a", FINISHED)], None, True))
            assert answers.next() == ("a", FINISHED)
        engine.kill()
    assert scripts.next().until(Start)


def test_an_engine_that_is_being_opened_ends_with_the_worker(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers
) -> None:
    submit(worker, answers, "a")
    scripts.answer = None
    scripts.next().kill()
    second = scripts.next()
    assert worker.stop(0.0)
    assert isinstance(answers.error("a"), Draining)
    assert second.returncode is not None and len(scripts.all) == 2


def test_a_pause_before_an_engine_ends_with_the_worker(
    worker: IsolatedWorker, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PROCESS}.FIRST_PAUSE_S", 3600.0)
    scripts.next().kill()
    assert worker.stop(0.0)
    assert len(scripts.all) == 1


def test_an_engine_that_ends_during_a_drain_is_not_replaced(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers
) -> None:
    submit(worker, answers, "a")
    worker.drain()
    scripts.next().kill()
    assert isinstance(answers.error("a"), EngineRestart)
    assert worker.stop(0.0)
    assert len(scripts.all) == 1 and not worker.heartbeat.has_died


def test_an_engine_with_chat_templates_brings_them(scripts: Scripts, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    files = ChatFiles(templates={"default": "{{ x }}"}, special_tokens={}, control_tokens=())
    scripts.answer = replace(
        opened((tmp_path / "tokenizer.json").read_bytes()),
        chat=files,
        generation_defaults={"top_p": 0.5},
    )
    serving = open_isolated(Path("bundle"), ServeOptions())
    info = describe(serving)
    assert info.chat.templates == ["default"]
    assert info.generation_defaults_json == '{"top_p": 0.5}'
    assert not info.applies_generation_defaults
    assert serving.worker.stop(0.0)


def test_a_group_that_does_not_fit_waits_as_a_whole(scripts: Scripts, answers: Answers) -> None:
    """Two slots: one request runs, and a group of two waits behind it with its prompt."""
    two = Harness("F3", max_batch=2).worker.snapshot()
    config = replace(CONFIG, max_queued=2)
    scripts.answer = replace(opened(), snapshot=two, config=config)
    worker = IsolatedWorker(Engines(Path("bundle"), ServeOptions()))
    worker.start()
    worker.check_room(2, 1)
    submit(worker, answers, "runs")
    worker.check_room(1, config.max_queued_tokens + 1)
    with pytest.raises(Overloaded):
        worker.check_room(2, config.max_queued_tokens + 1)
    submit_group(worker, answers, "g")
    num_prompt = len(spec("g").prompt_tokens)
    worker.check_room(1, config.max_queued_tokens - num_prompt)
    with pytest.raises(Overloaded):
        worker.check_room(1, config.max_queued_tokens - num_prompt + 1)
    submit_group(worker, answers, "h")
    with pytest.raises(Overloaded):
        worker.check_room(1, 1)
    scripts.next().kill()
    assert worker.stop(0.0)


def scored_messages(monkeypatch: pytest.MonkeyPatch) -> list[FromChild]:
    """What a child says of a request whose prompt of eight tokens is scored, three at most in a message."""
    monkeypatch.setattr(events, "MOST_PROMPT_TOKENS", 3)
    ours, theirs = Pipe()
    with ours, theirs:
        piped = PipedWorker(theirs)
        piped._worker = Harness("F3", max_batch=1).worker
        piped._worker.after_step(piped._tell)
        piped._submit([spec("a", (1, 2, 3, 4) * 2, num_prompt_logprobs=1, max_tokens=2)])
        while piped._worker.run_step():
            pass
        messages = []
        while ours.poll(0.0):
            messages.append(ours.recv())
    return messages


def test_a_scored_prompt_comes_in_pieces_and_is_told_as_one(
    worker: IsolatedWorker, scripts: Scripts, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = scored_messages(monkeypatch)
    pieces = [one for one in messages if isinstance(one, ScoredPiece)]
    assert [len(one.prompt) for one in pieces] == [3, 3]
    first = scripts.next()
    submit(worker, answers, "a")
    # The first engine ends between two pieces: nothing was told, and the next one tells all.
    first.tell(pieces[0])
    first.kill()
    second = scripts.next()
    second.until(Submit)
    for message in messages:
        second.tell(message)
    name, event = answers.next()
    assert name == "a" and isinstance(event, Progressed) and len(event.tokens) == 1
    assert [one.token for one in event.prompt] == [1, 2, 3, 4] * 2
    assert [one.logprobs is None for one in event.prompt] == [True] + [False] * 7
    _, event = answers.next()
    assert isinstance(event, Progressed) and not event.prompt
