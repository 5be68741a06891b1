"""What is traced of a decoder, run by PyTorch: no graph comes of it, so that a mistake in it is found in a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
from outrider.engines.base import FloatArray
from outrider.export.certificate import graph_runner
from outrider.export.certificate.feeds import Feeds
from outrider.export.graph.to_onnx import canonical_decoder
from outrider.export.graph.tracing.probe import mixer_sizes
from outrider.export.graph.tracing.signatures import decoder_signature
from outrider.export.graph.tracing.windows import Windows
from outrider.export.model_config import read_model_config
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel


class UntracedSession:
    """As ONNX Runtime's session over the graph of a decoder."""

    def __init__(self, model: PreTrainedModel, num_positions: int, max_open: int = 1) -> None:
        self._model, self._num_positions = model, num_positions
        model_config = read_model_config(model.config)
        states = mixer_sizes(model.config, model_config, max_open)  # None of a model without mixers
        self._signature = decoder_signature(model_config, states)

    def get_inputs(self) -> Sequence[SimpleNamespace]:
        """Return names, and shapes of which those of the example vary."""
        tensors = pytree.tree_leaves(self._signature.example)
        return [
            SimpleNamespace(name=name, shape=list(tensor.shape))
            for name, tensor in zip(self._signature.inputs, tensors, strict=True)
        ]

    def get_outputs(self) -> Sequence[SimpleNamespace]:
        """Return names."""
        return [SimpleNamespace(name=name) for name in self._signature.outputs]

    def run(self, outputs: Sequence[str], feeds: Feeds) -> list[FloatArray]:
        """Return outputs by their names; the model is itself again afterwards."""
        given = [torch.from_numpy(feeds[name]) for name in self._signature.inputs]
        arguments = pytree.tree_unflatten(given, pytree.tree_structure(self._signature.example))
        seen = Windows(self._num_positions)
        with canonical_decoder(self._model, seen, self._num_positions) as decoder, torch.no_grad():
            answers = pytree.tree_leaves(decoder(*arguments))
        found: Mapping[str, torch.Tensor] = dict(zip(self._signature.outputs, answers, strict=True))
        return [found[name].numpy() for name in outputs]


def run_untraced(monkeypatch: pytest.MonkeyPatch, session: UntracedSession) -> None:
    """Let every ``GraphRunner`` run what would be traced."""
    monkeypatch.setattr(graph_runner, "open_graph", lambda *_, **__: session)
