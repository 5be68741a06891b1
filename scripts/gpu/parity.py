"""Logits of a device against PyTorch's in float32, measured in what PyTorch itself loses in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.base import Engine, FloatArray, Span
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.engines.opening import open_engine
from outrider.runtime.serving.tokenizer import TokenizersCodec
from transformers import AutoModelForCausalLM

from scripts.tools.common import code_prompts

Part = Literal["target", "draft"]
Logits = Callable[[list[int]], FloatArray]

GREEDY_AGREEMENT = 0.995
# Of float32, what is lost in 16 bits by another library's order of sums.
ALLOWED_LOSS = 2.0
# Reported and not judged: weights were rounded on purpose.
LOSSY = ("float8",)
# More than there are.
_MANY = 10_000
_HALVES = {"bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Teacher-forced logits of a device against a reference.

    Attributes:
        part: which model.
        precision: the device's.
        reference: whose logits, in words.
        max_difference: of the device's logits from the reference's.
        half_difference: of PyTorch's in 16 bits, likewise; None where there is no checkpoint.
        num_greedy_equal: positions of equal greatest logit.
        num_compared: positions.
    """

    part: str
    precision: str
    reference: str
    max_difference: float
    half_difference: float | None
    num_greedy_equal: int
    num_compared: int

    @property
    def has_passed(self) -> bool:
        """True where greedy choices agree and differences stay as small as promised."""
        if self.precision in LOSSY:
            return True
        is_close = (
            self.half_difference is None
            or self.max_difference <= ALLOWED_LOSS * self.half_difference
        )
        return is_close and self.num_greedy_equal >= GREEDY_AGREEMENT * self.num_compared


def check_parity(
    bundle: Bundle, device: str, part: Part, *, checkpoint: Path | None, num_prompts: int, num_tokens: int,
    provider_options: Mapping[str, str],
) -> Parity:  # fmt: skip
    """Logits of texts of ``num_tokens`` tokens on a device and by the reference.

    Args:
        bundle: to check.
        device: as ``open_engine`` takes it.
        part: which model.
        checkpoint: it was exported from, with weights as they are; None compares with the bundle's
            own graph on ONNX Runtime's CPU.
        num_prompts: texts.
        num_tokens: of each.
        provider_options: as ``open_engine`` takes them.
    """
    engine = open_engine(
        bundle, part, device=device, max_batch=1, provider_options=provider_options
    )
    precision = precision_of(engine)
    texts = _texts(bundle, num_prompts, num_tokens, engine.limits.vocab_size)
    half_difference: float | None = None
    with _references(bundle, part, checkpoint, precision) as (name, reference, half):
        worst, equal, compared = 0.0, 0, 0
        for tokens in texts:
            found, expected = _whole(engine, tokens), reference(tokens)
            worst = max(worst, float(np.abs(found - expected).max()))
            equal += int((found.argmax(-1) == expected.argmax(-1)).sum())
            compared += len(tokens)
            if half is not None:
                lost = float(np.abs(half(tokens) - expected).max())
                half_difference = max(lost, half_difference or 0.0)
    engine.close()
    return Parity(
        part=part, precision=precision, reference=name, max_difference=worst, half_difference=half_difference,
        num_greedy_equal=equal, num_compared=compared,
    )  # fmt: skip


def precision_of(engine: Engine) -> str:
    """Type of an engine's weights and products."""
    return engine.precision if isinstance(engine, PlanEngine) else "float32"


@contextmanager
def _references(
    bundle: Bundle, part: Part, checkpoint: Path | None, precision: str
) -> Iterator[tuple[str, Logits, Logits | None]]:
    """Name and logits of the reference, and PyTorch's in 16 bits."""
    if checkpoint is None:
        engine = open_engine(bundle, part, device="cpu", max_batch=1)
        yield "the graph on ONNX Runtime's CPU", lambda tokens: _whole(engine, tokens), None
        engine.close()
        return
    half = _HALVES.get(precision, torch.float16)
    models = [_open_model(checkpoint, kind) for kind in (torch.float32, half)]
    whole, lost = (_torch_logits(model) for model in models)
    yield f"PyTorch float32 on {models[0].device}", whole, lost


def _open_model(checkpoint: Path, kind: torch.dtype) -> torch.nn.Module:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=kind, local_files_only=True)
    placed: torch.nn.Module = model.eval().to(where)
    return placed


def _torch_logits(model: torch.nn.Module) -> Logits:
    def logits(tokens: list[int]) -> FloatArray:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=model.device)
            found: FloatArray = (
                model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
            )
        return found

    return logits


def _texts(bundle: Bundle, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Runs of a text's tokens; a small model's tokenizer may have more ids than it has logits for."""
    codec = TokenizersCodec(bundle.root / TOKENIZER_FILE)
    encoded = (codec.encode(text) for text in code_prompts(_MANY, num_lines=60))
    endless = cycle([token % vocab_size for tokens in encoded for token in tokens])
    return [list(islice(endless, length)) for _ in range(count)]


def _whole(engine: Engine, tokens: list[int]) -> FloatArray:
    span = Span(slot=0, start=0, tokens=tuple(tokens), num_logits=len(tokens))
    return engine.extend([span])[0, : len(tokens)].copy()
