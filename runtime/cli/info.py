"""``outrider info``: what a server serves, as a table for people or JSON for programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from outrider.runtime.cli.connection import (
    DEFAULT_ADDRESS,
    Address,
    AllowInsecure,
    ApiKeyFile,
    Connection,
    TlsCa,
    TlsCertificate,
    TlsKey,
)
from outrider.runtime.cli.refusals import refusals
from outrider.runtime.gamma.verdicts import verdict_words

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2 as wire


def info(
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="All that the server says.")] = False,
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_insecure: AllowInsecure = False,
) -> None:
    """Print what a server serves, within which limits, under which load."""
    connection = Connection(
        address=address,
        api_key_file=api_key_file,
        tls_ca=tls_ca,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        allow_insecure=allow_insecure,
    )
    with refusals():
        found = asyncio.run(_info(connection))
        if as_json:
            typer.echo(json.dumps(values_of(found), indent=2, ensure_ascii=False))
        else:
            for line in table(found):
                typer.echo(line)


async def _info(connection: Connection) -> wire.GetServerInfoResponse:
    async with connection.open() as client:
        return await client.info()


def values_of(found: wire.GetServerInfoResponse) -> dict[str, Any]:
    """Return all fields by their names of the wire; texts of JSON as what they say."""
    from google.protobuf.json_format import MessageToDict

    values: dict[str, Any] = MessageToDict(
        found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for name in ("certificate_json", "generation_defaults_json"):
        values[name.removesuffix("_json")] = json.loads(values.pop(name) or "{}")
    return values


def table(found: wire.GetServerInfoResponse) -> Iterator[str]:
    """Yield the lines of a table: what is served, how it drafts, limits, load."""
    from outrider.engines.bundle.manifest import TEXT_PART_OF

    limits, speculation, load = found.limits, found.speculation, found.load
    gamma = f"up to {speculation.default_gamma}, chosen step by step"
    rows = {
        "server": found.server_version,
        "model": found.model,
        "vocabulary": f"{found.vocab_size} tokens, ends {_listed(found.eos_token_ids)}",
        "chat templates": _listed(found.chat.templates) or "none",
        "tool calls": found.chat.tool_call_format or "unknown format",
        "reasoning": " ... ".join(found.chat.reasoning_marks) or "none",
        "constraints": _listed(found.constraints) or "none",
        "context": f"{limits.max_context} tokens",
        "drafters": _listed(speculation.drafters),
        "default drafter": speculation.default_drafter,
        "draft tokens per step": (
            gamma if speculation.default_is_adaptive else str(speculation.default_gamma)
        ),
        "requests": (
            f"{load.num_running} running of {load.num_slots}, {load.num_queued} queued"
            f" of {limits.max_queued}{', draining' if load.is_draining else ''}"
        ),
        "output tokens": f"{limits.default_max_tokens} by default, at most {limits.max_tokens}",
        "caches": f"{limits.cache_bytes_per_token * 1000 / 2**20:.1f} MiB for 1,000 tokens",
        "prefix cache": f"{limits.prefix_cache_bytes / 2**20:.0f} MiB",
    }
    if whole := json.loads(found.certificate_json or "{}").get("target", {}).get(TEXT_PART_OF):
        rows["model"] += f", the text part of {whole}: images are refused"
    if found.HasField("text_to_text"):
        rows["source"] = f"at most {limits.max_source_tokens} tokens"
    if speculation.HasField("control") and speculation.control.HasField("speed_up"):
        rows["speed-up of late"] = f"{speculation.control.speed_up:.2f}"
    for name, value in rows.items():
        yield f"{name:<22} {value}"
    for one in speculation.control.verdicts:
        alpha = one.alpha if one.HasField("alpha") else None
        least = one.least_alpha if one.HasField("least_alpha") else None
        words = verdict_words(one.drafter, alpha, least)
        yield f"{'verdict':<22} {words}, {one.num_rows} at a time"
    for gain in found.gained_by_export:
        yield f"{'exporting again brings':<22} {gain}"


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))
