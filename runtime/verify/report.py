"""The report of ``outrider verify-sampler``, check by check."""

from __future__ import annotations

from dataclasses import dataclass

COVERS = (
    "max_accept, seed_stable at a fixed gamma; temperature, top-k, top-p, min-p, penalties, bias, bad words, n-grams, "
    "min_tokens; drafts of the model as chains, blocks and trees, cascades, point masses; the first four tokens"
)
"""What a report with a draft model and trees is about; its checks say which of it they are."""
COVERS_NOT = (
    "lenient (not exact by its definition), constraints, beam search, gamma and drafter auto, several completions of a "
    "prompt, cached prefixes, drafters from texts other than suffix, positions beyond the fourth token"
)
"""What the project's own tests hold, and no report about a bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One test.

    Attributes:
        num_draws: 0 where all outcomes were enumerated.
        p_value: 0.0 when a token of probability zero was drawn; without draws 1.0 if the check holds, else 0.0.
    """

    name: str
    num_draws: int
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Outcome of all checks.

    Attributes:
        false_alarm: chance that a correct bundle fails, all checks together.
        accepted: what the export was told to accept of differences from the checkpoints, in words.
    """

    checks: tuple[Check, ...]
    false_alarm: float
    accepted: str = ""

    @property
    def level(self) -> float:
        """Smallest p-value that passes (Bonferroni)."""
        return self.false_alarm / len(self.checks)

    @property
    def has_passed(self) -> bool:
        """True if every check passed."""
        return all(check.p_value >= self.level for check in self.checks)

    def table(self) -> str:
        """Return the report as text."""
        lines = [
            f"{'ok  ' if check.p_value >= self.level else 'FAIL'} {check.name:66s} "
            + (
                f"draws {check.num_draws:6d}  p-value {check.p_value:.3g}"
                if check.num_draws
                else "enumerated"
            )
            for check in self.checks
        ]
        verdict = "passed" if self.has_passed else "FAILED"
        lines.append(
            f"{verdict}: {len(self.checks)} checks, each at level {self.level:.2g}; "
            f"false-alarm rate of the whole at most about {self.false_alarm:.2g}"
        )
        lines += [
            f"covered, as far as a check above names it: {COVERS}",
            f"not covered: {COVERS_NOT}",
        ]
        return "\n".join([*lines, *filter(None, [self.accepted])])
