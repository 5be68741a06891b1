"""Measures alpha, the mean probability that the target keeps a draft token, over text that the target wrote.

As in Leviathan et al. 2023, section 4.1, every position of the text counts, with the probability of keeping the first
draft token there. ``alpha_hat`` of a request is usually higher: the later positions of a draft follow an accepted
token, and are easier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from outrider.engines.base import Engine, Source, Span
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow
from outrider.runtime.core.params import Prompt
from outrider.runtime.core.sequence import SEPARATOR
from outrider.runtime.drafters.base import DraftRow, Guesser
from outrider.runtime.offline.results import AlphaRow
from outrider.runtime.oracle.analysis import (
    lenient_acceptance,
    oracle_tokens,
    rejection_acceptance,
)

Rows = npt.NDArray[np.float64]
Report = Callable[[str, int, int], None]

MODEL = "model"
CHUNK = 32
"""Positions whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class Text:
    """Prompt and completion, how many of these tokens are prompt, and what the encoder reads."""

    tokens: tuple[int, ...]
    num_prompt: int
    source: tuple[int, ...] = ()
    is_quotable: bool = True


def text_of(prompt: Prompt, answer: Sequence[int], end_tokens: Sequence[int]) -> Text:
    """Return a prompt and its answer up to the first end token, where a server stops."""
    ends = (i for i, token in enumerate(answer, 1) if token in end_tokens)
    length = next(ends, len(answer))
    tokens = (*prompt.tokens, *answer[:length])
    return Text(tokens, len(prompt.tokens), prompt.source, prompt.is_quotable)


@dataclass(slots=True)
class _Tally:
    """Sums of one drafter over positions, by lenience."""

    num_drafted: int = 0
    rejection: float = 0.0
    kept: dict[float, float] = field(default_factory=dict)

    def add(self, kept: Mapping[float, float], rejection: float) -> None:
        self.num_drafted += 1
        self.rejection += rejection
        for lenience, probability in kept.items():
            self.kept[lenience] = self.kept.get(lenience, 0.0) + probability


def measure_alphas(
    target: Engine,
    drafts: Mapping[str, Engine],
    guessers: Mapping[str, Guesser],
    texts: Sequence[Text],
    temperature: float,
    leniences: Sequence[float],
    report: Report,
) -> list[AlphaRow]:
    """Return alpha of drafters by their whole distribution, and of those that propose one token.

    Args:
        target: with slot 0 free.
        drafts: engines by the names of the drafters that draw from them; likewise.
        guessers: by name; they see each request grow by one token at a time.
        texts: written by the target.
        temperature: at which they were written.
        leniences: l in (0, 1]; 1 is alpha itself and always measured.
        report: called with the phase, the texts done and their number.
    """
    wanted = tuple(dict.fromkeys((1.0, *leniences)))
    tallies = {name: _Tally() for name in (*drafts, *guessers)}
    num_positions = sum(len(text.tokens) - text.num_prompt for text in texts)
    for number, text in enumerate(texts):
        _add_text(target, drafts, guessers, text, number, temperature, wanted, tallies)
        report(f"alpha at temperature {temperature:g}", number + 1, len(texts))
    return [
        AlphaRow(
            drafter=name,
            temperature=temperature,
            alpha=tally.kept.get(1.0, 0.0) / num_positions,
            coverage=tally.num_drafted / num_positions,
            num_positions=num_positions,
            rejection=tally.rejection / num_positions,
            most_tokens=oracle_tokens(tally.kept.get(1.0, 0.0) / num_positions),
            lenient={one: tally.kept.get(one, 0.0) / num_positions for one in wanted},
        )
        for name, tally in tallies.items()
    ]


def probs_of(logits: Rows, temperature: float) -> Rows:
    """Return [N, V] float64 probabilities of [N, V] logits, rows sum to 1; temperature 0 is a point mass."""
    if temperature == 0.0:
        probs = np.zeros_like(logits)
        probs[np.arange(len(logits)), logits.argmax(axis=1)] = 1.0
        return probs
    scores = (logits - logits.max(axis=1, keepdims=True)) / temperature
    weights = np.exp(scores)
    total: Rows = weights / weights.sum(axis=1, keepdims=True)
    return total


def kept_of_token(target_probs: Rows, token: int, lenience: float, *, is_greedy: bool) -> float:
    """Return the probability that the target keeps a given draft token.

    Args:
        target_probs: [V] float64, p; of a greedy target the softmax at temperature 1.
        token: of the draft.
        lenience: l in (0, 1].
        is_greedy: whether the target is.

    Source: appendix A.5, for a point mass: min(1, p / l); greedy: p >= l max p.
    """
    if not is_greedy:
        return min(1.0, float(target_probs[token]) / lenience)
    is_best = token == int(target_probs.argmax())
    is_near = lenience < 1.0 and target_probs[token] >= lenience * target_probs.max()
    return float(is_best or is_near)


def _add_text(
    target: Engine,
    drafts: Mapping[str, Engine],
    guessers: Mapping[str, Guesser],
    text: Text,
    number: int,
    temperature: float,
    leniences: Sequence[float],
    tallies: Mapping[str, _Tally],
) -> None:
    is_greedy = temperature == 0.0
    vocab_size = target.limits.vocab_size
    drafted = {name: _logits(one, text, _num_readable(text, one)) for name, one in drafts.items()}
    position = text.num_prompt
    for logits in _logits(target, text, len(text.tokens)):
        judged = probs_of(logits, 1.0 if is_greedy else temperature)
        for name, rows in drafted.items():
            proposed = _fitted(next(rows, None), len(judged), vocab_size)
            for probs, draft_logits in zip(judged, proposed, strict=False):
                if is_greedy:
                    token = int(draft_logits.argmax())
                    tallies[name].add(*_of_token(probs, token, leniences, is_greedy=True))
                else:
                    draft_probs = probs_of(draft_logits[None], temperature)[0]
                    tallies[name].add(
                        {one: lenient_acceptance(probs, draft_probs, one) for one in leniences},
                        rejection_acceptance(probs, draft_probs),
                    )
        for row, probs in enumerate(judged):
            for name, token in _guesses(guessers, text, number, position + row, temperature):
                if token < vocab_size:
                    tallies[name].add(*_of_token(probs, token, leniences, is_greedy=is_greedy))
        position += len(judged)


def _of_token(
    target_probs: Rows, token: int, leniences: Sequence[float], *, is_greedy: bool
) -> tuple[dict[float, float], float]:
    """Return what a given draft token adds to a tally; rejection sampling keeps it where the target has no other."""
    kept = {one: kept_of_token(target_probs, token, one, is_greedy=is_greedy) for one in leniences}
    is_only = is_greedy or bool(target_probs[token] >= 1.0)
    return kept, kept_of_token(target_probs, token, 1.0, is_greedy=is_greedy) * is_only


def _num_readable(text: Text, draft: Engine) -> int:
    """Return the leading tokens that a draft can read: of a smaller vocabulary none beyond one it does not know."""
    if len(text.source) > draft.limits.max_source:
        return 0
    vocab_size, tokens = draft.limits.vocab_size, text.tokens
    return next((i for i, token in enumerate(tokens) if token >= vocab_size), len(tokens))


def _logits(engine: Engine, text: Text, num_readable: int) -> Iterator[Rows]:
    """Yield [<= CHUNK, V] float64 logits before each token of the completion, as far as tokens are readable."""
    limits = engine.limits
    first = text.num_prompt - 1
    if text.source and num_readable:
        engine.read([Source(slot=0, tokens=text.source)])
    for start in range(0, min(first, num_readable), limits.max_extend):
        tokens = text.tokens[start : min(start + limits.max_extend, first, num_readable)]
        count = len(tokens)
        engine.extend([Span(slot=0, start=start, tokens=tokens, num_logits=0, num_settled=count)])
    end = min(len(text.tokens) - 1, num_readable)
    for start in range(first, end, CHUNK):
        tokens = text.tokens[start : min(start + CHUNK, end)]
        count = len(tokens)
        logits = engine.extend(
            [Span(slot=0, start=start, tokens=tokens, num_logits=count, num_settled=count)]
        )
        yield np.array(logits[0, :count], dtype=np.float64)


def _fitted(logits: Rows | None, num_rows: int, vocab_size: int) -> Rows:
    """Return a draft's rows over the target's vocabulary, [<= num_rows, V] float64."""
    if logits is None:
        return np.zeros((0, vocab_size))
    fitted = np.full((min(len(logits), num_rows), vocab_size), -np.inf)
    width = min(vocab_size, logits.shape[1])
    fitted[:, :width] = logits[: len(fitted), :width]
    return fitted


def _guesses(
    guessers: Mapping[str, Guesser], text: Text, number: int, position: int, temperature: float
) -> Iterator[tuple[str, int]]:
    """Yield each drafter's name and first token at one position; nothing where it proposes none."""
    sampling = SamplingRow(
        index=0,
        slot=0,
        params=SamplingParams(temperature=temperature),
        mode=ExactnessMode.MAX_ACCEPT,
        lenience=1.0,
        seed=0,
        history=np.array(text.tokens[:position], dtype=np.int64),
        num_prompt=text.num_prompt,
    )
    quoted = (*text.source, SEPARATOR) if text.source and text.is_quotable else ()
    row = DraftRow(
        sampling=sampling,
        text=np.array((*quoted, *text.tokens[:position]), dtype=np.int64),
        source=text.source,
        gamma=1,
        num_computed=0,
        key=f"alpha-{temperature:g}-{number}",
    )
    for name, guesser in guessers.items():
        for token in guesser.guess(row, (), 1)[:1]:
            yield name, token
