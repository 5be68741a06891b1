"""Settings of the drafters, and the grammar of their names.

A name takes one of three forms. "lookup" is one drafter. "model/lookup" is a model accelerated by a guesser: prompt
lookup speculates on the draft model's own drafting. "suffix+model" is a chain of fallbacks: the second is asked where
the first proposes nothing, or expects too few of its tokens to be kept. ":NUMBER" behind a drafter bounds the tokens it
proposes, at any gamma: "suffix+model:3" takes long drafts of suffix, which cost nothing, and short ones of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

from outrider.engines.sampling.base import MAX_BEHIND, ExactnessMode
from outrider.runtime.core.errors import ConfigError, RequestError, UnsupportedOption
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.core.settings import Option, Panel, converted, setting

AUTO = "auto"
"""Stands for the drafter that recent requests went fastest with."""
AUTO_DRAFTERS = ("model", "suffix+model", "suffix")
GONE: Mapping[str, str] = {
    "recycling": "suffix",
    "ngram": "suffix",
}
"""Drafters that 0.2 had, and which one to ask for in their place."""
GONE_SETTINGS: Mapping[str, str] = {
    "ngram_order": "it was drafter ngram's",
    "max_ngrams": "it was drafter ngram's",
    "draws_with_replacement": "siblings of a tree always differ",
}
"""Settings that 0.2 had, and why there is nothing to set."""
LEAST_READ, MOST_READ = 64, 256
"""Tokens at the end of a prompt that a draft model reads at least, and at most.

Qwen2.5-Coder 1.5B / 0.5B, five prompts of 1,077 tokens on average: 64 tokens keep an alpha of .79, 128 of .88, 256 of
.90, which all of them have too.
"""
MAX_PARTS = 4
"""Drafters of one chain of fallbacks."""
MAX_PHRASE = MAX_BEHIND
"""Tokens of a phrase, and phrases behind one draft."""
MAX_WINDOW = 32
"""Columns of a lookahead window."""
PRESET = "preset"
"""Among the settings of drafters, stands for all those of ``PRESETS`` under its value."""
MAX_BRANCHING = 16
"""Candidates of one node of a tree, and levels that have a number."""
_CAP = re.compile("[1-9][0-9]{0,2}")
BRANCHING_RULE = f"must be 1 to {MAX_BRANCHING} numbers in [1, {MAX_BRANCHING}]"


def num_left_out(num_known: int, num_remaining: int) -> int:
    """Return how many leading tokens of a text a draft model need not read: it reads as many as it may draft.

    Args:
        num_known: tokens of the text.
        num_remaining: tokens that the answer may still have.
    """
    return max(0, num_known - min(MOST_READ, max(LEAST_READ, num_remaining)))


class HistoryScope(StrEnum):
    """The requests whose answers may inform a request's drafts.

    Shared history is a timing side channel: the speed of an answer hints at the answers of others. With TENANT, a
    caller whom nobody knows (``runtime.core.tenant.is_known``) shares nothing.
    """

    REQUEST = "request"
    TENANT = "tenant"
    SERVER = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingConfig:
    """Settings of all drafters; validated on construction.

    Attributes:
        lookup_min_ngram: shortest suffix that lookup, reference and datastore search for.
        lookup_max_ngram: longest suffix that lookup searches for.
        datastore: folder made by ``outrider datastore build``; empty for none.
        datastore_max_match: longest suffix the datastore is searched for.
        min_prob: suffix decoding stops where the draft's estimated probability falls below.
        suffix_factor: tokens proposed per matched token by suffix decoding.
        fallback_share: in a chain of fallbacks a draft is taken at once if its drafter expects at
            least this share of what the next one may propose to be kept; 0 takes every one.
        history_scope: see ``HistoryScope``.
        max_history_tokens: output tokens of earlier requests kept per scope.
        max_scopes: scopes whose history is kept; the one unused for longest is dropped.
        pool_size: phrases kept per key token.
        pool_keys: key tokens of one pool.
        phrase_length: tokens of a phrase where a request does not say.
        num_phrases: phrases tried where a request does not say.
        window: columns of the lookahead window on the target, with drafter lookahead, where a
            request does not say.
        phrase_draft: whether phrases accelerate the draft model in drafter ouroboros.
        draft_lenience: there, how likely a phrase's token must be, in the draft model's own eyes,
            relative to its first choice, to be drafted; 1 drafts first choices only. Any value is
            exact: these drafts are judged as point masses.
        draft_passes: there, passes of the draft model after which a phrase, if one goes on from
            where they led, is taken for the rest of the draft; 0 for no such bound.
        draft_window: there, columns of the lookahead window on the draft model where a request
            does not say; 0 for none.
        root_phrases: there, phrases tried beside the draft where a row takes trees; 0 for none.
        tree_nodes: tokens of a tree at most, where the engine takes as many.
        branching: candidates drawn at the root of drafter tree's trees, at the nodes below it, and
            so on; deeper nodes have one each.
        min_node_prob: chance of being kept, as its drafter estimates it, below which a node is left
            out of a tree; where step costs are known, what a node costs in plain steps instead.
        harvests_rejected: whether phrases may come from rejected drafts; else from committed text.
        trees_may_round_differently: whether greedy and seed_stable requests get trees too. Without it their
            answers equal plain decoding bit for bit. A tree's side branches are summed in another order, so that an
            answer may differ where two tokens nearly tie.
    """

    lookup_min_ngram: int = 2
    lookup_max_ngram: int = 4
    datastore: str = converted(
        "",
        lambda given: str(given["datastore"] or ""),
        datastore=Option(Panel.DRAFTING, "Corpus made by outrider datastore build.", Path | None),
    )
    datastore_max_match: int = 16
    min_prob: float = 0.3
    suffix_factor: float = 1.0
    fallback_share: float = 0.5
    history_scope: HistoryScope = setting(
        HistoryScope.TENANT,
        Panel.DRAFTING,
        "Whose earlier answers a request may profit from: request, tenant or server.",
        option="scope",
        flags=("--scope", "--history-scope"),
    )
    max_history_tokens: int = 32_768
    max_scopes: int = 64
    pool_size: int = 8
    pool_keys: int = 16_384
    phrase_length: int = 4
    num_phrases: int = 3
    window: int = 4
    phrase_draft: bool = True
    draft_lenience: float = 0.3
    draft_passes: int = 1
    draft_window: int = 0
    root_phrases: int = 0
    tree_nodes: int = 24
    branching: tuple[int, ...] = (3, 2)
    min_node_prob: float = 0.1
    harvests_rejected: bool = True
    trees_may_round_differently: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for a setting out of range, with its key and its rule."""
        for one in fields(self):
            value = getattr(self, one.name)
            least = int(one.name not in ("window", "draft_window", "root_phrases", "draft_passes"))
            if isinstance(value, int) and value < least and not isinstance(value, bool):
                raise ConfigError(one.name, f"must be at least {least}")
        for name, most in (
            ("window", MAX_WINDOW), ("draft_window", MAX_WINDOW),
            ("phrase_length", MAX_PHRASE), ("num_phrases", MAX_PHRASE), ("root_phrases", MAX_PHRASE),
        ):  # fmt: skip
            if getattr(self, name) > most:
                raise ConfigError(name, f"must be at most {most}")
        if self.lookup_max_ngram < self.lookup_min_ngram:
            raise ConfigError("lookup_max_ngram", "must be at least lookup_min_ngram")
        if self.datastore_max_match < self.lookup_min_ngram:
            raise ConfigError("datastore_max_match", "must be at least lookup_min_ngram")
        for name in ("min_prob", "fallback_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(name, "must be in [0, 1]")
        if not 0.0 < self.draft_lenience <= 1.0:
            raise ConfigError("draft_lenience", "must be in (0, 1]")
        if not 0.0 < self.min_node_prob <= 1.0:
            raise ConfigError("min_node_prob", "must be in (0, 1]")
        if not is_branching(self.branching):
            raise ConfigError("branching", BRANCHING_RULE)
        if not 0.0 < self.suffix_factor <= 64.0:
            raise ConfigError("suffix_factor", "must be in (0, 64]")


Setting = bool | int | float | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A name for several settings; each that is given beside it wins.

    Attributes:
        settings: of the drafters.
        options: of the command line.
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "outrider": Preset(),
    "paper": Preset(
        settings={
            "phrase_length": 6, "num_phrases": 3, "pool_size": 20, "draft_window": 20,
            "draft_passes": 0, "draft_lenience": 1.0, "root_phrases": 0,
        },
        options={"drafter": "ouroboros", "gamma": "12"},
    ),
}  # fmt: skip
"""Ouroboros with this project's settings, the defaults, and with its paper's: Zhao et al. 2024 (arXiv:2402.13720),
Table 12, HumanEval with Yi; its beta of 8 is a phrase_length of 6."""
_BOOLEANS = {"true": True, "false": False}


def setting_names() -> tuple[str, ...]:
    """Return the numbers and switches of ``DraftingConfig``; its texts have options of their own."""
    return tuple(one.name for one in fields(DraftingConfig) if not isinstance(one.default, str))


def parse_settings(texts: Iterable[str]) -> dict[str, Setting]:
    """Parse settings of the drafters, ``name=value``; ``DraftingConfig`` checks their ranges.

    Raises:
        ConfigError: a name is unknown, gone or given twice, or a value is of the wrong kind.
    """
    defaults = {one.name: one.default for one in fields(DraftingConfig)}
    preset, pairs = split_preset(texts)
    for name in (pair.partition("=")[0] for pair in pairs):
        if name in GONE_SETTINGS:
            raise ConfigError(name, f"is gone since 0.3: {GONE_SETTINGS[name]}; leave it out")
    known = {name: defaults[name] for name in setting_names()}
    return {**preset.settings, **parse_pairs("drafting", pairs, known)}


def split_preset(texts: Iterable[str]) -> tuple[Preset, tuple[str, ...]]:
    """Return the preset that settings of the drafters name, and the settings beside it.

    Raises:
        ConfigError: it is unknown, or there are two.
    """
    given = tuple(texts)
    names = [text.partition("=")[2] for text in given if text.startswith(f"{PRESET}=")]
    if len(names) > 1:
        raise ConfigError(PRESET, "must be given once")
    if names and names[0] not in PRESETS:
        raise ConfigError(PRESET, f"must be one of {', '.join(PRESETS)}")
    rest = tuple(text for text in given if not text.startswith(f"{PRESET}="))
    return PRESETS[names[0]] if names else Preset(), rest


def parse_pairs(
    option: str, texts: Iterable[str], defaults: Mapping[str, object]
) -> dict[str, Setting]:
    """Parse settings of an option, ``name=value``; a value is of the kind of its default.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is of the wrong kind.
    """
    found: dict[str, Setting] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in defaults:
            raise ConfigError.unknown(option, name, defaults)
        if name in found:
            raise ConfigError(name, "must be given once")
        found[name] = _value(name, value, defaults[name])
    return found


def _value(name: str, text: str, default: object) -> Setting:
    if isinstance(default, bool):
        if text not in _BOOLEANS:
            raise ConfigError(name, "must be true or false")
        return _BOOLEANS[text]
    if isinstance(default, tuple):
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError as error:
            raise ConfigError(name, "must be whole numbers with commas between them") from error
    kind = int if isinstance(default, int) else float
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(
            name, "must be a whole number" if kind is int else "must be a number"
        ) from error


@dataclass(frozen=True, slots=True)
class Part:
    """One drafter of a chain.

    Attributes:
        name: of the drafter.
        inner: the guesser that speculates on it, if any.
        most: tokens that it proposes at most; None for as many as are asked for.
    """

    name: str
    inner: str | None = None
    most: int | None = None

    @property
    def uncapped(self) -> str:
        """Return its name without the cap."""
        return self.name if self.inner is None else f"{self.name}/{self.inner}"

    def __str__(self) -> str:
        """Return the name as a request gives it."""
        return self.uncapped if self.most is None else f"{self.uncapped}:{self.most}"


def parse_drafter(name: str) -> tuple[Part, ...]:
    """Return the parts of a drafter's name, in the order in which they are asked.

    Raises:
        RequestError: it is not a name of the grammar.
    """
    # No more are split off: a message has room for a million.
    parts = tuple(_parse_part(text) for text in name.split("+", MAX_PARTS))
    if len(parts) > MAX_PARTS or len({part.uncapped for part in parts}) < len(parts):
        raise RequestError("speculation.drafter", f"must have at most {MAX_PARTS} distinct parts")
    return parts


def _parse_part(text: str) -> Part:
    text, colon, number = text.partition(":")
    outer, slash, inner = text.partition("/")
    if not outer or (slash and not inner) or "/" in inner:
        raise RequestError("speculation.drafter", "must be NAME, model/NAME or parts by '+'")
    if not colon:
        return Part(outer, inner or None)
    if not _CAP.fullmatch(number):
        raise RequestError("speculation.drafter", "behind ':' must be a number from 1 to 999")
    return Part(outer, inner or None, int(number))


def check_drafter(name: str, names: Collection[str], guessers: Collection[str]) -> None:
    """Refuse a drafter that this server does not have.

    ``guessers`` are those of its drafters' ``names`` that may stand behind the slash.

    Raises:
        RequestError: a part is unknown, or may not stand where it stands.
    """
    for part in parse_drafter(name):
        if AUTO in (part.name, part.inner) and name != AUTO:
            raise RequestError("speculation.drafter", f"{AUTO} stands alone")
        for one, known in ((part.name, names), (part.inner, guessers)):
            if one and one in GONE and one not in known:
                rule = f"{one} is gone since 0.3: use {GONE[one]}"
                raise RequestError("speculation.drafter", rule)
        if part.name not in names:
            rule = f"must be one of {', '.join(names)}, or several joined by '+'"
            raise RequestError("speculation.drafter", rule)
        if part.inner is not None and (part.name != "model" or part.inner not in guessers):
            known = ", ".join(guessers) or "none here, where the draft is a head"
            rule = f"only model may be followed by '/', and by one of {known}"
            raise RequestError("speculation.drafter", rule)


def without_gone(name: str) -> str:
    """Return a drafter's name with what replaces those of its parts that are gone; no drafter stands in it twice."""
    current = re.sub(r"[\w-]+", lambda found: GONE.get(found[0], found[0]), name)
    return "+".join({part.partition(":")[0]: part for part in current.split("+")}.values())


def check_drafter_params(params: SpeculationParams, *, max_reference_bytes: int) -> None:
    """Refuse parameters out of range, and those that the named drafter would ignore.

    Raises:
        RequestError: a parameter breaks its rule; names it.
    """
    parts = parse_drafter(params.drafter) if params.drafter else ()
    used = {name for part in parts for name in (part.name, part.inner)}
    phrasers = {"lookahead", "ouroboros", "phrases"}
    given = {
        "phrase_length": (params.phrase_length is not None, phrasers),
        "num_phrases": (params.num_phrases is not None, phrasers),
        "window": (bool(params.window), {"lookahead", "ouroboros"}),
        "reference": (bool(params.reference), {"reference"}),
        "branching": (bool(params.branching), {"tree"}),
    }
    for name, (is_given, users) in given.items():
        if is_given and not used & users:
            rule = f"needs a drafter that uses it: {', '.join(sorted(users))}"
            raise RequestError(f"speculation.{name}", rule)
    if not 1 <= (params.phrase_length or 1) <= MAX_PHRASE or params.phrase_length == 0:
        raise RequestError("speculation.phrase_length", f"must be in [1, {MAX_PHRASE}]")
    if not 0 <= (params.num_phrases or 0) <= MAX_PHRASE:
        raise RequestError("speculation.num_phrases", f"must be in [0, {MAX_PHRASE}]")
    if not 0 <= (params.window or 0) <= MAX_WINDOW:
        raise RequestError("speculation.window", f"must be in [0, {MAX_WINDOW}]")
    if params.branching and not is_branching(params.branching):
        raise RequestError("speculation.branching", BRANCHING_RULE)
    if params.window and params.phrase_length == 1:
        raise RequestError("speculation.window", "needs a phrase_length of at least 2")
    if len(params.reference.encode()) > max_reference_bytes:
        rule = f"must be at most {max_reference_bytes} bytes of UTF-8"
        raise RequestError("speculation.reference", rule)


def is_branching(counts: Sequence[int]) -> bool:
    """Return whether numbers of candidates per level are within bounds."""
    return 1 <= len(counts) <= MAX_BRANCHING and all(1 <= n <= MAX_BRANCHING for n in counts)


def check_mode(params: SpeculationParams, *, can_adapt: bool) -> None:
    """Refuse parameters that the mode or the server does not have.

    Raises:
        RequestError: a parameter is out of range or of another mode; names it.
        UnsupportedOption: gamma is to be chosen by a server that knows no costs.
    """
    if params.is_adaptive and params.is_enabled and not can_adapt:
        rule = "must not be true: this server was started with a fixed gamma"
        raise UnsupportedOption("speculation.adaptive", rule)
    if not 0.0 < params.lenience <= 1.0:
        raise RequestError("speculation.lenience", "must be in (0, 1]")
    if params.lenience != 1.0 and params.mode is not ExactnessMode.LENIENT:
        raise RequestError("speculation.lenience", "must be 1 unless mode is LENIENT")
    if params.verifies_block and params.mode is not ExactnessMode.MAX_ACCEPT:
        raise RequestError("speculation.block_verification", "needs mode MAX_ACCEPT")


def scope_of(scope: HistoryScope, tenant: str | None) -> str | None:
    """Return the name of those whom a request shares histories or caches with; None when it shares nothing.

    ``tenant`` is None for a caller whom nobody knows.
    """
    if scope is HistoryScope.SERVER:
        return "server"
    return None if scope is HistoryScope.REQUEST or tenant is None else f"tenant:{tenant}"


def salted_scope_of(scope: HistoryScope, tenant: str | None, salt: str) -> str | None:
    """Return the name of those with the same salt among ``scope_of``; no name has a slash."""
    found = scope_of(scope, tenant)
    return f"{found}/{salt}" if found and salt else found
