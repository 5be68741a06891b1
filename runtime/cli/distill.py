"""``outrider distill``: drafts made of what a target answers itself. Training needs PyTorch, which is imported then."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from outrider.runtime.cli.refusals import end_on_sigterm, refusals
from outrider.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.export.heads.training import HeldOut, Training
    from outrider.runtime.cli.progress import BuildProgress
    from outrider.runtime.offline.distill.answers import Written
    from outrider.runtime.offline.distill.replay import Replayed
    from outrider.runtime.offline.step_costs import StepCosts

SHARE_OF_ANSWERS = 1 / 3
"""Of the time for a head, that answers may take; a corpus is nothing but answers."""
EXPECTED_ALPHAS = (0.35, 0.5)
"""Of a head that has read some 100,000 tokens: published figures of EAGLE-3 at 5,000 answers and fewer."""


class Kind(StrEnum):
    """Drafts that are made."""

    NGRAM = "ngram"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The options of a run, in the command's own words."""

    target: Path
    prompts: Path
    out: Path
    kind: Kind
    hours: float
    max_tokens: int
    answers: int
    is_chat: bool
    weights: str | None
    costs: Path | None
    cpu_time: bool
    draft_vocabulary: int
    yes: bool

    @property
    def clock(self) -> Callable[[], float]:
        """The clock that seconds are counted by."""
        return time.process_time if self.cpu_time else time.monotonic


def distill(
    target: Annotated[
        Path, typer.Argument(help="Checkpoint of the target as for export, or a bundle of it.")
    ],
    prompts: Annotated[
        Path, typer.Option(help="One prompt per line; .jsonl: strings, or objects with a prompt.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for what is made; a run that ended goes on.")],
    kind: Annotated[
        Kind, typer.Option(help="A corpus for drafter datastore, or a head of EAGLE-3.")
    ] = Kind.NGRAM,
    hours: Annotated[float, typer.Option(min=0.0, help="For answers and training.")] = 0.5,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 256,
    answers: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    chat: Annotated[
        bool, typer.Option(help="Give prompts as chats, if the target has a template.")
    ] = True,
    weights: Annotated[
        str | None, typer.Option(help="Of the bundle that answers, as for export.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Folder for measured step costs; default: as serve.")
    ] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count processor seconds, of --hours too.")
    ] = False,
    draft_vocabulary: Annotated[
        int, typer.Option(min=1, help="Ids that a head can propose.")
    ] = 8192,
    yes: Annotated[bool, typer.Option("--yes", help="Train the head that was predicted.")] = False,
) -> None:
    """Make drafts of the target's own answers to your prompts: a corpus in minutes, or a trained head."""
    from outrider.runtime.cli.progress import BuildProgress, compile_stage

    work = _Work(
        target=target, prompts=prompts, out=out, kind=kind, hours=hours, max_tokens=max_tokens, answers=answers,
        is_chat=chat, weights=weights, costs=costs, cpu_time=cpu_time,
        draft_vocabulary=draft_vocabulary, yes=yes,
    )  # fmt: skip
    end_on_sigterm()
    with refusals(), BuildProgress() as progress:
        with compile_stage():
            import outrider.runtime.offline.distill.replay  # noqa: F401
        if kind is Kind.HEAD:
            _make_head(work, progress)
        else:
            _make_corpus(work, _bundle(work, progress), progress)


def _bundle(work: _Work, progress: BuildProgress) -> Path:
    """Return the bundle that answers: the target itself, or one that is exported of it once."""
    from outrider.engines.bundle.files import MANIFEST_FILE

    if (work.target / MANIFEST_FILE).exists():
        return work.target
    return _export(work, None, work.out / "bundle", progress)


def _export(work: _Work, draft: Path | None, bundle: Path, progress: BuildProgress) -> Path:
    from outrider.export.pipeline import ExportOptions, export_bundle

    if not bundle.exists():
        options = ExportOptions(weights=work.weights, max_batch=64, max_tree_nodes=0)
        export_bundle(
            target=work.target, draft=draft, out=bundle, options=options, progress=progress.say, report=progress.report
        )  # fmt: skip
    return bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """Answers; of greedy ones and sampled ones the drafter that is best on those held out, and what steps cost."""

    written: Sequence[Written]
    best: Mapping[bool, Replayed]
    costs: Mapping[bool, StepCosts]


def _make_corpus(work: _Work, bundle: Path, progress: BuildProgress) -> _Answered:
    """Answer, write the corpus anew, and say what it brings."""
    from outrider.runtime.drafters.text.suffix_array import write_datastore
    from outrider.runtime.offline.distill.answers import write_answers
    from outrider.runtime.offline.distill.replay import compare, step_costs
    from outrider.runtime.offline.options import SERVED_ROWS
    from outrider.runtime.offline.prompts import encode_prompts, read_prompts
    from outrider.runtime.offline.rig import RigOptions, open_rig
    from outrider.runtime.serving.factory import open_chats

    began, share = work.clock(), 1.0 if work.kind is Kind.NGRAM else SHARE_OF_ANSWERS
    options = RigOptions(
        max_batch=SERVED_ROWS, knows_costs=True, costs_folder=work.costs,
        counts_processor=work.cpu_time,
    )  # fmt: skip
    with closing(open_rig(bundle, options)) as rig:
        manifest = rig.bundle.manifest
        if manifest.text2text is not None:
            raise ConfigError("target", "must be decoder-only: a source is what an encoder reads")
        chats = open_chats(rig.bundle, rig.tokenizer) if work.is_chat else None
        asked = encode_prompts(
            read_prompts(work.prompts), rig.tokenizer, max_tokens=work.max_tokens, manifest=manifest, chats=chats
        )  # fmt: skip
        written = write_answers(
            rig, asked, work.out / "answers.jsonl", num_answers=work.answers, max_tokens=work.max_tokens,
            most_s=3600 * work.hours * share, report=progress.report, clock=work.clock,
        )  # fmt: skip
        corpus = work.out / "corpus"
        shutil.rmtree(corpus, ignore_errors=True)
        learnt = [one.answer for one in written if not one.is_held_out]
        num_tokens = write_datastore(learnt, corpus, vocab_size=manifest.target.vocab_size)
        typer.echo(
            f"{len(learnt)} answers, {num_tokens} tokens, {len(written) - len(learnt)} more held out; "
            f"{(work.clock() - began) / 60:.1f} minutes"
        )
        found = compare(rig, corpus, written)
        costs = {kind: step_costs(rig, written, is_greedy=kind) for kind in found}
    _say_compared(found)
    typer.echo(_advice(found, bundle, corpus))
    best = {kind: max(rows, key=lambda one: one.speedup) for kind, rows in found.items()}
    return _Answered(written=written, best=best, costs=costs)


def _say_compared(found: Mapping[bool, Sequence[Replayed]]) -> None:
    for is_greedy, rows in found.items():
        typer.echo(
            f"held out, {_words(is_greedy)}, {len(rows[0].tokens)} answers: "
            "best gamma, tokens per pass, predicted speed-up"
        )
        for one in rows:
            typer.echo(f"  {one.words()}")


def _advice(found: Mapping[bool, Sequence[Replayed]], bundle: Path, corpus: Path) -> str:
    """Return what to serve: the drafter whose gain over ``suffix`` is certain on greedy answers, or no corpus."""
    suffix, *others = found.get(True) or found[False]
    best = max(others, key=lambda one: one.speedup)
    gain = best.gain_over(suffix)
    if gain is None or gain[0] <= 1.0:
        return "The corpus is not better than suffix here."
    served, store = (shlex.quote(str(one)) for one in (bundle, corpus))
    return f"next: outrider serve {served} --datastore {store} --drafter {best.name}"


def _make_head(work: _Work, progress: BuildProgress) -> None:
    """Answer, say what a head would bring, and train it where that is wanted."""
    from outrider.export.checkpoint import open_checkpoint
    from outrider.export.heads import training as heads
    from outrider.export.heads.texts import Lesson, frequent_ids, read_lessons
    from outrider.export.progress import Progress
    from outrider.export.sources import located

    work.out.mkdir(parents=True, exist_ok=True)
    with located({"target": work.target}, work.out, Progress(progress.say)) as found:
        checkpoint = open_checkpoint(found["target"].path, max_context=None)
        model = heads.teacher(checkpoint)
        untrained = work.out / "untrained"
        heads.save_untrained(model, work.draft_vocabulary, untrained)
        bundle = _export(work, untrained, work.out / "with-head", progress)
        answered = _make_corpus(work, bundle, progress)
        _say_prediction(answered, work.hours * (1 - SHARE_OF_ANSWERS))
        if not work.yes:
            typer.echo("next: the same command with --yes")
            return
        lessons = [
            Lesson(tokens=one.tokens, num_prompt=one.num_prompt, is_greedy=one.is_greedy, is_held_out=one.is_held_out)
            for one in answered.written
            if len(one.answer) > heads.JUDGED
        ]  # fmt: skip
        texts = read_lessons(
            model, heads.taps_of(model), lessons, lambda *done: progress.report("texts", *done)
        )
        training = heads.begin(
            model, frequent_ids(texts, model.config.vocab_size, work.draft_vocabulary), work.out
        )
        heads.train(
            training, texts, work.out,
            seconds=3600 * work.hours * (1 - SHARE_OF_ANSWERS),
            report=lambda one: _say_tenth(one, answered), clock=work.clock,
        )  # fmt: skip
    _say_outcome(training.judged[-1][1], answered)
    head = work.out / "head"
    typer.echo(
        f"next: outrider export --target {shlex.quote(str(work.target))} --draft {shlex.quote(str(head))} --out BUNDLE"
    )


def _say_prediction(answered: _Answered, hours: float) -> None:
    """Say what a head may bring at this machine's costs, before it costs anything."""
    from outrider.runtime.cli.progress import duration
    from outrider.runtime.offline.distill.replay import predicted_of_alpha

    for is_greedy, costs in answered.costs.items():
        c = costs.c(uses_model=True)
        low, high = (predicted_of_alpha(alpha, costs, 4) for alpha in EXPECTED_ALPHAS)
        best = answered.best[is_greedy]
        typer.echo(
            f"a head, {_words(is_greedy)}: a draft token costs {c:.3f} of a step, passes of 2, 3 and 4 tokens "
            f"{costs.v(2):.2f}, {costs.v(3):.2f} and {costs.v(4):.2f}. Trained on so little, alpha is expected in "
            f"{EXPECTED_ALPHAS[0]} to {EXPECTED_ALPHAS[1]}: a speed-up of {low[1]:.2f} (gamma {low[0]}) to "
            f"{high[1]:.2f} (gamma {high[0]}); {best.name} {best.speedup:.2f}"
        )
    typer.echo(f"training takes {duration(3600 * hours)}")


def _say_tenth(training: Training, answered: _Answered) -> None:
    """Say what held-out texts say after a tenth of the time, and what the rest of it may bring."""
    seen, held = training.judged[-1]
    typer.echo(f"{training.num_done} tenths, {seen} tokens of answers read")
    for is_greedy in answered.costs:
        alphas = ", ".join(
            f"{alpha:.3f}" + ("" if at is None else f" [{at[0]:.3f}, {at[1]:.3f}]")
            for alpha, at in held.alphas(is_greedy=is_greedy)
        )
        gamma, speedup, interval = _predicted(held, answered, is_greedy=is_greedy)
        bounds = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
        typer.echo(
            f"  {_words(is_greedy)}: alpha_1.. {alphas}; gamma {gamma}, predicted speed-up {speedup:.3f}{bounds}"
        )
    expected = training.expected()
    if expected is not None:
        typer.echo(f"  at the end of the time alpha_1 of both is expected at {expected:.3f}")


def _predicted(
    held: HeldOut, answered: _Answered, *, is_greedy: bool
) -> tuple[int, float, tuple[float, float] | None]:
    """Return the best gamma of a head, its predicted speed-up and the interval of it."""
    costs, found = answered.costs[is_greedy], []
    for gamma in range(1, len(held.alphas(is_greedy=is_greedy)) + 1):
        price = costs.v(gamma + 1) + gamma * costs.c(uses_model=True)
        tokens, interval = held.tokens_per_pass(gamma, is_greedy=is_greedy)
        bounds = None if interval is None else (interval[0] / price, interval[1] / price)
        found.append((gamma, tokens / price, bounds))
    return max(found, key=lambda one: one[1])


def _say_outcome(held: HeldOut, answered: _Answered) -> None:
    """Say whether the head is better than lookup, as far as held-out texts are certain of it."""
    for is_greedy, best in answered.best.items():
        _, speedup, interval = _predicted(held, answered, is_greedy=is_greedy)
        is_better = interval is not None and interval[0] > best.speedup
        typer.echo(
            f"{_words(is_greedy)}: {'better' if is_better else 'not better'} than {best.name} here: predicted speed-up "
            f"{speedup:.3f}, {best.speedup:.3f}"
        )


def _words(is_greedy: bool) -> str:
    return "greedy" if is_greedy else "temperature 1"
