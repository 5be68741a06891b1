"""How much of a draft the target would keep: alpha, over text that the target itself wrote.

As in Leviathan et al. 2023, section 4.1: every position of the text counts, and what is averaged is
the probability of keeping the first draft token there, not whether one was kept. Positions that
requests reach in a draft follow an accepted token and are easier; ``alpha_hat`` of a request is
therefore usually higher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from outrider.engines.base import Engine, Span
from outrider.engines.sampling.base import ExactnessMode, SamplingParams, SamplingRow
from outrider.runtime.drafters.base import DraftRow, Guesser
from outrider.runtime.offline.results import AlphaRow
from outrider.runtime.oracle.analysis import lenient_acceptance

Rows = npt.NDArray[np.float64]
Report = Callable[[str, int, int], None]

MODEL = "model"
CHUNK = 32
"""Positions whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the target wrote.

    Attributes:
        tokens: prompt and completion.
        num_prompt: how many of them are prompt.
    """

    tokens: tuple[int, ...]
    num_prompt: int


def text_of(prompt: Sequence[int], answer: Sequence[int], end_tokens: Sequence[int]) -> Text:
    """A prompt and what followed, up to and with the first end token: no server goes on there."""
    ends = (i for i, token in enumerate(answer, 1) if token in end_tokens)
    length = next(ends, len(answer))
    return Text((*prompt, *answer[:length]), len(prompt))


@dataclass(slots=True)
class _Tally:
    """Sums over positions of one drafter, by lenience."""

    num_drafted: int = 0
    kept: dict[float, float] = field(default_factory=dict)

    def add(self, kept: Mapping[float, float]) -> None:
        self.num_drafted += 1
        for lenience, probability in kept.items():
            self.kept[lenience] = self.kept.get(lenience, 0.0) + probability


def measure_alphas(
    target: Engine,
    draft: Engine | None,
    guessers: Mapping[str, Guesser],
    texts: Sequence[Text],
    temperature: float,
    leniences: Sequence[float],
    report: Report,
) -> list[AlphaRow]:
    """Alpha of the draft model, if there is one, and of drafters without a model.

    Args:
        target: with slot 0 free.
        draft: likewise, or None.
        guessers: by name; they see each request grow by one token at a time.
        texts: written by the target.
        temperature: at which they were written.
        leniences: l in (0, 1]; 1 is alpha itself and always measured.
        report: told the phase, the texts done and their number.
    """
    wanted = tuple(dict.fromkeys((1.0, *leniences)))
    names = (*((MODEL,) if draft is not None else ()), *guessers)
    tallies = {name: _Tally() for name in names}
    num_positions = sum(len(text.tokens) - text.num_prompt for text in texts)
    for number, text in enumerate(texts):
        _add_text(target, draft, guessers, text, number, temperature, wanted, tallies)
        report(f"alpha at temperature {temperature:g}", number + 1, len(texts))
    return [
        AlphaRow(
            drafter=name,
            temperature=temperature,
            alpha=tally.kept.get(1.0, 0.0) / num_positions,
            coverage=tally.num_drafted / num_positions,
            num_positions=num_positions,
            lenient={one: tally.kept.get(one, 0.0) / num_positions for one in wanted},
        )
        for name, tally in tallies.items()
    ]


def law_rows(logits: Rows, temperature: float) -> Rows:
    """[N, V] float64 laws of [N, V] logits, rows sum to 1; temperature 0 is a point mass."""
    if temperature == 0.0:
        laws = np.zeros_like(logits)
        laws[np.arange(len(logits)), logits.argmax(axis=1)] = 1.0
        return laws
    scores = (logits - logits.max(axis=1, keepdims=True)) / temperature
    weights = np.exp(scores)
    total: Rows = weights / weights.sum(axis=1, keepdims=True)
    return total


def kept_of_token(target_probs: Rows, token: int, lenience: float, *, is_greedy: bool) -> float:
    """Probability that a given token is kept.

    Args:
        target_probs: [V] float64, p; of a greedy target the softmax at temperature 1.
        token: what was drafted.
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
    draft: Engine | None,
    guessers: Mapping[str, Guesser],
    text: Text,
    number: int,
    temperature: float,
    leniences: Sequence[float],
    tallies: Mapping[str, _Tally],
) -> None:
    is_greedy = temperature == 0.0
    vocab_size = target.limits.vocab_size
    # A draft model of a smaller vocabulary cannot read on behind a token it does not know.
    readable = _num_readable(text.tokens, draft)
    drafted = _logits(draft, text, readable) if draft is not None else iter(())
    position = text.num_prompt
    for logits in _logits(target, text, len(text.tokens)):
        judged = law_rows(logits, 1.0 if is_greedy else temperature)
        proposed = _fitted(next(drafted, None), len(judged), vocab_size)
        laws = law_rows(proposed, temperature) if len(proposed) else proposed
        for row, probs in enumerate(judged):
            if row < len(laws):
                token = int(proposed[row].argmax())
                tallies[MODEL].add(
                    {
                        one: kept_of_token(probs, token, one, is_greedy=True)
                        if is_greedy
                        else lenient_acceptance(probs, laws[row], one)
                        for one in leniences
                    }
                )
            for name, token in _guesses(guessers, text, number, position + row, temperature):
                if token < vocab_size:
                    tallies[name].add(
                        {
                            one: kept_of_token(probs, token, one, is_greedy=is_greedy)
                            for one in leniences
                        }
                    )
        position += len(judged)


def _num_readable(tokens: Sequence[int], draft: Engine | None) -> int:
    if draft is None:
        return 0
    vocab_size = draft.limits.vocab_size
    return next((i for i, token in enumerate(tokens) if token >= vocab_size), len(tokens))


def _logits(engine: Engine, text: Text, num_readable: int) -> Iterator[Rows]:
    """[<= CHUNK, V] float64 logits before each token of the completion, in order.

    The row before token i needs the tokens before it: reading ends where they cannot be read.
    """
    limits = engine.limits
    first = text.num_prompt - 1
    for start in range(0, min(first, num_readable), limits.max_extend):
        tokens = text.tokens[start : min(start + limits.max_extend, first, num_readable)]
        engine.extend([Span(slot=0, start=start, tokens=tokens, num_logits=0)])
    end = min(len(text.tokens) - 1, num_readable)
    for start in range(first, end, CHUNK):
        tokens = text.tokens[start : min(start + CHUNK, end)]
        logits = engine.extend([Span(slot=0, start=start, tokens=tokens, num_logits=len(tokens))])
        yield np.array(logits[0, : len(tokens)], dtype=np.float64)


def _fitted(logits: Rows | None, num_rows: int, vocab_size: int) -> Rows:
    """[<= num_rows, V] float64: a draft's rows over the target's vocabulary."""
    if logits is None:
        return np.zeros((0, vocab_size))
    fitted = np.full((min(len(logits), num_rows), vocab_size), -np.inf)
    width = min(vocab_size, logits.shape[1])
    fitted[:, :width] = logits[: len(fitted), :width]
    return fitted


def _guesses(
    guessers: Mapping[str, Guesser], text: Text, number: int, position: int, temperature: float
) -> Iterator[tuple[str, int]]:
    """What each drafter proposes for one position, where it proposes anything."""
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
    row = DraftRow(
        sampling=sampling, gamma=1, num_computed=0, key=f"alpha-{temperature:g}-{number}"
    )
    for name, guesser in guessers.items():
        for token in guesser.guess(row, (), 1)[:1]:
            yield name, token
