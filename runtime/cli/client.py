"""``outrider generate`` and ``outrider info``: the client's commands."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _RequestOption:
    """An option of ``generate`` that is a field of the request.

    Attributes:
        name: of the option.
        kind: of its values; a ``Path`` is a file whose text is the value.
        help: what the command line says of it.
        field: of ``GenerateRequest`` or, behind a dot, of its speculation; empty for ``name``.
        default: None and False leave the field out.
    """

    name: str
    kind: Any
    help: str
    field: str = ""
    default: Any = None

    @property
    def parameter(self) -> inspect.Parameter:
        """A parameter that typer reads."""
        is_flag = self.kind is bool and self.default is False
        flags = [f"--{self.name.replace('_', '-')}"] if is_flag else []
        option = typer.Option(self.default, *flags, help=self.help)
        has_value = self.default is not None
        kind = self.kind if has_value else self.kind | None
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind
        )

    def value(self, given: Mapping[str, Any]) -> Any:
        """Return the field's value, a file read; None to leave it out."""
        found = given[self.name]
        if isinstance(found, Path):
            return found.read_text(encoding="utf-8")
        return None if found is False and self.default is False else found


_OPTIONS = (
    _RequestOption("source_language", str, "Of the prompt, for a model with an encoder."),
    _RequestOption("target_language", str, "Of the answer, for a model with an encoder."),
    _RequestOption("answer_prefix", str, "What the answer begins with, for such a model."),
    _RequestOption("max_tokens", int, "Output tokens at most; 0 with --echo or --prompt-logprobs."),
    _RequestOption("echo", bool, "Print the prompt before its answer.", default=False),
    _RequestOption(
        "prompt_logprobs", int, "Log-probabilities of the prompt, beside so many alternatives."
    ),
    _RequestOption("temperature", float, "0 is greedy."),
    _RequestOption("top_k", int, "0 is off."),
    _RequestOption("top_p", float, "1 is off."),
    _RequestOption("min_p", float, "0 is off."),
    _RequestOption("no_repeat_ngram_size", int, "No so many tokens occur twice; 0 is off."),
    _RequestOption("top_n_sigma", float, "Keeps logits so many deviations from the top; 0 is off."),
    _RequestOption("seed", int, "Default: random, reported."),
    _RequestOption("stop", list[str], "Ends the completion."),
    _RequestOption("num_beams", int, "Beam search; 1 is none."),
    _RequestOption("num_results", int, "Completions, drawn apart; of a beam search the best.", "n"),
    _RequestOption("length_penalty", float, "Of a beam's score."),
    _RequestOption("early_stopping", bool, "End at num_beams ends.", default=False),
    _RequestOption("exhaustive_search", bool, "End when nothing can win.", default=False),
    _RequestOption("json_schema", Path, "File of a JSON schema that the answer has."),
    _RequestOption("regex", str, "Expression of the whole answer."),
    _RequestOption("grammar", Path, "File of a Lark grammar that the answer has."),
    _RequestOption(
        "compact", bool, "With --json-schema: no white space.", "disable_any_whitespace", False
    ),
    _RequestOption("speculate", bool, "Draft at all.", "speculation.enabled", True),
    _RequestOption("drafter", str, "Name; see outrider info.", "speculation.drafter"),
    _RequestOption("phrase_length", int, "Of phrases, ouroboros.", "speculation.phrase_length"),
    _RequestOption("num_phrases", int, "Of ouroboros; 0 is none.", "speculation.num_phrases"),
    _RequestOption(
        "branching",
        list[int],
        "Of tree: candidates per level, given once per level.",
        "speculation.branching",
    ),
    _RequestOption(
        "reference",
        Path,
        "Text the answer may quote; of drafter reference.",
        "speculation.reference",
    ),
    _RequestOption("gamma", int, "Draft tokens per step.", "speculation.gamma"),
    _RequestOption(
        "mode", str, "max_accept, seed_stable, lenient.", "speculation.mode", "max_accept"
    ),
    _RequestOption("lenience", float, "Of mode lenient.", "speculation.lenience"),
    _RequestOption(
        "block_verification",
        bool,
        "Judge sampled drafts as whole blocks.",
        "speculation.block_verification",
    ),
    _RequestOption("priority", int, "Among waiting requests; lower goes first, 0 is usual."),
    _RequestOption("trace", bool, "One line per pass of the target.", "return_trace", False),
)


def _with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of requests behind its own; it gets their values as keyword arguments."""
    own = inspect.signature(command, eval_str=True)
    fixed = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    found = own.replace(parameters=[*fixed, *(one.parameter for one in _OPTIONS)])
    command.__signature__ = found  # type: ignore[attr-defined]
    return command


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that options ask for."""
    options: dict[str, Any] = {"speculation": {}, "return_trace": False}
    for one in _OPTIONS:
        if (value := one.value(given)) is not None:
            part, _, name = (one.field or one.name).rpartition(".")
            (options[part] if part else options)[name] = value
    return options


@_with_request_options
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
    timeout_s: Annotated[float | None, typer.Option(help="Deadline, seconds.")] = None,
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_insecure: AllowInsecure = False,
    **given: Any,
) -> None:
    """Stream one completion to standard output."""
    from outrider.v1 import inference_pb2 as wire

    names = wire.ExactnessMode.DESCRIPTOR.values_by_name
    if (mode_name := f"EXACTNESS_MODE_{given['mode'].upper()}") not in names:
        raise typer.BadParameter("must be max_accept, seed_stable or lenient", param_hint="--mode")
    with refusals():
        options = _asked({**given, "mode": names[mode_name].number})
    text = sys.stdin.read() if prompt == "-" else prompt
    if chat:
        arguments = template_arguments(template_argument or [])
        options |= {"template_arguments": arguments} if arguments else {}
        options["messages"] = [*opening_messages(system), {"role": "user", "content": text}]
    elif system is not None or template_argument:
        name = "--system" if system is not None else "--template-argument"
        raise typer.BadParameter("needs --chat", param_hint=name)
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
    from outrider.runtime.cli.operate.trace import (
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
