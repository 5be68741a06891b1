"""Known mistakes, put into the source one at a time, so that tests are known to fail on them.

A mutant is a module's source with one place changed. It is compiled, and the functions of the real module are given its
code, so that they are mutants wherever they have been imported to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType

import pytest


def put_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    """Change the one place of a module's source that reads ``old``."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"the mutation must hit one place: {old}"
    mutant = compile(source.replace(old, new), inspect.getfile(module), "exec", dont_inherit=True)
    codes = {code.co_qualname: code for code in codes_of(mutant)}
    for function in functions_of(module, module.__name__):
        code = codes.get(function.__qualname__, function.__code__)
        if code != function.__code__:
            monkeypatch.setattr(function, "__code__", code)


def put_in_loops(monkeypatch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    """The same in a module of compiled loops, which then run as the Python that they are written in."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"the mutation must hit one place: {old}"
    plain = source.replace(
        "import njit_exact\n",
        "import njit_exact as _\n\ndef njit_exact(*_):\n    return lambda f: f\n",
    )
    names: dict[str, object] = {"__name__": module.__name__}
    exec(compile(plain.replace(old, new), inspect.getfile(module), "exec"), names)
    for function in [one for one in vars(module) if one in names and one.islower()]:
        monkeypatch.setattr(module, function, names[function])


def assert_caught(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    old: str,
    new: str,
    killer: Callable[[], object],
    errors: tuple[type[Exception], ...] = (AssertionError,),
) -> None:
    """The test ``killer`` passes, and with the mutation in place fails with one of ``errors``."""
    killer()
    put_in(monkeypatch, module, old, new)
    with pytest.raises(errors):
        killer()


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Code of every function within."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from codes_of(inner)


def functions_of(owner: object, module_name: str) -> Iterator[FunctionType]:
    """Functions of a module and methods of its classes, without what they are wrapped in."""
    for value in vars(owner).values():
        value = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if getattr(value, "__module__", None) != module_name:
            continue
        if isinstance(value, type):
            yield from functions_of(value, module_name)
        elif isinstance(value, FunctionType):
            yield value
