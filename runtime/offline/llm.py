"""``outrider.LLM``: a bundle in this process, asked like a server but without one.

Requests go through the server's own handler (``runtime.serving.request_handler``), on an event loop of a thread of its
own, so that limits, defaults, refusals and distributions are the server's. Options and answers are the client's:
``outrider.options``, ``outrider.outputs``. There is no queue's limit and no time limit: whoever asks also waits.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

from outrider.options import ChatParams, Message, SamplingParams, build_request
from outrider.outputs import OutputBuilder, RequestOutput
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import MOST_COUNT, PREFIX_CACHE_BYTES, ServerConfig
from outrider.runtime.offline.prompt_forms import AnyPrompt, Text, checked, plain
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.loaded_model import LoadedModel, describe
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.request_handler import RequestHandler
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.supervision.watchdog import Watchdog
from outrider.runtime.serving.v1.generate_request import V1Request
from outrider.v1 import inference_pb2 as wire
from rich.console import Console
from rich.progress import Progress

Write: TypeAlias = Callable[[wire.GenerateResponse], None]

# Seconds between two looks at the worker, and that answers under way get at the end.
WATCH_EVERY_S = 0.5
FLUSH_S = 5.0
# Requests under way for each one that is answered: the loop takes no longer to cancel them than to begin them.
MOST_AHEAD = 4


class LLM:
    """A bundle's models in this process.

    ``with LLM("bundle") as llm: print(llm.generate("def main", SamplingParams(max_tokens=64))[0].text)``

    Threads may share it. Requests are answered side by side, as many at once as there are slots.

    Args:
        bundle: folder of an export.
        device: "cpu", "cuda[:N]", "tensorrt[:N]" or "auto".
        drafter: default of requests; None for the bundle's, else the draft model.
        gamma: draft tokens per step, default of requests; None for the bundle's, else what is expected to gain most.
            For that the first use of a bundle on a machine measures what steps cost, some seconds.
        max_running: requests that are answered side by side; the bundle's slots bound it too.
        num_threads: of the CPU; 0: one per physical core that this process may use.
        prefix_cache_bytes: memory of the caches of earlier prompts and answers; 0 for none.
        generation_defaults: whether requests get the checkpoint's generation settings for what they leave open.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: a setting cannot be used.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        device: str = "auto",
        drafter: str | None = None,
        gamma: int | None = None,
        max_running: int = 64,
        num_threads: int = 0,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        generation_defaults: bool = False,
    ) -> None:
        config = ServerConfig(
            max_running=max_running,
            num_threads=num_threads,
            prefix_cache_bytes=prefix_cache_bytes,
            default_drafter="model" if drafter is None else drafter,
            default_gamma=gamma,
            max_queued=MOST_COUNT,
            max_queued_tokens=MOST_COUNT,
            # Nobody watches: prompts are read as wide as without answers under way, in up to a tenth less time.
            shared_chunk=MOST_COUNT,
            queue_timeout_s=math.inf,
        )
        options = ServeOptions(
            device=device,
            leaves_drafter=drafter is None,
            leaves_gamma=gamma is None,
            applies_generation_defaults=generation_defaults,
            config=config,
            limits=RequestLimits(max_request_s=math.inf),
        )
        self._pid = os.getpid()
        self._serving = load_model(Path(bundle), options)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="outrider-llm", daemon=True)
        thread.start()
        opened = asyncio.run_coroutine_threadsafe(_open(self._serving), self._loop).result()
        self._handler = opened.handler
        # Also at the end of the interpreter, while its threads still run.
        self._handing_over = threading.Lock()
        ends = (self._serving, opened, self._loop, thread, self._handing_over, self._pid)
        self._close = weakref.finalize(self, _close, *ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way, and free the models."""
        self._close()

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Return the answers to prompts, in their order.

        Args:
            prompts: a text or the token ids of one, or several of them; ``{"prompt": ...}`` and
                ``{"prompt_token_ids": ...}`` say the same.
            sampling_params: of all prompts, or of each; None for the defaults.
            progress: whether a bar on standard error counts answers.

        Raises:
            ServingError: a prompt was refused or failed; the others are cancelled.
            TypeError: no field has the name of an option, or a prompt is none.
            ValueError: there are not as many sampling_params as prompts.
        """
        several = _prompts(checked(prompts))
        params = _params(sampling_params, len(several))
        requests = [
            build_request(plain(prompt), **own) for prompt, own in zip(several, params, strict=True)
        ]
        return self._answer(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_params: ChatParams | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Return what a model with a chat template answers to a conversation, or to several.

        Args:
            messages: ``[{"role": "user", "content": "Hello"}]``, or a list of such lists.
            sampling_params: as of ``generate``; errors are the same, too.
            chat_params: how conversations are rendered; its ``messages`` are ``messages``.
            progress: whether a bar on standard error counts answers.
        """
        several = _conversations(messages)
        params = _params(sampling_params, len(several))
        requests = []
        for conversation, own in zip(several, params, strict=True):
            chat: ChatParams = {**(chat_params or {}), "messages": conversation}
            requests.append(build_request(**own, **chat))
        return self._answer(requests, progress)

    def stream(
        self,
        prompt: AnyPrompt | wire.GenerateRequest,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[wire.GenerateResponse]:
        """Yield an answer piece by piece as ``Client.generate`` does; leaving the loop cancels it.

        A conversation is asked with ``build_request(messages=...)``. Errors are those of ``generate``.
        """
        request = build_request(plain(prompt), **(sampling_params or {}))
        responses = SimpleQueue[wire.GenerateResponse | None]()
        answering = self._begin(self._call(request, responses.put))
        try:
            answering.add_done_callback(lambda _: responses.put(None))
            while (response := responses.get()) is not None:
                yield response
            answering.result()
        finally:
            answering.cancel()

    def info(self) -> wire.GetServerInfoResponse:
        """Return what is served and within which limits, as a server does; nothing of the load."""
        return describe(self._serving)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return list(self._serving.codec.encode(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._serving.codec.decode(tuple(token_ids), skip_special_tokens)

    def _answer(
        self, requests: Sequence[wire.GenerateRequest], shows_progress: bool
    ) -> list[RequestOutput]:
        builders = [OutputBuilder(request) for request in requests]
        calls: list[V1Request] = []
        answering: set[Future[None]] = set()
        ended = SimpleQueue[Future[None]]()
        most = MOST_AHEAD * self._serving.config.max_running
        console = Console(stderr=True, force_jupyter=False)
        try:
            with Progress(console=console, disable=not shows_progress) as bar:
                task = bar.add_task("answers", total=len(requests))
                waiting = zip(requests, builders, strict=True)
                for _ in requests:
                    for request, builder in islice(waiting, most - len(answering)):
                        call = self._call(request, builder.add)
                        calls.append(call)
                        one = self._begin(call)
                        answering.add(one)
                        one.add_done_callback(ended.put)
                    one = ended.get()
                    answering.discard(one)
                    one.result()
                    bar.advance(task)
        finally:
            for one in answering:
                one.cancel()
        return [
            replace(builder.output(), prompt_token_ids=list(call.prompt_tokens))
            for builder, call in zip(builders, calls, strict=True)
        ]

    def _call(self, request: wire.GenerateRequest, write: Write) -> V1Request:
        """Return a call of this process; ``write`` gets the pieces on the loop's thread."""
        data = request.SerializeToString()

        async def hand_over(answer: bytes) -> None:
            write(wire.GenerateResponse.FromString(answer))

        return V1Request(self._serving, data, ClientIdentity(), hand_over)

    def _begin(self, call: V1Request) -> Future[None]:
        """Ask. Cancelling the future cancels the request."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the LLM was made in another process; a forked one must make its own"
            )
        with self._handing_over:
            if not self._close.alive:
                raise RuntimeError("the LLM is closed")
            return asyncio.run_coroutine_threadsafe(self._handler.complete(call), self._loop)


class _OpenedHandler(NamedTuple):
    """The request handler of a loaded model, and the task that watches its worker."""

    handler: RequestHandler
    watching: asyncio.Task[None]


async def _open(serving: LoadedModel) -> _OpenedHandler:
    """Start a loaded model's worker and return its request handler."""
    handler = RequestHandler(serving, RequestAccounting(Metrics(), serving.clock))
    serving.worker.start()
    return _OpenedHandler(handler, asyncio.create_task(_watch(serving, handler)))


async def _watch(serving: LoadedModel, handler: RequestHandler) -> None:
    """End all requests where the worker hangs or is dead."""
    watchdog = Watchdog(serving.worker.heartbeat, serving.config.hang_s, serving.clock)
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        if watchdog.complaint() is not None:
            handler.fail()
            return


async def _end(opened: _OpenedHandler) -> None:
    """Return once everybody is answered, or cancelled where the worker does not answer."""
    opened.watching.cancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await opened.handler.wait_idle()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


def _close(
    serving: LoadedModel,
    opened: _OpenedHandler,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    handing_over: threading.Lock,
    pid: int,
) -> None:
    """End the worker and the loop, and free the engines, unless one is stuck in a step.

    In a forked process there is nothing to end: threads stay behind.
    """
    if os.getpid() != pid:
        return
    if threading.current_thread() is thread:
        # The collector came by on the loop's thread, which cannot wait for itself.
        threading.Thread(
            target=_close,
            args=(serving, opened, loop, thread, handing_over, pid),
            name="outrider-llm-end",
        ).start()
        return
    has_stopped = serving.worker.stop(0.0)
    # Whoever looked before this began is on the loop by now, and others see that it has begun.
    with handing_over:
        ending = asyncio.run_coroutine_threadsafe(_end(opened), loop)
    ending.result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    if has_stopped:
        serving.close()
    if serving.grammars is not None:
        serving.grammars.close()


def _prompts(prompts: Text | Sequence[Text]) -> list[Text]:
    """Return several prompts where there may be one alone."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _params(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return the parameters of each prompt."""
    if given is None or isinstance(given, Mapping):
        own: SamplingParams = {} if given is None else given
        return [own] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts")
    return list(given)
