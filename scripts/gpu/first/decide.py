"""Which defaults a GPU gets, from what was found on it.

    python -m scripts.gpu.first.decide first-*.json    # settings for `outrider serve --config`

A rule that lacks its figures, because a part failed or was not reached, leaves the default as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Parts = Mapping[str, Any]
# A change of a default must bring more than repeated runs differ.
_WORTH = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A setting of ``outrider serve``, its value as TOML writes it, and why; ``table`` is the setting's, if any."""

    setting: str
    value: str
    reason: str
    table: str = ""


def merged(files: Sequence[Path]) -> Parts:
    """Return what was found by all commands, by part; a part that failed is not among them."""
    parts: dict[str, Any] = {}
    for file in files:
        parts |= json.loads(file.read_text(encoding="utf-8"))["found"]
    return parts


def decide(parts: Parts) -> list[Decision]:
    """Return the settings that differ from the defaults or were confirmed, with reasons."""
    return [*_device(parts), *_sampler(parts), *_graphs(parts), *_attention(parts), *_gamma(parts)]


def _device(parts: Parts) -> Iterator[Decision]:
    checks = {
        name: parts[name]["has_passed"]
        for name in ("contract", "placement", "steps", "parity", "rounds", "sampler")
        if name in parts
    }
    failed = sorted(name for name, passed in checks.items() if not passed)
    if failed:
        yield Decision(setting="device", value='"cpu"', reason=f"failed: {', '.join(failed)}")
    elif {"contract", "steps"} <= set(checks):
        yield Decision(setting="device", value='"auto"', reason=f"passed: {', '.join(checks)}")


def _sampler(parts: Parts) -> Iterator[Decision]:
    kernels, rounds = parts.get("kernels"), parts.get("rounds")
    if kernels is not None and kernels["num_equal"] < kernels["num_compared"]:
        reason = f"{kernels['num_equal']} of {kernels['num_compared']} batches have the host's bits"
        yield Decision(setting="sampler", value='"host"', reason=reason)
    elif rounds is not None and rounds["has_passed"]:
        device_s, host_s = rounds["device_step_s"], rounds["host_step_s"]
        place = "host" if host_s < _WORTH * device_s else "auto"
        reason = (
            f"a round takes {_ms(device_s)} with kernels, {_ms(host_s)} with the host's sampler"
        )
        yield Decision(setting="sampler", value=f'"{place}"', reason=reason)


def _graphs(parts: Parts) -> Iterator[Decision]:
    with_, without = parts.get("rounds"), parts.get("rounds without graphs")
    if with_ is None or without is None or not without["has_passed"]:
        return
    faster = with_["has_passed"] and with_["device_step_s"] < without["device_step_s"]
    reason = (
        f"a round takes {_ms(with_['device_step_s'])} recorded, {_ms(without['device_step_s'])} not"
    )
    if not with_["has_passed"]:
        reason = "recorded rounds fail their check, others pass"
    yield Decision(
        setting="enable_cuda_graph", value=str(int(faster)), reason=reason, table="provider_options"
    )


def _attention(parts: Parts) -> Iterator[Decision]:
    ours, theirs = parts.get("times"), parts.get("any attention")
    if ours is None or theirs is None:
        return
    own_s, other_s = (_target_step_s(one["timings"]) for one in (ours, theirs))
    if theirs["has_passed"] and other_s < _WORTH * own_s:
        reason = (
            f"a step takes {_ms(other_s)} with the library's own choice, {_ms(own_s)} with ours"
        )
        yield Decision(setting="sdpa_kernel", value="0", reason=reason, table="provider_options")


def _gamma(parts: Parts) -> Iterator[Decision]:
    speeds = parts.get("pair", {}).get("speeds", ())
    if speeds:
        best = max(speeds, key=lambda one: one["speedup"])
        value = '"auto"' if best["speedup"] > 1.0 else "0"
        reason = (
            f"at best {best['speedup']:.2f} of plain, batch {best['batch']}, gamma {best['gamma']}"
        )
        yield Decision(setting="gamma", value=value, reason=reason)


def _target_step_s(timings: Sequence[Mapping[str, Any]]) -> float:
    return next(
        float(one["device_s"])
        for one in timings
        if (one["part"], one["batch"], one["tokens"]) == ("target", 1, 1)
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def as_toml(decisions: Sequence[Decision]) -> str:
    """Return a configuration of ``outrider serve``: a setting a line, its reason behind it."""
    lines = [f"{one.setting} = {one.value}  # {one.reason}" for one in decisions if not one.table]
    for table in dict.fromkeys(one.table for one in decisions if one.table):
        lines += ["", f"[{table}]"]
        lines += [
            f"{one.setting} = {one.value}  # {one.reason}"
            for one in decisions
            if one.table == table
        ]
    return "\n".join([*lines, ""])


def main(
    files: Annotated[list[Path], typer.Argument(help="What the three commands wrote, as JSON.")],
) -> None:
    """Print the settings that a GPU gets."""
    typer.echo(as_toml(decide(merged(files))), nl=False)


if __name__ == "__main__":
    typer.run(main)
