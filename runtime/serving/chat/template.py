"""Chat templates, rendered byte for byte as Transformers 5.23 renders them, and without it.

A template is code of the bundle's maker, never of a request. The sandbox keeps it from attributes of Python's objects.
Texts are bounded, those it gets and the one it makes; so are its steps, which are turns of loops and calls, and the
processor's time between two of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from outrider.engines.base import BundleError
from outrider.runtime.core.errors import RequestError

MESSAGES_FIELD = "chat.messages"
_MOST_QUOTED = 200
MOST_STEPS = 1_000_000
"""Of one text: as many as a template takes that looks at each of 1,000 messages for each of them."""
LIMIT_S = 2.0
"""Seconds of the processor."""
_LOOKS_EVERY = 64


class ChatTemplate:
    """One template of a bundle.

    Args:
        name: in the bundle.
        source: Jinja.
        now: the time of day, for templates that write the date.

    Attributes:
        source: as given.
        literals: the texts that stand in the template: what it writes as it is, and its string constants.

    Raises:
        BundleError: it cannot be compiled.
    """

    def __init__(self, name: str, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._compiled = _counted(environment, environment.parse(source))
        # Whatever the compiler makes of a wrong text: TemplateSyntaxError for most, RecursionError for some.
        except (jinja2.TemplateError, RecursionError, ValueError, TypeError) as error:
            raise BundleError(f"chat template {name}: {error}") from error
        self._name = name
        self.source = source
        constants = (node.value for node in tree.find_all(jinja2.nodes.Const))
        self.literals = frozenset(
            [
                *(node.data for node in tree.find_all(jinja2.nodes.TemplateData)),
                *(value for value in constants if isinstance(value, str)),
            ]
        )

    def render(self, variables: Mapping[str, Any], max_bytes: int, suspect: str) -> str:
        """Return the text that a template makes of its variables.

        Args:
            variables: plain JSON values.
            max_bytes: of the text, in UTF-8; marks of ``conversation`` included.
            suspect: the field that is named where the sandbox stops the template.

        Raises:
            RequestError: the template refuses them, fails on them, or makes too long a text of them.
        """
        parts, size = [], 0
        steps = _Steps()
        _STEPS.set(steps)
        # Any exception of any of its expressions ends a template; all of them are answers to what it was given.
        try:
            for part in self._compiled.generate(variables):
                steps.take()
                size += len(part.encode("utf-8", "surrogatepass"))
                if size > max_bytes:
                    rule = f"must be at most {max_bytes} bytes of UTF-8 when it is rendered"
                    raise RequestError("chat", rule)
                parts.append(part)
        except RequestError:
            raise
        except _TooLongError as error:
            rule = f"the chat template {self._name} takes too long on them"
            raise RequestError(MESSAGES_FIELD, rule) from error
        except _Refusal as error:
            raise RequestError(MESSAGES_FIELD, self._refusal(str(error))) from error
        except Exception as error:
            is_stopped = isinstance(error, (SecurityError, OverflowError, MemoryError))
            rule = f"the chat template {self._name} fails on them: {type(error).__name__}"
            raise RequestError(suspect if is_stopped else MESSAGES_FIELD, rule) from error
        return "".join(parts)

    def _refusal(self, message: str) -> str:
        """Return a template's own words as far as they stand in it: what it adds to them may be a caller's value."""
        known = [one for one in self.literals if message.startswith(one)]
        words = max(known, key=len, default="").strip()[:_MOST_QUOTED]
        line = "".join(one if one.isprintable() else " " for one in words)
        rest = "" if len(line) == len(message.strip()) else " ..."
        return f"the chat template {self._name} refuses them" + (f": {line}{rest}" if line else "")


class _TooLongError(Exception):
    """A template takes more steps, or more time, than it may."""


class _Steps:
    """Counts the steps of one text."""

    def __init__(self) -> None:
        self._num = 0
        self._until_s = time.thread_time() + LIMIT_S

    def take(self) -> None:
        """Count one more.

        Raises:
            _TooLongError: it is one too many, or the time is over.
        """
        self._num += 1
        is_late = self._num % _LOOKS_EVERY == 0 and time.thread_time() > self._until_s
        if is_late or self._num > MOST_STEPS:
            raise _TooLongError


_STEPS: ContextVar[_Steps] = ContextVar("steps")
_COUNTED = "outrider_counted"


def _turns(value: Iterable[Any]) -> Iterator[Any]:
    """Yield what a loop runs over, and count its turns."""
    steps = _STEPS.get()
    for one in value:
        steps.take()
        yield one


def _counted(environment: jinja2.Environment, tree: jinja2.nodes.Template) -> jinja2.Template:
    """Return the template of a tree whose loops count their turns."""
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(loop.iter, _COUNTED, [], [], None, None)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls counted."""

    # ``self`` may be a name of the template's.
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        _STEPS.get().take()
        environment, context, called, *given = args
        if isinstance(called, LoopContext):  # of a recursive loop, which runs over what it is given
            given[:1] = map(_turns, given[:1])
            kwargs = {name: _turns(value) for name, value in kwargs.items()}
        return ImmutableSandboxedEnvironment.call(environment, context, called, *given, **kwargs)


class _Refusal(jinja2.TemplateError):
    """What a template raises itself."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Return the body, whose names are its own as those of a call are."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """Python's ``dict`` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's ``namespace`` without names of Python's own."""

    # ``self`` may be a name of the template's.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace takes no names that begin with an underscore")


def _environment(now: Callable[[], datetime]) -> _Environment:
    """Return what Transformers renders chat templates in.

    Source: transformers 5.23.0, ``utils/chat_template_utils.py``, ``_cached_compile_jinja_template``.
    """
    found = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.filters[_COUNTED] = _turns
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = lambda form: now().strftime(form)
    found.globals["dict"] = _Dict()
    found.globals["namespace"] = _Namespace
    return found


def _refuse(message: object) -> None:
    raise _Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would write HTML's signs as escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
