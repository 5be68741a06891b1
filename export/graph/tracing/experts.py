"""Mixtures of experts in a traced graph: every expert multiplies the rows that are routed to it, and no others.

Transformers keeps the weights of a layer's experts stacked, and asks an interface for the function that computes with
them. Here that function sorts rows by expert, cuts them into one part per expert and lets each part through its
expert:

    hidden [N, width] -> Gather by expert, then row -> Split -> [n_e, width] per expert e -> expert -> Concat
    -> Gather [k, N, width] -> times the router's weights -> Sum over the k experts of a row, in the router's order

A part without rows costs its nodes alone: a product with no rows reads no weight. There is no branch, so every expert's
weights are constants of the graph like all others, and passes see them so.

ONNX Runtime's CPU kernels give a row the same bits in every product of two or more rows. So each part with rows has
one more, a copy of some row, whose answer nobody reads. Counts and places are whole numbers, and a row's answers are
added in the order that its router gave them: a row's bits depend on no neighbour.

What an expert computes is the module's own: its weights by the names of the interface, and its gate.

Source: ``transformers.integrations.moe``; ONNX operators NonZero-13, Split-18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset24
from outrider.export.graph.edits import constant, source
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_NAME = "outrider_experts"
# Where a module's experts stand, one by one, while it is traced.
_SEPARATE = "separate_experts"
# Stacked weights, by the names of the interface; those of a gate or without one.
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
# What the interface gives to every module that computes experts through it.
_MARK = "_is_expert_parallel"


@torch.library.custom_op("outrider::sort_by_expert", mutates_args=())
def sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of all experts, how many each has, and where a row's answers will stand.

    Args:
        index: [N, k] int64, the experts of each row.
        num_experts: E.

    Returns:
        rows [P] int64, by expert, behind those of each expert that has any the copy of another; sizes [E] int64, which
        add up to P; places [k, N] int64, in P.
    """
    mask = torch.arange(num_experts)[:, None] == index.reshape(1, -1)
    mask = torch.cat([mask, mask.any(dim=1, keepdim=True)], dim=1)
    flat = mask.nonzero()[:, 1]
    rows = flat.clamp(max=index.numel() - 1) // index.shape[1]
    places = torch.zeros(index.numel() + 1, dtype=torch.int64)
    places[flat] = torch.arange(len(flat))
    return rows, mask.sum(dim=1), places[:-1].reshape(index.shape).t().contiguous()


@sort_by_expert.register_fake
def _(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    # As if no row were copied: how many are is known in a call alone.
    rows = index.new_empty(index.shape[0] * index.shape[1])
    return rows, index.new_empty(num_experts), index.new_empty(index.shape[1], index.shape[0])


@torch.library.custom_op("outrider::rows_of_experts", mutates_args=())
def rows_of_experts(hidden: Tensor, rows: Tensor, sizes: Tensor, num_experts: int) -> list[Tensor]:
    """Return each expert's part [n_e, width] of hidden states [N, width]; see ``sort_by_expert``."""
    return [part.clone() for part in hidden[rows].split(sizes.tolist())]


@rows_of_experts.register_fake
def _(hidden: Tensor, rows: Tensor, sizes: Tensor, num_experts: int) -> list[Tensor]:
    # As if each expert had all rows; ``forget_row_counts`` takes that out of the graph.
    return [torch.empty_like(hidden) for _ in range(num_experts)]


@torch.library.custom_op("outrider::sum_of_experts", mutates_args=())
def sum_of_experts(answers: Sequence[Tensor], places: Tensor, weights: Tensor) -> Tensor:
    """Return the sum [N, width] of each row's answers at its places [k, N], times its weights [N, k]."""
    found = torch.cat(list(answers))[places] * weights.t()[:, :, None]
    total = found[0].clone()
    for one in found[1:]:
        total += one
    return total


@sum_of_experts.register_fake
def _(answers: Sequence[Tensor], places: Tensor, weights: Tensor) -> Tensor:
    return answers[0].new_empty(places.shape[1], answers[0].shape[1])


# As Any: the types of these functions know tensors, and what is traced here is none.
_ONNX: Any = opset24


def _onnx_sort(index: Any, num_experts: int) -> Any:
    first, second = (_ONNX.Constant(value_ints=[axis]) for axis in (0, 1))
    experts = _ONNX.Constant(value=ir.tensor([[expert] for expert in range(num_experts)]))
    flat = _ONNX.Reshape(index, _ONNX.Constant(value_ints=[1, -1]))
    mask = _ONNX.Cast(_ONNX.Equal(experts, flat), to=ir.DataType.FLOAT.value)
    mask = _ONNX.Concat(mask, _ONNX.ReduceMax(mask, second), axis=1)
    # Of numbers below 2**24, which are exact.
    sizes = _ONNX.Cast(_ONNX.ReduceSum(mask, second, keepdims=0), to=ir.DataType.INT64.value)
    taken = _ONNX.Gather(_ONNX.NonZero(mask), _ONNX.Constant(value_int=1))
    total = _ONNX.Size(index)
    last = _ONNX.Sub(total, _ONNX.Constant(value_int=1))
    num_chosen = index.shape[1]
    rows = _ONNX.Div(_ONNX.Min(taken, last), _ONNX.Constant(value_int=num_chosen))
    num_taken = _ONNX.Size(taken)
    numbers = _ONNX.Range(_ONNX.Constant(value_int=0), num_taken, _ONNX.Constant(value_int=1))
    room = _ONNX.ConstantOfShape(
        _ONNX.Unsqueeze(_ONNX.Add(total, _ONNX.Constant(value_int=1)), first), value=ir.tensor([0])
    )
    places = _ONNX.ScatterElements(room, taken, numbers, axis=0)
    places = _ONNX.Slice(places, first, _ONNX.Unsqueeze(total, first), first)
    places = _ONNX.Reshape(places, _ONNX.Constant(value_ints=[-1, num_chosen]))
    places = _ONNX.Transpose(places, perm=[1, 0])
    return rows, sizes, places


def _onnx_rows(hidden: Any, rows: Any, sizes: Any, num_experts: int) -> Any:
    parts = _ONNX.Split(_ONNX.Gather(hidden, rows), sizes, axis=0, num_outputs=num_experts)
    return parts if num_experts > 1 else (parts,)


def _onnx_sum(answers: Sequence[Any], places: Any, weights: Any) -> Any:
    first = _ONNX.Constant(value_ints=[0])
    found = _ONNX.Gather(_ONNX.Concat(*answers, axis=0), places)
    factors = _ONNX.Unsqueeze(_ONNX.Transpose(weights, perm=[1, 0]), _ONNX.Constant(value_ints=[2]))
    weighted = _ONNX.Mul(found, factors)
    num_answers = places.shape[0]
    if num_answers == 1:
        return _ONNX.Squeeze(weighted, first)
    parts = _ONNX.Split(weighted, axis=0, num_outputs=num_answers)
    return _ONNX.Squeeze(_ONNX.Sum(*parts), first)


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of each custom operator, for ``torch.onnx.export``."""
    return {
        torch.ops.outrider.sort_by_expert.default: _onnx_sort,
        torch.ops.outrider.rows_of_experts.default: _onnx_rows,
        torch.ops.outrider.sum_of_experts.default: _onnx_sum,
    }


def _compute_experts(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what a layer's experts answer, [N, width], to hidden states [N, width].

    ``index`` [N, k] int64 has the experts of each row, ``weights`` [N, k] what each counts.
    """
    experts: Any = getattr(module, _SEPARATE)
    rows, sizes, places = sort_by_expert(index, len(experts))
    parts = rows_of_experts(hidden, rows, sizes, len(experts))
    answers = [_answer(module, expert, part) for expert, part in zip(experts, parts, strict=True)]
    return sum_of_experts(answers, places, weights)


def _answer(module: Any, expert: nn.Module, hidden: Tensor) -> Tensor:
    """Return what one expert of a module answers to its rows."""
    if module.has_gate:
        inner = module._apply_gate(_project(module, expert, "gate_up_proj", hidden))
    else:
        inner = module.act_fn(_project(module, expert, "up_proj", hidden))
    answer = _project(module, expert, "down_proj", inner)
    return module.post_expert_norm(answer) if module.has_post_expert_norm else answer


def _project(module: Any, expert: nn.Module, name: str, hidden: Tensor) -> Tensor:
    weight: Any = getattr(expert, name)
    bias: Any = getattr(expert, f"{name}_bias", None)
    if not module.is_transposed:
        return functional.linear(hidden, weight, bias)
    product = hidden @ weight
    return product if bias is None else product + bias


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _compute_experts)


@contextmanager
def separate_experts(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute its experts one by one, each with weights of its own, views of the stacked ones.

    The model has its stacked weights and its own function back at the end.
    """
    modules = [module for module in model.modules() if hasattr(module, _MARK)]
    if not modules:
        yield
        return
    held = [(module, dict(module._parameters)) for module in modules]
    old = model.get_experts_implementation()
    model.set_experts_implementation(EXPERTS_NAME)
    try:
        for module in modules:
            _separate(module)
        yield
    finally:
        for module, parameters in held:
            module._parameters.update(parameters)
            module._modules.pop(_SEPARATE, None)
        model.set_experts_implementation(old)


def _separate(module: nn.Module) -> None:
    names = [name for name in _WEIGHTS if name in module._parameters]
    names += [f"{name}_bias" for name in names if f"{name}_bias" in module._parameters]
    stacks = {name: module._parameters.pop(name) for name in names}
    experts = nn.ModuleList()
    for number in range(len(next(iter(stacks.values())))):
        expert = nn.Module()
        for name, stack in stacks.items():
            expert.register_parameter(name, nn.Parameter(stack.detach()[number], False))
        experts.append(expert)
    module.add_module(_SEPARATE, experts)


def has_experts(graph: ir.Graph) -> bool:
    """Return whether a graph routes rows to experts."""
    return any(True for _ in _cuts(graph))


def forget_row_counts(graph: ir.Graph) -> None:
    """Take out of a traced graph how many rows each expert has, which a trace does not know.

    ONNX Runtime would reuse memory by these shapes.
    """
    for gathered, parts in _cuts(graph):
        # ONNX takes either sizes or their number.
        parts.attributes.pop("num_outputs", None)
        left = [gathered.inputs[1], *gathered.outputs, *parts.outputs]
        while left:
            value = left.pop()
            assert value is not None
            if value.shape is not None:
                value.shape = ir.Shape([None, *value.shape[1:]])
            for use in value.uses():
                if use.node.op_type != "Concat" or use.node.attributes.get_int("axis", 0) != 0:
                    left += use.node.outputs


def _cuts(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Yield the nodes that gather rows by expert and cut them into parts, whose sizes are computed in a call."""
    for node in graph:
        has_sizes = node.op_type == "Split" and len(node.inputs) > 1
        gathered = source(node.inputs[0], "Gather") if has_sizes else None
        if gathered is not None and constant(node.inputs[1]) is None:
            yield gathered, node
