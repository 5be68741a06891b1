"""The environment of chat templates: what the sandbox stops, and how a failure is named."""

from __future__ import annotations

from datetime import datetime

import pytest
from outrider.engines.base import BundleError
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.chat import template
from outrider.runtime.serving.chat.template import ChatTemplate

ARGUMENTS = "chat.template_arguments_json"


def render(source: str, max_bytes: int = 1000, **variables: object) -> str:
    made = ChatTemplate("default", source, now=lambda: datetime(2026, 3, 1))
    return made.render(variables, max_bytes, suspect=ARGUMENTS)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "01 Mar 2026"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 2, 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": 2\n}'),
        ("{{ dict(a=1)['a'] + dict.fromkeys('xy') | length }}", "3"),
        ("{% set n = namespace(self=1) %}{% set n.a = 2 %}{{ n.self + n.a }}", "3"),
        ("{% generation %}a{% set b = 1 %}{% endgeneration %}{{ b }}", "a"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ tools }}|{{ nothing }}|{{ messages is none }}", "None||False"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
    ],
)
def test_the_environment_is_that_of_transformers(source: str, text: str) -> None:
    assert render(source, messages=[], tools=None) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{% for i in range(n) %}{% endfor %}",
    ],
)
def test_the_sandbox_names_what_it_is_given(source: str) -> None:
    with pytest.raises(RequestError) as refusal:
        render(source, messages=[], n=10**6)
    assert refusal.value.field == ARGUMENTS


@pytest.mark.parametrize("source", ["{{ messages[0].role.x.y }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_other_failures_are_those_of_the_messages(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template default fails on them") as refusal:
        render(source, messages=[])
    assert refusal.value.field == "chat.messages"


def test_a_refusal_has_the_templates_words_and_no_value() -> None:
    with pytest.raises(RequestError) as refusal:
        render("{{ raise_exception('Unknown role: ' + role) }}", role="secret")
    assert refusal.value.rule == "the chat template default refuses them: Unknown role: ..."


def test_texts_are_bounded_while_they_are_made() -> None:
    assert render("{% for i in range(5) %}é{% endfor %}", max_bytes=10) == "é" * 5
    with pytest.raises(RequestError, match="chat: must be at most 9 bytes"):
        render("{% for i in range(5) %}é{% endfor %}", max_bytes=9)
    # Were it made whole, it would take hours.
    with pytest.raises(RequestError, match="chat: must be at most 1000 bytes"):
        nested = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
        render(nested)


LONG = {
    "empty loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "loops that look ahead": (
        "{% for i in range(9999) %}{% for j in range(9999) %}{% if loop.last %}{% endif %}{% endfor %}{% endfor %}"
    ),
    "filtered loops": (
        "{% for i in range(9999) %}{% for j in range(9999) if j > 9998 %}{% endfor %}{% endfor %}"
    ),
    "loops that call themselves": (
        "{% for i in range(40) recursive %}{{ loop(range(40)) if loop.depth < 9 }}{% endfor %}"
    ),
    "turns of a loop that calls itself": (
        "{% for i in [1] recursive %}{% if loop.depth < 2 %}{% set _ = loop(range(20000)) %}{% endif %}{% endfor %}"
    ),
    "turns of a loop that calls itself by name": (
        "{% for i in [1] recursive %}{% if loop.depth < 2 %}"
        "{% set _ = loop(iterable=range(20000)) %}{% endif %}{% endfor %}"
    ),
    "macros": "{% macro f(n) %}{% if n %}{% set _ = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    "parts": "{% for i in range(9999) %}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("source", LONG.values(), ids=LONG)
def test_steps_are_bounded_whatever_repeats_them(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these would take minutes or years."""
    monkeypatch.setattr(template, "MOST_STEPS", 10_000)
    with pytest.raises(RequestError, match="the chat template default takes too long on them"):
        render(source)


def test_time_is_bounded_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr(template.time, "thread_time", lambda: float(next(times)))
    with pytest.raises(RequestError, match="takes too long"):
        render("{% for i in range(1000) %}{% endfor %}")
    # Three seconds at the third look.
    assert next(times) == 4


def test_a_template_may_look_at_each_message_for_each_of_them() -> None:
    source = "{% for a in m %}{% for b in m %}{% if a == b %}{{ loop.length }}{% endif %}{% endfor %}{% endfor %}"
    assert render(source, max_bytes=10_000, m=[*range(900)]) == "900" * 900


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nothing %}"])
def test_a_wrong_template_is_refused_with_the_bundle(source: str) -> None:
    with pytest.raises(BundleError, match="chat template default: "):
        ChatTemplate("default", source)
