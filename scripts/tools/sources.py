"""Sources of benchmarks of encoder-decoder models: what a machine with Python has, the same on all of one version."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from scripts.tools.common import PROMPT_MODULES

TRANSLATE, SUMMARIZE = "translate English to German: ", "summarize: "
"""What the translating demo pair's sources begin with."""
TASKS = {"translate": TRANSLATE, "summarize": SUMMARIZE}
_MESSAGE_MODULES = (
    "shutil", "subprocess", "socket", "ssl", "zipfile", "tarfile", "tempfile", "random", "statistics", "pickle",
    "plistlib", "ipaddress", "mailbox", "optparse", "fractions", "datetime", "threading", "textwrap", "string", "uuid",
    "inspect", "types",
)  # fmt: skip
_MESSAGE_CHARACTERS = range(24, 200)
_FUNCTION_CHARACTERS = range(100, 420)


def _trees(modules: Sequence[str]) -> Iterator[ast.Module]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in modules:
        yield ast.parse((library / f"{name}.py").read_text())


def messages() -> Iterator[str]:
    """English messages that modules of the standard library raise their errors with, each once."""
    found: dict[str, None] = {}
    for tree in _trees(_MESSAGE_MODULES):
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for part in node.exc.args:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        found.setdefault(part.value)
    yield from (text for text in found if len(text) in _MESSAGE_CHARACTERS and " " in text)


def functions() -> Iterator[str]:
    """Functions of the standard library without their docstrings."""
    for tree in _trees(PROMPT_MODULES):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                node.body = node.body[1:]
                text = ast.unparse(node)
                if len(text) in _FUNCTION_CHARACTERS:
                    yield text


def task_sources(task: str, count: int) -> list[str]:
    """At most ``count`` sources of a task of ``TASKS``, with what they begin with."""
    texts = messages() if task == "translate" else functions()
    return [TASKS[task] + text for text in islice(texts, count)]


def sources_of_length(tokenizer: Tokenizer, count: int, num_tokens: int) -> list[list[int]]:
    """Sources of ``num_tokens`` tokens each, end token included: messages one behind the other, translated together.

    Raises:
        ValueError: there are not that many.
    """
    every = list(messages())
    made = []
    for first in range(count):
        if not every[first:]:
            raise ValueError(f"only {first} sources of {num_tokens} tokens")
        text = " ".join(every[first:] + every[:first])[: 16 * num_tokens]
        ids = tokenizer.encode(TRANSLATE + text).ids
        made.append([*ids[: num_tokens - 1], ids[-1]])
    return made
