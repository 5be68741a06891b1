"""The logits that graphs are compared with: PyTorch's, in float32 and, for what that rounds away, in float64.

All graphs of a model meet the same sequences. Each is computed once and kept, so the model can go before a graph is
opened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.reference.torch_engine import tree_logits
from outrider.engines.trees import path_to
from outrider.export.certificate.doubles import Doubles
from outrider.export.certificate.feeds import Sources
from outrider.export.model_config import window_of
from outrider.export.weights.mapped import read, widened
from transformers import DynamicCache, PreTrainedModel

# Functions of Transformers that scan in chunks, and their own like that goes token by token.
_BY_TOKEN = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
# Logits below the likeliest; no model draws what is as far.
_MOST_BELOW = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongText:
    """A row whose cache is as long as one likes and costs nothing to compute: a prompt's, again and again.

    Attributes:
        prompt: [1, n] int64, computed.
        past: columns of the cache that the prompt's keys and values fill.
    """

    prompt: IntArray
    past: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """What a graph's logits are compared with.

    Attributes:
        values: [..., V] float32.
        measure_rounding: returns ``rounding``.
    """

    values: FloatArray
    measure_rounding: Callable[[], float] = float

    @property
    def rounding(self) -> float:
        """How far PyTorch's float32 is from its float64 over these sequences, at most; 0 of logits of a graph."""
        return self.measure_rounding()

    def __getitem__(self, where: Any) -> Logits:
        """Return some of them, by an index of the values."""
        return replace(self, values=self.values[where])


class LogitsOfSequences(Protocol):
    """Where logits come from that a graph's are compared with."""

    def logits(self, sequences: IntArray, sources: Sources | None = None) -> Logits:
        """Return logits [B, n, V] of whole sequences [B, n] int64; rows attend to ``sources``, if any."""
        ...

    def behind(self, text: LongText, tokens: IntArray) -> Logits:
        """Return logits [B, n, V] of tokens [B, n] int64, each row behind the same long text."""
        ...


class Reference:
    """Logits of a checkpoint's model, whose weights may be mapped (``weights.mapped``).

    Those in float64 are computed when a rounding is asked for: a graph that is as near as it may be on any sequence
    needs them of one alone. ``load`` returns the model again, where it is released.
    """

    def __init__(
        self, model: PreTrainedModel, load: Callable[[], PreTrainedModel] | None = None
    ) -> None:
        self._model: PreTrainedModel | None = model
        self._load = load
        self._window = window_of(model.config.get_text_config(decoder=True))
        self._known: dict[tuple[object, ...], Logits] = {}

    def logits(self, sequences: IntArray, sources: Sources | None = None) -> Logits:
        """Return logits [B, n, V] of whole sequences [B, n] int64, without a cache."""
        key = (sequences.shape, sequences.tobytes(), *_key_of(sources))
        return self._once(key, lambda model: reference_logits(model, sequences, sources))

    def tree(
        self, tokens: Sequence[int], parents: tuple[int, ...], source: Sources | None = None
    ) -> Logits:
        """Return logits [n, V] of a text with a tree behind it; see ``tree_logits``.

        ``source`` is the text's, one row.
        """
        key = (tuple(tokens), parents, *_key_of(source))
        # An explicit mask would be that of all layers, those with a window and those without.
        is_whole = self._window is None or len(tokens) <= self._window
        if source is None and is_whole:
            return self._once(key, lambda model: tree_logits(model, tokens, parents))
        return self._once(key, lambda model: _logits_by_paths(model, tokens, parents, source))

    def behind(self, text: LongText, tokens: IntArray) -> Logits:
        """Return logits [B, n, V] of tokens [B, n] int64, each row behind the same long text."""
        key = (text.prompt.tobytes(), text.past, tokens.shape, tokens.tobytes())
        return self._once(key, lambda model: _logits_behind(model, text, tokens))

    def tree_behind(self, text: LongText, tokens: IntArray, parents: tuple[int, ...]) -> Logits:
        """Return logits [n, V] of a tree's tokens [n] int64 behind a long text."""
        paths = _paths_to_leaves(parents)
        found = self.behind(text, _rows_of(tokens, paths))
        return replace(found, values=_by_node(found.values, paths, len(tokens)))

    def release(self) -> None:
        """Let the model go, where it can be loaded again; what was computed stays."""
        if self._load is not None:
            self._model = None

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            assert self._load is not None
            self._model = self._load()
        return self._model

    def _once(
        self, key: tuple[object, ...], compute: Callable[[PreTrainedModel], FloatArray]
    ) -> Logits:
        if key not in self._known:
            model = self._loaded()
            with widened(model), _scanned_by_token(model):
                narrow = compute(model)

            @cache
            def rounding() -> float:
                loaded = self._loaded()
                with read(loaded), Doubles(), _scanned_by_token(loaded):
                    found = _most_apart(narrow, compute(loaded))
                self.release()
                return found

            self._known[key] = Logits(values=narrow, measure_rounding=rounding)
        return self._known[key]


def reference_logits(
    model: PreTrainedModel, sequences: IntArray, sources: Sources | None = None
) -> FloatArray:
    """Return PyTorch's logits [B, n, V] of whole sequences [B, n] int64, without a cache.

    They are float32, or float64 inside of ``Doubles``. Of a model with an encoder, rows attend to ``sources``.
    """
    texts = torch.from_numpy(np.ascontiguousarray(sequences))
    given = {"input_ids": texts}
    if sources is not None:
        is_read = np.arange(sources.tokens.shape[1]) < sources.lengths[:, None]
        given = {
            "input_ids": torch.from_numpy(sources.tokens),
            "attention_mask": torch.from_numpy(is_read.astype(np.int64)),
            "decoder_input_ids": texts,
        }
    with torch.no_grad():
        output = model(**given, use_cache=False)
    logits: FloatArray = output.logits.float().numpy()
    return logits


@contextmanager
def _scanned_by_token(model: PreTrainedModel) -> Iterator[None]:
    """Let a scan go token by token, as graphs do and as texts are written, and in chunks again at the end.

    In chunks it rounds away ten times as much: 7e-4 of logits of 8, against 7e-5 (a tiny random Qwen3.5).
    """
    modules = {sys.modules[type(one).__module__] for one in model.modules()}
    chunked = [
        (module, name, getattr(module, name))
        for module in modules
        for name in _BY_TOKEN
        if hasattr(module, name)
    ]
    for module, name, _ in chunked:
        setattr(module, name, getattr(module, _BY_TOKEN[name]))
    # MiniMax's scan has no function; a block of one token is the recurrent rule. What 16 bits hold of a block's factors
    # contradicts the decay that they are made of.
    blocks = {
        one: (one.block_size, dict(one.named_buffers(recurse=False)))
        for one in model.modules()
        if hasattr(one, "slope_rate")
    }
    for one in blocks:
        one.block_size, one.slope_rate = 1, one.slope_rate.float()
        factors = one.decay_factors(one.slope_rate)
        one.query_decay, one.key_decay, one.diagonal_decay = factors
    try:
        yield
    finally:
        for module, name, function in chunked:
            setattr(module, name, function)
        for one, (size, buffers) in blocks.items():
            one.block_size = size
            for name, buffer in buffers.items():
                setattr(one, name, buffer)


def _most_apart(narrow: FloatArray, wide: FloatArray) -> float:
    """Return how far logits in float32 are from those in float64, at most.

    A token so far below the likeliest that only a bias puts it there says nothing of rounding.
    """
    is_told = ~(wide < wide.max(-1, keepdims=True) - _MOST_BELOW)  # what is not a number, too
    return float(np.abs(np.subtract(wide, narrow, where=is_told, out=np.zeros_like(wide))).max())


def _logits_behind(model: PreTrainedModel, text: LongText, tokens: IntArray) -> FloatArray:
    """Return PyTorch's logits [B, n, V] of tokens [B, n] behind a cache of ``text.past`` columns."""
    short, long = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.from_numpy(text.prompt), past_key_values=short, use_cache=True)
        index = torch.arange(text.past) % text.prompt.shape[1]
        for number, layer in enumerate(short.layers):
            held = (
                one[:, :, index].expand(len(tokens), -1, -1, -1)
                for one in (layer.keys, layer.values)
            )
            long.update(*held, number)
        output = model(input_ids=torch.from_numpy(tokens), past_key_values=long, use_cache=True)
    logits: FloatArray = output.logits.float().numpy()
    return logits


def _logits_by_paths(
    model: PreTrainedModel,
    tokens: Sequence[int],
    parents: tuple[int, ...],
    source: Sources | None,
) -> FloatArray:
    """Return logits [n, V] of a text with a tree behind it, each path to a leaf as a sequence of its own.

    Decoders behind an encoder take their positions from columns: they cannot be given those of a tree.
    """
    num_text = len(tokens) - len(parents) - 1
    text, nodes = np.split(np.array(tokens, np.int64), [num_text])
    paths = _paths_to_leaves(parents)
    rows = _rows_of(nodes, paths)
    sequences = np.concatenate([np.tile(text, (len(rows), 1)), rows], axis=1)
    sources = source and Sources(
        tokens=np.repeat(source.tokens, len(rows), axis=0),
        lengths=np.repeat(source.lengths, len(rows)),
    )
    found = reference_logits(model, sequences, sources)
    return np.concatenate([found[0, :num_text], _by_node(found[:, num_text:], paths, len(nodes))])


def _paths_to_leaves(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the paths from a tree's root to each of its leaves."""
    leaves = sorted({*range(len(parents) + 1)} - {*parents})
    return [path_to(leaf, parents) for leaf in leaves]


def _rows_of(tokens: IntArray, paths: Sequence[tuple[int, ...]]) -> IntArray:
    """Return the tokens of paths [B, n] int64; behind a path its last is repeated, which no token before it sees."""
    longest = max(map(len, paths))
    rows = [tokens[list(path)] for path in paths]
    return np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])


def _by_node(logits: FloatArray, paths: Sequence[tuple[int, ...]], num_nodes: int) -> FloatArray:
    """Return logits [nodes, V] of those of paths [B, n, V]."""
    found = np.empty((num_nodes, logits.shape[2]), logits.dtype)
    for row, path in enumerate(paths):
        found[list(path)] = logits[row, : len(path)]
    return found


def _key_of(sources: Sources | None) -> tuple[object, ...]:
    if sources is None:
        return ()
    return sources.tokens.shape, sources.tokens.tobytes(), sources.lengths.tobytes()
