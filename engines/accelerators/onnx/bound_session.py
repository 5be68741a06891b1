"""An ONNX Runtime session run over tensors of a device, with what was bound kept for the next time.

Where the caller asks for it, runs that come again are recorded as CUDA graphs: by us and not by the library, which
keeps every recording for good and takes .1 ms of the host to replay one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping

import onnxruntime
from outrider.engines.accelerators.device.base import Call, DeviceTensor, PlanDevice, Recording
from outrider.engines.accelerators.device.recordings import Recordings
from outrider.engines.bundle.names import is_cache
from outrider.engines.onnx.session import enqueue

# Of [rows, capacity, heads * size]; heads first has one more.
_BY_TOKEN_AXES = 3
_MAX_BINDINGS = 512
_MAX_RECORDINGS = 128
# NumPy has no bfloat16; ONNX Runtime takes the number of its type in ONNX.
_BFLOAT16_TYPE, _BFLOAT16 = "tensor(bfloat16)", 16


class BoundSession:
    """A session over one device's memory; its provider is the device's.

    ``name`` is the graph's, for the log; ``records`` says whether runs that come again are recorded.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        device: PlanDevice,
        *,
        name: str = "a graph",
        records: bool = False,
    ) -> None:
        self._session, self._device = session, device
        self._bindings: OrderedDict[Hashable, onnxruntime.IOBinding] = OrderedDict()
        self._recordings = Recordings(name, _MAX_RECORDINGS if records else 0)
        tensors = (*session.get_inputs(), *session.get_outputs())
        self._bfloat16 = {tensor.name for tensor in tensors if tensor.type == _BFLOAT16_TYPE}
        self.inputs = frozenset(tensor.name for tensor in session.get_inputs())
        # Of the caches of texts: a token's heads lie side by side.
        self.is_by_token = any(
            is_cache(tensor.name) and len(tensor.shape) == _BY_TOKEN_AXES for tensor in tensors
        )
        self.outputs = tuple(tensor.name for tensor in session.get_outputs())

    def run(self, call: Call, *, may_record: bool = True) -> None:
        """Enqueue the graph.

        Args:
            call: its tensors.
            may_record: whether this very call comes again and again.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        if may_record:
            self._recordings.run(call.key, lambda: self._enqueue(call), lambda: self._record(call))
        else:
            self._enqueue(call)

    def close(self) -> None:
        """Drop what is bound and recorded."""
        self._recordings.close()
        self._bindings.clear()

    def _enqueue(self, call: Call) -> None:
        binding = self._bindings.pop(call.key, None)
        if binding is None:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.popitem(last=False)
            binding = self._bind(call.describe())
        self._bindings[call.key] = binding  # the one used last is last
        enqueue(self._session, binding)

    def _record(self, call: Call) -> Recording:
        # The library must find all the memory that it needs: nothing may be allocated while work is recorded.
        self._enqueue(call)
        return self._device.capture(lambda: self._enqueue(call))

    def _bind(self, tensors: Mapping[str, DeviceTensor]) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name, tensor in tensors.items():
            bind = binding.bind_input if name in self.inputs else binding.bind_output
            kind = _BFLOAT16 if name in self._bfloat16 else tensor.dtype.type
            place = (self._device.kind, self._device.index)
            bind(name, *place, kind, tensor.shape, tensor.pointer)
        return binding
