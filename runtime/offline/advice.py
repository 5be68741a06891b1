"""What an analysis recommends, in words: which drafter to serve with, by what was measured, and why."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterator

from outrider.runtime.gamma.verdicts import least_alpha, verdict_words
from outrider.runtime.offline.results import Analysis, SpeedRow

OF_HEADS = (
    "The draft is a head: heads are trained on chats, so measure with prompts in the chat template; behind others "
    "fewer of its tokens are kept."
)


def recommendation(analysis: Analysis) -> str:
    """Return a paragraph: the fastest setting at each temperature, what to serve with, and how sure that is."""
    temperatures = dict.fromkeys(row.temperature for row in analysis.speeds)
    fastest = [
        max((row for row in analysis.speeds if row.temperature == one), key=lambda row: row.speedup)
        for one in temperatures
    ]
    sentences = [_of_fastest(row) for row in fastest]
    command = f"outrider serve {shlex.quote(analysis.folder)}"
    drafter, mean = _best_drafter(analysis)
    if mean > 1.0:
        serve = f"Recommended: {command} --drafter {drafter}"
        if len(temperatures) > 1:
            serve += f", {mean:.2f} times plain decoding over these temperatures (geometric mean)"
        sentences.append(f"{serve}. The server chooses each step's draft tokens by itself.")
    else:
        sentences.append(f"Recommended: {command} --drafter none.")
    if analysis.has_head:
        sentences.append(OF_HEADS)
    return " ".join([*sentences, *_verdicts(analysis), _how_sure(analysis, fastest)])


def _verdicts(analysis: Analysis) -> Iterator[str]:
    """Yield whether each drafter pays at each temperature, by its acceptance and the costs of steps."""
    costs = {row.temperature: row for row in analysis.costs}
    for row in analysis.alphas:
        known = costs[row.temperature]
        draft, verify = known.draft_cost[row.drafter], known.verify_cost
        least = least_alpha([gamma * draft + verify[gamma + 1] for gamma in range(len(verify))])
        # Of what was drafted: a step that drafts nothing costs what a plain one does.
        alpha = row.alpha / row.coverage if row.coverage else None
        yield f"{verdict_words(row.drafter, alpha, least)} (temperature {row.temperature:g})."


def _best_drafter(analysis: Analysis) -> tuple[str, float]:
    """Return the drafter with the greatest mean speed-up over temperatures, each with its best gamma, and that mean."""
    best: dict[str, dict[float, float]] = defaultdict(dict)
    for row in analysis.speeds:
        known = best[row.drafter].get(row.temperature, 0.0)
        best[row.drafter][row.temperature] = max(known, row.speedup)
    means = {
        name: math.prod(speeds.values()) ** (1.0 / len(speeds)) for name, speeds in best.items()
    }
    return max(means.items(), key=lambda item: item[1])


def _of_fastest(row: SpeedRow) -> str:
    """Return what the fastest setting at a temperature gained, and the costs that it comes from."""
    setting = f"{row.drafter} with {row.gamma} draft token{'s' * (row.gamma > 1)}"
    speed = f"{row.speedup:.2f} times plain decoding"
    if row.interval is not None:
        speed += f" ({row.interval[0]:.2f} to {row.interval[1]:.2f})"
    where = f"At temperature {row.temperature:g}"
    found = (
        f"{where} the fastest is {setting}: {speed}."
        if row.speedup > 1.0
        else f"{where} nothing is faster than plain decoding; {setting} comes closest: {speed}."
    )
    formula = (
        ""
        if row.paper is None or row.predicted is None
        else f" Theorem 3.8 says {row.paper:.2f} as printed, and {row.predicted:.2f} with the measured cost of "
        "verification."
    )
    kept = (
        "" if row.alpha is None else f"the target keeps {100.0 * row.alpha:.0f} % of the drafts, "
    )
    return (
        f"{found}{formula} There {kept}a draft token costs {row.draft_cost:.2f} plain steps, and a pass over "
        f"{row.gamma + 1} tokens {row.verify_cost:.2f}."
    )


def _how_sure(analysis: Analysis, fastest: list[SpeedRow]) -> str:
    """Return what the numbers rest on, and what would decide."""
    basis = (
        f"Measured over {analysis.num_prompts} prompts in rounds of every setting: {analysis.rounds}, at batch "
        f"{analysis.batch}."
    )
    if any(row.interval is None or row.interval[0] <= 1.0 <= row.interval[1] for row in fastest):
        basis += " Differences of a few percent may be chance."
    return f"{basis} outrider tune compares settings until they are apart and writes its choice into the bundle."
