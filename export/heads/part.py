"""Export of a head: its features in the target's graph, its own graph, and the certificate of both.

What is compared with is written apart (``heads.reference``), and reads a target's streams as Transformers returns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.bundle import names
from outrider.engines.bundle.manifest import W8A8, ModelEntry
from outrider.export.certificate.graph_runner import GraphRunner, open_graph
from outrider.export.checkpoint import Checkpoint
from outrider.export.graph.narrow_spans import NARROWEST_SPAN
from outrider.export.graph.to_onnx import export_head
from outrider.export.graph.tracing.taps import Taps
from outrider.export.heads.checkpoint import EMBEDDING, HeadCheckpoint, open_head
from outrider.export.heads.model import Head, Inlet, build
from outrider.export.heads.reference import features_of, head_answers
from outrider.export.model_config import ModelConfig, read_model_config
from outrider.export.progress import Progress, Steps, untold
from outrider.export.weights.blocks import BITS, quantize_file
from outrider.export.weights.half_weights import FLOAT16, FLOAT32, HALF_TYPES, store_halves
from outrider.export.weights.mapped import widened
from torch import Tensor
from transformers import PreTrainedModel

MOST_APART = 1e-4
"""Of the greatest number compared, that float32 may differ by."""
_NUM_TOKENS, _NUM_RECYCLED = 64, 3
# Spans that the tokens are fed in; the last takes the rest.
_WIDTHS = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPart:
    """A head beside the target that it drafts for.

    Attributes:
        checkpoint: as it was read.
        taps: layers of the target whose inputs it reads.
        embedding: [V, hidden] float32 of tokens.
        inlet: what runs in the target's graph.
        own: what runs in its own.
    """

    checkpoint: HeadCheckpoint
    taps: tuple[int, ...]
    embedding: Tensor
    inlet: Inlet
    own: Head

    @property
    def size(self) -> int:
        """Return F, numbers of a token's features."""
        return int(self.checkpoint.config.hidden_size)

    def tapped(self) -> Taps:
        """Return what has a target's graph cache its features."""
        return Taps(self.taps, self.inlet, self.size)


def head_beside(path: Path, target: Checkpoint) -> HeadPart:
    """Return the head in a folder for a target.

    Raises:
        BundleError: it is broken, of a form that is not read, or of another target; says which.
    """
    head, config = open_head(path), target.config.get_text_config(decoder=True)
    if target.model_config.source is not None or target.states is not None:
        raise BundleError(
            f"{head.name}: a head drafts for decoder-only targets without recurrent layers"
        )
    if config.hidden_size != head.target_hidden_size:
        raise BundleError(
            f"{head.name}: it reads layers {head.target_hidden_size} wide, the target's are {config.hidden_size}"
        )
    taps = head.taps_of(config.num_hidden_layers)
    embedding = head.tensors.get(EMBEDDING)
    if embedding is None:
        embedding = target.load().get_input_embeddings().weight.detach().float()
    inlet, own = build(head, target.model_config.vocab_size, embedding)
    return HeadPart(checkpoint=head, taps=taps, embedding=embedding, inlet=inlet, own=own)


def export_part(
    head: HeadPart, root: Path, weights: str | None, num_positions: int, progress: Progress
) -> tuple[ModelEntry, dict[str, object]]:
    """Write a head's graph below ``root`` as the draft; return its entry in the manifest and its certificate.

    Matrices of integers are rounded to nearest: there is no text that a head writes by itself.

    Raises:
        BundleError: the graph does not answer as the checkpoint does.
    """
    path, kind = root / "draft" / names.MODEL_FILE, _kind_of(weights)
    model_config = read_model_config(head.own.config)
    progress.tell(f"draft: a head that reads what enters layers {list(head.taps)} of the target")
    if weights not in (None, kind):
        progress.tell(f"draft: weights {weights} are not made of a head; {kind} are")
    export_head(head.own, path, head.size, num_positions)
    certificate = compare_head(head, path, most=MOST_APART)
    if kind != FLOAT32:
        progress.tell(f"draft: storing the weights as {kind}")
        steps = progress.steps("draft: weights")
        certificate[kind] = _stored(head, path, kind, steps)
    entry = ModelEntry(
        path="draft",
        num_layers=1,
        num_kv_heads=model_config.num_kv_heads,
        head_size=model_config.head_size,
        vocab_size=len(head.embedding),
        weights=kind,
        narrowest_span=NARROWEST_SPAN,
        reads_features=head.size,
    )
    return entry, certificate


def _kind_of(weights: str | None) -> str:
    """Return how a head is stored where a model would be as asked."""
    if weights in BITS or weights in HALF_TYPES:
        return str(weights)
    return {W8A8: "int8", "half": FLOAT16}.get(weights or "", FLOAT32)


def _stored(head: HeadPart, path: Path, kind: str, steps: Steps = untold) -> dict[str, object]:
    if kind in BITS:
        quantize_file(path, kind, report=steps)
    else:
        store_halves(path, kind, steps)
    return compare_head(head, path, most=None)


def compare_head(head: HeadPart, path: Path, *, most: float | None) -> dict[str, object]:
    """Return how far a head's graph is from its reference: taught by a text, then on its own features.

    ``most`` is the share of the greatest number that it may differ by; None judges nothing.

    Raises:
        BundleError: it differs by more.
    """
    random = np.random.default_rng(0)
    tokens = random.integers(0, len(head.embedding), _NUM_TOKENS + _NUM_RECYCLED)
    features = random.standard_normal((_NUM_TOKENS, head.size)).astype(np.float32)
    wanted, recycled = _expected(head, tokens, features)
    runner = _HeadRunner(path, len(tokens))
    found, start = [], 0
    for width in (*_WIDTHS, _NUM_TOKENS - sum(_WIDTHS)):
        given = features[start : start + width]
        found.append(runner.extend(tokens[start : start + width], given, start))
        start += width
    while start < len(tokens):
        given = found[-1][1][-1:]
        found.append(runner.extend(tokens[start : start + 1], given, start))
        start += 1
    answered = np.concatenate([logits for logits, _ in found])
    ids = head.checkpoint.target_ids
    answered = answered if ids is None else answered[:, ids.numpy()]
    _judge(f"{path.parent.name}/{path.name}: logits", answered, wanted, most)
    own = np.concatenate([one for _, one in found])
    _judge(f"{path.parent.name}/{path.name}: {names.RECYCLED}", own, recycled, most)
    case = {
        "max_difference": float(np.abs(answered - wanted).max()),
        "num_greedy_equal": int((answered.argmax(-1) == wanted.argmax(-1)).sum()),
        "num_compared": len(tokens),
    }
    return {"head": case}


def _expected(
    head: HeadPart, tokens: IntArray, features: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the reference's logits [n, V_draft] and recycled features [n, F] of a text and what is drafted behind."""
    given, count = torch.from_numpy(features), len(features)
    texts = torch.from_numpy(tokens)
    with torch.no_grad():
        while True:
            logits, recycled = head_answers(
                head.checkpoint, head.embedding, given, texts[: len(given)]
            )
            if len(given) == len(tokens):
                break
            given = torch.cat([given, recycled[-1:]])
    assert len(logits) == count + _NUM_RECYCLED
    return logits.numpy(), recycled.numpy()


class _HeadRunner:
    """A head's graph over one row, with its cache as arrays."""

    def __init__(self, path: Path, capacity: int) -> None:
        self._session: Any = open_graph(path)
        shapes = {one.name: one.shape for one in self._session.get_inputs()}
        self._caches = {
            name: np.zeros((1, shape[1], capacity, shape[3]), np.float32)
            for name, shape in shapes.items()
            if names.is_cache(name)
        }

    def extend(
        self, tokens: IntArray, features: FloatArray, start: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return logits [n, V] and recycled features [n, F] of a span."""
        feeds = {
            names.TOKENS: tokens[None],
            names.START: np.array([start]),
            names.LOGIT_POSITIONS: np.arange(len(tokens))[None],
            names.FEATURES: features[None],
            **self._caches,
        }
        outputs = [one.name for one in self._session.get_outputs()]
        found = dict(zip(outputs, self._session.run(outputs, feeds), strict=True))
        self._caches = {name: found[f"new_{name}"] for name in self._caches}
        return found[names.LOGITS][0], found[names.RECYCLED][0]


def target_features(head: HeadPart, model: PreTrainedModel, tokens: IntArray) -> FloatArray:
    """Return features [n, F] float32 of a text [n] int64, of the streams that Transformers returns."""
    with widened(model), torch.no_grad():
        output = model(torch.from_numpy(tokens)[None], use_cache=False, output_hidden_states=True)
        streams = [output.hidden_states[tap][0].float() for tap in head.taps]
        features: FloatArray = features_of(head.checkpoint, streams).numpy()
        return features


def features_text(model_config: ModelConfig) -> IntArray:
    """Return the tokens [n] int64 that a target's features are compared over."""
    random = np.random.default_rng(1)
    length = min(_NUM_TOKENS, model_config.max_position)
    return random.integers(0, model_config.vocab_size, length)


def check_features(
    path: Path, model_config: ModelConfig, expected: FloatArray, *, exact_blocks: bool = False
) -> dict[str, object]:
    """Return how far the features in the caches of a target's graphs are from ``expected`` [n, F], in float32.

    Raises:
        BundleError: by more than ``MOST_APART`` of the greatest: the graph taps another stream.
    """
    tokens, found = features_text(model_config), {}
    key, value = (name(model_config.num_layers - 1) for name in (names.key_name, names.value_name))
    for file in (path, path.with_name(names.GROUPED_FILE)):
        if not file.exists():
            continue
        runner = GraphRunner(
            file, model_config, batch=1, capacity=len(tokens), exact_blocks=exact_blocks
        )
        runner.extend(tokens[None], np.zeros(1, np.int64))
        features = np.concatenate([runner.caches[name][0, 0] for name in (key, value)], axis=-1)
        found[file.stem] = _judge(
            f"{path.parent.name}/{file.name}: features", features, expected, MOST_APART
        )
    return {"of_greatest": found}


def _judge(where: str, found: FloatArray, wanted: FloatArray, most: float | None) -> float:
    """Return the greatest difference as a share of the greatest number.

    Raises:
        BundleError: it is more than ``most``, or is not a number.
    """
    apart = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not np.isfinite(apart) or (most is not None and apart > most):
        raise BundleError(f"{where} differ by {apart:.3g} of the greatest, allowed {most}")
    return apart
