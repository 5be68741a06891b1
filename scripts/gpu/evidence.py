"""Where ONNX Runtime puts a bundle's graphs on a CUDA device, and which attention kernels its calls take.

Read from the library's log, as the engine opens and runs the graphs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnxruntime
from outrider.engines.base import Span
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.onnx.session import records_graphs
from outrider.engines.opening import open_engine

from scripts.gpu.parity import Part
from scripts.tools.library_log import (
    VERBOSE,
    WARNINGS,
    log_of_libraries,
    num_memcpys,
    sessions_made_by,
)

# The library's own words, with the name of the kernel behind them.
_ATTENTION = re.compile(r"Attention: using ([^\n(]*)")
_SHAPES = (1, 5, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the library's log says of one model.

    Attributes:
        part: which model.
        num_memcpys: nodes added to copy between host and device; 0 is right.
        attention: kernels' names by tokens of a span of one row; empty where the log names none.
        records: whether graphs were opened to be recorded.
    """

    part: str
    num_memcpys: int
    attention: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    records: bool = False

    @property
    def has_passed(self) -> bool:
        """True where nothing is copied between host and device within a call."""
        return not self.num_memcpys


def find_evidence(
    bundle: Bundle, device: str, part: Part, *, provider_options: Mapping[str, str]
) -> Evidence:
    """Open a model with its trees on a device, extend by spans of some widths, and read the log."""

    def make_verbose(
        plain: Any, graph: object, options: onnxruntime.SessionOptions, **given: object
    ) -> Any:
        options.log_severity_level = VERBOSE
        return plain(graph, options, **given)

    onnxruntime.set_default_logger_severity(VERBOSE)
    try:
        with log_of_libraries() as log, sessions_made_by(make_verbose):
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
        onnxruntime.set_default_logger_severity(WARNINGS)
    return Evidence(
        part=part,
        num_memcpys=num_memcpys(placed),
        attention=attention,
        records=records_graphs(provider_options),
    )
