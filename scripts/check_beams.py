"""Beam searches of an exported encoder-decoder bundle against Transformers' on its checkpoint, at length.

Scores that two hypotheses share to within rounding (1e-5 of their size) may rank either way: such a source counts as
a tie where both sides found hypotheses of these scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.events import Failed
from outrider.runtime.core.params import BeamParams, Prompt, SpeculationParams
from outrider.runtime.offline.prompts import prompt_of
from outrider.runtime.offline.rig import Answer
from rich.progress import track
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel

from scripts.tools.common import Rig, open_rig
from scripts.tools.sources import TASKS, task_sources

Ranked = list[tuple[tuple[int, ...], float]]
"""Tokens and scores of hypotheses, best first."""
RELATIVE = 1e-5


def ours(rig: Rig, prompt: Prompt, beams: BeamParams, ngram: int, max_tokens: int) -> Ranked:
    """What the runtime finds, with what the bundle's answers begin with."""
    params = SamplingParams(temperature=0.0, no_repeat_ngram_size=ngram)
    answer = Answer()
    rig.worker.submit(
        rig.spec(prompt, params, SpeculationParams(), max_tokens, beams=beams), answer
    )
    while answer.end is None:
        rig.worker.run_step()
    if isinstance(answer.end, Failed):
        raise RuntimeError("a search failed") from answer.end.error
    return [(one.tokens, one.score) for one in answer.end.beams]


def theirs(
    model: PreTrainedModel, prompt: Prompt, beams: BeamParams, ngram: int, max_tokens: int, end: int
) -> Ranked:
    """What ``generate`` finds behind the same decoder prefix."""
    config = GenerationConfig(
        num_beams=beams.num_beams, num_return_sequences=beams.num_results, do_sample=False, max_new_tokens=max_tokens,
        length_penalty=beams.length_penalty, early_stopping=beams.stops_early, no_repeat_ngram_size=ngram,
        eos_token_id=end, pad_token_id=model.config.pad_token_id, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = model.generate(
        torch.tensor([prompt.source]),
        decoder_input_ids=torch.tensor([prompt.tokens]),
        generation_config=config,
    )
    ranked = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt.tokens) :]
        ranked.append((tuple(tokens[: tokens.index(end) + 1] if end in tokens else tokens), score))
    return ranked


def compared(found: Ranked, expected: Ranked) -> str:
    """Return equal, tied or differs."""
    if [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]:
        return "equal"
    scores = zip([one for _, one in found], [one for _, one in expected], strict=True)
    return (
        "tied" if all(abs(a - b) <= RELATIVE * max(1.0, abs(b)) for a, b in scores) else "differs"
    )


def main(
    bundle: Path,
    checkpoint: Path,
    num_sources: Annotated[
        int, typer.Option(min=2, help="Half of each task; too long ones are left out.")
    ] = 200,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    no_repeat_ngram_size: int = 3,
    max_tokens: int = 64,
    threads: int = 2,
) -> None:
    """Compare the best hypotheses of every source, tokens and order; exit code 1 where any differ."""
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    beams = BeamParams(num_beams=num_beams, num_results=num_beams, length_penalty=length_penalty)
    rig = open_rig(bundle, max_batch=num_beams, num_threads=threads)
    (end,) = rig.bundle.manifest.eos_token_ids
    verdicts = []
    for task in TASKS:
        for text in track(task_sources(task, num_sources // 2), description=task):
            prompt = prompt_of(text, rig.tokenizer)
            if len(prompt) > rig.target.limits.max_source:
                continue
            found = ours(rig, prompt, beams, no_repeat_ngram_size, max_tokens)
            expected = theirs(model, prompt, beams, no_repeat_ngram_size, max_tokens, end)
            verdicts.append(compared(found, expected))
            if verdicts[-1] == "differs":
                typer.echo(f"differs: {text!r}\n  {found}\n  {expected}")
    rig.close()
    counts = {verdict: verdicts.count(verdict) for verdict in ("equal", "tied", "differs")}
    typer.echo(f"{bundle.name}, {len(verdicts)} sources of {num_beams} hypotheses: {counts}")
    raise typer.Exit(int(counts["differs"] > 0))


if __name__ == "__main__":
    typer.run(main)
