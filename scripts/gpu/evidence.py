"""Where ONNX Runtime puts a bundle's graphs on a CUDA device, and which attention kernels its calls take.

Read from the library's log, as the engine opens and runs the graphs.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import onnxruntime
from outrider.engines.base import Span
from outrider.engines.bundle.manifest import Bundle
from outrider.engines.onnx.session import records_graphs
from outrider.engines.opening import open_engine

from scripts.gpu.parity import Part

_MEMCPY_NODES = re.compile(r"(\d+) Memcpy nodes are added")
# The library's own words, with the name of the kernel behind them.
_ATTENTION = re.compile(r"Attention: using ([^\n(]*)")
_VERBOSE, _WARNINGS = 0, 2
_SHAPES = (1, 5, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the library's log and sessions say of one model.

    Attributes:
        part: which model.
        num_memcpys: nodes added to copy between host and device; 0 is right.
        host_inputs: inputs read on the host, which are copied once, when they are bound; none is right.
        attention: kernels' names by tokens of a span of one row; empty where the log names none.
        records: whether graphs were opened to be recorded.
    """

    part: str
    num_memcpys: int
    host_inputs: tuple[str, ...]
    attention: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    records: bool = False

    @property
    def has_passed(self) -> bool:
        """True where nothing is copied between host and device within a call."""
        return not self.num_memcpys and not self.host_inputs


def find_evidence(
    bundle: Bundle, device: str, part: Part, *, provider_options: Mapping[str, str]
) -> Evidence:
    """Open a model with its trees on a device, extend by spans of some widths, and read the log."""
    names: list[str] = []
    plain = onnxruntime.InferenceSession

    class Session(plain):  # type: ignore[misc, valid-type]
        """Says which inputs it reads on the host, and logs everything."""

        def __init__(
            self, path: object, options: onnxruntime.SessionOptions, **given: object
        ) -> None:
            options.log_severity_level = _VERBOSE
            super().__init__(path, options, **given)
            memories = zip(self.get_inputs(), self.get_input_memory_infos(), strict=True)
            names.extend(tensor.name for tensor, memory in memories if memory.name == "Cpu")

    onnxruntime.InferenceSession = Session
    onnxruntime.set_default_logger_severity(_VERBOSE)
    try:
        with _log_of_libraries() as log:
            engine = open_engine(
                bundle, part, device=device, max_batch=1, with_trees=True, provider_options=provider_options
            )  # fmt: skip
            placed = log.take()
            attention = {}
            for tokens in (count for count in _SHAPES if count <= engine.limits.max_extend):
                span = Span(slot=0, start=0, tokens=(1,) * tokens, num_logits=1)
                engine.extend([span])
                attention[tokens] = tuple(
                    sorted({one.strip() for one in _ATTENTION.findall(log.take())})
                )
            engine.close()
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)
        onnxruntime.InferenceSession = plain
    return Evidence(
        part=part, num_memcpys=sum(map(int, _MEMCPY_NODES.findall(placed))), host_inputs=tuple(names),
        attention=attention, records=records_graphs(provider_options),
    )  # fmt: skip


class _Log:
    """What libraries write to stderr."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file.fileno()
        self._place = 0

    def take(self) -> str:
        """Return what was written since the last call."""
        text = os.pread(self._file, os.fstat(self._file).st_size - self._place, self._place)
        self._place += len(text)
        return text.decode(errors="replace")


@contextmanager
def _log_of_libraries() -> Iterator[_Log]:
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield _Log(file)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
