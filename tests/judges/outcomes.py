"""What became of requests, without what differs from one run to the next."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import grpc.aio
from google.protobuf.json_format import MessageToDict
from outrider.errors import decode_error
from outrider.oip import inference_pb2 as oip
from outrider.v1 import inference_pb2 as wire
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from tests.judges.requests import Asked
from tests.runtime.serving.http.client import Http

# Names of requests, times, and counts that depend on which requests were answered at once.
_CHANGING = {
    "request_id", "created", "system_fingerprint", "times", "queue_s", "prefill_s", "decode_s", "load",
    "uptime_s", "num_cached_tokens", "cached_tokens", "prompt_tokens_details", "build", "version", "started_unix_s",
    "engine",
}  # fmt: skip
_NUMBER = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|(?:cmpl|chatcmpl|req)-[\w-]+")
ANSWERS = {"Generate": wire.GenerateResponse, "Tokenize": wire.TokenizeResponse, "Abort": wire.AbortResponse,
           "GetServerInfo": wire.GetServerInfoResponse}  # fmt: skip
Outcome = dict[str, Any]


def answer_type(method: str) -> Any:
    service, name = method.strip("/").split("/")
    if service.startswith("outrider"):
        return ANSWERS[name]
    if service.startswith("vllm"):
        return getattr(vllm, f"{name}Response")
    return getattr(oip, f"{name}Response")


def steady(value: Any) -> Any:
    """Return a JSON value without what changes, numbers rounded."""
    if isinstance(value, dict):
        return {name: steady(one) for name, one in value.items() if name not in _CHANGING}
    if isinstance(value, list):
        return [steady(one) for one in value]
    if isinstance(value, float):
        return round(value, 3)
    return _NUMBER.sub("ID", value) if isinstance(value, str) else value


def joined(parts: Iterable[Any]) -> Any:
    """Return the pieces of an answer as one: lists and texts joined by completion, else what came last."""
    found: dict[Any, dict[str, Any]] = {}
    for part in parts:
        at = part.get("index", 0) if isinstance(part, dict) else 0
        held = found.setdefault(at, {})
        for name, value in part.items():
            if (
                name in held
                and isinstance(value, list | str)
                and name not in ("finish_reason", "id", "object", "model", "role")
            ):
                held[name] = held[name] + value
            elif isinstance(value, dict) and isinstance(held.get(name), dict):
                held[name] = joined([held[name], value])["0"]
            else:
                held[name] = value
    return {str(at): held for at, held in sorted(found.items())}


async def of_grpc(channel: grpc.aio.Channel, asked: Asked) -> Outcome:
    """Return what a method answers to bytes."""
    kind = answer_type(asked.method)
    try:
        if asked.way == "unary":
            messages = [await channel.unary_unary(asked.method)(asked.body, timeout=60)]
        elif asked.way == "stream":
            messages = [
                one async for one in channel.unary_stream(asked.method)(asked.body, timeout=60)
            ]
        else:
            call = channel.stream_stream(asked.method)(iter([asked.body]), timeout=60)
            messages = [one async for one in call]
    except grpc.aio.AioRpcError as error:
        found = decode_error(error)
        fields = [[one.field, one.rule] for one in found.violations]
        return {
            "code": found.code.name,
            "reason": found.reason,
            "fields": fields,
            "said": steady(str(error.details())),
        }
    parts = [
        MessageToDict(kind.FromString(one), preserving_proto_field_name=True) for one in messages
    ]
    return {"code": "OK", "answer": joined(steady(parts))}


async def of_http(http: Http, asked: Asked) -> Outcome:
    """Return what a route answers to a body."""
    answer = await http.ask(asked.method, asked.body or None, method=asked.way)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        parts = [one for one in answer.events() if one != "[DONE]"]
        choices = [steady(choice) for part in parts for choice in part.get("choices", ())]
        # How many events there are is a matter of time; usage comes with the last.
        rest = [
            steady({name: one for name, one in part.items() if name != "choices"}) for part in parts
        ]
        return {"code": answer.status, "answer": joined(choices), "rest": joined(rest)}
    if "json" in answer.headers.get("content-type", ""):
        return {"code": answer.status, "answer": steady(json.loads(answer.body))}
    return {
        "code": answer.status,
        "type": answer.headers.get("content-type", ""),
        "bytes": len(answer.body) > 0,
    }
