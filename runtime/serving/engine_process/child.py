"""The engine's process: a worker behind a pipe.

Ends with the process that started it: when the pipe is closed, nobody is left to answer.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from outrider.engines.base import BundleError, SpeculativeError
from outrider.runtime.core.errors import ServingError
from outrider.runtime.core.events import Event, Progressed, pieces_of
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.loop.event_queue import Deliver
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.engine_process.messages import (
    Beat,
    Cancel,
    Changed,
    Declined,
    Drain,
    FromChild,
    Open,
    Opened,
    Refused,
    ScoredPiece,
    Start,
    StepEvents,
    Stop,
    Submit,
)
from outrider.runtime.serving.factory import load_model, settle_loaded
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.observability.logs import Logging
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec

log = logging.getLogger(__name__)

DEAD_EXIT_CODE = 71
SNAPSHOT_EVERY_S = 0.25
"""Metrics are read about once a second; a picture of the worker costs as much as the events of a step."""
BEAT_EVERY_S = 0.5
"""The watchdog looks as often."""


class PipedWorker:
    """Answers the messages of one pipe with one worker.

    Args:
        connection: to the process that started this one.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # The worker's thread tells of steps, the main thread declines requests.
        self._sending = threading.Lock()
        self._events: list[tuple[str, Event]] = []
        self._sent_s = 0.0
        self._beat_s = 0.0
        self._has_changed = False

    def run(self, root: Path, options: ServeOptions) -> None:
        """Serve until the other side stops it; ends the process where the worker's thread dies."""
        try:
            serving = load_model(root, options, on_beat=self._beat)
        except (SpeculativeError, OSError, MemoryError, ModuleNotFoundError) as error:
            self._send(Refused(error))
            return
        assert isinstance(serving.worker, Worker)
        codec = serving.codec
        assert isinstance(codec, TokenizersCodec)
        source_tokenizer, text2text = None, None
        if isinstance(codec, EncoderDecoderCodec):
            text2text = codec.text2text
            source_tokenizer = codec.sources.source if text2text.has_source_tokenizer else None
        self._worker = worker = serving.worker
        worker.after_step(self._tell)
        settle_loaded()
        self._send(
            Opened(
                model=serving.model,
                config=serving.config,
                limits=serving.limits,
                defaults=serving.defaults,
                tokenizer=codec.source,
                source_tokenizer=source_tokenizer,
                text2text=text2text,
                certificate=dict(serving.certificate),
                bit_equality=serving.bit_equality,
                weights_are_private=serving.weights_are_private,
                speculation=worker.default_speculation,
                snapshot=worker.snapshot(),
                chat=None if serving.chats is None else serving.chats.files,
                generation_defaults=dict(serving.generation_defaults),
            )
        )
        while self._wait(serving) is False or self._obey(self._connection.recv()):
            pass

    def _wait(self, serving: LoadedModel) -> bool:
        """Return whether a message came before it was time to look at the files; a change is told once."""
        if serving.mapped is None or self._has_changed:
            return self._connection.poll(None)
        has_message = self._connection.poll(serving.file_watch_s)
        try:
            serving.mapped.check_unchanged()
        except BundleError as error:
            log.error("no longer serving: %s", error)
            self._has_changed = True
            self._send(Changed())
        return has_message

    def _obey(self, message: object) -> bool:
        """Do what a message asks for; False where it was the last."""
        worker = self._worker
        match message:
            case Submit(specs):
                self._submit(specs)
            case Cancel(internal_id, error):
                worker.cancel(internal_id, error)
            case Start():
                worker.start()
                threading.Thread(target=self._end_with_worker, daemon=True).start()
            case Drain():
                worker.drain()
            case Stop(timeout_s):
                return not worker.stop(timeout_s)
        return True

    def _submit(self, specs: Sequence[RequestSpec]) -> None:
        delivers = [self._deliver_of(spec.internal_id) for spec in specs]
        try:
            self._worker.submit_group(specs, delivers)
        except ServingError as error:
            for spec in specs:
                self._send(Declined(spec.internal_id, error))

    def _deliver_of(self, internal_id: str) -> Deliver:
        return lambda event: self._events.append((internal_id, event))

    def _tell(self) -> None:
        """Send what a step has to say, or that it has nothing; on the worker's thread."""
        events, self._events = self._events, []
        now_s = time.monotonic()
        snapshot = None
        has_ending = any(not isinstance(event, Progressed) for _, event in events)
        if has_ending or now_s - self._sent_s > SNAPSHOT_EVERY_S:
            self._sent_s = now_s
            snapshot = self._worker.snapshot()
        self._beat_s = 0.0
        events = [self._without_prompt(*one) for one in events]
        self._send(StepEvents(events, snapshot, self._worker.heartbeat.is_stepping))

    def _without_prompt(self, internal_id: str, event: Event) -> tuple[str, Event]:
        """Return an event with the end of its scored prompt at most; send what is before."""
        if not isinstance(event, Progressed) or not event.prompt:
            return internal_id, event
        *pieces, last = pieces_of(event.prompt)
        for piece in pieces:
            self._send(ScoredPiece(internal_id, piece))
        return internal_id, replace(event, prompt=last)

    def _beat(self) -> None:
        """Say that a step goes on, unless that was said just now; on the worker's thread."""
        now_s = time.monotonic()
        if now_s - self._beat_s > BEAT_EVERY_S:
            self._beat_s = now_s
            self._send(Beat())

    def _end_with_worker(self) -> None:
        self._worker.wait()
        if self._worker.heartbeat.has_died:
            logging.shutdown()
            os._exit(DEAD_EXIT_CODE)

    def _send(self, message: FromChild) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send_bytes(data)


def _end_with_starter(descriptor: int) -> None:
    """End the process if the other side closes its end of an open socket before it has sent anything."""
    with socket.socket(fileno=os.dup(descriptor)) as pipe:
        if not pipe.recv(1, socket.MSG_PEEK):
            os._exit(DEAD_EXIT_CODE)


def main(descriptor: int) -> None:
    """Run the engine's process over an open socket."""
    # Only the process that started this one ends it, after the requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Where it hangs, SIGABRT has it say where.
    faulthandler.enable()
    connection = Connection(descriptor)
    code = 0
    try:
        asked: Open = connection.recv()
        sys.setswitchinterval(asked.switch_interval_s)
        Logging(asked.options.watch.logs)
        # Nobody reads from the pipe while the bundle is opened, and nothing is sent.
        threading.Thread(target=_end_with_starter, args=(descriptor,), daemon=True).start()
        PipedWorker(connection).run(asked.root, asked.options)
    except (EOFError, ConnectionError):
        code = DEAD_EXIT_CODE
    except BaseException:  # whatever it is, a library that hangs must not hold the process
        log.critical("the engine's process ends", exc_info=True)
        code = DEAD_EXIT_CODE
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
