"""Cases of a bundle's certificate: scripts of extends, what they are fed, and what a reference answers.

The extends of a case run over fresh caches, ragged, rolled back or one token wide. Where the model has an encoder a
source per row is read first, of three lengths in one batch; some cases are about sources alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.kv_cache import MIN_SPAN
from outrider.export.certificate.feeds import Sources
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.reference import Logits, LogitsOfSequences
from outrider.export.model_config import ModelConfig

_BATCH, _PREFILL, _NUM_EXTRA = 3, 12, 24
# Of the rows of a batch.
_SOURCE_LENGTHS = (17, 5, 11)
# Of cases about reading: calls of two columns, of which one may be padding, have kernels of their own.
_READ_LENGTHS = (1, 2, 17)
# Longer ones are read as those of this length are where positions are relative, whose distances end at 128. Of places
# that are learnt those behind it are in no certificate.
_LONGEST_SOURCE = 512
_STALE_COLUMNS, _MORE_COLUMNS = 8, 8
# Beyond the distances that biases of attention tell apart.
_LONG_TEXT = 144


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """One extend of every row, by ``num_tokens`` of its sequence [n] from ``start`` on.

    Attributes:
        settled: [B] int64, tokens of each span that no later extend takes back; None for all.
    """

    sequences: IntArray
    start: IntArray
    num_tokens: int
    is_compared: bool = True
    settled: IntArray | None = None

    def run(self, runner: GraphRunner) -> FloatArray:
        """Return the graph's logits [B, num_tokens, V]."""
        spans = np.take_along_axis(self.sequences, self._columns(), axis=1)
        return runner.extend(spans, self.start, self.settled)

    def expected(self, reference: LogitsOfSequences, sources: Sources | None) -> Logits:
        """Return the reference's logits [B, num_tokens, V] where rows attend to ``sources``."""
        rows = np.arange(len(self.sequences))[:, None]
        return reference.logits(self.sequences, sources)[rows, self._columns()]

    def _columns(self) -> IntArray:
        return self.start[:, None] + np.arange(self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Extends over fresh caches.

    Attributes:
        extends: in order.
        sources: read before them; None for decoder-only models.
        former: read before those, by requests that had the rows before.
        more_columns: of the cache of sources, added before the last extend.
        beginnings: names of cases that are this one's first extends, and how many of those that are compared.
    """

    extends: Sequence[Extend]
    sources: Sources | None = None
    former: Sources | None = None
    more_columns: int = 0
    beginnings: Mapping[str, int] = field(default_factory=dict)

    def run(self, runner: GraphRunner) -> Iterator[tuple[Extend, FloatArray]]:
        """Yield the extends that are compared, with the graph's logits [B, num_tokens, V]."""
        runner.forget()
        runner.read(self.former)
        runner.read(self.sources)
        for number, extend in enumerate(self.extends, start=1):
            if self.more_columns and number == len(self.extends):
                runner.widen_sources(self.more_columns)
            logits = extend.run(runner)
            if extend.is_compared:
                yield extend, logits


def parity_cases(model_config: ModelConfig, max_gamma: int, seed: int) -> dict[str, Case]:
    """Return all cases of a graph that extends chains, by name; some are the beginnings of others."""
    prompts, sources = (
        certified_prompts(model_config, max_gamma, seed),
        certified_sources(model_config, seed),
    )
    if model_config.kinds is None:
        rollback, ragged = _rollback(prompts, max_gamma + 1), _ragged(prompts)
    else:
        rollback = _rollback(prompts, max_gamma + 1, num_settled=1)
        ragged = _ragged(prompts, max(max_gamma, 1))
    scripts = {"rollback": rollback, "single_token": _continue(prompts, 1), "ragged": ragged}
    if model_config.kinds is not None:
        scripts["rejections"] = _rejections(prompts, max_gamma)
        scripts["drafting"] = _drafting(prompts, max_gamma)
    cases = {name: Case(extends=script, sources=sources) for name, script in scripts.items()}
    cases["rollback"] = replace(cases["rollback"], beginnings={"prefill": 1, "verify": 2})
    verify = Case(extends=_continue(prompts, max_gamma + 1), sources=sources)
    return {**cases, **_source_cases(model_config, prompts, verify, seed)}


def certified_prompts(model_config: ModelConfig, max_gamma: int, seed: int = 0) -> IntArray:
    """Return the sequences [B, n] int64 that all cases take their tokens from."""
    length = _PREFILL + max_gamma + 1 + _NUM_EXTRA
    return draw_tokens(model_config, np.random.default_rng(seed), (_BATCH, length))


def certified_sources(model_config: ModelConfig, seed: int = 0) -> Sources | None:
    """Return the sources of all cases that are not about them; None for decoder-only models."""
    return draw_sources(model_config, _SOURCE_LENGTHS, seed)


def draw_tokens(
    model_config: ModelConfig, generator: np.random.Generator, shape: tuple[int, ...]
) -> IntArray:
    """Return random tokens int64 of the decoder's vocabulary."""
    return _draw(model_config, generator, shape, model_config.vocab_size)


def draw_sources(model_config: ModelConfig, lengths: Sequence[int], seed: int) -> Sources | None:
    """Return random sources of these lengths, cut to what the model knows; behind them stand more tokens."""
    if model_config.source is None:
        return None
    cut = np.minimum(np.array(lengths, np.int64), model_config.source.max_source)
    # Engines read no single column.
    shape = len(lengths), max(MIN_SPAN, int(cut.max()))
    tokens = _draw(
        model_config, np.random.default_rng([seed, *lengths]), shape, model_config.source.vocab_size
    )
    return Sources(tokens=tokens, lengths=cut)


def most_columns(model_config: ModelConfig, max_gamma: int) -> int:
    """Return the columns of a cache that all cases fit in; none writes the last."""
    needed = _PREFILL + max_gamma + 1 + 2 * _NUM_EXTRA
    return needed if model_config.source is None else max(needed, _LONG_TEXT + 1)


def most_source_columns(model_config: ModelConfig) -> int:
    """Return the columns of a cache of sources that all cases fit in; 0 for decoder-only models."""
    if model_config.source is None:
        return 0
    return max(_longest(model_config), max(_SOURCE_LENGTHS) + _STALE_COLUMNS)


def _longest(model_config: ModelConfig) -> int:
    assert model_config.source is not None
    return min(model_config.source.max_source, _LONGEST_SOURCE)


def _draw(
    model_config: ModelConfig, generator: np.random.Generator, shape: tuple[int, ...], size: int
) -> IntArray:
    if model_config.source is None or model_config.pad_token_id is None:
        return generator.integers(0, size, shape, dtype=np.int64)
    # Some models count positions by the tokens that are no padding, even inside of texts.
    tokens = generator.integers(0, size - 1, shape, dtype=np.int64)
    return tokens + (tokens >= model_config.pad_token_id)


def _source_cases(
    model_config: ModelConfig, prompts: IntArray, verify: Case, seed: int
) -> Mapping[str, Case]:
    """Return cases of models with an encoder alone.

    They are about sources: their lengths, rows that had longer ones before, a cache that grows; and about a long text.
    """
    if model_config.source is None:
        return {}
    few = [_extend(prompts, 0, 4)]
    length = min(model_config.max_position, _LONG_TEXT)
    long = draw_tokens(model_config, np.random.default_rng([seed, length]), (_BATCH, length))
    longest = (_longest(model_config), 2, max(_SOURCE_LENGTHS))
    lengths = {f"read_{count}": (count,) * _BATCH for count in _READ_LENGTHS}
    lengths |= {"read_longest": longest}
    reads = {
        name: Case(extends=few, sources=draw_sources(model_config, each, seed))
        for name, each in lengths.items()
    }
    longer = [length + _STALE_COLUMNS for length in _SOURCE_LENGTHS]
    return {
        **reads,
        "long_text": replace(verify, extends=[_extend(long, 0, length)]),
        "source_reused": replace(verify, former=draw_sources(model_config, longer, seed)),
        "source_widened": replace(verify, more_columns=_MORE_COLUMNS),
    }


def _extend(sequences: IntArray, start: int, num_tokens: int) -> Extend:
    starts = np.full(len(sequences), start, np.int64)
    return Extend(sequences=sequences, start=starts, num_tokens=num_tokens)


def _continue(prompts: IntArray, num_tokens: int) -> list[Extend]:
    return [_extend(prompts, 0, _PREFILL), _extend(prompts, _PREFILL, num_tokens)]


def _ragged(prompts: IntArray, max_open: int | None = None) -> list[Extend]:
    """Compare rows of different lengths; the first prefill leaves padding beyond each row's end."""
    fewer = 2 * np.arange(len(prompts), dtype=np.int64)
    lengths = _PREFILL - (fewer if max_open is None else np.minimum(fewer, max_open))
    least = int(lengths.min())
    return [
        replace(_extend(prompts[:, ::-1].copy(), 0, _PREFILL), is_compared=False),
        _extend(prompts, 0, least),
        replace(_extend(prompts, least, _PREFILL - least), settled=lengths - least),
        Extend(sequences=prompts, start=lengths, num_tokens=4),
    ]


def _rollback(prompts: IntArray, num_tokens: int, num_settled: int = 0) -> list[Extend]:
    """Write a span, truncate each row at another place behind what is settled, write other tokens and compare."""
    places = np.arange(len(prompts), dtype=np.int64) % max(1, num_tokens - num_settled)
    kept = _PREFILL + num_settled + places
    others = _otherwise(prompts, kept)
    prefill, verified = _continue(prompts, num_tokens)
    settled = np.full(len(prompts), num_settled, np.int64)
    return [
        prefill,
        replace(verified, settled=settled),
        Extend(sequences=others, start=kept, num_tokens=num_tokens, settled=settled),
    ]


def _rejections(prompts: IntArray, max_gamma: int) -> list[Extend]:
    """Reject drafts at every place, none to all kept, each time behind the prompt, and go on by a few tokens."""
    extends, one = [], np.ones(len(prompts), np.int64)
    for first in range(0, max_gamma + 1, len(prompts)):
        num_accepted = np.minimum(first + np.arange(len(prompts)), max_gamma)
        kept = _PREFILL + 1 + num_accepted
        others = _otherwise(prompts, kept)
        prefill, verified = _continue(prompts, max_gamma + 1)
        extends += [
            replace(prefill, is_compared=False),
            replace(verified, is_compared=False, settled=one),
            Extend(sequences=others, start=kept, num_tokens=4),
        ]
    return extends


def _drafting(prompts: IntArray, max_gamma: int) -> list[Extend]:
    """Write tokens one by one that may all be taken back, as a draft model does, and a few that stay."""
    nothing = np.zeros(len(prompts), np.int64)
    drafts = [
        replace(_extend(prompts, _PREFILL + place, 1), settled=nothing)
        for place in range(max_gamma)
    ]
    prefill = replace(_extend(prompts, 0, _PREFILL), is_compared=False)
    return [prefill, *drafts, _extend(prompts, _PREFILL + max_gamma, 4)]


def _otherwise(prompts: IntArray, kept: IntArray) -> IntArray:
    """Return sequences that go on in another way behind their first ``kept`` [B] tokens."""
    others = prompts.copy()
    for row, start in enumerate(kept):
        others[row, start:] = prompts[row, start:][::-1]
    return others
