"""Malformed requests of the other dialects of gRPC, in process: each is refused, or could be answered.

Half are valid ones with damaged bytes, as in ``scripts.soak.malformed``; the other half say extreme values, in fields
of vLLM's messages, and in JSON, parameters and tensors of the Open Inference Protocol.

    python -m scripts.soak.dialects.malformed
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import typer
from google.protobuf.message import Message
from outrider.oip import inference_pb2 as oip
from outrider.runtime.core.errors import ServingError
from outrider.runtime.serving.generation_defaults import NO_DEFAULTS
from outrider.runtime.serving.kserve.infer_call import INPUTS, InferCall, message_of
from outrider.runtime.serving.ledger import NOBODY
from outrider.runtime.serving.vllm.generate_call import EngineCall
from outrider.v1 import inference_pb2 as wire
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from scripts.soak.malformed import (
    DEFAULTS,
    EXTREMES,
    LIMITS,
    MODEL,
    WITH_ENCODER,
    check_request,
    malformed,
)
from scripts.soak.verdict import finish

OPTIONS = sorted(
    {*wire.GenerateRequest.DESCRIPTOR.fields_by_name, *wire.Sampling.DESCRIPTOR.fields_by_name}
)
IN_SPECULATION = sorted(wire.Speculation.DESCRIPTOR.fields_by_name)
JSON_VALUES: tuple[Any, ...] = (
    *(value for values in EXTREMES.values() for value in values),
    None, [], {}, [[]], [1, "a", None], {"1": 2}, {"a": {}}, "-1", "1e999", "true", 10**30, "\ud800", ["\ud800"],
)  # fmt: skip


def _infer(options: str | None = None, **inputs: bytes) -> oip.ModelInferRequest:
    given = {"text_input": b"def main("} | inputs
    if options is not None:
        given["sampling_parameters"] = options.encode()
    request = oip.ModelInferRequest(model_name="soak", id="a")
    for name, value in given.items():
        request.inputs.add(name=name, datatype=INPUTS[name], shape=[1])
        is_text = INPUTS[name] == "BYTES"
        size = len(value).to_bytes(4, "little") if is_text else b""
        request.raw_input_contents.append(size + value)
    request.outputs.add(name="text_output")
    return request


def _infer_with_contents() -> oip.ModelInferRequest:
    request = oip.ModelInferRequest()
    one = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    one.contents.bytes_contents.append(b"abc")
    request.parameters["max_tokens"].int64_param = 3
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def _ask(**fields: Any) -> vllm.GenerateRequest:
    params = {"temperature": 0.5, "max_tokens": 3, "skip_special_tokens": True, "n": 1}
    return vllm.GenerateRequest(
        request_id="a", sampling_params=vllm.SamplingParams(**params | fields), text="abc"
    )


SEEDS: Mapping[str, tuple[tuple[str, Message], ...]] = {
    "kserve": (
        ("kserve", _infer('{"temperature": 0, "max_tokens": 2, "stop": ["a", "b"]}')),
        ("kserve", _infer('{"speculation": {"gamma": 2, "mode": "lenient"}, "logit_bias": {"3": 1.5}}')),
        ("kserve", _infer(stream=b"\1", exclude_input_in_output=b"\1", return_logprobs=b"\1")),
        ("kserve", _infer_with_contents()),
    ),
    "vllm": (
        ("vllm", _ask(stop=["a"], logprobs=2, seed=3)),
        ("vllm", _ask(json_schema="{}", logit_bias={3: 1.5}, top_p=0.9)),
        ("vllm", _ask(choice=vllm.ChoiceConstraint(choices=["a", "b"]), top_k=3)),
        ("vllm", vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[3, 4]), stream=True)),
    ),
}  # fmt: skip


def _infer_with_extremes(message: Message, rng: random.Random) -> bytes:
    """Return a request that says one to three extreme things, in its options, parameters or tensors."""
    changed = oip.ModelInferRequest()
    changed.CopyFrom(message)
    options: dict[str, Any] = {}
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(JSON_VALUES)
        match rng.randrange(5):
            case 0 | 1:
                options[rng.choice(OPTIONS)] = value
            case 2:
                options["speculation"] = {rng.choice(IN_SPECULATION): value}
            case 3:
                name = rng.choice((*OPTIONS, "timeout", "triton_enable_empty_final_response"))
                _set_parameter(changed.parameters[name], value)
            case _:
                one = rng.choice(changed.inputs)
                one.shape.append(rng.choice((-1, 0, 1, 2**40)))
    if options:
        text = json.dumps(options).encode()
        changed.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
        size = rng.choice((len(text), len(text) + 1, 0, 2**32 - 1, len(text), len(text)))
        changed.raw_input_contents.append(size.to_bytes(4, "little") + text)
    return changed.SerializeToString()


def _set_parameter(parameter: oip.InferParameter, value: Any) -> None:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    try:
        setattr(parameter, kinds.get(type(value), "string_param"), value)
    except (ValueError, TypeError):
        parameter.SetInParent()


WITH_EXTREMES: Mapping[str, Callable[[Message, random.Random], bytes] | None] = {
    "kserve": _infer_with_extremes,
    "vllm": None,
}


async def _to_nobody(answer: object) -> None:
    raise AssertionError(answer)


def judge(dialect: str, data: bytes, *, has_encoder: bool) -> str:
    """Return the reason for which a message is refused, "OK" where it is not; anything else that is raised is a bug."""
    model = WITH_ENCODER if has_encoder else MODEL
    defaults = DEFAULTS if has_encoder else NO_DEFAULTS
    serving: Any = SimpleNamespace(model=model, limits=LIMITS, defaults=defaults)
    call: EngineCall | InferCall
    if dialect == "vllm":
        call = EngineCall(serving, data, NOBODY, _to_nobody)
    else:
        call = InferCall(serving, message_of(data), NOBODY, _to_nobody, is_stream=True)
    try:
        call.caller()
        check_request(call.fields(), model)
    except ServingError as error:
        return error.reason
    return "OK"


def in_process(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Judge many damaged messages of each dialect; the reasons, and what broke."""
    reasons, problems = Counter[str](), list[str]()
    for dialect, seeds in SEEDS.items():
        rng = random.Random(f"{dialect} {seed}")
        for number, (_, data) in enumerate(malformed(count, rng, seeds, WITH_EXTREMES[dialect])):
            try:
                reason = judge(dialect, data, has_encoder=number % 2 == 1)
                reasons[f"{dialect}: {reason}"] += 1
            except Exception as error:  # whatever it is, it is what this looks for
                problems.append(f"{dialect} {data.hex()}: {error!r}")
    return reasons, problems


def main(messages: int = 500_000, seed: int = 0) -> None:
    """Judge malformed messages, and exit 1 where anything but a refusal or a request comes of one."""
    reasons, problems = in_process(messages, seed)
    figures = dict(sorted(reasons.items())) | {"broken": len(problems)}
    finish("malformed messages of other dialects", figures, problems)


if __name__ == "__main__":
    typer.run(main)
