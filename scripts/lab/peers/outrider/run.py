"""Outrider itself, in process, as one of the peers, with any of its drafters."""

from pathlib import Path

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import Prompt, SpeculationParams
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec
from peer_job import converted, main

from scripts.tools.common import open_rig

WEIGHTS = {"float32": "float32", "int8": "w8a8", "int4": "int4"}
"""As the peers do it, whose int8 narrows activations too, while the model runs."""

MAX_GAMMA = 16
"""Draft tokens per step: drafts that cost nothing to make may be longer than a bundle takes by default."""

MAX_BATCH = 32
"""Rows at once: a rig would answer more than its bundle takes in turns, and say nothing."""


def load(job):
    if job["batch"] > MAX_BATCH:
        raise ValueError(f"batch: {job['batch']} rows at once; at most {MAX_BATCH}")

    def export(_, out):
        from outrider.export.pipeline import (
            ExportOptions,
            export_bundle,  # only where it is needed: it loads torch
        )

        export_bundle(
            target=Path(job["target"]),
            draft=Path(job["draft"]),
            out=out / "bundle",
            options=ExportOptions(
                weights=WEIGHTS[job["weights"]],
                max_context=1024,
                max_batch=MAX_BATCH,
                max_gamma=MAX_GAMMA,
            ),
            progress=lambda stage: None,
        )

    bundle = converted(job, "target", export) / "bundle"
    # What steps cost is measured once and kept; only a gamma that is chosen asks for it.
    costs = Path(job["work"]) / "costs" if job["drafter"] and job["gamma"] is None else None
    rig = open_rig(bundle, max_batch=job["batch"], num_threads=job["threads"], costs=costs)
    speculation = SpeculationParams(
        is_enabled=job["drafter"] is not None, drafter=job["drafter"], gamma=job["gamma"]
    )

    # Answers of a model with an encoder would end: as with the other peers, the end is banned.
    params = SamplingParams(
        temperature=0.0, min_tokens=job["max_tokens"] if job["reads_source"] else 0
    )

    def run(prompts):
        asked = [prompt_of(rig, prompt) for prompt in prompts]
        answers, _ = rig.answer(asked, params, speculation, job["max_tokens"])
        return [answer.tokens for answer in answers]

    return run


def prompt_of(rig, tokens):
    """Return what the model is asked; of a model with an encoder the tokens are the source."""
    if not isinstance(rig.tokenizer, EncoderDecoderCodec):
        return Prompt(tuple(tokens))
    codec = rig.tokenizer
    return Prompt(codec.decoder_prefix(), tuple(tokens), codec.text2text.shares_vocabulary)


if __name__ == "__main__":
    main(load)
