"""Functions and what their docstrings say they do, from Python source."""

import ast
from collections.abc import Iterator
from pathlib import Path

_DOCSTRING_LENGTHS = range(15, 401)  # characters


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Each function's code without its docstring, and the docstring's first paragraph in one line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        said = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if len(said) in _DOCSTRING_LENGTHS:
            node.body = node.body[1:]
            yield ast.unparse(node), said


def function_pairs(path: Path) -> dict[str, str]:
    """The documented functions of one file; empty where it is not Python of this version in UTF-8."""
    try:
        return dict(documented_functions(path.read_text("utf-8")))
    except (SyntaxError, UnicodeDecodeError):
        return {}
