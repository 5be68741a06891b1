from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExactnessMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_MODE_UNSPECIFIED: _ClassVar[ExactnessMode]
    EXACTNESS_MODE_MAX_ACCEPT: _ClassVar[ExactnessMode]
    EXACTNESS_MODE_SEED_STABLE: _ClassVar[ExactnessMode]
    EXACTNESS_MODE_LENIENT: _ClassVar[ExactnessMode]

class Provenance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVENANCE_UNSPECIFIED: _ClassVar[Provenance]
    PROVENANCE_ACCEPTED: _ClassVar[Provenance]
    PROVENANCE_RECOVERED: _ClassVar[Provenance]
    PROVENANCE_BONUS: _ClassVar[Provenance]
    PROVENANCE_FORCED: _ClassVar[Provenance]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class OffReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFF_REASON_UNSPECIFIED: _ClassVar[OffReason]
    OFF_REASON_DISABLED: _ClassVar[OffReason]
    OFF_REASON_NO_DRAFT: _ClassVar[OffReason]
    OFF_REASON_DEGRADED: _ClassVar[OffReason]
    OFF_REASON_DRAFTER_PAUSED: _ClassVar[OffReason]
    OFF_REASON_NO_EXPECTED_GAIN: _ClassVar[OffReason]

class BitEquality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BIT_EQUALITY_UNSPECIFIED: _ClassVar[BitEquality]
    BIT_EQUALITY_NOT_CLAIMED: _ClassVar[BitEquality]
    BIT_EQUALITY_CERTIFIED: _ClassVar[BitEquality]
    BIT_EQUALITY_CONFIRMED: _ClassVar[BitEquality]
    BIT_EQUALITY_WITHDRAWN: _ClassVar[BitEquality]
EXACTNESS_MODE_UNSPECIFIED: ExactnessMode
EXACTNESS_MODE_MAX_ACCEPT: ExactnessMode
EXACTNESS_MODE_SEED_STABLE: ExactnessMode
EXACTNESS_MODE_LENIENT: ExactnessMode
PROVENANCE_UNSPECIFIED: Provenance
PROVENANCE_ACCEPTED: Provenance
PROVENANCE_RECOVERED: Provenance
PROVENANCE_BONUS: Provenance
PROVENANCE_FORCED: Provenance
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
OFF_REASON_UNSPECIFIED: OffReason
OFF_REASON_DISABLED: OffReason
OFF_REASON_NO_DRAFT: OffReason
OFF_REASON_DEGRADED: OffReason
OFF_REASON_DRAFTER_PAUSED: OffReason
OFF_REASON_NO_EXPECTED_GAIN: OffReason
BIT_EQUALITY_UNSPECIFIED: BitEquality
BIT_EQUALITY_NOT_CLAIMED: BitEquality
BIT_EQUALITY_CERTIFIED: BitEquality
BIT_EQUALITY_CONFIRMED: BitEquality
BIT_EQUALITY_WITHDRAWN: BitEquality

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "tokens", "chat", "sampling", "max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logprobs", "skip_special_tokens", "return_provenance", "return_trace", "speculation", "model", "n", "prompt_logprobs", "regex", "json_schema", "grammar", "disable_any_whitespace", "adapter", "best_of", "num_beams", "length_penalty", "early_stopping", "exhaustive_search", "source_language", "target_language", "answer_prefix", "answer_prefix_tokens", "echo", "cache_salt", "priority", "add_special_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    RETURN_TRACE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTIVE_SEARCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_PREFIX_FIELD_NUMBER: _ClassVar[int]
    ANSWER_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    tokens: TokenIds
    chat: Chat
    sampling: Sampling
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int
    skip_special_tokens: bool
    return_provenance: bool
    return_trace: bool
    speculation: Speculation
    model: str
    n: int
    prompt_logprobs: int
    regex: str
    json_schema: str
    grammar: str
    disable_any_whitespace: bool
    adapter: str
    best_of: int
    num_beams: int
    length_penalty: float
    early_stopping: bool
    exhaustive_search: bool
    source_language: str
    target_language: str
    answer_prefix: str
    answer_prefix_tokens: TokenIds
    echo: bool
    cache_salt: str
    priority: int
    add_special_tokens: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., return_provenance: _Optional[bool] = ..., return_trace: _Optional[bool] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., model: _Optional[str] = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., regex: _Optional[str] = ..., json_schema: _Optional[str] = ..., grammar: _Optional[str] = ..., disable_any_whitespace: _Optional[bool] = ..., adapter: _Optional[str] = ..., best_of: _Optional[int] = ..., num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ..., exhaustive_search: _Optional[bool] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., answer_prefix: _Optional[str] = ..., answer_prefix_tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., echo: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message", "tools_json", "template_arguments_json", "template", "tool_choice", "tool_name", "parallel_tool_calls", "parse_answer", "max_reasoning_tokens")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    PARSE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    MAX_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    tools_json: str
    template_arguments_json: str
    template: str
    tool_choice: str
    tool_name: str
    parallel_tool_calls: bool
    parse_answer: bool
    max_reasoning_tokens: int
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., tools_json: _Optional[str] = ..., template_arguments_json: _Optional[str] = ..., template: _Optional[str] = ..., tool_choice: _Optional[str] = ..., tool_name: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., parse_answer: _Optional[bool] = ..., max_reasoning_tokens: _Optional[int] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "fields_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    fields_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "seed", "no_repeat_ngram_size", "top_n_sigma")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    min_tokens: int
    seed: int
    no_repeat_ngram_size: int
    top_n_sigma: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., min_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., no_repeat_ngram_size: _Optional[int] = ..., top_n_sigma: _Optional[float] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("enabled", "drafter", "gamma", "mode", "lenience", "phrase_length", "num_phrases", "window", "reference", "adaptive", "block_verification", "beam_width", "branching")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    PHRASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_PHRASES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    BRANCHING_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    drafter: str
    gamma: int
    mode: ExactnessMode
    lenience: float
    phrase_length: int
    num_phrases: int
    window: int
    reference: str
    adaptive: bool
    block_verification: bool
    beam_width: int
    branching: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, enabled: _Optional[bool] = ..., drafter: _Optional[str] = ..., gamma: _Optional[int] = ..., mode: _Optional[_Union[ExactnessMode, str]] = ..., lenience: _Optional[float] = ..., phrase_length: _Optional[int] = ..., num_phrases: _Optional[int] = ..., window: _Optional[int] = ..., reference: _Optional[str] = ..., adaptive: _Optional[bool] = ..., block_verification: _Optional[bool] = ..., beam_width: _Optional[int] = ..., branching: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "tokens", "steps", "finish", "index", "prompt", "reasoning", "tool_calls")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    finish: Finish
    index: int
    prompt: _containers.RepeatedCompositeFieldContainer[Token]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., index: _Optional[int] = ..., prompt: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "provenance", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    provenance: Provenance
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopToken]
    def __init__(self, id: _Optional[int] = ..., provenance: _Optional[_Union[Provenance, str]] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ...) -> None: ...

class TopToken(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("drafted", "num_accepted", "next_token", "drafted_text", "next_text", "forced", "forced_text")
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_TEXT_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    FORCED_TEXT_FIELD_NUMBER: _ClassVar[int]
    drafted: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    next_token: int
    drafted_text: _containers.RepeatedScalarFieldContainer[str]
    next_text: str
    forced: _containers.RepeatedScalarFieldContainer[int]
    forced_text: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, drafted: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., next_token: _Optional[int] = ..., drafted_text: _Optional[_Iterable[str]] = ..., next_text: _Optional[str] = ..., forced: _Optional[_Iterable[int]] = ..., forced_text: _Optional[_Iterable[str]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token", "usage", "speculation", "seed", "request_id", "beams")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token: int
    usage: Usage
    speculation: SpeculationReport
    seed: int
    request_id: str
    beams: _containers.RepeatedCompositeFieldContainer[Beam]
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationReport, _Mapping]] = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ..., beams: _Optional[_Iterable[_Union[Beam, _Mapping]]] = ...) -> None: ...

class Beam(_message.Message):
    __slots__ = ("text", "token_ids", "logprob", "score", "reason", "stop_token")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob: float
    score: float
    reason: FinishReason
    stop_token: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprob: _Optional[float] = ..., score: _Optional[float] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SpeculationReport(_message.Message):
    __slots__ = ("is_on", "off_reason", "drafter", "mode", "lenience", "num_steps", "num_drafted", "num_accepted", "alpha_hat", "draft_utilization", "tokens_per_step", "accepted_by_position", "drafted_by_position", "num_fallbacks", "is_exact", "num_off", "block_verification", "off_reason_code", "num_forced")
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ALPHA_HAT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    NUM_OFF_FIELD_NUMBER: _ClassVar[int]
    BLOCK_VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    OFF_REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_FIELD_NUMBER: _ClassVar[int]
    is_on: bool
    off_reason: str
    drafter: str
    mode: ExactnessMode
    lenience: float
    num_steps: int
    num_drafted: int
    num_accepted: int
    alpha_hat: float
    draft_utilization: float
    tokens_per_step: float
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    drafted_by_position: _containers.RepeatedScalarFieldContainer[int]
    num_fallbacks: int
    is_exact: bool
    num_off: int
    block_verification: bool
    off_reason_code: OffReason
    num_forced: int
    def __init__(self, is_on: _Optional[bool] = ..., off_reason: _Optional[str] = ..., drafter: _Optional[str] = ..., mode: _Optional[_Union[ExactnessMode, str]] = ..., lenience: _Optional[float] = ..., num_steps: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., alpha_hat: _Optional[float] = ..., draft_utilization: _Optional[float] = ..., tokens_per_step: _Optional[float] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., drafted_by_position: _Optional[_Iterable[int]] = ..., num_fallbacks: _Optional[int] = ..., is_exact: _Optional[bool] = ..., num_off: _Optional[int] = ..., block_verification: _Optional[bool] = ..., off_reason_code: _Optional[_Union[OffReason, str]] = ..., num_forced: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "add_special_tokens", "target", "source_language", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    add_special_tokens: bool
    target: bool
    source_language: str
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ..., target: _Optional[bool] = ..., source_language: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "tokens", "max_context")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    max_context: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ..., max_context: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "model", "vocab_size", "eos_token_ids", "limits", "speculation", "load", "certificate_json", "engine", "text_to_text", "chat", "generation_defaults_json", "applies_generation_defaults", "constraints", "gained_by_export")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_JSON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TEXT_TO_TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_JSON_FIELD_NUMBER: _ClassVar[int]
    APPLIES_GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    GAINED_BY_EXPORT_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    model: str
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    limits: Limits
    speculation: SpeculationInfo
    load: Load
    certificate_json: str
    engine: EngineInfo
    text_to_text: TextToTextInfo
    chat: ChatInfo
    generation_defaults_json: str
    applies_generation_defaults: bool
    constraints: _containers.RepeatedScalarFieldContainer[str]
    gained_by_export: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server_version: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationInfo, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., certificate_json: _Optional[str] = ..., engine: _Optional[_Union[EngineInfo, _Mapping]] = ..., text_to_text: _Optional[_Union[TextToTextInfo, _Mapping]] = ..., chat: _Optional[_Union[ChatInfo, _Mapping]] = ..., generation_defaults_json: _Optional[str] = ..., applies_generation_defaults: _Optional[bool] = ..., constraints: _Optional[_Iterable[str]] = ..., gained_by_export: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatInfo(_message.Message):
    __slots__ = ("templates", "control_token_roles", "tool_call_format", "reasoning_marks")
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_ROLES_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REASONING_MARKS_FIELD_NUMBER: _ClassVar[int]
    templates: _containers.RepeatedScalarFieldContainer[str]
    control_token_roles: _containers.RepeatedScalarFieldContainer[str]
    tool_call_format: str
    reasoning_marks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, templates: _Optional[_Iterable[str]] = ..., control_token_roles: _Optional[_Iterable[str]] = ..., tool_call_format: _Optional[str] = ..., reasoning_marks: _Optional[_Iterable[str]] = ...) -> None: ...

class TextToTextInfo(_message.Message):
    __slots__ = ("languages", "default_source_language", "default_target_language", "has_source_language", "has_target_language", "decoder_prefix", "banned_token_ids", "generation_defaults_json", "applies_generation_defaults")
    class LanguagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LANGUAGES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    HAS_SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    HAS_TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    DECODER_PREFIX_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_JSON_FIELD_NUMBER: _ClassVar[int]
    APPLIES_GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    languages: _containers.ScalarMap[str, int]
    default_source_language: str
    default_target_language: str
    has_source_language: bool
    has_target_language: bool
    decoder_prefix: _containers.RepeatedCompositeFieldContainer[PrefixToken]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generation_defaults_json: str
    applies_generation_defaults: bool
    def __init__(self, languages: _Optional[_Mapping[str, int]] = ..., default_source_language: _Optional[str] = ..., default_target_language: _Optional[str] = ..., has_source_language: _Optional[bool] = ..., has_target_language: _Optional[bool] = ..., decoder_prefix: _Optional[_Iterable[_Union[PrefixToken, _Mapping]]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., generation_defaults_json: _Optional[str] = ..., applies_generation_defaults: _Optional[bool] = ...) -> None: ...

class PrefixToken(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("weights_are_private", "bit_equality")
    WEIGHTS_ARE_PRIVATE_FIELD_NUMBER: _ClassVar[int]
    BIT_EQUALITY_FIELD_NUMBER: _ClassVar[int]
    weights_are_private: bool
    bit_equality: BitEquality
    def __init__(self, weights_are_private: _Optional[bool] = ..., bit_equality: _Optional[_Union[BitEquality, str]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_context", "max_prompt_bytes", "max_tokens", "default_max_tokens", "max_stop_strings", "max_stop_bytes", "max_stop_token_ids", "max_logit_bias", "max_allowed_token_ids", "max_logprobs", "max_bad_words", "max_running", "max_queued", "max_queued_tokens", "queue_timeout_s", "max_request_s", "max_message_bytes", "max_beams", "max_source_tokens", "prefix_cache_bytes", "max_prompt_logprobs", "max_n", "max_grammar_bytes", "max_messages", "min_priority", "max_priority", "cache_bytes_per_token")
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BEAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_N_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAMMAR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MIN_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    max_context: int
    max_prompt_bytes: int
    max_tokens: int
    default_max_tokens: int
    max_stop_strings: int
    max_stop_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_allowed_token_ids: int
    max_logprobs: int
    max_bad_words: int
    max_running: int
    max_queued: int
    max_queued_tokens: int
    queue_timeout_s: float
    max_request_s: float
    max_message_bytes: int
    max_beams: int
    max_source_tokens: int
    prefix_cache_bytes: int
    max_prompt_logprobs: int
    max_n: int
    max_grammar_bytes: int
    max_messages: int
    min_priority: int
    max_priority: int
    cache_bytes_per_token: int
    def __init__(self, max_context: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ..., max_tokens: _Optional[int] = ..., default_max_tokens: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_bytes: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_allowed_token_ids: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_bad_words: _Optional[int] = ..., max_running: _Optional[int] = ..., max_queued: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., queue_timeout_s: _Optional[float] = ..., max_request_s: _Optional[float] = ..., max_message_bytes: _Optional[int] = ..., max_beams: _Optional[int] = ..., max_source_tokens: _Optional[int] = ..., prefix_cache_bytes: _Optional[int] = ..., max_prompt_logprobs: _Optional[int] = ..., max_n: _Optional[int] = ..., max_grammar_bytes: _Optional[int] = ..., max_messages: _Optional[int] = ..., min_priority: _Optional[int] = ..., max_priority: _Optional[int] = ..., cache_bytes_per_token: _Optional[int] = ...) -> None: ...

class SpeculationInfo(_message.Message):
    __slots__ = ("drafters", "default_drafter", "max_gamma", "default_gamma", "default_is_adaptive", "default_block_verification", "control")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_GAMMA_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_GAMMA_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_IS_ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BLOCK_VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedScalarFieldContainer[str]
    default_drafter: str
    max_gamma: int
    default_gamma: int
    default_is_adaptive: bool
    default_block_verification: bool
    control: Control
    def __init__(self, drafters: _Optional[_Iterable[str]] = ..., default_drafter: _Optional[str] = ..., max_gamma: _Optional[int] = ..., default_gamma: _Optional[int] = ..., default_is_adaptive: _Optional[bool] = ..., default_block_verification: _Optional[bool] = ..., control: _Optional[_Union[Control, _Mapping]] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("speed_up", "regret", "best_fixed_gamma", "num_steps_on", "num_steps_off", "num_probes", "cost_share", "verdicts")
    SPEED_UP_FIELD_NUMBER: _ClassVar[int]
    REGRET_FIELD_NUMBER: _ClassVar[int]
    BEST_FIXED_GAMMA_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_ON_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_OFF_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBES_FIELD_NUMBER: _ClassVar[int]
    COST_SHARE_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    speed_up: float
    regret: float
    best_fixed_gamma: int
    num_steps_on: int
    num_steps_off: int
    num_probes: int
    cost_share: float
    verdicts: _containers.RepeatedCompositeFieldContainer[DrafterVerdict]
    def __init__(self, speed_up: _Optional[float] = ..., regret: _Optional[float] = ..., best_fixed_gamma: _Optional[int] = ..., num_steps_on: _Optional[int] = ..., num_steps_off: _Optional[int] = ..., num_probes: _Optional[int] = ..., cost_share: _Optional[float] = ..., verdicts: _Optional[_Iterable[_Union[DrafterVerdict, _Mapping]]] = ...) -> None: ...

class DrafterVerdict(_message.Message):
    __slots__ = ("drafter", "alpha", "least_alpha", "num_rows")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    LEAST_ALPHA_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    alpha: float
    least_alpha: float
    num_rows: int
    def __init__(self, drafter: _Optional[str] = ..., alpha: _Optional[float] = ..., least_alpha: _Optional[float] = ..., num_rows: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_queued", "num_slots", "num_free_slots", "is_draining")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_queued: int
    num_slots: int
    num_free_slots: int
    is_draining: bool
    def __init__(self, num_running: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_free_slots: _Optional[int] = ..., is_draining: _Optional[bool] = ...) -> None: ...
