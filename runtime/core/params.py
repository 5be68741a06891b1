"""What a request asks for: the values that the service gives the worker.

Pure values; validation against the bundle's limits is in ``runtime.serving.requests``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.tenant import NO_RULES, Claim, TenantRules

# What a message of a chat takes to be rendered beside its text, in bytes of text that take as long to be tokenised.
MESSAGE_OVERHEAD = 200

SAMPLE_STREAM = 9
"""Half of the key that seeds of completions are drawn under; ``engines.sampling.noise`` has the other streams."""


class GrammarKind(StrEnum):
    """How a constraint is written down; names of the wire's fields."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarParams:
    """A constraint on an answer's text.

    Attributes:
        text: the schema, expression or grammar; of tools the grammar that is made of them.
        allows_whitespace: of a schema: a space, or a new line with its indent, may stand between two parts.
        field: of the request, that the constraint was made of; empty for that of its kind.
        scope: whose it is: what is kept of a grammar serves its scope alone, so that nobody finds out by time what
            others ask for.
    """

    kind: GrammarKind
    text: str
    allows_whitespace: bool = True
    field: str = ""
    scope: str = ""

    @property
    def name(self) -> str:
        """The field that refusals name."""
        return self.field or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How a request is drafted for.

    Attributes:
        drafter: name as in ``runtime.core.drafting``; None takes the server's default.
        gamma: draft tokens per step; None takes the server's default; 0 is plain decoding.
        is_adaptive: whether gamma is a cap only, and the server chooses each step's draft tokens by
            what they are expected to gain; None: exactly where gamma and the server's default are
            both left open.
        lenience: l of the lenient mode, in (0, 1].
        verifies_block: whether sampled drafts are judged as whole blocks, in mode max_accept; None
            takes the server's default. At temperature 0 and for point masses it changes nothing.
        phrase_length: tokens of a phrase after its key token; None takes the server's default.
        num_phrases: phrases tried per step; None takes the server's default.
        window: columns of the lookahead window, on the target or, with a draft model, on that; 0
            for none, None takes the server's default.
        branching: candidates sampled per node of a tree, by depth; empty takes the server's default.
        reference: text the answer is expected to quote; ``reference_tokens`` once tokenised.
    """

    is_enabled: bool = True
    drafter: str | None = None
    gamma: int | None = None
    is_adaptive: bool | None = None
    mode: ExactnessMode = ExactnessMode.MAX_ACCEPT
    lenience: float = 1.0
    verifies_block: bool | None = None
    phrase_length: int | None = None
    num_phrases: int | None = None
    window: int | None = None
    branching: tuple[int, ...] = ()
    reference: str = ""
    reference_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """A beam search instead of one completion.

    Attributes:
        num_beams: hypotheses that live.
        width: without effect since 0.3: searches are not drafted for.
        num_results: completions to answer with, the best ones.
        length_penalty: exponent of the length that a sum of log-probabilities is divided by.
        stops_early: as in ``runtime.loop.beams.beam.BeamRules``.
        is_exhaustive: likewise.
        num_forced: likewise; the model's own, never a caller's.
    """

    num_beams: int
    num_results: int = 1
    length_penalty: float = 1.0
    stops_early: bool = False
    is_exhaustive: bool = False
    width: int = 0
    num_forced: int = 0

    @property
    def num_slots(self) -> int:
        """Slots of a request."""
        return self.num_beams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        content: text; without meaning where ``fields`` has a content.
        fields: JSON object of the message's other keys; empty for none.
    """

    role: str
    content: str = ""
    fields: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParams:
    """A conversation to go on with; nothing is checked yet.

    Attributes:
        adds_generation_prompt: whether to end with what an answer begins with; None: unless ``continues_final``.
        continues_final: whether to go on with the last message instead of answering it.
        tools: JSON array; empty for none.
        arguments: JSON object of further variables of the template; empty for none.
        template: name; empty for the default.
    """

    messages: tuple[ChatMessage, ...]
    adds_generation_prompt: bool | None = None
    continues_final: bool = False
    tools: str = ""
    arguments: str = ""
    template: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of UTF-8 of all texts together."""
        return sum(len(text.encode()) for text in self._texts())

    @property
    def size(self) -> int:
        """Bytes of a text that takes about as long to be tokenised as this takes to be rendered and tokenised."""
        return self.num_bytes + MESSAGE_OVERHEAD * len(self.messages)

    def _texts(self) -> Iterator[str]:
        yield from (self.tools, self.arguments)
        for one in self.messages:
            yield from (one.role, one.content, one.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A validated request.

    Of a model with an encoder, the prompt that callers speak of is the source, and ``prompt_tokens`` are the decoder
    prefix: what the answer begins behind, never sampled.

    Attributes:
        internal_id: unique in the process; ``request_id`` is the caller's name for it.
        deadline_s: time on the worker's monotonic clock after which the request ends, or None.
        params: ``end_token_ids`` already holds EOS (unless ignored) and the stop ids.
        skip_special_tokens: whether the text leaves special tokens out.
        tenant: whose request it is; history may be shared within a tenant.
        is_known: whether it is certain enough whose it is to share anything within the tenant.
        beams: None for one completion, which is drawn or greedy.
        source_tokens: what the encoder reads; empty for a model without one.
        source_is_quotable: whether ids of the source stand for the answer's tokens, so that drafts may be found there.
        max_tokens: 0 for an answer without tokens, which ends with its prompt.
        grammar: what constrains the answer; None for nothing.
        num_prompt_logprobs: top entries wanted beside each prompt token's logprob; None for no logprobs of the prompt.
        echoes_prompt: whether the text begins with the prompt's.
        salt: drafts are found in earlier texts with the same one alone.
        cache_scope: name of those whose cached prefixes may serve it, and who may use its own; empty for nobody.
        sample: which of a group's completions it is; the group's first is 0.
        num_samples: completions of the group that are admitted together; 1 for a request alone.
        priority: of waiting requests the lowest goes first.
        rules: the tenant's share, as far as the queue keeps to it.
    """

    internal_id: str
    request_id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    num_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    deadline_s: float | None = None
    tenant: str = ""
    is_known: bool = True
    beams: BeamParams | None = None
    source_tokens: tuple[int, ...] = ()
    source_is_quotable: bool = True
    grammar: GrammarParams | None = None
    num_prompt_logprobs: int | None = None
    echoes_prompt: bool = False
    salt: str = ""
    cache_scope: str = ""
    sample: int = 0
    num_samples: int = 1
    priority: int = 0
    rules: TenantRules = NO_RULES

    @property
    def claim(self) -> Claim:
        """What the request's place in the queue goes by."""
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        return Claim(
            tenant=self.tenant, priority=self.priority, deadline_s=deadline_s, rules=self.rules
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt as callers count them."""
        return len(self.source_tokens or self.prompt_tokens)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that the queue counts: of the source, and of what the text begins with."""
        return len(self.source_tokens) + len(self.prompt_tokens)

    @property
    def num_slots(self) -> int:
        """Rows of the cache that the request needs, all at once."""
        return 1 if self.beams is None else self.beams.num_slots

    def samples(self) -> tuple[RequestSpec, ...]:
        """Return the requests of a group by index, this one first; they differ by their names and seeds alone."""
        return (
            self,
            *(
                replace(
                    self,
                    internal_id=f"{self.internal_id}.{index}",
                    seed=sample_seed(self.seed, index),
                    sample=index,
                )
                for index in range(1, self.num_samples)
            ),
        )


def sample_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of a group's completion; that of the first is the group's.

    Source: Salmon et al. 2011, Philox 4x64 as numpy has it: the first word of key (seed, stream) and counter index.
    """
    if index == 0:
        return seed
    key = np.array([seed, SAMPLE_STREAM], dtype=np.uint64)
    return int(np.random.Philox(key=key, counter=index).random_raw())


@dataclass(frozen=True, slots=True)
class Prompt:
    """What tools ask a model to answer, with the meaning that the fields have in ``RequestSpec``.

    Attributes:
        tokens: what the text begins with, at least one.
        source: what the encoder reads.
        is_quotable: of the source.
    """

    tokens: tuple[int, ...]
    source: tuple[int, ...] = ()
    is_quotable: bool = True

    def __len__(self) -> int:
        """Return the number of its tokens as callers count them."""
        return len(self.source or self.tokens)
