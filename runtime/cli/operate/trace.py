"""Prints a completion like figure 1 of the paper: one line per pass of the target.

Accepted draft tokens green, the rejected one red, the token that the target put in its place blue, those that the
answer's constraint forced behind it dim; without a terminal the same by marks: ``+accepted``, ``-rejected``,
``=target's``, ``~forced``.

Source: Leviathan et al. 2023 (arXiv:2211.17192), figure 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.v1 import inference_pb2 as wire
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"+": "green", "-": "red strike", "=": "bold blue", "~": "dim"}


def whole_text(prompt: str, text: str, info: wire.GetServerInfoResponse) -> str:
    """Return a prompt with the text that continues it or, of a model with an encoder, answers it below."""
    return f"{prompt}\n{text}" if info.HasField("text_to_text") else f"{prompt}{text}"


def step_line(step: wire.Step) -> list[tuple[str, str]]:
    """Return marks and texts of one pass, up to its first rejected token or the answer's end."""
    accepted = [("+", text) for text in step.drafted_text[: step.num_accepted]]
    if not step.HasField("next_token"):
        return accepted
    rejected = [("-", text) for text in step.drafted_text[step.num_accepted :][:1]]
    forced = [("~", text) for text in step.forced_text]
    return [*accepted, *rejected, ("=", step.next_text), *forced]


def print_step(console: Console, number: int, step: wire.Step) -> None:
    """Print one line: in colours on a terminal, with marks elsewhere."""
    line = Text(f"{number:4d} ")
    for mark, text in step_line(step):
        shown = text.replace("\n", "\\n").replace("\t", "\\t")
        if console.is_terminal:
            line.append(shown, style=STYLES[mark])
        else:
            line.append(f"{mark}{shown!r} ")
    console.print(line, soft_wrap=True)


def prompt_lines(prompt: Sequence[wire.Token]) -> list[str]:
    """Return a line per token of a prompt that was scored, and one with their sum; none for a prompt that was not."""
    if not prompt:
        return []
    lines = []
    for token in prompt:
        logprob = f"{token.logprob:.4f}" if token.HasField("logprob") else "-"
        others = "".join(f"  {one.id} {one.logprob:.4f}" for one in token.top)
        lines.append(f"{token.id:8d}  {logprob:>9}{others}")
    scored = [token.logprob for token in prompt if token.HasField("logprob")]
    mean = f", {sum(scored) / len(scored):.4f} each" if scored else ""
    return [*lines, f"log-probability {sum(scored):.4f} of {len(scored)} tokens{mean}"]


def beam_heading(rank: int, beam: wire.Beam) -> str:
    """Return the line above the text of one completion of a beam search."""
    reason = wire.FinishReason.Name(beam.reason).removeprefix("FINISH_REASON_").lower()
    num_tokens = len(beam.token_ids)
    return f"#{rank}  score {beam.score:.4f}  logprob {beam.logprob:.4f}  {num_tokens} tokens, {reason}"


def sample_heading(response: wire.GenerateResponse) -> str:
    """Return the line above the text of one completion of several, given its last response."""
    finish = response.finish
    reason = wire.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    num_tokens = finish.usage.output_tokens
    return f"#{response.index + 1}  seed {finish.seed}  {num_tokens} tokens, {reason}"


def print_report(console: Console, finish: wire.Finish) -> None:
    """Print the acceptance figures of a completion as a table."""
    report = finish.speculation
    table = Table(title="speculation" if report.is_on else f"speculation off: {report.off_reason}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _figures(finish):
        table.add_row(name, value)
    console.print(table)


def _figures(finish: wire.Finish) -> list[tuple[str, str]]:
    report = finish.speculation
    figures = [
        ("finish", wire.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()),
        ("prompt tokens", str(finish.usage.prompt_tokens)),
        ("output tokens", str(finish.usage.output_tokens)),
        ("seed", str(finish.seed)),
        ("drafter", report.drafter),
        ("mode", _mode(report)),
        ("target passes", str(report.num_steps)),
        ("drafted / accepted", f"{report.num_drafted} / {report.num_accepted}"),
    ]
    if report.num_forced:
        figures.append(("forced", str(report.num_forced)))
    figures.extend(
        (name, f"{getattr(report, name):.3f}")
        for name in ("alpha_hat", "draft_utilization", "tokens_per_step")
        if report.HasField(name)
    )
    pairs = zip(report.accepted_by_position, report.drafted_by_position, strict=False)
    for position, (accepted, drafted) in enumerate(pairs, start=1):
        figures.append((f"accepted at position {position}", f"{accepted} / {drafted}"))
    return figures


def _mode(report: wire.SpeculationReport) -> str:
    mode = wire.ExactnessMode.Name(report.mode).removeprefix("EXACTNESS_MODE_").lower()
    if not report.is_exact:
        return f"{mode} ({report.lenience:g}), not exact"
    return f"{mode}, whole blocks" if report.block_verification else mode
