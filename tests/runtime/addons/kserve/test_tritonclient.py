"""Triton's own client, from an environment of its own, against our server.

Two descriptors named grpc_service.proto exclude each other in a process, and tritonclient wants protobuf below 7.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.environments import Environments
from tests.runtime.addons.kserve.requests import KSERVE
from tests.runtime.conftest import ALPHABET, ENDLESS_TOKENS, LetterCodec

ROOT = Path(__file__).parents[4]
CLIENT = "tritonclient[grpc]==2.73.0"
CALLS = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

def tensor(name, datatype, value):
    one = triton.InferInput(name, [1], datatype)
    one.set_data_from_numpy(np.array([value], dtype=object if datatype == "BYTES" else bool))
    return one

def inputs(text, stream=False, **options):
    return [
        tensor("text_input", "BYTES", text.encode()),
        tensor("stream", "BOOL", stream),
        tensor("sampling_parameters", "BYTES", json.dumps(options).encode()),
        tensor("exclude_input_in_output", "BOOL", True),
    ]

def texts(result, name="text_output"):
    return [one.decode() for one in result.as_numpy(name)]

def status(call):
    try:
        call()
    except InferenceServerException as error:
        return str(error.status())

told = {}
GREEDY = {"temperature": "0", "max_tokens": "9"}
ENDLESS = {"temperature": 0, "max_tokens": int(sys.argv[2]), "speculation": {"enabled": False}}
client = triton.InferenceServerClient(sys.argv[1])
told["live"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready("letters")]
told["other"] = client.is_model_ready("other")
told["server"] = client.get_server_metadata().name
told["outputs"] = [one.name for one in client.get_model_metadata("letters").outputs]

result = client.infer(
    "letters", inputs("abc", **GREEDY), request_id="7",
    outputs=[triton.InferRequestedOutput(name) for name in ("text_output", "token_ids")],
)
told["unary"] = [result.get_response().id, texts(result), result.as_numpy("token_ids").tolist()]
told["parameters"] = texts(client.infer(
    "letters", [tensor("text_input", "BYTES", b"abc")], parameters={"max_tokens": 2, "temperature": 0.0},
))
told["refused"] = [
    status(lambda: client.infer("letters", inputs("abc", temperature=9))),
    status(lambda: client.infer("other", inputs("abc"))),
    status(client.get_system_shared_memory_status),
    status(lambda: client.register_system_shared_memory("a", "/a", 8)),
    status(client.get_model_repository_index),
    status(lambda: client.infer("letters", inputs("abc", **ENDLESS), client_timeout=0.2)),
]

answers = queue.Queue()
def open_stream():
    client.start_stream(callback=lambda result, error: answers.put((result, error)))

open_stream()
ask = client.async_stream_infer
ask("letters", inputs("abc", True, **GREEDY), request_id="a", enable_empty_final_response=True)
ask("letters", inputs("xyz", True, **GREEDY), request_id="b")
ask("letters", inputs("abc", True, temperature=9), request_id="c")
client.stop_stream()
streamed, finals, failed = {}, [], []
while not answers.empty():
    result, error = answers.get()
    if error is not None:
        failed.append([error.message(), error.status()])
        continue
    response = result.get_response()
    if result.as_numpy("text_output") is not None:
        streamed[response.id] = streamed.get(response.id, "") + texts(result)[0]
    if response.parameters["triton_final_response"].bool_param:
        finals.append([response.id, len(response.outputs)])
told["stream"], told["finals"], told["failed"] = streamed, sorted(finals), failed

open_stream()
for name in ("e", "f"):
    ask("letters", inputs("abc", True, **ENDLESS), request_id=name)
seen = set()
while seen != {"e", "f"}:
    result, error = answers.get(timeout=60)
    assert error is None, error
    seen.add(result.get_response().id)
client.stop_stream(cancel_requests=True)
told["cancelled"] = sorted(seen)
client.close()
print(json.dumps(told))
"""


class AnyText(LetterCodec):
    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return (0,)


@pytest.fixture(scope="module")
def python(environments: Environments) -> Path:
    return environments.python(CLIENT)


async def test_the_example_of_the_page_runs(python: Path, start):
    page = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    async with start(serve_options=KSERVE, codec=AnyText()) as run:
        source = example.replace("127.0.0.1:50051", run.address).replace('"demo"', '"letters"')
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", source), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    answer = "".join(ALPHABET[number % 26] for number in range(1, 33))
    assert out.decode() == f"def main({answer}\n{answer}"


async def test_tritonclient_infers_streams_is_refused_and_cancels(python: Path, start_endless):
    async with start_endless(serve_options=KSERVE) as run:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", CALLS, run.address, str(ENDLESS_TOKENS - 10)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        async with asyncio.timeout(60.0):
            while (load := (await run.client.info()).load).num_free_slots < load.num_slots:
                pass
    told = json.loads(out)
    refused = told.pop("refused")
    assert told.pop("outputs")[:2] == ["text_output", "finish_reason"]
    assert told == {
        "live": [True, True, True],
        "other": False,
        "server": "outrider",
        "unary": ["7", ["defghijkl"], [*range(3, 12)]],
        "parameters": ["abcde"],
        "stream": {"a": "defghijkl", "b": "abcdefghi"},
        "finals": [["a", 0], ["b", 1]],
        "failed": [
            [
                "[request id: c] INVALID_PARAMETER: sampling.temperature: must be 0 or in [0.01, 2]",
                None,
            ]
        ],
        "cancelled": ["e", "f"],
    }
    assert refused == [
        "StatusCode.INVALID_ARGUMENT",
        "StatusCode.NOT_FOUND",
        "StatusCode.UNIMPLEMENTED",
        "StatusCode.UNIMPLEMENTED",
        "StatusCode.UNIMPLEMENTED",
        "StatusCode.DEADLINE_EXCEEDED",
    ]
