"""What a command of the first half hour is run on; imports nothing that a bare machine may lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outrider.engines.devices import CPU, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is checked and where.

    Attributes:
        device: to check.
        carried: folder of what was carried, with ``kernels.json`` and, if it was made before, ``bundle``.
        work: folder for what is made.
        is_small: everything in shapes for a host.
    """

    device: Device
    carried: Path
    work: Path
    is_small: bool

    @property
    def torch_device(self) -> torch.device:
        """Where PyTorch runs."""
        has_cuda = self.device.kind != CPU and torch.cuda.is_available()
        return torch.device(f"cuda:{self.device.index}" if has_cuda else CPU)


# Of a job: what a part found, as JSON has it. A command's parts have each a limit in seconds.
Part = Callable[[Job], Mapping[str, Any]]
Parts = Mapping[str, tuple[float, Part]]
