"""A model's chat template, rendered as `transformers` renders it, in jinja2's sandbox.

A checkpoint's template is untrusted code, and so are the messages it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stanchion.core.errors import RequestRejected


class ChatTemplate:
    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self.source = source
        self._template = environment.from_string(source)
        self._constants = {name: value for name, value in constants.items() if value}

    def mentions(self, *words: str) -> bool:
        return all(word in self.source for word in words)

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        try:
            return self._template.render(messages=messages, **(self._constants | settings))
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # The template refused these messages, or does not know what to make of them.
            raise RequestRejected("messages", f"the chat template says: {error}") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks text for training; serving renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(wanted: str) -> str:
    return datetime.now().strftime(wanted)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip
