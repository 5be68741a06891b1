"""How far it is through the code: what a request enters before the worker, what a decode step enters, and sizes.

    python -m scripts.count_way BUNDLE

One prompt is sent over gRPC and over HTTP; what the server's event loop enters from the bytes on until the worker has
the request is counted, and how often it comes back to a file that it has left.

A worker without a thread decodes greedily at batch 1 and 8; each of its steps is profiled by itself. Only files of this
project count; a compiled function counts as one call. Steps that draft are compared by ``drafted``, the draft tokens
of the step: each is a call of the draft model.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Annotated
from urllib.request import Request, urlopen

import typer
from outrider import SyncClient
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Event, Progressed
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.http.factory import open_api
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.server import Server
from outrider.runtime.serving.settings import ServeOptions

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engines", "export", "proto", "runtime", "scripts")
SERVER_FOLDERS = ("engines/", "runtime/")
BATCHES = (1, 8)
GAMMA = 4
PROMPT = "def main() -> None:\n    for name in names:\n        print(name)\n\n\ndef"
MAX_TOKENS = 200
NUM_WARM_UP, NUM_COUNTED = 10, 60
"""Steps of compilation and prefill, and steps at most of which one is shown; an answer that ends is the end of them."""


@dataclass(frozen=True, slots=True)
class Way:
    """What one step entered.

    Attributes:
        drafted: draft tokens of all rows.
        calls: by file, relative to the root, and function.
    """

    drafted: int
    calls: Counter[tuple[str, str]]

    @property
    def num_calls(self) -> int:
        """Python calls."""
        return self.calls.total()

    def __str__(self) -> str:
        files = {file for file, _ in self.calls}
        return f"{len(files):6} {len(self.calls):10} {self.num_calls:6} {self.drafted:8}"


class Profiler:
    """Counts calls of this project's functions; links are followed, so that a stage folder is this project too."""

    def __init__(self) -> None:
        self._files: dict[str, str | None] = {}

    def step(self, worker: Worker, events: list[Event]) -> Way:
        """Run one step, whose events go to ``events``, and return what it entered."""
        calls: Counter[tuple[str, str]] = Counter()

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and (file := self.file(code.co_filename)) is not None:
                calls[file, code.co_qualname] += 1

        events.clear()
        sys.setprofile(note)
        try:
            worker.run_step()
        finally:
            sys.setprofile(None)
        traces = [event.trace for event in events if isinstance(event, Progressed)]
        return Way(sum(len(trace.draft_tokens) for trace in traces), calls)

    def file(self, name: str) -> str | None:
        """Return a file of this project relative to its root; None for another one."""
        if name not in self._files:
            path = Path(os.path.realpath(name))
            own = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ("",)
            # An environment may lie under the root, too.
            self._files[name] = "/".join(own) if own[0] in FOLDERS and path.is_file() else None
        return self._files[name]


class Entered:
    """What the thread that calls ``start`` enters of the server, from there until the worker has a request.

    Attributes:
        calls: file and function of each call, in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._profiler = Profiler()

    def start(self) -> None:
        """Count from now on."""
        self.calls.clear()
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = self._profiler.file(code.co_filename) if event == "call" else None
        if file is None or not file.startswith(SERVER_FOLDERS):
            return
        if code.co_name == "submit_group":
            sys.setprofile(None)
        else:
            self.calls.append((file, code.co_qualname))

    def __str__(self) -> str:
        files = [file for file, _ in groupby(self.calls, key=lambda call: call[0])]
        num_files = len({*files})
        num_returns = len(files) - num_files
        return f"{num_files:6} {len({*self.calls}):10} {len(self.calls):6} {num_returns:8}"


async def requests(root: Path) -> list[tuple[str, str]]:
    """Return, by protocol, what a prompt enters on its way to the worker; the second of two, which fills no caches."""
    config, limits, security = ServerConfig(default_gamma=0), RequestLimits(), Security()
    state = ServerState(RequestAccounting(Metrics(), time.monotonic))
    listener = open_api(state, security, ServeOptions(http_address="127.0.0.1:0"))
    assert listener is not None
    server = Server(state, config, limits, security=security, listeners=[listener])
    port = await server.listen("127.0.0.1:0")
    await server.open(load_model(root, ServeOptions(config=config)))
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9}

    def over_grpc() -> None:
        with SyncClient(f"127.0.0.1:{port}") as client:
            client.complete(**body)

    def over_http() -> None:
        url = f"http://127.0.0.1:{listener.port}/v1/completions"
        kinds = {"content-type": "application/json"}
        urlopen(Request(url, json.dumps(body).encode(), kinds)).read()

    found = []
    for name, ask in (("gRPC", over_grpc), ("HTTP", over_http)):
        entered = Entered()
        for _ in range(2):
            entered.start()
            await asyncio.to_thread(ask)
        found.append((name, str(entered)))
    server.hurry()
    await server.drain()
    return found


def ways(root: Path, batch: int, *, gamma: int | None, is_enabled: bool) -> list[Way]:
    """Return what steps of a bundle enter, those with the fewest calls first; gamma None is chosen by the server."""
    config = ServerConfig(max_running=batch, default_gamma=gamma)
    serving = load_model(root, ServeOptions(config=config))
    events: list[Event] = []
    for number in range(batch):
        spec = RequestSpec(
            internal_id=str(number), request_id=str(number), prompt_tokens=tuple(serving.codec.encode(PROMPT)),
            params=SamplingParams(temperature=0.0), seed=number, max_tokens=MAX_TOKENS,
            speculation=SpeculationParams(is_enabled=is_enabled),
        )  # fmt: skip
        serving.worker.submit(spec, events.append)
    for _ in range(NUM_WARM_UP):
        serving.worker.run_step()
    profiler = Profiler()
    found: list[Way] = []
    while len(found) < NUM_COUNTED:
        way = profiler.step(serving.worker, events)
        if not all(isinstance(event, Progressed) for event in events):
            break
        found.append(way)
    return sorted(found, key=lambda way: way.num_calls)


def rows(root: Path) -> Iterator[tuple[str, Way]]:
    """Yield what is decoded, and the step in the middle of all; of a chosen gamma the step with the most calls too."""
    for batch in BATCHES:
        plain = ways(root, batch, gamma=0, is_enabled=False)
        yield f"batch {batch}, plain", plain[len(plain) // 2]
        fixed = ways(root, batch, gamma=GAMMA, is_enabled=True)
        whole = [way for way in fixed if way.drafted == batch * GAMMA] or fixed
        yield f"batch {batch}, gamma {GAMMA}", whole[len(whole) // 2]
        chosen = ways(root, batch, gamma=None, is_enabled=True)
        yield f"batch {batch}, auto", chosen[len(chosen) // 2]
        yield f"batch {batch}, auto, deciding", chosen[-1]


def sizes() -> None:
    """Print files per folder and lines outside of tests."""
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    files = [path for path in files if "_pb2" not in path.name]
    per_folder = Counter(path.parent for path in files if path.name != "__init__.py")
    lines = {path: len(path.read_text().splitlines()) for path in files}
    largest, count = per_folder.most_common(1)[0]
    print(f"\nfiles {len(files)}, in the fullest folder {count} ({largest.relative_to(ROOT)})")
    print(
        f"lines outside of tests {sum(lines.values())}, in the longest file {max(lines.values())}"
    )
    for name in (*FOLDERS, "runtime/core", "runtime/loop", "runtime/gamma", "runtime/calibration"):
        inside = [count for path, count in lines.items() if path.is_relative_to(ROOT / name)]
        print(f"  {name:20} {len(inside):4} files {sum(inside):6} lines")


def main(bundle: Annotated[Path, typer.Argument(help="folder of a bundle")]) -> None:
    """Print what a request and a step enter, and sizes."""
    print(f"{'':24}{'files':>6} {'functions':>10} {'calls':>6} {'returns':>8}")
    for protocol, entered in asyncio.run(requests(bundle)):
        print(f"{protocol:24}{entered}")
    print(f"{'':24}{'files':>6} {'functions':>10} {'calls':>6} {'drafted':>8}")
    for name, way in rows(bundle):
        print(f"{name:24}{way}")
    sizes()


if __name__ == "__main__":
    typer.run(main)
