"""One command on a GPU machine: what only a GPU can show, as a report.

    python -m scripts.gpu.check BUNDLE --device tensorrt:0 --target demo/target --draft demo/draft
    # and: --pair 1b-50m --report docs/gpu-check.md; or parts alone: --only contract --only steps

Its parts are the engine contract, where graphs were placed and which kernels ran, single steps against one span, the
parity of logits with PyTorch, whole rounds on the device, the exactness of the sampler, times of a step's shapes
against their floor, and the speed-up of speculation, on the bundle's pair and on pairs of real size that it makes.
Each runs in a process of its own with a limit of time. The report, with device, versions and date, is written again
after each: a part that fails, hangs or ends its process loses nothing but itself. ``--device cpu`` runs the same code
on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from outrider.engines.base import BundleError, Engine, EngineError, SpeculativeError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.devices import CUDA, Choice, Device
from outrider.engines.opening import choose_device, open_engine, open_pair
from outrider.engines.pair import AUTO, DEVICE, Pair
from outrider.runtime.verify.command import verify

from scripts.gpu.evidence import find_evidence
from scripts.gpu.machine import Rates, describe_machine, measure_rates
from scripts.gpu.pairs import make_pair
from scripts.gpu.parity import Part, check_parity, precision_of
from scripts.gpu.processes import run_apart
from scripts.gpu.report import Findings, render
from scripts.gpu.rounds import check_rounds
from scripts.gpu.speed import Speed, measure_speed
from scripts.gpu.steps import check_steps
from scripts.gpu.times import time_shapes
from scripts.lab.widen.widen import PAIRS
from scripts.tools.results import ROOT

CONTRACT = ROOT / "tests" / "engines" / "accelerators" / "device" / "contract.py"
CONTRACT_SLOTS = 3
# Texts that are teacher-forced, and tokens of each.
PARITY_PROMPTS, PARITY_TOKENS = 50, 128
FALSE_ALARM = 1e-6
_ROUND_PROMPTS, _ROUND_TOKENS = 8, 64
_SPEED_GAMMAS = (2, 4)
_LIMIT_S = 600.0


def run_contract(
    bundle: Bundle, device: str, parts: Sequence[str], options: Mapping[str, str]
) -> bool:
    """The engine contract's own tests, trees included, over a bundle's models on a device."""

    class Engines:
        """Gives the contract its engines."""

        @pytest.fixture(params=parts)
        def make_engine(self, request: pytest.FixtureRequest) -> Callable[[], Engine]:
            return lambda: open_engine(
                bundle, request.param, device=device, max_batch=CONTRACT_SLOTS, with_trees=True,
                provider_options=options,
            )  # fmt: skip

    # Settings of the project's own tests are for plugins that another machine may lack.
    alone = ["-c", os.devnull, f"--rootdir={ROOT}", "--noconftest", "--import-mode=importlib"]
    # Transformers has imported plugins of pytest's by now; nothing of theirs is asserted here.
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = [*alone, *quiet, str(CONTRACT)]
    return pytest.main(arguments, plugins=[Engines()]) == pytest.ExitCode.OK


def open_for_times(bundle: Bundle, device: str, options: Mapping[str, str]) -> Pair:
    """The pair as it serves: its rounds on the device, where they can be."""
    try:
        return open_pair(bundle, device=device, sampler=DEVICE, provider_options=options)
    except SpeculativeError:
        return open_pair(bundle, device=device, sampler=AUTO, provider_options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is checked, where, and how much of it; see ``main``."""

    bundle: Bundle
    device: Device
    checkpoints: Mapping[Part, Path | None]
    options: Mapping[str, str]
    num_prompts: int
    num_tokens: int
    samples: int
    repeats: int
    speed_prompts: int
    speed_tokens: int
    speed_gammas: Sequence[int]

    def each(self, check: Callable[..., Any]) -> list[Any]:
        """Return what a check finds of every model."""
        name = str(self.device)
        return [
            check(self.bundle, name, part, provider_options=self.options)
            for part in self.checkpoints
        ]


# What a part found, by the names of ``Findings``.
Found = Mapping[str, Any]


def find_contract(asked: Asked) -> Found:
    """Run the engine contract."""
    parts = tuple(asked.checkpoints)
    kept = run_contract(asked.bundle, str(asked.device), parts, asked.options)
    return {"has_kept_contract": kept}


def find_placement(asked: Asked) -> Found:
    """Find where graphs are placed; only ONNX Runtime's CUDA provider says so."""
    return {"evidence": asked.each(find_evidence) if asked.device.kind == CUDA else []}


def find_steps(asked: Asked) -> Found:
    """Compare single steps with one span."""
    return {"steps": asked.each(check_steps)}


def find_parity(asked: Asked) -> Found:
    """Compare logits with PyTorch's."""
    return {
        "parities": [
            check_parity(
                asked.bundle, str(asked.device), part, checkpoint=checkpoint, num_prompts=asked.num_prompts,
                num_tokens=asked.num_tokens, provider_options=asked.options,
            )
            for part, checkpoint in asked.checkpoints.items()
        ]
    }  # fmt: skip


def find_rounds(asked: Asked) -> Found:
    """Compare rounds on the device with rounds on the host."""
    return {
        "rounds": check_rounds(
            asked.bundle, str(asked.device), num_prompts=min(asked.num_prompts, _ROUND_PROMPTS),
            num_tokens=min(asked.num_tokens, _ROUND_TOKENS), provider_options=asked.options,
        )
    }  # fmt: skip


def find_sampler(asked: Asked) -> Found:
    """Prove the exactness of the sampler where it is."""
    pair = open_for_times(asked.bundle, str(asked.device), asked.options)
    place = DEVICE if pair.rounds is not None else AUTO
    pair.close()
    report = verify(
        asked.bundle.root,
        num_samples=asked.samples,
        false_alarm=FALSE_ALARM,
        seed=0,
        device=str(asked.device),
        place=place,
    )
    typer.echo(report.table())
    return {"sampler": report}


def find_times(asked: Asked) -> Found:
    """Time the shapes of a step."""
    pair = open_for_times(asked.bundle, str(asked.device), asked.options)
    rates = measure_rates(asked.device, precision_of(pair.target))
    timings = time_shapes(asked.bundle, pair, rates, repeats=asked.repeats)
    pair.close()
    return {"rates": rates, "timings": {asked.bundle.root.name: timings}}


def find_speed(asked: Asked) -> Found:
    """Measure the speed-up of speculation, where there is a draft model."""
    pair = open_for_times(asked.bundle, str(asked.device), asked.options)
    gammas = [gamma for gamma in asked.speed_gammas if gamma <= asked.bundle.manifest.max_gamma]
    speeds: list[Speed] = []
    if pair.draft is not None and gammas:
        for temperature in (0.0, 1.0):
            speeds += measure_speed(
                asked.bundle, pair, gammas=gammas, batches=(1, 8), temperature=temperature,
                num_prompts=asked.speed_prompts, num_tokens=asked.speed_tokens, repeats=asked.repeats,
            )  # fmt: skip
    pair.close()
    return {"speeds": speeds}


def find_pair(asked: Asked, size: str, work: Path) -> Found:
    """Make a pair of real size, and time and measure it likewise."""
    made = replace(asked, bundle=load_bundle(make_pair(size, work, asked.device)))
    return {**find_times(made), **find_speed(made)}


PARTS: Mapping[str, Callable[[Asked], Found]] = {
    "contract": find_contract,
    "placement": find_placement,
    "steps": find_steps,
    "parity": find_parity,
    "rounds": find_rounds,
    "sampler": find_sampler,
    "times": find_times,
    "speed": find_speed,
}


def add(findings: Findings, found: Found) -> None:
    """Add what a part found: lists and tables grow, anything else is set."""
    for name, value in found.items():
        held = getattr(findings, name)
        if isinstance(held, list):
            held += value
        elif isinstance(held, dict):
            held |= value
        elif held is None or not isinstance(value, Rates):
            setattr(findings, name, value)


def run_parts(
    parts: Mapping[str, Callable[[], Found]], findings: Findings, report: Path, limit_s: float
) -> None:
    """Run each part apart, and write the report after each; parts not run yet are in it by name."""
    report.parent.mkdir(parents=True, exist_ok=True)
    waiting = list(parts)
    for name, part in parts.items():
        typer.echo(f"{name} ...")
        outcome = run_apart(part, limit_s)
        waiting.remove(name)
        if outcome.value is None:
            findings.broken[name] = outcome.failure
        else:
            add(findings, outcome.value)
        rest = replace(findings, left=[*findings.left, *waiting])
        report.write_text(render(rest), encoding="utf-8")


def _describe(text: str, bundle: Bundle) -> tuple[Choice, dict[str, str]]:
    choice = choose_device(text, bundle)
    return choice, describe_machine(choice.device)


def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle; with plans for this machine.")],
    device: Annotated[str, typer.Option(help="As outrider serve takes it.")] = "auto",
    report: Annotated[Path, typer.Option(help="File to write.")] = Path("gpu_check.md"),
    target: Annotated[Path | None, typer.Option(help="Checkpoint of the target.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Checkpoint of the draft.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help=f"Also time a widened pair: {', '.join(PAIRS)}.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder for such pairs.")] = Path("gpu_check_pairs"),
    provider_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for ONNX Runtime's CUDA provider.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Run this part alone: {', '.join(PARTS)}, or pair.")
    ] = None,
    limit_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds of each part at most.")
    ] = _LIMIT_S,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of parity.")] = PARITY_PROMPTS,
    num_tokens: Annotated[int, typer.Option(min=1, help="Of parity.")] = PARITY_TOKENS,
    samples: Annotated[int, typer.Option(min=1, help="Draws per check of the sampler.")] = 2000,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of a shape.")] = 50,
    speed_prompts: Annotated[int, typer.Option(min=1, help="Of a speed-up, per row.")] = 8,
    speed_gamma: Annotated[
        list[int] | None, typer.Option(min=1, help="Draft tokens per step of a speed-up: 2 and 4.")
    ] = None,
    speed_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 96,
) -> None:
    """Check and time a bundle on a device; the exit code says whether all checks passed."""
    loaded = load_bundle(bundle)
    if loaded.manifest.max_batch < CONTRACT_SLOTS:
        raise BundleError(
            f"max_batch {loaded.manifest.max_batch}: the engine contract takes {CONTRACT_SLOTS} slots"
        )
    names = [*PARTS, *(f"pair {size}" for size in pair or ())]
    wanted = [name for name in names if not only or name.split()[0] in only]
    if unknown := sorted({*(only or ())} - {*PARTS, "pair"}):
        raise typer.BadParameter(f"--only {unknown[0]}: must be one of {', '.join(PARTS)}, pair")
    # The device is used in forks alone: a fork of a process that uses it could not.
    described = run_apart(partial(_describe, device, loaded), limit_s)
    if described.value is None:
        raise EngineError(described.failure)
    choice, facts = described.value
    checkpoints: dict[Part, Path | None] = {"target": target}
    if loaded.manifest.draft is not None:
        checkpoints["draft"] = draft
    asked = Asked(
        bundle=loaded, device=choice.device, checkpoints=checkpoints,
        options={key: value for key, _, value in (one.partition("=") for one in provider_option or ())},
        num_prompts=num_prompts, num_tokens=num_tokens, samples=samples, repeats=repeats,
        speed_prompts=speed_prompts, speed_tokens=speed_tokens, speed_gammas=speed_gamma or _SPEED_GAMMAS,
    )  # fmt: skip
    found = Findings(facts=facts, reason=choice.reason)
    found.left = [name for name in names if name not in wanted]
    parts = {name: partial(part, asked) for name, part in PARTS.items()}
    parts |= {f"pair {size}": partial(find_pair, asked, size, work) for size in pair or ()}
    run_parts({name: parts[name] for name in wanted}, found, report, limit_s)
    typer.echo(render(found))
    if found.failures():
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
