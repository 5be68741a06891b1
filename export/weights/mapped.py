"""Models whose weights stay in their files, mapped: what they compute, in float32, and what a trace sees.

They are of 16 bits, or stand for what a file stores otherwise (``stored``). A mapped weight takes no memory of its own:
the kernel reads its pages when they are wanted and drops them when others want memory. A module that computes gets its
own weights in float32 for that long, so there is one module's float32 copy at a time, and the numbers are those of a
model loaded as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.optimizer import _constant_folding
from outrider.engines.base import BundleError
from outrider.export.weights.stored import StoredTensor, stored_weight
from outrider.export.weights.widened import WidenedTensor
from torch import Tensor, nn

_HALVES = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}
# The exporter computes with no constant of more elements, but to transpose it.
_MOST_FOLDED = _constant_folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT


def give_weights(model: nn.Module, source: nn.Module) -> None:
    """Replace a float32 model's parameters by another's, and copy its stored buffers.

    Both are models of one configuration.
    """
    stored = source.state_dict().keys()
    for (name, module), (_, given) in zip(
        model.named_modules(), source.named_modules(), strict=True
    ):
        module._parameters.update(given._parameters)
        for key, buffer in given._buffers.items():
            if buffer is not None and f"{name}.{key}".lstrip(".") in stored:
                old = module._buffers[key]
                assert old is not None
                module._buffers[key] = buffer.to(old.dtype)


def is_mapped(model: nn.Module) -> bool:
    """Return whether a model has parameters that stay in their files."""
    return any(_is_mapped(one) for one in model.parameters())


def _is_mapped(value: Tensor) -> bool:
    return value.dtype in _HALVES or value.is_meta


def _float32(value: Tensor) -> Tensor:
    """Return the values of a mapped weight."""
    stored = stored_weight(value)
    return value.float() if stored is None else torch.from_numpy(stored.values())


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Let a model compute in float32: each module's mapped weights are float32 while it computes."""
    with _given(model, _is_mapped, _float32):
        yield


@contextmanager
def read(model: nn.Module) -> Iterator[None]:
    """Let a model compute in the types of its parameters: stored weights are read while their module computes."""

    def values(value: Tensor) -> Tensor:
        return _float32(value).to(value.dtype)

    with _given(model, lambda value: value.is_meta, values):
        yield


@contextmanager
def _given(
    model: nn.Module, chosen: Callable[[Tensor], bool], values: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Give each module other values of chosen parameters while it computes."""
    hooks = []
    for owner, module in _computed_by(model):
        held = {
            name: value
            for name, value in module._parameters.items()
            if value is not None and chosen(value)
        }
        if held:
            hooks.append(owner.register_forward_pre_hook(_give(module, held, values)))
            hooks.append(owner.register_forward_hook(_narrow(module, held), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _computed_by(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield all modules, each behind the one that must find its weights widened: itself or its parent.

    Parents of modules that Transformers may keep in float32 ask for the type of their weights; those of convolutions
    read the taps and never call the module.
    """
    asked = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    yield model, model
    for parent in model.modules():
        for name, module in parent.named_children():
            is_read = name in asked or isinstance(module, nn.Conv1d)
            yield parent if is_read else module, module


def _give(
    module: nn.Module, held: Mapping[str, nn.Parameter], values: Callable[[Tensor], Tensor]
) -> Callable[..., None]:
    def give(*_: object) -> None:
        module._parameters.update(
            {name: nn.Parameter(values(value), False) for name, value in held.items()}
        )

    return give


def _narrow(module: nn.Module, held: Mapping[str, nn.Parameter]) -> Callable[..., None]:
    def give(*_: object) -> None:
        module._parameters.update(held)

    return give


class StandIns:
    """What a trace sees instead of mapped weights: float32 parameters of their shapes, without their memory.

    A stand-in is one row of NaN, repeated with a stride of zero, and every view of it has its address: a constant of
    the traced graph is known by the address of its weight, and by its strides. What was computed from one is NaN.
    Vectors and what the exporter computes with are real float32 copies.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, nn.Parameter] = {}
        self._rows: list[Tensor] = []

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Put stand-ins into a model, and its own parameters back at the end."""
        held = [(module, dict(module._parameters)) for module in model.modules()]
        seen: dict[int, nn.Parameter] = {}
        try:
            for module, parameters in held:
                for name, value in parameters.items():
                    if value is not None and _is_mapped(value):
                        if id(value) not in seen:  # tied weights stay one
                            seen[id(value)] = self._stand_in(value)
                        module._parameters[name] = seen[id(value)]
            yield
        finally:
            for module, parameters in held:
                module._parameters.update(parameters)

    def _stand_in(self, value: nn.Parameter) -> nn.Parameter:
        if value.ndim != 2 or value.numel() <= _MOST_FOLDED:
            return nn.Parameter(_float32(value), False)
        row = torch.full((1, value.shape[1]), torch.nan)
        self._rows.append(row)
        self._by_address[row.data_ptr()] = value
        return nn.Parameter(row.expand(value.shape), False)

    def give_way(self, graph: ir.Graph) -> None:
        """Replace every stand-in among a graph's constants by the weight that it stands for, read when it is wanted.

        Raises:
            BundleError: the exporter computed with a stand-in.
        """
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.dtype is not ir.DataType.FLOAT:
                continue
            array = tensor.numpy()
            weight = self._by_address.get(array.__array_interface__["data"][0])
            if weight is not None and array.ndim == 2 and 0 in array.strides:
                value.const_value = _constant(weight, array.strides[1] == 0, value.name)
            elif self._by_address and np.isnan(array).any():
                raise BundleError(f"{value.name}: computed from weights, which stay in their file")


def _constant(weight: nn.Parameter, is_turned: bool, name: str | None) -> ir.TensorProtocol:
    """Return a mapped matrix, or its transpose, as float32, read when it is wanted."""
    if (stored := stored_weight(weight)) is not None:
        return StoredTensor([stored], is_turned=is_turned, name=name)
    kind = _HALVES[weight.dtype]

    def read() -> ir.TensorProtocol:
        array = weight.detach().view(torch.uint16).numpy().view(kind.numpy())
        return ir.tensor(np.ascontiguousarray(array.T if is_turned else array), dtype=kind)

    rows, columns = reversed(weight.shape) if is_turned else weight.shape
    return WidenedTensor(ir.LazyTensor(read, kind, ir.Shape([rows, columns])), name=name)
