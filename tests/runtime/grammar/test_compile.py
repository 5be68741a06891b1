"""Grammars are tried in a process that bounds each of them, and answers the next one."""

from __future__ import annotations

import pytest
from outrider.runtime.core.errors import InternalError, RequestError
from outrider.runtime.core.params import GrammarKind, GrammarParams
from outrider.runtime.grammar import compile as compiling
from outrider.runtime.grammar.child import NO_TEXT, TOO_LARGE, TOO_LONG
from outrider.runtime.grammar.compile import GrammarCompiler

from tests.runtime.grammar.letters import END, V, constraints, regex, tokenizer

# Longer than any that a server takes: compiled in a tenth of a second, where timers tick in hundredths.
HEAVY = "|".join(f"({'[abc]?' * 40}{letter}){{3}}" for letter in "abc" * 400)


@pytest.fixture(scope="module")
def compiler():
    found = GrammarCompiler(tokenizer(), V, (END,), constraints=constraints())
    yield found
    found.close()


def rule_of(compiler: GrammarCompiler, params: GrammarParams) -> str:
    with pytest.raises(RequestError) as refused:
        compiler.prepare(params)
    assert refused.value.field == params.kind.value
    return refused.value.rule


def test_good_grammars_pass_and_bad_ones_are_refused_again_and_again(compiler) -> None:
    for _ in range(2):
        compiler.prepare(regex("ab*c"))
        assert rule_of(compiler, regex("a(b")) == "unclosed group"
        assert rule_of(compiler, regex("d")) == NO_TEXT


def test_a_schema_is_json_and_not_nested_too_deep(compiler) -> None:
    def schema(text: str) -> GrammarParams:
        return GrammarParams(kind=GrammarKind.JSON_SCHEMA, text=text)

    assert rule_of(compiler, schema("{bad")) == "must be JSON"
    deep = '{"items":' * 40 + "{}" + "}" * 40
    assert rule_of(compiler, schema(deep)) == "must be nested at most 32 deep"
    assert rule_of(compiler, schema("[" * 4000)) == "must be nested at most 32 deep"


def test_a_grammar_beyond_its_time_is_refused_and_the_next_one_served(compiler) -> None:
    quick = GrammarCompiler(tokenizer(), V, (END,), limit_s=0.01)
    assert rule_of(quick, regex(HEAVY)) == TOO_LONG
    quick._limits["limit_s"] = 2.0
    quick.prepare(regex("a"))
    quick.close()


def test_a_grammar_beyond_its_memory_is_refused_and_the_next_one_served(compiler) -> None:
    small = GrammarCompiler(tokenizer(), V, (END,), limit_bytes=32 << 20)
    assert rule_of(small, regex(HEAVY)) == TOO_LARGE
    small.prepare(regex("a"))
    small.close()


def test_a_process_that_was_killed_is_replaced(compiler, caplog) -> None:
    compiler.prepare(regex("abc"))
    compiler._child._connection.close()
    with pytest.raises(InternalError):
        compiler.prepare(regex("abcb"))
    assert "grammars cannot be tried" in caplog.text
    compiler.prepare(regex("abcb"))


def test_what_was_found_out_is_kept_within_bounds(compiler, monkeypatch) -> None:
    monkeypatch.setattr(compiling, "MOST_TOLD", 3)
    compiler._told.clear()
    for length in range(5):
        compiler.prepare(regex("b" * (10 + length)))
        assert len(compiler._told) >= 3 or length < 3
    tried: list[object] = []
    monkeypatch.setattr(compiler, "_try", lambda params: tried.append(params) or "")
    for length in (4, 0):
        compiler.prepare(regex("b" * (10 + length)))
    assert tried == [regex("b" * 10)]
