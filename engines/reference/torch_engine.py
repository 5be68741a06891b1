"""The reference: a checkpoint's own PyTorch model behind the engine contract.

Simple and slow on purpose. It keeps the tokens of every slot and computes each span from the
first token on, without a cache, one slot at a time: nothing that could hide a mistake of the
faster engines. LoadedModel never imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from outrider.engines.base import BundleError, EngineError, EngineLimits, FloatArray, Source, Span
from outrider.engines.reference.token_slots import TokenSlots
from outrider.engines.trees import path_to, tree_layout
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM


class TorchEngine(TokenSlots):
    """Engine over a causal language model, or over an encoder-decoder model where ``limits.max_source`` is not 0.

    Args:
        model: maps ``input_ids`` [1, n] int64 to an output with ``logits`` [1, n, V]; put into
            evaluation mode here. For trees it takes ``position_ids`` and an additive 4-dimensional
            ``attention_mask`` too, as the models of Transformers do. One with an encoder maps the source as
            ``input_ids`` and the text as ``decoder_input_ids``.
        limits: capacities; V must be the model's.
        source_vocab_size: of the sources' tokens; None for V.
    """

    # PyTorch picks kernels by the number of rows.
    is_row_invariant = False

    def __init__(
        self,
        model: torch.nn.Module,
        limits: EngineLimits,
        *,
        source_vocab_size: int | None = None,
    ) -> None:
        super().__init__(limits, source_vocab_size)
        self._model: torch.nn.Module | None = model.eval()

    def read(self, sources: Sequence[Source]) -> None:
        """Keep sources, which each extend has the model read anew; see ``Engine.read``.

        Raises:
            EngineError: a source breaks a limit, or the engine is closed.
        """
        self._require_open()
        super().read(sources)

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Append spans and return the wanted logits; see ``Engine.extend``.

        Returns:
            [B, R, V] float32, R the greatest ``num_logits``; padding columns are 0.

        Raises:
            EngineError: a span breaks a limit, the model failed, or the engine is closed.
        """
        self._require_open()
        num_wanted = self._num_wanted(spans)
        shape = (len(spans), num_wanted, self.limits.vocab_size)
        logits = np.zeros(shape, dtype=np.float32)
        for row, span in enumerate(spans):
            held = self._append(span)
            if span.num_logits:
                found = self._logits_of(held, span.parents, self._sources[span.slot])
                logits[row, : span.num_logits] = found[-span.num_logits :]
        return logits

    def close(self) -> None:
        """Let go of the model; a later extend raises EngineError."""
        self._model = None

    def _require_open(self) -> None:
        if self._model is None:
            raise EngineError("this engine is closed")

    def _logits_of(
        self, tokens: tuple[int, ...], parents: tuple[int, ...] | None, source: tuple[int, ...]
    ) -> FloatArray:
        """[n, V] float32: the logits after each of n tokens, of which the last may form a tree."""
        assert self._model is not None
        try:
            if source:
                return _answer_logits(self._model, source, tokens, parents)
            if parents is None:
                return _model_logits(self._model, tokens)
            return tree_logits(self._model, tokens, parents)
        except (RuntimeError, ValueError, IndexError) as error:
            raise EngineError(f"PyTorch failed: {error}") from error


def tree_logits(
    model: torch.nn.Module, tokens: Sequence[int], parents: tuple[int, ...]
) -> FloatArray:
    """PyTorch's logits [n, V] float32 of a text and the tree behind it, in one pass without a cache.

    Args:
        model: see ``TorchEngine``.
        tokens: the text, then the ``len(parents) + 1`` tokens of the tree.
        parents: of the tree (``engines.trees``).
    """
    layout = tree_layout(parents)
    num_text = len(tokens) - len(layout.depths)
    is_seen = np.tril(np.ones((len(tokens), len(tokens)), dtype=np.bool_))
    is_seen[num_text:, num_text:] = layout.ancestors
    mask = torch.zeros(is_seen.shape).masked_fill(
        torch.from_numpy(~is_seen), torch.finfo(torch.float32).min
    )
    positions = np.concatenate([np.arange(num_text), num_text + layout.depths])
    return _model_logits(
        model,
        tokens,
        position_ids=torch.from_numpy(positions[None]),
        attention_mask=mask[None, None],
    )


def _model_logits(
    model: torch.nn.Module, tokens: Sequence[int], **where: torch.Tensor
) -> FloatArray:
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(tokens)]), use_cache=False, **where)
        logits: FloatArray = output.logits[0].float().cpu().numpy()
    return logits


def _answer_logits(
    model: torch.nn.Module,
    source: Sequence[int],
    tokens: tuple[int, ...],
    parents: tuple[int, ...] | None,
) -> FloatArray:
    """PyTorch's logits [n, V] float32 of a text that answers a source.

    Of a tree every token's chain is computed alone: such models take no positions, and some no masks.
    """
    encoder = torch.tensor([list(source)])
    whole = {"input_ids": encoder, "attention_mask": torch.ones_like(encoder)}

    def logits_of(text: Sequence[int]) -> FloatArray:
        with torch.inference_mode():
            output = model(**whole, decoder_input_ids=torch.tensor([list(text)]), use_cache=False)
            logits: FloatArray = output.logits[0].float().cpu().numpy()
        return logits

    if parents is None:
        return logits_of(tokens)
    num_text = len(tokens) - len(parents) - 1
    chains = (path_to(node, parents) for node in range(len(parents) + 1))
    text, tree = tokens[:num_text], tokens[num_text:]
    rows = [logits_of((*text, *(tree[node] for node in chain)))[-1] for chain in chains]
    return np.stack(rows)


def open_checkpoint(
    path: Path,
    *,
    max_batch: int,
    max_context: int,
    max_extend: int,
    max_tree_nodes: int = 0,
    max_source: int = 0,
) -> TorchEngine:
    """Engine over a Hugging Face checkpoint folder, in float32.

    Raises:
        BundleError: the folder holds no causal language model, or where sources are asked for no model with an
            encoder.
    """
    kind = AutoModelForSeq2SeqLM if max_source else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        words = "an encoder-decoder model" if max_source else "a causal language model"
        raise BundleError(f"{path.name}: not {words}: {error}") from error
    limits = EngineLimits(
        max_batch=max_batch,
        max_context=max_context,
        max_extend=max_extend,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_tree_nodes=max_tree_nodes,
        max_source=max_source,
    )
    source_vocab_size = model.get_input_embeddings().weight.shape[0] if max_source else None
    return TorchEngine(model, limits, source_vocab_size=source_vocab_size)
