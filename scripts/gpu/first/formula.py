"""Times that steps and rounds should take on a GPU, from counts and rates, and what a measured step says of those.

    python -m scripts.gpu.first.formula        # the table of docs/gpu.md

    step  = weights / rate + rows * context * bytes of a cached token / rate + layers * launches * launch_s
    round = gamma * (step of the draft + propose) + step of the target (gamma + 1 tokens) + judge + host

Bytes bound a step of few rows, so a verification of gamma + 1 tokens takes what a step does.
"""

from __future__ import annotations

from dataclasses import dataclass

import typer

from scripts.tools.results import Row
from scripts.tools.tables import markdown

_ITEM_BYTES = 2
CONTEXT, GAMMA, ALPHA = 2000, 4, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama whose weights have 16 bits; ``is_tied``: its head is its embedding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    is_tied: bool = False

    @property
    def layer_weights(self) -> int:
        """Numbers of a layer's matrices."""
        attended = (2 * self.heads + 2 * self.kv_heads) * self.head_size
        return self.hidden * (attended + 3 * self.inner)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step reads of the weights; of an embedding that is no head it looks up single rows."""
        return _ITEM_BYTES * (self.layers * self.layer_weights + self.vocab * self.hidden)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache."""
        return 2 * _ITEM_BYTES * self.layers * self.kv_heads * self.head_size


SHAPES = {
    "8B": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, inner=14336, vocab=128256
    ),
    "1B": ModelShape(
        layers=16, hidden=2048, heads=32, kv_heads=8, head_size=64, inner=8192, vocab=128256, is_tied=True
    ),
    # For a machine without a GPU.
    "tiny": ModelShape(
        layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, inner=128, vocab=512
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A GPU's rates: bytes read in a second, .88 of what its maker states, and seconds of a small kernel in a graph."""

    bytes_per_s: float
    launch_s: float = 1.5e-6


GPUS = {
    "H100": Rates(bytes_per_s=2.95e12),
    "H200": Rates(bytes_per_s=4.2e12),
    "L4": Rates(bytes_per_s=0.26e12),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What the code asks of a GPU.

    Attributes:
        launches: of a layer.
        propose_s: seconds that drawing a draft token takes; ``judge_s`` likewise of judging a round.
        host_s: of a round beside its launches.
    """

    launches: int
    propose_s: float
    judge_s: float
    host_s: float


# A draw in ONNX graphs was 680 launches and a judgement 798, at 1.5 us each. The kernels' times are an H200's, top-p,
# V = 151,936 (docs/measurements.md); the host's of 41 calls at 5 us, and of 11 launches of graphs and 6 of kernels.
BEFORE = Software(launches=34, propose_s=1020e-6, judge_s=1197e-6, host_s=205e-6)
NOW = Software(launches=17, propose_s=302e-6, judge_s=325e-6, host_s=50e-6)


def step_s(
    shape: ModelShape, rates: Rates, launches: float, *, rows: int = 1, context: int = CONTEXT
) -> float:
    """Seconds of one step of a model, or of one verification."""
    num_bytes = shape.weight_bytes + rows * context * shape.token_bytes
    return num_bytes / rates.bytes_per_s + shape.layers * launches * rates.launch_s


def round_s(target: ModelShape, draft: ModelShape, rates: Rates, software: Software) -> float:
    """Seconds of a round of one row that drafts ``GAMMA`` tokens."""
    drafted = step_s(draft, rates, software.launches) + software.propose_s
    verified = step_s(target, rates, software.launches) + software.judge_s
    return GAMMA * drafted + verified + software.host_s


def expected_emitted(alpha: float, gamma: int) -> float:
    """Tokens of a round on average (Leviathan et al. 2023, equation 1)."""
    return float(gamma + 1) if alpha == 1.0 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def launches_of(
    seconds: float, shape: ModelShape, rates: Rates, *, rows: int, context: int
) -> float:
    """Return how many dependent launches a layer would have for a step to take so long."""
    rest = seconds - step_s(shape, rates, 0.0, rows=rows, context=context)
    return max(0.0, rest / (shape.layers * rates.launch_s))


def table() -> str:
    """Expected times of batch 1 at ``CONTEXT`` tokens, as the graphs were and as they are."""
    big, small = SHAPES["8B"], SHAPES["1B"]
    rows = []
    for name, rates in GPUS.items():
        for when, software in (("before", BEFORE), ("now", NOW)):
            plain_s = step_s(big, rates, software.launches) + software.propose_s
            drafted_s = round_s(big, small, rates, software)
            emitted = expected_emitted(ALPHA, GAMMA)
            figures = {
                "8B step, ms": 1e3 * step_s(big, rates, software.launches),
                "1B step, ms": 1e3 * step_s(small, rates, software.launches),
                f"round, gamma {GAMMA}, ms": 1e3 * drafted_s,
                "plain, tokens/s": 1 / plain_s,
                f"drafted at alpha {ALPHA}, tokens/s": emitted / drafted_s,
                "speed-up": emitted * plain_s / drafted_s,
            }
            rows.append(
                Row(
                    case={"GPU": name, "code": when},
                    figures={name: float(f"{value:.3g}") for name, value in figures.items()},
                )
            )
    return markdown(rows)


if __name__ == "__main__":
    typer.echo(table())
