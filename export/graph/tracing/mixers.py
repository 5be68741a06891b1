"""Layers that keep a recurrent state, or a window of a convolution's inputs, while a model is traced.

Families of Transformers call their convolution and their scan by module-level names that all share; ``replaced`` gives
a model's module these instead. A cache that says it keeps no state (``kv_export.ScatterCache``) leads every module to
them, whatever the span. They compute over what slots keep (``engines.bundle.states``) and the places of a call:

    causal_conv1d_fn                a row is a sum over the rows of the window's pool that its taps name
    torch_chunk_gated_delta_rule    two scans: of settled tokens, which move the state, and from there of open ones
    chunk_kimi_delta_attention      likewise, with a decay for each number of a key
    mamba2_chunk_scan               likewise, by the gated rule
    functional.softplus             LinearAttentionGate, whose bits do not depend on a number's place in its tensor

Two modules of Transformers call none of these and get another forward: MiniMax's lightning attention, and Kimi's gate.

A pool is a row of zeros, what is kept, and what is new. A row of zeros leaves a state as it is, and is what precedes a
text, so padding needs no mask.

Source: Yang et al. 2025 (arXiv:2412.06464), equation 10 (gated delta rule); Kimi Team 2025 (arXiv:2510.26692, with a
decay per key); MiniMax 2025 (arXiv:2501.08313, lightning attention); Dao and Gu 2024 (arXiv:2405.21060), 3.1 (gated);
operators LinearAttention and LinearAttentionGate of ONNX Runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import values
from onnxscript.onnx_opset import opset24
from outrider.engines.bundle import names
from outrider.engines.bundle.states import SCAN_PLACES, WINDOW_PLACES, StatesEntry
from outrider.export.model_config import LayerKinds
from torch import Tensor, nn
from torch.nn import functional

MICROSOFT = "com.microsoft"
"""Domain of the two operators."""
OPERATORS = frozenset({"LinearAttention", "LinearAttentionGate"})
DELTA_RULE, GATED_RULE = "gated_delta", "gated"
# Activations behind a convolution, by Transformers' names.
_SILU = ("silu", "swish")
_ONNX: Any = opset24
# Of the l2 norm of queries and keys, as in all families.
_NORM_EPSILON = 1e-6


class UnsupportedMixerError(Exception):
    """A layer's convolution or scan is not one that the graph can express."""


@torch.library.custom_op("outrider::linear_attention", mutates_args=())
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    num_query_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return answers [B, T, H * Dv] of a scan over T tokens from a state [B, H, Dk, Dv], and the state behind them.

    Args:
        query: [B, T, Hq * Dk]; H / Hq heads of the state share one, and one of ``key``.
        key: [B, T, Hq * Dk].
        value: [B, T, H * Dv].
        state: [B, H, Dk, Dv].
        decay: [B, T, H], or [B, T, H * Dk] where each number of a key has its own; logarithms of the factors.
        beta: [B, T, H] of the delta rule; None for the gated one.
        num_query_heads: Hq.
        scale: factor of the answers.
    """
    heads = state.shape[1]
    query, key = (
        one.unflatten(2, (num_query_heads, -1)).repeat_interleave(heads // num_query_heads, 2)
        for one in (query, key)
    )
    by_head, answers = value.unflatten(2, (heads, -1)), torch.empty_like(value)
    for token in range(value.shape[1]):
        state = state * decay[:, token].unflatten(1, (heads, -1))[..., None].exp()
        update = by_head[:, token]
        if beta is not None:
            held = torch.einsum("bhkv,bhk->bhv", state, key[:, token])
            update = (update - held) * beta[:, token, :, None]
        state = state + key[:, token, :, :, None] * update[:, :, None]
        answers[:, token] = torch.einsum("bhkv,bhk->bhv", state, query[:, token]).flatten(1) * scale
    return answers, state.clone()


@linear_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    num_query_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value), torch.empty_like(state)


@torch.library.custom_op("outrider::placeless_softplus", mutates_args=())
def placeless_softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) [..., n], the same bits of a number at every place."""
    return torch.ops.aten.softplus(x)  # what `functional` has under this name may be this operator


@placeless_softplus.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@dataclass(slots=True)
class _Kept:
    """What slots keep, by number of the mixer, and the places of a call by name."""

    states: list[Tensor]
    pending: list[Tensor]
    windows: list[Tensor]
    places: Mapping[str, Tensor]


class Mixers:
    """The mixers of one model, as its modules call them.

    Args:
        kinds: of its layers.

    Attributes:
        attention: numbers of the layers that cache keys and values.
    """

    def __init__(self, kinds: LayerKinds) -> None:
        self.attention = kinds.attention
        self._layers = kinds.mixers
        self._kept: _Kept | None = None
        self._sizes: dict[int, dict[str, int]] = {}
        self._layer: int | None = None
        # What the cache was told of a layer, or is told next, by the call that has to be beside it.
        self._open: list[tuple[str, int]] = []

    def begin(self, *tensors: Any) -> None:
        """Start a call over lists of states, pending rows and windows, and its places; over none to learn sizes."""
        self._sizes.clear()
        self._open.clear()
        self._kept = None
        if tensors:
            states, pending, windows, *places = tensors
            given = (WINDOW_PLACES if windows else ()) + (SCAN_PLACES if states else ())
            by_name = dict(zip(given, places, strict=True))
            self._kept = _Kept(list(states), list(pending), list(windows), by_name)

    def kept(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return states, pending rows and windows behind the call."""
        assert self._kept is not None
        return self._kept.states, self._kept.pending, self._kept.windows

    def sizes(self) -> StatesEntry:
        """Return the sizes that the mixers of the last call have, all the same.

        Raises:
            UnsupportedMixerError: a mixer computed by none of the functions, or by others too, or sizes differ.
        """
        if self._open:
            what, layer = self._open[0]
            raise UnsupportedMixerError(f"layer {layer} computes its {what} by itself")
        if missing := sorted(set(self._layers) - self._sizes.keys()):
            raise UnsupportedMixerError(f"layer {missing[0]} keeps a state of another kind")
        first = self._sizes[self._layers[0]]
        for layer, sizes in self._sizes.items():
            if sizes != first:
                raise UnsupportedMixerError(
                    f"layer {layer} keeps a state of other sizes than layer {self._layers[0]}"
                )
        none = dict.fromkeys(("channels", "row", "heads", "key_size", "value_size"), 0)
        known = {"kernel": 1, **none, **first}
        return StatesEntry(mixers=len(self._layers), max_open=1, **known)

    def begin_convolution(self, layer: int) -> None:
        """Note whose convolution follows."""
        if layer not in self._layers:
            raise UnsupportedMixerError(f"layer {layer} keeps a window, by its kind it has none")
        self._layer = layer
        self._open.append(("convolution", layer))

    def end_scan(self, layer: int) -> None:
        """Note whose scan that was."""
        if ("scan", layer) not in self._open:
            raise UnsupportedMixerError(f"layer {layer} computes its scan by itself")
        self._open.remove(("scan", layer))

    def forwards(self) -> dict[str, Callable[..., Any]]:
        """Return what stands for forwards of Transformers that call no such function, by the names of their classes."""
        return {"KimiLinearForgetGate": _forget, "MiniMaxLightningAttention": self._lightning}

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return what stands for the functions of Transformers, by their names."""
        return {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": self._delta_rule,
            "chunk_kimi_delta_attention": self._delta_rule,
            "mamba2_chunk_scan": self._mamba2,
            "MiniMaxCache": object,  # the only class of caches that it takes
        }

    def _convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Return a causal convolution [B, C, T] of each of C channels by K taps; weight [C, K]."""
        layer = self._layer
        if layer is None or ("convolution", layer) not in self._open:
            raise UnsupportedMixerError("a layer's convolution does not go through its cache")
        if activation not in (None, *_SILU):
            raise UnsupportedMixerError(f"layer {layer} convolves behind {activation}")
        self._open.remove(("convolution", layer))
        self._note(layer, kernel=weight.shape[1], channels=weight.shape[0])
        if self._kept is None:
            return x
        rows, number, kept = x.transpose(1, 2), self._layers.index(layer), self._kept
        taps, window_rows = (kept.places[name] for name in WINDOW_PLACES)
        pool = _pool(kept.windows[number], rows)
        kept.windows[number] = functional.embedding(window_rows, pool)
        weighted = functional.embedding(taps, pool) * weight.t()[:, None]
        # Sums and products of elements, whose bits depend on no place.
        total = weighted[0]
        for tap in range(1, weight.shape[1]):
            total = total + weighted[tap]
        if bias is not None:
            total = total + bias
        if activation is not None:
            total = total * total.sigmoid()
        return total.reshape(rows.shape).transpose(1, 2)

    def _delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the gated delta rule's answers [B, T, H, Dv]; g is the decay [B, T, H], or [B, T, H, Dk]."""
        if use_qk_l2norm_in_kernel:
            query, key = _of_length_one(query), _of_length_one(key)
        # In place of the state that a module hands to its cache, which keeps none.
        return self._scan(query, key, value, g, beta, query.shape[-1] ** -0.5), query

    def _lightning(self, module: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return what MiniMax's lightning attention makes of hidden states [B, T, width]; one decay for each head."""
        layer, heads = module.layer_idx, module.num_attention_heads
        mixed = module.act_fn(module.qkv_proj(hidden_states)).unflatten(2, (heads, -1))
        query, key, value = mixed.split(module.head_dim, 3)
        decay = (-module.slope_rate.float().reshape(1, 1, heads)).expand(
            *hidden_states.shape[:2], heads
        )
        self._layer = layer
        answers = module.norm(self._scan(query, key, value, decay, None, 1.0).flatten(2))
        self.end_scan(layer)
        return module.out_proj(module.output_gate(hidden_states).sigmoid() * answers), None

    def _mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        rates: Tensor,
        keys: Tensor,
        queries: Tensor,
        *,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **others: Any,
    ) -> Any:
        """Return Mamba-2's answers [B, T, H, Dv] to x [B, T, H, Dv] by steps dt [B, T, H].

        ``rates`` [H] is A of the source, ``keys`` and ``queries`` [B, T, groups, Dk] are B and C; D is added as it is.
        """
        dt = dt if dt_bias is None else dt + dt_bias
        dt = placeless_softplus(dt) if dt_softplus else dt
        least, most = dt_limit
        if least > 0.0 or most < float("inf"):
            dt = dt.clamp(least, most)
        answers = self._scan(queries, keys, x * dt[..., None], dt * rates, None, 1.0)
        if (passed := others.get("D")) is not None:
            answers = answers + passed[:, None] * x
        return (answers, None) if return_final_states else answers

    def _scan(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Return answers [B, T, H, Dv] of the layer whose convolution was the last; decay as ``_delta_rule``'s."""
        layer = self._layer
        if layer is None:
            raise UnsupportedMixerError("a layer scans without a convolution")
        parts = [query.flatten(2), key.flatten(2), value.flatten(2), decay.flatten(2)]
        parts += [] if beta is None else [beta]
        widths = [part.shape[2] for part in parts]
        heads, value_size = value.shape[2:]
        self._note(
            layer, row=sum(widths), heads=heads, key_size=key.shape[3], value_size=value_size
        )
        self._open.append(("scan", layer))
        if self._kept is None:
            return torch.empty_like(value)
        kept, number = self._kept, self._layers.index(layer)
        settled, open_, scan_out, pending_rows = (kept.places[name] for name in SCAN_PLACES)
        pool = _pool(kept.pending[number], torch.cat(parts, 2))
        kept.pending[number] = functional.embedding(pending_rows, pool)

        def scan(places: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            rows = [*functional.embedding(places, pool).split(widths, 2), None][:5]
            given = *rows[:3], state, *rows[3:], query.shape[2], scale
            answers, after = linear_attention(*given)
            return answers, after

        first, kept.states[number] = scan(settled, kept.states[number])
        second, _ = scan(open_, kept.states[number])
        answers = torch.cat([first, second], 1).flatten(0, 1)
        return functional.embedding(scan_out, answers).reshape(value.shape)

    def _note(self, layer: int, **sizes: int) -> None:
        known = self._sizes.setdefault(layer, {})
        if twice := sorted(known.keys() & sizes.keys()):
            raise UnsupportedMixerError(f"layer {layer} keeps {twice[0]} of two sizes")
        known.update({name: int(size) for name, size in sizes.items()})


def _pool(kept: Tensor, new: Tensor) -> Tensor:
    """Return a row of zeros, then rows [B, n, width] that are kept, then new ones [B, T, width]."""
    zeros = kept.new_zeros(1, kept.shape[2])
    return torch.cat([zeros, kept.flatten(0, 1), new.flatten(0, 1)])


def _forget(module: Any, hidden: Tensor) -> Tensor:
    """Return the decay [B, T, H, Dk] of Kimi's gate, which spells out its softplus."""
    steps = module.f_b_proj(module.f_a_proj(hidden)) + module.dt_bias.float()
    rates = -module.A_log.float().exp()
    return rates * placeless_softplus(steps).unflatten(2, (module.num_heads, -1))


def _of_length_one(x: Tensor) -> Tensor:
    """Return x / sqrt(sum(x * x) + epsilon) over the last axis, as a norm that ONNX has an operator for."""
    size = x.shape[-1]
    return functional.rms_norm(x, [size], eps=_NORM_EPSILON / size) * size**-0.5


@contextmanager
def replaced(model: nn.Module, mixers: Mixers | None) -> Iterator[None]:
    """Let a model compute its mixers by ``mixers``, and by its own functions again at the end; None changes nothing."""
    if mixers is None:
        yield
        return
    module = sys.modules[type(model).__module__]
    given = mixers.functions()
    own = {name: getattr(module, name) for name in given if hasattr(module, name)}
    own_softplus = functional.softplus
    forwards = mixers.forwards()
    others = [one for one in model.modules() if type(one).__name__ in forwards]
    try:
        for one in others:
            one.forward = partial(forwards[type(one).__name__], one)
        for name in own:
            setattr(module, name, given[name])
        functional.softplus = lambda x, *_: placeless_softplus(x)
        yield
    finally:
        functional.softplus = own_softplus
        for one in others:
            del one.forward
        for name, function in own.items():
            setattr(module, name, function)


def measure_tokens(graph: ir.Graph) -> None:
    """Read the size of a batch from the tokens' own inputs, where the exporter read it from those of mixers."""
    (start,) = (value for value in graph.inputs if value.name == names.START)
    assert start.shape is not None
    for node in graph:
        measured = node.inputs[0] if node.op_type == "Shape" else None
        if measured is None or measured.name not in (*WINDOW_PLACES, *SCAN_PLACES):
            continue
        first, end = (node.attributes[name].as_int() for name in ("start", "end"))
        assert measured.shape is not None
        if list(measured.shape[first:end]) == list(start.shape):
            node.replace_input_with(0, start)
            node.attributes["start"] = ir.AttrInt64("start", 0)
            node.attributes["end"] = ir.AttrInt64("end", 1)


def _operator(
    name: str, inputs: Sequence[str], num_optional: int, outputs: Sequence[str], **kinds: Any
) -> Any:
    """Return one of ONNX Runtime's operators of float32, as far as it is used here."""
    schema = onnx.defs.OpSchema
    option = schema.FormalParameterOption
    required = len(inputs) - num_optional
    given = [
        schema.FormalParameter(
            one, "T", param_option=option.Single if index < required else option.Optional
        )
        for index, one in enumerate(inputs)
    ]
    found = schema(
        name,
        MICROSOFT,
        1,
        inputs=given,
        outputs=[schema.FormalParameter(one, "T") for one in outputs],
        type_constraints=[("T", ["tensor(float)"], "")],
        attributes=[schema.Attribute(one, kind, "") for one, kind in kinds.items()],
    )
    return values.Op(values.Opset(MICROSOFT, 1), name, found)


_KIND = onnx.defs.OpSchema.AttrType
_LINEAR_ATTENTION = _operator(
    "LinearAttention",
    ("query", "key", "value", "past_state", "decay", "beta"),
    1,
    ("output", "present_state"),
    q_num_heads=_KIND.INT,
    kv_num_heads=_KIND.INT,
    update_rule=_KIND.STRING,
    scale=_KIND.FLOAT,
)
_GATE = _operator("LinearAttentionGate", ("decay", "decay_bias", "decay_scale"), 0, ("output",))


def _onnx_linear_attention(
    query: Any,
    key: Any,
    value: Any,
    state: Any,
    decay: Any,
    beta: Any,
    num_query_heads: int,
    scale: float,
) -> Any:
    return _LINEAR_ATTENTION(
        query,
        key,
        value,
        state,
        decay,
        *(() if beta is None else (beta,)),
        q_num_heads=num_query_heads,
        kv_num_heads=int(state.shape[1]),
        update_rule=GATED_RULE if beta is None else DELTA_RULE,
        scale=scale,
    )


def _onnx_softplus(x: Any) -> Any:
    """Return log(1 + exp x) from operators whose bits do not depend on an element's place.

    The gate, log(1 + exp(x + 0)) * 1, rounds 1 + exp x: of the steps of trained models, 1e-3 and less, digits are lost.
    Below -2 it is 2 artanh z with z = e / (2 + e), e = exp x, by four terms of the series: z is at most .064.
    """
    size = int(x.shape[-1])
    zeros, ones = (_ONNX.Constant(value_floats=[number] * size) for number in (0.0, 1.0))

    def number(value: float) -> Any:
        return _ONNX.Constant(value_float=value)

    exp = _ONNX.Exp(_ONNX.Min(x, number(0.0)))
    z = _ONNX.Div(exp, _ONNX.Add(exp, number(2.0)))
    square = _ONNX.Mul(z, z)
    series = number(1 / 7)
    for term in (1 / 5, 1 / 3, 1.0):
        series = _ONNX.Add(number(term), _ONNX.Mul(square, series))
    small = _ONNX.Mul(_ONNX.Mul(z, number(2.0)), series)
    return _ONNX.Where(_ONNX.Less(x, number(-2.0)), small, _GATE(x, zeros, ones))


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of each custom operator, for ``torch.onnx.export``."""
    return {
        torch.ops.outrider.linear_attention.default: _onnx_linear_attention,
        torch.ops.outrider.placeless_softplus.default: _onnx_softplus,
    }
