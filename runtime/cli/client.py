"""``outrider generate`` and ``outrider info``: the client's commands."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from outrider.runtime.cli.chat import opening_messages, template_arguments
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
from outrider.runtime.cli.refusals import refusals, visible

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2 as wire


def generate(
    prompt: Annotated[
        str, typer.Option(help="Text to complete, or to answer to; - reads standard input.")
    ],
    address: Address = DEFAULT_ADDRESS,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message, put into the chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: what the system says first.")
    ] = None,
    template_argument: Annotated[
        list[str] | None, typer.Option(help="With --chat: NAME=JSON, a variable of the template.")
    ] = None,
    source_language: Annotated[
        str | None, typer.Option(help="Of the prompt, for a model with an encoder.")
    ] = None,
    target_language: Annotated[
        str | None, typer.Option(help="Of the answer, for a model with an encoder.")
    ] = None,
    answer_prefix: Annotated[
        str | None, typer.Option(help="What the answer begins with, for such a model.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Output tokens at most; 0 with --echo or --prompt-logprobs."),
    ] = None,
    echo: Annotated[
        bool, typer.Option("--echo", help="Print the prompt before its answer.")
    ] = False,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(help="Log-probabilities of the prompt, beside so many alternatives."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 is off.")] = None,
    no_repeat_ngram_size: Annotated[
        int | None, typer.Option(help="No so many tokens occur twice; 0 is off.")
    ] = None,
    top_n_sigma: Annotated[
        float | None, typer.Option(help="Keeps logits so many deviations from the top; 0 is off.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: random, reported.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the completion.")] = None,
    num_beams: Annotated[int | None, typer.Option(help="Beam search; 1 is none.")] = None,
    num_results: Annotated[
        int | None, typer.Option(help="Completions, drawn apart; of a beam search the best.")
    ] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Of a beam's score.")] = None,
    early_stopping: Annotated[bool, typer.Option(help="End at num_beams ends.")] = False,
    exhaustive_search: Annotated[bool, typer.Option(help="End when nothing can win.")] = False,
    json_schema: Annotated[
        Path | None, typer.Option(help="File of a JSON schema that the answer has.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Expression of the whole answer.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File of a Lark grammar that the answer has.")
    ] = None,
    compact: Annotated[bool, typer.Option(help="With --json-schema: no white space.")] = False,
    speculate: Annotated[bool, typer.Option(help="Draft at all.")] = True,
    drafter: Annotated[str | None, typer.Option(help="Name; see outrider info.")] = None,
    phrase_length: Annotated[int | None, typer.Option(help="Of phrases, ouroboros.")] = None,
    num_phrases: Annotated[int | None, typer.Option(help="Of ouroboros; 0 is none.")] = None,
    branching: Annotated[
        list[int] | None, typer.Option(help="Of tree: candidates per level, given once per level.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Text the answer may quote; of drafter reference.")
    ] = None,
    gamma: Annotated[int | None, typer.Option(help="Draft tokens per step.")] = None,
    mode: Annotated[str, typer.Option(help="max_accept, seed_stable, lenient.")] = "max_accept",
    lenience: Annotated[float | None, typer.Option(help="Of mode lenient.")] = None,
    block_verification: Annotated[
        bool | None, typer.Option(help="Judge sampled drafts as whole blocks.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Among waiting requests; lower goes first, 0 is usual.")
    ] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline, seconds.")] = None,
    trace: Annotated[bool, typer.Option(help="One line per pass of the target.")] = False,
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_insecure: AllowInsecure = False,
) -> None:
    """Stream one completion to standard output."""
    from outrider.v1 import inference_pb2 as wire

    names = wire.ExactnessMode.DESCRIPTOR.values_by_name
    if (mode_name := f"EXACTNESS_MODE_{mode.upper()}") not in names:
        raise typer.BadParameter("must be max_accept, seed_stable or lenient", param_hint="--mode")
    with refusals():
        quoted, schema, lark = (
            None if path is None else path.read_text(encoding="utf-8")
            for path in (reference, json_schema, grammar)
        )
    speculation = {
        "enabled": speculate,
        "drafter": drafter,
        "gamma": gamma,
        "mode": names[mode_name].number,
        "lenience": lenience,
        "block_verification": block_verification,
        "phrase_length": phrase_length,
        "num_phrases": num_phrases,
        "branching": branching,
        "reference": quoted,
    }
    given: dict[str, Any] = {
        "source_language": source_language,
        "target_language": target_language,
        "answer_prefix": answer_prefix,
        "max_tokens": max_tokens,
        "echo": echo or None,
        "prompt_logprobs": prompt_logprobs,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "top_n_sigma": top_n_sigma,
        "seed": seed,
        "stop": stop,
        "num_beams": num_beams,
        "n": num_results,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping or None,
        "exhaustive_search": exhaustive_search or None,
        "json_schema": schema,
        "regex": regex,
        "grammar": lark,
        "disable_any_whitespace": compact or None,
        "priority": priority,
    }
    options = {name: value for name, value in given.items() if value is not None}
    options["speculation"] = {k: v for k, v in speculation.items() if v is not None}
    options["return_trace"] = trace
    if chat:
        arguments = template_arguments(template_argument or [])
        options |= {"template_arguments": arguments} if arguments else {}
    elif system is not None or template_argument:
        name = "--system" if system is not None else "--template-argument"
        raise typer.BadParameter("needs --chat", param_hint=name)
    text = sys.stdin.read() if prompt == "-" else prompt
    if chat:
        options["messages"] = [*opening_messages(system), {"role": "user", "content": text}]
    connection = Connection(
        address=address,
        api_key_file=api_key_file,
        tls_ca=tls_ca,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        allow_insecure=allow_insecure,
    )
    with refusals():
        asyncio.run(_generate(connection, text, timeout_s, options))


async def _generate(
    connection: Connection, prompt: str, timeout_s: float | None, options: dict[str, Any]
) -> None:
    from outrider.runtime.cli.trace import (
        beam_heading,
        print_report,
        print_step,
        prompt_lines,
        sample_heading,
        whole_text,
    )
    from rich.console import Console

    console = Console()
    num_steps = 0
    scored: list[wire.Token] = []
    texts: defaultdict[int, str] = defaultdict(str)
    # Pieces of several completions come in any order: each is printed when it is whole.
    is_one = options.get("n", 1) == 1
    async with connection.open() as client:
        given = None if "messages" in options else prompt
        async for response in client.generate(given, timeout_s=timeout_s, **options):
            is_ranked = len(response.finish.beams) > 1
            if not options["return_trace"] and is_one:
                typer.echo(visible(response.text), nl=False)
            text = texts[response.index] = texts[response.index] + response.text
            scored += response.prompt
            for step in response.steps:
                num_steps += 1
                print_step(console, num_steps, step)
            for rank, beam in enumerate(response.finish.beams if is_ranked else (), start=1):
                typer.echo(f"{beam_heading(rank, beam)}\n{visible(beam.text)}")
            if response.HasField("finish"):
                if not is_one and not is_ranked:
                    typer.echo(f"{sample_heading(response)}\n{visible(text)}")
                typer.echo()
                for line in prompt_lines(scored):
                    typer.echo(line)
                scored = []
                if options["return_trace"]:
                    known = "" if options.get("echo") else prompt
                    typer.echo(f"{whole_text(known, text, await client.info())}\n")
                    print_report(console, response.finish)
