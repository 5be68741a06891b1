"""The report of a check: Markdown for readers, and every figure once more as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.runtime.verify.report import VerifyReport

from scripts.gpu.evidence import Evidence
from scripts.gpu.machine import Rates
from scripts.gpu.parity import Parity
from scripts.gpu.rounds import RoundsCheck
from scripts.gpu.rounds import render as render_rounds
from scripts.gpu.speed import Speed
from scripts.gpu.steps import StepsCheck
from scripts.gpu.times import ALLOWED_OVER_FLOOR, Timing
from scripts.tools.results import Row
from scripts.tools.tables import markdown


@dataclass(slots=True)
class Findings:
    """All that was found, as far as it was asked for and has been run yet.

    Attributes:
        facts: of the machine.
        reason: why this device.
        left: parts that were not run, or are still to be.
        broken: by part, why it gave nothing.
        has_kept_contract: whether the engine contract's tests passed; None where they were not run.
        evidence: of placement and kernels on ONNX Runtime's CUDA provider.
        steps: single tokens against one span.
        parities: of logits.
        sampler: exactness of the sampler on the device; None where it was not run.
        rounds: on the device; None likewise.
        rates: of the machine.
        timings: of the bundle, and by name of the pairs measured beside it.
        speeds: of all pairs.
    """

    facts: Mapping[str, str]
    reason: str
    left: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    has_kept_contract: bool | None = None
    evidence: list[Evidence] = field(default_factory=list)
    steps: list[StepsCheck] = field(default_factory=list)
    parities: list[Parity] = field(default_factory=list)
    sampler: VerifyReport | None = None
    rounds: RoundsCheck | None = None
    rates: Rates | None = None
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Return the failed checks, in words. Times are figures of the report, not failures."""
        checks = [(False, f"part {name} ({reason})") for name, reason in self.broken.items()]
        checks.append((self.has_kept_contract is not False, "the engine contract"))
        checks += [(one.has_passed, f"placement of the {one.part}") for one in self.evidence]
        checks += [(one.has_passed, f"single steps of the {one.part}") for one in self.steps]
        checks += [(one.has_passed, f"parity of the {one.part}") for one in self.parities]
        if self.sampler is not None:
            checks.append((self.sampler.has_passed, "exactness of the sampler"))
        if self.rounds is not None:
            checks.append((self.rounds.has_passed, "rounds on the device"))
        return [name for holds, name in checks if not holds]

    def missed_aims(self) -> list[str]:
        """Return the times that miss their aims, in words."""
        missed = [
            f"{name}: a target step of one row takes {timing.over_floor:.2f} floors"
            for name, timings in self.timings.items()
            for timing in timings
            if timing.is_fast is False
        ]
        for speed in self.speeds:
            cell = f"{speed.pair}, {speed.batch} rows, temperature {speed.temperature:g}, "
            cell += f"gamma {speed.gamma}"
            if not speed.reaches_prediction:
                share = speed.speedup / speed.predicted
                missed.append(f"{cell}: {share:.2f} of the predicted speed-up")
            if not speed.is_lean:
                missed.append(f"{cell}: {100 * speed.overhead:.0f} % beside the engine calls")
        return missed


def render(found: Findings) -> str:
    """The report."""
    parts = [
        "# GPU check",
        "",
        *(f"* {name}: {value}" for name, value in found.facts.items()),
    ]
    parts.append(f"* chosen because: {found.reason}")
    if found.has_kept_contract is not None:
        parts.append(f"* engine contract: {'passed' if found.has_kept_contract else 'FAILED'}")
    parts += map(_evidence_line, found.evidence)
    parts += map(_steps_line, found.steps)
    if found.sampler is not None:
        word = "passed" if found.sampler.has_passed else "FAILED"
        parts.append(f"* the sampler's exactness: {word}, {len(found.sampler.checks)} checks")
    if found.rounds is not None:
        parts += render_rounds(found.rounds)
    failures, missed = found.failures(), found.missed_aims()
    parts += [
        f"* in all: {'passed' if not failures else 'FAILED: ' + ', '.join(failures)}",
        f"* not run: {', '.join(found.left) if found.left else 'nothing'}",
        f"* aims missed: {'; '.join(missed) if missed else 'none'}",
        "",
    ]
    if found.parities:
        parts += _table(found.parities, "has_passed")
    if found.rates is not None:
        parts += _rates_lines(found.rates)
    for name, timings in found.timings.items():
        parts += [f"{name}, times of calls; the aim is {ALLOWED_OVER_FLOOR} floors:", ""]
        parts += _table(timings, "over_floor", "is_fast")
    if found.speeds:
        parts += [
            "Speculation on against off; predicted is the generalised Theorem 3.8 from the calls' times, overhead what "
            "a step takes beside its engine calls:",
            "",
            *_table(found.speeds, "speedup", "reaches_prediction", "is_lean"),
        ]
    data = {
        "facts": dict(found.facts),
        "failures": failures,
        "missed_aims": missed,
        "not_run": found.left,
        "evidence": [asdict(one) for one in found.evidence],
        "steps": [asdict(one) for one in found.steps],
        "rounds": None if found.rounds is None else asdict(found.rounds),
        "parity": [asdict(one) for one in found.parities],
        "rates": None if found.rates is None else _rates_data(found.rates),
        "timings": {name: [asdict(one) for one in rows] for name, rows in found.timings.items()},
        "speed": [asdict(one) for one in found.speeds],
    }
    text = json.dumps(data, indent=2, allow_nan=False)
    return "\n".join([*parts, "```json", text, "```", ""])


def _evidence_line(one: Evidence) -> str:
    kernels = "; ".join(
        f"{tokens} tokens: {', '.join(names) or 'not named'}"
        for tokens, names in one.attention.items()
    )
    return (
        f"* placement of the {one.part}: {'passed' if one.has_passed else 'FAILED'}; {one.num_memcpys} Memcpy "
        f"nodes; attention of one row: {kernels}"
    )


def _steps_line(one: StepsCheck) -> str:
    word = "passed" if one.has_passed else f"FAILED from step {one.first_wrong} on"
    worst = "not a number" if one.max_difference is None else f"{one.max_difference:.3g}"
    return (
        f"* single steps of the {one.part}: {word}; {one.num_steps} against one span, "
        f"largest difference {worst}"
    )


def _rates_data(rates: Rates) -> dict[str, object]:
    """The rates; None for what was not measured."""
    return asdict(rates) | ({"products_per_s": None} if rates.missing else {})


def _rates_lines(rates: Rates) -> list[str]:
    products = f"{rates.products_per_s / 1e12:.3g} T multiply-adds/s"
    if rates.missing:
        products = f"multiply-adds not measured ({rates.missing}), floors are those of memory"
    return [f"Measured rates: {rates.bytes_per_s / 1e9:.3g} GB/s read and written; {products}.", ""]


def _table(found: Sequence[Any], *properties: str) -> list[str]:
    """Return a table with a line for each of some dataclass's values: its fields, then the properties."""
    rows = [
        Row(case={}, figures=asdict(one) | {name: getattr(one, name) for name in properties})
        for one in found
    ]
    return [markdown(rows), ""]
