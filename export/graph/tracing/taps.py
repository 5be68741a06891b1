"""Features of a target: what a head drafts from, kept with the keys and values of every token.

A tap is the residual stream that enters a layer (``hidden_states[i]`` of Transformers). The streams of all taps, one
behind the other, go through the head's own input projection; what comes out is a token's features. They are cached as
one layer more, the last: the first half where its key would be, [B, 1, S, F / 2], the second where its value would be.
So whatever is done to a slot (moves, kept prefixes, paths of trees) is done to its features.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.export.graph.tracing.kv_export import ScatterCache
from torch import Tensor, nn
from transformers import PreTrainedModel


class Taps(nn.Module):
    """Features of a model's tokens.

    Args:
        layers: whose inputs are taken, in the order in which the projection reads them.
        projection: from [B, T, taps * hidden] float32 to [B, T, F] float32, F even.
        size: F.
    """

    def __init__(self, layers: Sequence[int], projection: nn.Module, size: int) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.projection = projection
        self.size = size
        self._seen: dict[int, Tensor] = {}

    @contextmanager
    def inside(self, model: PreTrainedModel) -> Iterator[None]:
        """See the streams of every call of a model, until the end.

        Raises:
            BundleError: it has no such layers.
        """
        layers = layers_of(model)
        if beyond := [layer for layer in self.layers if not 0 <= layer < len(layers)]:
            raise BundleError(
                f"the head reads what enters layer {beyond[0]}, the target has 0..{len(layers) - 1}"
            )
        with ExitStack() as hooks:
            for layer in self.layers:
                handle = layers[layer].register_forward_pre_hook(
                    self._hook(layer), with_kwargs=True
                )
                hooks.callback(handle.remove)
            yield
        self._seen = {}

    def features(self) -> Tensor:
        """Return the features [B, T, F] float32 of the last call's tokens."""
        streams = torch.cat([self._seen[layer] for layer in self.layers], dim=-1)
        features: Tensor = self.projection(streams)
        return features

    def write(self, cache: ScatterCache) -> None:
        """Write the last call's features to the last layer of the caches."""
        for half, caches in zip(
            self.features().chunk(2, dim=-1), (cache.keys, cache.values), strict=True
        ):
            states = half.view(*half.shape[:2], 1, self.size // 2).transpose(1, 2)
            caches[-1] = cache.scattered(caches[-1], states)

    def _hook(self, layer: int) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[layer] = args[0] if args else kwargs["hidden_states"]

        return see


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers.

    Raises:
        BundleError: the model holds them in no list of its own.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        one
        for one in model.base_model.children()
        if isinstance(one, nn.ModuleList) and len(one) == count
    ]
    if len(found) != 1:
        raise BundleError(
            f"{model.config.model_type}: no single list of its {count} layers, so no head can read their inputs"
        )
    return found[0]
