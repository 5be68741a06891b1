"""``outrider chat``: a conversation with a served model, on a terminal or through pipes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
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
from outrider.runtime.cli.refusals import EXIT_REFUSED, refusals, say, visible

if TYPE_CHECKING:
    from outrider import Client

QUIT, ANEW = "/quit", "/new"
_PROMPT = "> "


def chat(
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str | None, typer.Option(help="What the system says first.")] = None,
    template_argument: Annotated[
        list[str] | None,
        typer.Option(help="NAME=JSON, a variable of the template; repeat for several."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Output tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every answer; default: random.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline of an answer, seconds.")] = None,
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_insecure: AllowInsecure = False,
) -> None:
    """Talk with a model: a line is a message, /new begins anew, /quit or the input's end ends.

    What gets no answer is forgotten; the exit code is that of the last answer.
    """
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "timeout_s": timeout_s,
        "template_arguments": template_arguments(template_argument or []),
    }
    options = {name: value for name, value in given.items() if value is not None}
    connection = Connection(
        address=address,
        api_key_file=api_key_file,
        tls_ca=tls_ca,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        allow_insecure=allow_insecure,
    )
    with refusals():
        code = _chat(connection, system, options)
    if code:
        raise typer.Exit(code)


def template_arguments(texts: list[str]) -> dict[str, Any] | None:
    """Return variables of a template from texts such as "enable_thinking=false"; None for none.

    Raises:
        typer.BadParameter: a text is not NAME=JSON.
    """
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError as error:
            raise typer.BadParameter(
                'must be NAME=JSON, with texts in quotes: NAME="TEXT"',
                param_hint="--template-argument",
            ) from error
    return found or None


def opening_messages(system: str | None) -> list[dict[str, Any]]:
    """Return what a conversation begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def _chat(connection: Connection, system: str | None, options: Mapping[str, Any]) -> int:
    """Hold a conversation; return the exit code of its last answer."""
    from outrider import CallError

    async def connect() -> Client:
        return connection.open()

    messages, code = opening_messages(system), 0
    # The loop stands still while somebody types, so that an interrupt ends that at once.
    with asyncio.Runner() as runner:
        client = runner.run(connect())
        try:
            found = runner.run(client.info(timeout_s=options.get("timeout_s")))
            if not found.HasField("chat"):
                text = "has no chat template: outrider generate completes texts with it"
                typer.echo(f"outrider: {found.model} {text}", err=True)
                return EXIT_REFUSED
            while (line := _read_line()) not in (None, QUIT):
                if line == ANEW:
                    messages = opening_messages(system)
                elif line:
                    messages.append({"role": "user", "content": line})
                    try:
                        answer = runner.run(_answer(client, messages, options))
                    except CallError as error:
                        del messages[-1]
                        code = say(error)
                    else:
                        messages.append({"role": "assistant", "content": answer})
                        code = 0
        finally:
            runner.run(client.close())
    return code


def _read_line() -> str | None:
    """Return the next line without white space around it; None at the end of the input."""
    if sys.stdin.isatty():
        # Shown on standard error, so that standard output has the answers alone.
        typer.echo(_PROMPT, nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


async def _answer(
    client: Client, messages: list[dict[str, Any]], options: Mapping[str, Any]
) -> str:
    parts: list[str] = []
    try:
        async for response in client.generate(messages=messages, **options):
            typer.echo(visible(response.text), nl=False)
            parts.append(response.text)
    finally:
        if parts:
            typer.echo()
    return "".join(parts)
