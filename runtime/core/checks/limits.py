"""What requests are checked against: the table of limits, and the served model."""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.runtime.core.config import MOST_COUNT
from outrider.runtime.core.errors import ConfigError

# With less no request could be served.
_AT_LEAST_ONE = (
    "max_prompt_bytes", "max_tokens", "default_max_tokens", "max_beams", "max_n", "max_message_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of one request; ``GetServerInfo`` reports them.

    Attributes:
        max_prompt_bytes: UTF-8 bytes of a text prompt, checked before it is tokenised; of a chat those of all its
            texts together, and those of the rendered one.
        max_tokens: output tokens at most; the context bounds them too.
        default_max_tokens: output tokens where a request does not say.
        max_stop_strings: strings that end an answer.
        max_stop_bytes: UTF-8 bytes of one of them.
        max_stop_token_ids: tokens that end an answer.
        max_logit_bias: tokens with a bias of their own.
        max_allowed_token_ids: tokens that an answer may be restricted to.
        max_bad_words: words that an answer must not hold.
        max_logprobs: alternatives whose log probability an output token is given with.
        max_prompt_logprobs: likewise of a prompt's token.
        max_beams: of a beam search; the engine's slots bound them too.
        max_n: completions of one request; the engine's slots bound them too.
        max_abort_ids: requests that one call may abort.
        max_request_s: seconds a request may take in all, whatever the client's deadline.
        max_message_bytes: bytes of a request message.
        max_reference_bytes: UTF-8 bytes of a reference text.
        max_grammar_bytes: UTF-8 bytes of a regular expression, schema or grammar.
        max_messages: of a chat.
    """

    max_prompt_bytes: int = 1 << 20
    max_tokens: int = 4096
    default_max_tokens: int = 256
    max_stop_strings: int = 8
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    max_allowed_token_ids: int = 10_000
    max_bad_words: int = 64
    max_logprobs: int = 20
    max_prompt_logprobs: int = 5
    max_beams: int = 16
    max_n: int = 16
    max_abort_ids: int = 256
    max_request_s: float = 600.0
    max_message_bytes: int = 4 << 20
    max_reference_bytes: int = 1 << 16
    max_grammar_bytes: int = 8192
    max_messages: int = 1024

    def __post_init__(self) -> None:
        """Raise ConfigError for a limit out of range, with its key and its rule."""
        for key in (one.name for one in fields(self) if one.name != "max_request_s"):
            least = int(key in _AT_LEAST_ONE)
            if not least <= getattr(self, key) <= MOST_COUNT:
                raise ConfigError(key, f"must be in [{least}, {MOST_COUNT}]")
        if not self.max_request_s > 0.0:
            raise ConfigError("max_request_s", "must be more than 0 seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against.

    Attributes:
        max_context: tokens of prompt and output together; with an encoder, of decoder prefix and output.
        max_gamma: draft tokens per step at most.
        drafters: names a request may ask for.
        guessers: those of them that may speculate on the draft model, as "model/NAME".
        can_adapt: whether gamma can be chosen step by step.
        max_beams: slots that one request may hold.
        max_token_bytes: bytes of a prompt that one token stands for at most; None where that is not known.
        max_source: tokens of a source at most; 0 for a model without an encoder.
        source_vocab_size: of the sources' tokens; 0 for a model without an encoder.
        shares_vocabulary: whether ids of sources and answers stand for the same tokens.
        banned_token_ids: never drawn, and never part of a request's own answer prefix.
        constraints: names of the fields that ask for a constraint of the answer and are served.
        no_constraints: the rule that a request breaks which asks for another one.
        chat_templates: names of the templates for chats; empty where there are none.
        gained_by_export: what exporting the model again would bring, in words.
        cache_bytes_per_token: of a running text, in the caches of target and draft.
    """

    name: str
    vocab_size: int
    max_context: int
    max_gamma: int
    eos_token_ids: tuple[int, ...]
    drafters: tuple[str, ...]
    guessers: tuple[str, ...] = ()
    can_adapt: bool = False
    max_beams: int = 1
    max_token_bytes: int | None = None
    max_source: int = 0
    source_vocab_size: int = 0
    shares_vocabulary: bool = True
    banned_token_ids: tuple[int, ...] = ()
    constraints: tuple[str, ...] = ()
    no_constraints: str = "is not supported by this server; leave it out"
    chat_templates: tuple[str, ...] = ()
    gained_by_export: tuple[str, ...] = ()
    cache_bytes_per_token: int = 0
