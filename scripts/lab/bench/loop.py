"""How late the event loop is while strangers send what takes longest: a ticker of 1 ms beside a served bundle.

    python -m scripts.lab.bench.loop BUNDLE

The server runs in this process, its engines in one of their own, and the bombs come from a third. Lateness is measured
from when a tick was due, so that it has whatever holds the loop or the interpreter. One line for each bomb. On a shared
machine a turn's processor time, of the loop's thread alone, says more.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import typer
from outrider.oip import inference_pb2 as oip
from outrider.runtime.serving.process import serve
from outrider.runtime.serving.settings import ServeOptions
from outrider.v1 import inference_pb2 as wire

from scripts.lab.soak.verdict import finish

MOST_BYTES = (4 << 20) - 4096
TICK_S = 0.001
MOST_LATE_S = 0.040
TIMES = 2
"""Each bomb is sent so often."""
Samples = list[tuple[float, float]]
"""Moments and what was measured then, seconds."""
Bomb = tuple[str, str, bytes]
"""Name, path and body; gRPC's paths begin with a service."""
GENERATE, TOKENIZE = "/outrider.v1.Inference/Generate", "/outrider.v1.Inference/Tokenize"
INFER = "/inference.GRPCInferenceService/ModelInfer"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class Worst(NamedTuple):
    """How late a ticker came, and how long of a processor a turn of the loop took, seconds."""

    p999_s: float
    greatest_s: float
    turn_s: float

    def __str__(self) -> str:
        return " ".join(f"{one * 1e3:7.1f}" for one in self)


def filled(before: str, piece: str, after: str, most: int = MOST_BYTES) -> bytes:
    """Return as many pieces as a body may have, between two texts."""
    num = (most - len(before) - len(after)) // len(piece.encode())
    return (before + piece * num + after).encode()


def bombs() -> Iterator[Bomb]:
    """Yield the longest requests of each kind."""
    asked = '{"max_tokens":1,"prompt":"a","x":'
    pieces = {
        "lists": "[],", "numbers": "1,", "objects": '{"a":1},', "names": '{"a":1,"a":2},', "floats": "1.25e3,",
        "strings": '"a",', "nulls": "null,",
    }  # fmt: skip
    for name, piece in pieces.items():
        yield f"json {name}", COMPLETIONS, filled(f"{asked}[", piece, "0]}")
    yield "json deep", COMPLETIONS, filled(asked, "[", "")
    yield "json names of one object", COMPLETIONS, named_values(asked)
    yield "json escapes", COMPLETIONS, filled(f'{asked}"', "\\u00e9", '"}')
    yield "json half characters", COMPLETIONS, filled(f'{asked}"', "\\ud800", '"}')
    yield "json one number", COMPLETIONS, filled(asked, "1", "}")
    yield "json one fraction", COMPLETIONS, filled(f"{asked}0.", "1", "}")
    yield "json one text", COMPLETIONS, filled('{"max_tokens":1,"prompt":"', "word ", '"}', 1 << 20)
    text = "def main(argument): return argument + 1\n" * 68
    yield "256 prompts", COMPLETIONS, encoded(max_tokens=1, prompt=[text] * 256)
    yield "256 lists of ids", COMPLETIONS, encoded(max_tokens=1, prompt=[[5] * 900] * 256)
    yield "ids", COMPLETIONS, filled('{"max_tokens":1,"prompt":[', "5,", "5]}")
    turns = [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(1023)]
    yield "many messages", CHATS, encoded(max_tokens=1, messages=turns)
    parts = [{"type": "text", "text": "a"}] * 100_000
    yield "many parts", CHATS, encoded(max_tokens=1, messages=[{"role": "user", "content": parts}])
    marks = "<|im_start|><|endoftext|>" * 20_000
    yield (
        "control tokens",
        CHATS,
        encoded(max_tokens=1, messages=[{"role": "user", "content": marks}]),
    )
    yield "tokenize", "/tokenize", encoded(prompt="word " * 200_000, return_token_strs=True)
    yield "detokenize", "/detokenize", encoded(tokens=[5] * 1_000_000)
    many = {"max_tokens": 500, "logprobs": 20, "n": 16, "ignore_eos": True, "prompt": "a"}
    yield "long answer", COMPLETIONS, encoded(**many)
    yield from messages(text)


def named_values(asked: str) -> bytes:
    names, size = [], len(asked) + 4
    while size < MOST_BYTES:
        names.append(f'"{len(names)}":0')
        size += len(names[-1]) + 1
    return f"{asked}{{{','.join(names[:-1])}}}}}".encode()


def messages(text: str) -> Iterator[Bomb]:
    """Yield bombs of gRPC."""
    long = wire.GenerateRequest(max_tokens=1)
    long.tokens.ids.extend([5] * MOST_BYTES)
    yield "grpc ids", GENERATE, long.SerializeToString()
    words = wire.GenerateRequest(max_tokens=1, text="a")
    words.sampling.bad_words.extend(["a"] * (MOST_BYTES // 3))
    yield "grpc words", GENERATE, words.SerializeToString()
    biased = wire.GenerateRequest(max_tokens=1, text="a")
    for token in range(MOST_BYTES // 13):
        biased.sampling.logit_bias[token] = 1.0
    yield "grpc biases", GENERATE, biased.SerializeToString()[:MOST_BYTES]
    chat = wire.GenerateRequest(max_tokens=1)
    for _ in range(MOST_BYTES // 8):
        chat.chat.messages.add(role="a")
    yield "grpc messages", GENERATE, chat.SerializeToString()[:MOST_BYTES]
    yield (
        "grpc text",
        GENERATE,
        wire.GenerateRequest(max_tokens=1, text=text * 300).SerializeToString(),
    )
    yield (
        "grpc tokenize",
        TOKENIZE,
        wire.TokenizeRequest(text="word " * 200_000).SerializeToString(),
    )
    infer = oip.ModelInferRequest()
    for number in range(MOST_BYTES // 15):
        infer.parameters[f"{number:06d}"].SetInParent()
    yield "kserve parameters", INFER, infer.SerializeToString()[:MOST_BYTES]
    yield "kserve inputs", INFER, b"\x2a\x00" * (MOST_BYTES // 2)
    unknown = b"\xf8\x07\x01" * (MOST_BYTES // 3)
    yield "grpc unknown fields", GENERATE, unknown


def encoded(**values: object) -> bytes:
    """Return a body of JSON."""
    return json.dumps(values).encode()


def throw(grpc_port: int, http_port: int) -> None:
    """Send every bomb some times; print each one's name and moments on the system's clock."""
    channel = grpc.insecure_channel(f"localhost:{grpc_port}")
    for name, path, body in bombs():
        began_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        for _ in range(TIMES):
            if path.startswith(("/outrider", "/inference")):
                try:
                    if path == GENERATE:
                        outcome = str(len([*channel.unary_stream(path)(body, timeout=60)]))
                    else:
                        outcome = str(len(channel.unary_unary(path)(body, timeout=60)))
                except grpc.RpcError as error:
                    outcome = error.code().name
            else:
                connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
                connection.request("POST", path, body, {"content-type": "application/json"})
                response = connection.getresponse()
                outcome = f"{response.status} {len(response.read())}"
                connection.close()
        time.sleep(0.05)
        print(
            json.dumps([name, outcome, began_s, time.clock_gettime(time.CLOCK_MONOTONIC)]),
            flush=True,
        )


async def tick(late: Samples) -> None:
    """Note when each tick was due, and how late it came."""
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        late.append((due_s, time.monotonic() - due_s))


def note_turns(turns: Samples) -> None:
    """Have each turn of this thread's loop noted: when it ended, and the seconds of a processor that it took."""
    run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def noted(loop: asyncio.AbstractEventLoop) -> None:
        began_s = time.thread_time()
        run_once(loop)
        turns.append((time.monotonic(), time.thread_time() - began_s))

    asyncio.BaseEventLoop._run_once = noted  # type: ignore[attr-defined]


def worst(late: Samples, turns: Samples, began_s: float = 0.0, ended_s: float = math.inf) -> Worst:
    """Return the worst between two moments."""
    ordered = sorted(one for at_s, one in late if began_s <= at_s <= ended_s)
    longest = max((one for at_s, one in turns if began_s <= at_s <= ended_s), default=0.0)
    return Worst(ordered[min(len(ordered) - 1, int(0.999 * len(ordered)))], ordered[-1], longest)


async def measure(bundle: Path, report: Callable[[str], None]) -> dict[str, Worst]:
    """Serve a bundle under bombs; return the worst of each one's time, and print it."""
    late, turns = Samples(), Samples()
    note_turns(turns)
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("grpc", "http")]
        options = ServeOptions(
            address="127.0.0.1:0",
            has_kserve=True,
            port_file=files[0],
            http_address="127.0.0.1:0",
            http_port_file=files[1],
        )
        served = asyncio.ensure_future(serve(bundle, options))
        while not all(file.exists() and file.read_text().strip() for file in files):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        ports = [file.read_text().strip() for file in files]
        await asyncio.sleep(1.0)
        turns.clear()  # of the start
        ticker = asyncio.ensure_future(tick(late))
        await asyncio.sleep(3.0)
        found = {"idle": worst(late, turns)}
        command = [sys.executable, "-m", "scripts.lab.bench.loop", "--throw", *ports]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        async for line in child.stdout:
            name, outcome, began_s, ended_s = json.loads(line)
            found[name] = worst(late, turns, began_s, ended_s)
            report(f"{name:28} {outcome:>14}  {found[name]}")
        found["all"] = worst(late, turns)
        ticker.cancel()
        os.kill(os.getpid(), signal.SIGTERM)
        await served
    return found


def main(bundle: Path, seconds: float = MOST_LATE_S) -> None:
    """Print the lateness under each bomb, and exit 1 where the whole run's p99.9 is above the bound."""
    found = asyncio.run(measure(bundle, typer.echo))
    p999_s = found["all"].p999_s
    problem = f"the loop was {p999_s:.3f} s late at p99.9"
    title = "ms late at p99.9, at most; a turn's processor ms at most"
    finish(title, found, [problem] if p999_s > seconds else [])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--throw"]:
        throw(int(sys.argv[2]), int(sys.argv[3]))
    else:
        typer.run(main)
