"""What a client wants its answer's content to be, in OpenAI's words and in vLLM's. Pure.

`response_format`, vLLM's `structured_outputs` and its older `guided_*` fields all come to one part
of a grammar (`core.grammar`). JSON is written on one line, with a space or none after a comma or
colon: where more whitespace may come, a model may write nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from stanchion.core.errors import RequestRejected
from stanchion.core.grammar import HEAD, TooLarge, bare
from stanchion.core.grammar import check_whole as check_bounds
from stanchion.gateway.body import ChatBody, CompletionBody

Json = dict[str, Any]

ANY = "(?s:.*)"
CHOICES_MAX = 1024
CHOICE_CHARACTERS_MAX = 4096
OPTIONS: Json = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
GUIDED = ("json", "regex", "choice", "grammar")
STRUCTURED = (*GUIDED, "json_object")
NOT_SERVED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace",
              "disable_additional_properties")  # fmt: skip
_ANCHORED = re.compile(r"(?<!\\)(?:\\\\)*\$$")
_DIRECTIVE = re.compile(r"%(\w*)")
_SPECIAL = {"<": "special tokens", "@": "other grammars", "=": "attributes with a value"}


@dataclass(frozen=True)
class Constraint:
    """`part` is one of a grammar's texts; `field` is where the client said so."""

    field: str
    part: Json


def constraint(body: ChatBody | CompletionBody) -> Constraint | None:
    """Raise RequestRejected for what is no constraint, or for several of them."""
    found = [*_response_format(body.response_format), *_structured(body.structured_outputs)]
    for kind in GUIDED:
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found.append(_of(kind, f"guided_{kind}", value))
    if len(found) > 1:
        raise RequestRejected(found[1].field, f"not together with {found[0].field}")
    return found[0] if found else None


def _response_format(said: Any) -> Iterator[Constraint]:
    field = "response_format"
    if said is None:
        return
    kind = said.get("type") if isinstance(said, dict) else None
    match kind:
        case "text":
            return
        case "json_object":
            yield _of("json_object", field, True)
        case "json_schema":
            inner = said.get("json_schema")
            if not isinstance(inner, dict):
                raise RequestRejected(f"{field}.json_schema", "required, and an object")
            yield _of("json", f"{field}.json_schema.schema", inner.get("schema"))
        case _:
            raise RequestRejected(f"{field}.type", "must be text, json_object or json_schema")


def _structured(said: Any) -> Iterator[Constraint]:
    field = "structured_outputs"
    if said is None:
        return
    if not isinstance(said, dict):
        raise RequestRejected(field, f"an object with one of {', '.join(STRUCTURED)}")
    for name in NOT_SERVED:
        if said.get(name) not in (None, False):
            raise RequestRejected(f"{field}.{name}", "not supported by this server; leave it out")
    given = [name for name in STRUCTURED if said.get(name) not in (None, False)]
    if len(given) != 1:
        raise RequestRejected(field, f"exactly one of {', '.join(STRUCTURED)}")
    yield _of(given[0], f"{field}.{given[0]}", said[given[0]])


def _of(kind: str, field: str, value: Any) -> Constraint:
    match kind:
        case "json":
            part = schema_part(_schema(field, value))
        case "json_object":
            part = schema_part({"type": "object"})
        case "regex":
            part = lark_part(f"start: /{regex_text(_text(field, value))}/")
        case "choice":
            part = lark_part("start: " + " | ".join(map(literal, _choices(field, value))))
        case _:
            part = lark_part(own_lark(field, _text(field, value)))
    check_part(field, part)
    return Constraint(field, part)


def check_part(field: str, part: Json) -> None:
    try:
        check_bounds([part])
    except TooLarge as error:
        raise RequestRejected(field, str(error)) from None


def schema_part(schema: Mapping[str, Any]) -> Json:
    return {"json_schema": {**schema, "x-guidance": OPTIONS}}


def lark_part(lark: str) -> Json:
    return {"lark_grammar": HEAD + lark}


def literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _schema(field: str, value: Any) -> Json:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise RequestRejected(field, "must be a JSON schema, an object")
    return value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestRejected(field, "must be a text")
    return value


def _choices(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not 0 < len(value) <= CHOICES_MAX:
        raise RequestRejected(field, f"must be a list of 1 to {CHOICES_MAX} texts")
    for one in value:
        if not isinstance(one, str) or not 0 < len(one) <= CHOICE_CHARACTERS_MAX:
            words = f"each must be a text of 1 to {CHOICE_CHARACTERS_MAX} characters"
            raise RequestRejected(field, words)
    return value


def regex_text(regex: str) -> str:
    """A regular expression as Lark has it between slashes. The whole text is matched, so anchors
    at the ends say nothing."""
    _, inner, _ = anchored(regex)
    escaped = re.sub(r"\\(.)|/", lambda found: found[0] if found[1] else r"\/", inner, flags=re.S)
    return escaped.replace("\n", r"\n")


def anchored(regex: str) -> tuple[bool, str, bool]:
    """Whether it has an anchor in front, it without anchors, whether it has one at its end."""
    first, last = regex.startswith("^"), _ANCHORED.search(regex) is not None
    return first, regex[first : len(regex) - last], last


def own_lark(field: str, lark: str) -> str:
    """A client's grammar: rules and terminals, and nothing that reaches out of them."""
    if "::=" in lark:
        raise RequestRejected(field, "must be a Lark grammar (`start: ...`), not BNF (`::=`)")
    rest = bare(lark)
    for name in _DIRECTIVE.findall(rest):
        if name not in ("import", "ignore"):
            raise RequestRejected(field, f"%{name} is not supported; %import and %ignore are")
    for character, words in _SPECIAL.items():
        if character in rest:
            raise RequestRejected(field, f"{words} ({character}) are not supported in a grammar")
    return lark
