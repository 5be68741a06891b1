"""From a validated spec to a request that can be queued: what no step could ever serve is refused here."""

from __future__ import annotations

from dataclasses import replace

from outrider.runtime.core.errors import ContextTooLong, RequestError
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.request import Request
from outrider.runtime.core.text import Decoder
from outrider.runtime.loop.drafter_policy import SpeculationPolicy


def new_request(
    spec: RequestSpec,
    policy: SpeculationPolicy,
    decoder: Decoder,
    *,
    max_context: int,
    num_slots: int,
    submitted_at: float,
) -> Request:
    """A request with its speculation resolved; callable from any thread.

    Args:
        spec: as asked.
        policy: what there is to draft with.
        decoder: turns the answer into text.
        max_context: tokens of one slot.
        num_slots: of the server.
        submitted_at: seconds on the worker's clock.

    Raises:
        ContextTooLong: the prompt leaves no room for a token.
        RequestError: it would need more slots than there are.
    """
    needed = len(spec.prompt_tokens) + 1
    if needed > max_context:
        rule = "must leave room for one token"
        raise ContextTooLong("prompt", rule, limit=max_context, given=needed)
    if spec.beams is None:
        speculation = policy.resolve_request(spec)
    else:
        speculation = policy.resolve_search(spec.speculation)
        if speculation.gamma == 0:
            # Nothing is drafted that further rows could hold.
            spec = replace(spec, beams=replace(spec.beams, width=0))
    if spec.num_slots > num_slots:
        rule = f"must be at most {num_slots}, the slots of this server"
        raise RequestError("num_beams", rule)
    return Request(
        spec,
        speculation=speculation,
        max_context=max_context,
        decoder=decoder,
        submitted_at=submitted_at,
    )
