"""What ``outrider.LLM`` takes as prompts: texts, token ids, and vLLM's dicts of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np


class TextPrompt(TypedDict):
    """A text, as vLLM writes it."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, as vLLM writes them."""

    prompt_token_ids: Sequence[int]


Text: TypeAlias = str | Sequence[int]
"""A prompt: text, or token ids."""
AnyPrompt: TypeAlias = Text | TextPrompt | TokensPrompt


def checked(prompts: Any) -> Any:
    """Return what may be prompts, one alone in a dict as a list of it.

    Raises:
        TypeError: it is none.
    """
    if isinstance(prompts, Mapping):
        return [prompts]
    prompts = listed(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise TypeError(
            f"prompts must be a text, a list of token ids, or a list of either, not {type(prompts).__name__}"
        )
    return prompts


def plain(prompt: Any) -> Any:
    """Return a prompt out of its dict.

    Raises:
        TypeError: the dict has other keys.
    """
    if not isinstance(prompt, Mapping):
        return listed(prompt)
    if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
        raise TypeError(
            f"a prompt's dict must have prompt or prompt_token_ids, not {', '.join(map(str, prompt)) or 'nothing'}"
        )
    (plain,) = prompt.values()
    return listed(plain)


def listed(values: Any) -> Any:
    """Return an array of numpy as a list, and anything else as it is."""
    return values.tolist() if isinstance(values, np.ndarray) else values
