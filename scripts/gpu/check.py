"""One command on a GPU machine: what only a GPU can show, as a report.

    python -m scripts.gpu.check BUNDLE --device tensorrt:0 --target demo/target --draft demo/draft
    # and: --pair 1b-50m --report docs/gpu-check.md

Runs the engine contract, the parity of logits with PyTorch, the exactness of the sampler and whole
rounds on the device, times the shapes of a step against their floor, measures the speed-up of
speculation on the bundle's pair and on pairs of real size that it makes, and writes what it found with
device, versions and date. ``--device cpu`` runs the same code on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pytest
import typer
from outrider.engines.base import BundleError, Engine, SpeculativeError
from outrider.engines.bundle.manifest import Bundle, load_bundle
from outrider.engines.devices import Device
from outrider.engines.opening import choose_device, open_engine, open_pair
from outrider.engines.pair import AUTO, DEVICE, Pair
from outrider.runtime.verify.command import verify

from scripts.bench.tools.results import ROOT
from scripts.demo_pair.widen import PAIRS
from scripts.gpu.machine import describe_machine, measure_rates
from scripts.gpu.pairs import make_pair
from scripts.gpu.parity import check_parity, precision_of
from scripts.gpu.report import Findings, render
from scripts.gpu.rounds import check_rounds
from scripts.gpu.speed import measure_speed
from scripts.gpu.times import time_shapes

CONTRACT = ROOT / "tests" / "engines" / "device" / "contract.py"
CONTRACT_SLOTS = 3
# Texts that are teacher-forced, and tokens of each.
PARITY_PROMPTS, PARITY_TOKENS = 50, 128
FALSE_ALARM = 1e-6
_ROUND_PROMPTS, _ROUND_TOKENS = 8, 64
_SPEED_GAMMAS = (2, 4)


def run_contract(
    bundle: Bundle, device: str, parts: tuple[str, ...], options: Mapping[str, str]
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

    # Transformers has imported plugins of pytest's by now; nothing of theirs is asserted here.
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = [*quiet, str(CONTRACT)]
    return pytest.main(arguments, plugins=[Engines()]) == pytest.ExitCode.OK


def open_for_times(bundle: Bundle, device: str, options: Mapping[str, str]) -> Pair:
    """The pair as it serves: its rounds on the device, where they can be."""
    try:
        return open_pair(bundle, device=device, sampler=DEVICE, provider_options=options)
    except SpeculativeError:
        return open_pair(bundle, device=device, sampler=AUTO, provider_options=options)


def measure(
    found: Findings, bundle: Bundle, device: Device, options: Mapping[str, str], *, gammas: Sequence[int],
    repeats: int, num_prompts: int, num_tokens: int,
) -> None:  # fmt: skip
    """Add times and speed-ups of one bundle to the findings."""
    pair = open_for_times(bundle, str(device), options)
    if found.rates is None:
        found.rates = measure_rates(device, precision_of(pair.target))
    found.timings[bundle.root.name] = time_shapes(bundle, pair, found.rates, repeats=repeats)
    gammas = [gamma for gamma in gammas if gamma <= bundle.manifest.max_gamma]
    if pair.draft is not None and gammas:
        for temperature in (0.0, 1.0):
            found.speeds += measure_speed(
                bundle, pair, gammas=gammas, batches=(1, 8), temperature=temperature, num_prompts=num_prompts,
                num_tokens=num_tokens, repeats=repeats,
            )  # fmt: skip
    pair.close()


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
    choice = choose_device(device, loaded)
    name = str(choice.device)
    options = {
        key: value for key, _, value in (one.partition("=") for one in provider_option or ())
    }
    checkpoints = {"target": target} | ({} if loaded.manifest.draft is None else {"draft": draft})
    found = Findings(
        facts=describe_machine(choice.device),
        reason=choice.reason,
        has_kept_contract=run_contract(loaded, name, tuple(checkpoints), options),
    )
    found.parities = [
        check_parity(
            loaded, name, part, checkpoint=checkpoint, num_prompts=num_prompts, num_tokens=num_tokens,
            provider_options=options,
        )
        for part, checkpoint in checkpoints.items()
    ]  # fmt: skip
    found.rounds = check_rounds(
        loaded, name, num_prompts=min(num_prompts, _ROUND_PROMPTS), num_tokens=min(num_tokens, _ROUND_TOKENS),
        provider_options=options,
    )  # fmt: skip
    place = AUTO if found.rounds.missing else DEVICE
    found.sampler = verify(
        bundle, num_samples=samples, false_alarm=FALSE_ALARM, seed=0, device=name, place=place
    )
    typer.echo(found.sampler.table())
    sizes = {"repeats": repeats, "num_prompts": speed_prompts, "num_tokens": speed_tokens}
    gammas = speed_gamma or _SPEED_GAMMAS
    measure(found, loaded, choice.device, options, gammas=gammas, **sizes)
    for size in pair or ():
        made = load_bundle(make_pair(size, work, choice.device))
        measure(found, made, choice.device, options, gammas=gammas, **sizes)
    text = render(found)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(text, encoding="utf-8")
    typer.echo(text)
    if found.failures():
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
