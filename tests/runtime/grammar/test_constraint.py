"""A constraint is a function of the committed tokens, whatever drafts it was asked about in between."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import GrammarKind, GrammarParams
from outrider.runtime.drafters.model.tree import masks_of_level
from outrider.runtime.grammar.constraint import GrammarConstraints

from tests.runtime.grammar.letters import END, V, bits, constraint, constraints, regex, tokenizer

GRAMMARS = ("[ab]c+", "abc(a|b)*", "ab(c|a)", "(ab|ba){2}c?", "a*")
ANY = set(range(V))


def fresh(text: str, committed: tuple[int, ...]):
    one = constraint(text)
    one.commit(committed)
    return one


@pytest.mark.parametrize("text", GRAMMARS)
def test_masks_are_those_of_a_fresh_form_after_any_drafts(text: str) -> None:
    """Chains in random order, trees among them, commits in between: no draft leaves a trace."""
    rng, used, committed = np.random.default_rng(1), constraint(text), ()
    for _ in range(40):
        draft = tuple(rng.integers(0, V, int(rng.integers(0, 5))).tolist())
        if rng.random() < 0.3 and draft:
            parents = tuple(int(rng.integers(0, n + 1)) for n in range(len(draft)))
            used.masks(draft, parents)
        found = used.masks(draft).copy()
        fits = used.fits(draft)
        for place, row in enumerate(found):
            reachable = place <= fits and END not in draft[:place]
            expected = (
                bits(fresh(text, (*committed, *draft[:place])).masks(())[0]) if reachable else ANY
            )
            assert bits(row) == expected
        allowed = sorted(bits(used.masks(())[0]) - {END})
        if not allowed:
            break
        if rng.random() < 0.4:
            token = int(rng.choice(allowed))
            used.commit((token,))
            committed += (token,)


@pytest.mark.parametrize("text", GRAMMARS)
def test_a_trees_masks_are_those_of_the_paths_to_its_nodes(text: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(10):
        size = int(rng.integers(1, 8))
        tokens = tuple(rng.integers(0, V, size).tolist())
        parents = tuple(int(rng.integers(0, n + 1)) for n in range(size))
        masks = constraint(text).masks(tokens, parents)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token))
        for path, row in zip(paths, masks, strict=True):
            assert bits(row) == bits(constraint(text).masks(path)[len(path)])


def test_what_a_drafter_follows_is_what_its_draft_is_judged_by() -> None:
    one = constraint("(ab|ba){2}c?")
    rows = one.begin(3)
    assert bits(rows[0]) == bits(constraint("(ab|ba){2}c?").masks(())[0])
    drafted: list[int] = []
    for place in range(1, 4):
        drafted.append(min(bits(rows[place - 1])))
        one.follow(drafted)
    judged = one.masks(drafted)
    assert np.array_equal(rows[:4], judged)
    assert np.array_equal(judged, constraint("(ab|ba){2}c?").masks(drafted))


def test_the_masks_of_a_trees_level_lie_in_the_columns_of_its_nodes() -> None:
    nodes = [(1, (0,)), (3, (1,)), (4, (4,))]
    masks = masks_of_level(constraint("a(a|b)|bc*"), nodes, [1, 4, 2])
    expected = {
        column: bits(constraint("a(a|b)|bc*").masks(path)[1])
        for (_, path), column in zip(nodes, [1, 4, 2], strict=True)
    }
    assert {column: bits(masks[column]) for column in expected} == expected
    assert len({frozenset(one) for one in expected.values()}) > 1


@pytest.mark.parametrize("text", [*GRAMMARS, "abcabc", "abcabc(a|b)"])
def test_forced_tokens_are_all_that_the_masks_allow(text: str) -> None:
    """Along every text: a forced run's places have one bit each, the same however much was asked for."""
    num_forced, open_ends = 0, [()]
    while open_ends and num_forced < 200:
        committed = open_ends.pop()
        one = fresh(text, committed)
        forced = one.forced(8)
        assert [fresh(text, committed).forced(n) for n in range(4)] == [
            forced[:n] for n in range(4)
        ]
        masks = one.masks(forced)
        assert [bits(masks[place]) for place in range(len(forced))] == [{t} for t in forced]
        num_forced += len(forced)
        if len(committed) < 4:
            allowed = bits(fresh(text, committed).masks(())[0]) - {END}
            open_ends += [(*committed, token) for token in sorted(allowed)]
    assert num_forced > 0 or text == "a*"


def test_a_finished_form_forces_its_end() -> None:
    one = constraint("ab")
    assert one.forced(9) == (3,)
    one.commit((3,))
    assert one.forced(9) == (END,)
    assert bits(one.masks(())[0]) == {END}
    assert one.fits((END, 0)) == 1


def test_one_of_several_end_tokens_is_a_choice_and_not_forced() -> None:
    """Of Llama 3, Gemma and Qwen: which of them ends the answer is the model's to say, and is judged."""
    several = (END, END + 1)
    made = GrammarConstraints(tokenizer(special=("</s>", "<|eot|>")), V + 1, several)
    one = made.constraint(regex("ab"))
    assert one.forced(9) == (3,)
    one.commit((3,))
    assert one.forced(9) == ()
    assert bits(one.masks(())[0], V + 1) == {*several}
    assert [one.fits((end,)) for end in several] == [1, 1]


def test_an_end_token_in_a_draft_takes_nothing_of_the_text_back() -> None:
    """The library counts no end token that it is given after its stop, and would roll back one of the text."""
    one = constraint("ab(c|a)")
    one.commit((3,))
    for _ in range(2):
        assert one.fits((2, END, 2)) == 2
        assert [bits(row) for row in one.masks((2, END, 2))] == [{0, 2}, {END}, ANY, ANY]
        assert bits(one.masks(())[0]) == {0, 2}


def test_tokens_that_do_not_fit_are_an_error() -> None:
    one = constraint("ab(c|a)")
    with pytest.raises(RequestError, match="regex"):
        one.commit((1,))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "a(b"),
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.JSON_SCHEMA, '{"not": {}}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "' + "x" * 4000 + '"}'),
        (GrammarKind.JSON_SCHEMA, "[1"),
        (GrammarKind.LARK, "start: missing"),
        (GrammarKind.LARK, "start: <|endoftext|>"),
    ],
)
def test_a_bad_grammar_is_refused_by_its_fields_name_and_in_few_words(
    kind: GrammarKind, text: str
) -> None:
    with pytest.raises(RequestError) as refused:
        constraints().constraint(GrammarParams(kind=kind, text=text))
    assert refused.value.field == kind.value
    assert len(str(refused.value)) < 200
    assert "x" * 200 not in str(refused.value)


def test_text_that_spells_a_special_token_is_text() -> None:
    """Only an end token ends an answer: "</s>" in a grammar is four tokens, where the tokenizer has one."""
    letters = ("<", "/", "s", ">", "x")
    one = GrammarConstraints(tokenizer(letters), 6, (5,)).constraint(regex("x</s>x"))
    assert one.forced(9) == (4, 0, 1, 2, 3, 4)
    plain = json.loads(tokenizer(letters))
    added = {**plain["added_tokens"][0], "id": 6, "content": "<s>", "special": False}
    plain["added_tokens"].append(added)
    source = json.dumps(plain).encode()
    other = GrammarConstraints(source, 7, (5,)).constraint(regex("x<s>x"))
    assert other.forced(9) == (4, 0, 2, 3, 4)


def test_constraints_of_one_grammar_know_nothing_of_each_other() -> None:
    first, second = constraint("(a|b)c"), constraint("(a|b)c")
    first.commit((0,))
    assert bits(first.masks(())[0]) == {2}
    assert bits(second.masks(())[0]) == {0, 1, 4}
    assert all(
        bits(constraint("(a|b)c").masks(())[0]) == {0, 1, 4} for _ in itertools.repeat(None, 2)
    )


def test_masks_reach_to_the_end_of_a_padded_vocabulary() -> None:
    one = GrammarConstraints(tokenizer(), 70, (END,)).constraint(regex("[ab]c+"))
    masks = one.masks((0,))
    assert masks.shape == (2, 3)
    assert masks.dtype == np.int32
    assert bits(masks[0], 70) == {0, 1, 4}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/definitions/hidden-name"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/definitions/hidden\\u002dname"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://hidden-name.example/a"}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "hidden-name"}'),
        (GrammarKind.JSON_SCHEMA, '{"hidden-name": 1, "not": {}, "x-hidden-name": {}}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "hidden-name"}'),
        (GrammarKind.JSON_SCHEMA, '{"pattern": "(?=hidden-name)"}'),
        (GrammarKind.LARK, 'start: "a" hidden_name'),
        (GrammarKind.LARK, "start: /a/\nhidden_name: start hidden_name_b"),
        (GrammarKind.REGEX, "(?P<hidden_name>a"),
        (GrammarKind.REGEX, r"\p{hidden_name}"),
    ],
)
def test_a_refusal_repeats_nothing_that_the_caller_wrote(kind: GrammarKind, text: str) -> None:
    try:
        constraints().constraint(GrammarParams(kind=kind, text=text))
    except RequestError as error:
        assert "hidden" not in str(error), error
