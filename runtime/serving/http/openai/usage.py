"""What a request has used, and how its drafts fared, in the shapes that clients know."""

from __future__ import annotations

from typing import Any

from outrider.runtime.core.events import Finished, SpeculationReport, StepTrace
from outrider.runtime.serving.response_stream import Batch


class UsageCounter:
    """Counts the tokens of one HTTP request: of all its prompts and their completions."""

    def __init__(self) -> None:
        self.num_output = 0
        # By prompt: tokens, and those that were not computed again.
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_drafted = self._num_accepted = self._num_reasoning = 0

    def add(self, batch: Batch) -> None:
        """Count the tokens of a batch."""
        self.num_output += len(batch.tokens)
        self._num_reasoning += batch.num_reasoning

    def begin(self, prompt: int, num_tokens: int) -> None:
        """Count a prompt, by its place in the request."""
        self._prompts[prompt] = (num_tokens, 0)

    def finish(self, prompt: int, end: Finished) -> None:
        """Count what is known of a completion at its end."""
        if end.beams:
            self.num_output += end.num_output
        self._prompts[prompt] = (end.num_prompt, max(end.num_cached, self._prompts[prompt][1]))
        self._num_drafted += end.report.num_drafted
        self._num_accepted += end.report.num_accepted

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        num_prompt = sum(num for num, _ in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": sum(n for _, n in self._prompts.values())},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._num_accepted,
                "rejected_prediction_tokens": self._num_drafted - self._num_accepted,
                "reasoning_tokens": self._num_reasoning,
            },
        }

    def of_response(self) -> dict[str, Any]:
        """Return the usage by the names of responses."""
        found = self.usage()
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": found["completion_tokens_details"],
            "total_tokens": found["total_tokens"],
        }


def metrics_of(report: SpeculationReport, steps: list[StepTrace] | None) -> dict[str, Any]:
    """Return the figures of one completion as vLLM answers them.

    Args:
        report: of the completion.
        steps: its passes, to be listed one by one; None for the sums alone.
    """
    drafted, accepted = report.drafted_by_position, report.accepted_by_position
    num_drafts = drafted[0] if drafted else 0
    if not num_drafts:
        return {"speculative_decoding": None}
    # How many rounds accepted at least so many tokens, and from that exactly so many.
    at_least = [num_drafts, *accepted, *[0] * (len(drafted) + 1 - len(accepted))]
    num_accepted = sum(accepted)
    found: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + num_accepted / num_drafts,
        "draft_acceptance_rate": report.draft_utilization,
        "acceptance_histogram": [at_least[i] - at_least[i + 1] for i in range(len(drafted) + 1)],
        "num_spec_steps": num_drafts,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": report.num_drafted,
        "num_spec_tokens": len(drafted),
    }
    if steps is not None:
        found |= _by_step([step for step in steps if step.draft_tokens])
    return {"speculative_decoding": found}


def _by_step(steps: list[StepTrace]) -> dict[str, Any]:
    by_length: dict[str, list[int]] = {}
    for step in steps:
        length = len(step.draft_tokens)
        counts = by_length.setdefault(str(length), [0] * (length + 1))
        counts[step.num_accepted] += 1
    return {
        "acceptance_histogram_by_draft_length": by_length,
        "per_step_accepted": [step.num_accepted for step in steps],
        "per_step_drafted": [len(step.draft_tokens) for step in steps],
    }
