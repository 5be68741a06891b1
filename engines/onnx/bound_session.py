"""An ONNX Runtime session run over tensors of a device, with what was bound kept for the next time.

Where the caller asks for it, runs are recorded as CUDA graphs by the library: it replays a recording
without looking at what is bound, so every set of addresses and shapes has a number of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import onnxruntime
from outrider.engines.device.base import Call, DeviceTensor, PlanDevice
from outrider.engines.onnx.session import enqueue

_MAX_BINDINGS = 512
# The library keeps every recording of a session for good.
_MAX_RECORDINGS = 128
_NOT_RECORDED = -1
# NumPy has no bfloat16; ONNX Runtime takes the number of its type in ONNX.
_BFLOAT16_TYPE, _BFLOAT16 = "tensor(bfloat16)", 16


class BoundSession:
    """A session over one device's memory.

    Its provider is the device's; ``records`` says whether that was opened to record CUDA graphs.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, device: PlanDevice, *, records: bool = False
    ) -> None:
        self._session = session
        self._place = (device.kind, device.index)
        self._records = records
        self._bindings: dict[Hashable, onnxruntime.IOBinding] = {}
        self._recordings: dict[Hashable, int] = {}
        tensors = (*session.get_inputs(), *session.get_outputs())
        self._bfloat16 = {tensor.name for tensor in tensors if tensor.type == _BFLOAT16_TYPE}
        self.inputs = frozenset(tensor.name for tensor in session.get_inputs())
        self.outputs = tuple(tensor.name for tensor in session.get_outputs())

    def run(self, call: Call, *, may_record: bool = True) -> None:
        """Enqueue the graph.

        Args:
            call: its tensors.
            may_record: whether this very call comes again and again.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        binding = self._bindings.get(call.key)
        if binding is None:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
            binding = self._bindings[call.key] = self._bind(call.describe())
        recording = self._recording(call.key, may_record) if self._records else None
        enqueue(self._session, binding, recording=recording)

    def close(self) -> None:
        """Drop what is bound."""
        self._bindings.clear()
        self._recordings.clear()

    def _recording(self, key: Hashable, may_record: bool) -> int:
        """Number of the recording of a call."""
        number = self._recordings.get(key)
        if number is not None:
            return number
        if not may_record or len(self._recordings) >= _MAX_RECORDINGS:
            return _NOT_RECORDED
        number = self._recordings[key] = len(self._recordings)
        return number

    def _bind(self, tensors: Mapping[str, DeviceTensor]) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name, tensor in tensors.items():
            bind = binding.bind_input if name in self.inputs else binding.bind_output
            kind = _BFLOAT16 if name in self._bfloat16 else tensor.dtype.type
            bind(name, *self._place, kind, tensor.shape, tensor.pointer)
        return binding
