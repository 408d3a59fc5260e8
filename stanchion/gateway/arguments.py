"""What the arguments of a strict tool may be, as GLM writes them. Pure.

An argument that can only be a text is written plainly, any other as JSON (`toolschema`), so a
schema comes to one of three: some texts, a plain text that regular expressions match, or JSON that
follows a schema. What would be read back as something else than it was checked as is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from stanchion.core.errors import RequestRejected
from stanchion.gateway.markup import KEY_END, SPACE, VALUE_END
from stanchion.gateway.structured import ANY, Json, anchored, regex_text, schema_part
from stanchion.gateway.toolschema import STRING, Types, argument_types, written

SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
TEXT_WORDS = NOTES | {"type", "minLength", "maxLength", "pattern"}
TABLES = ("$defs", "definitions")


@dataclass(frozen=True)
class Literals:
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Plain:
    """Any text that all of these match, whole."""

    regexes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    part: Json  # of a grammar


@dataclass(frozen=True)
class Value:
    text: Literals | Plain | Checked
    required: bool


def value_of(where: str, parameters: Mapping[str, Any]) -> dict[str, Value]:
    """By name, in the schema's order. Raise RequestRejected for what cannot be held to."""
    declared = parameters.get("properties", {})
    needed = parameters.get("required", [])
    if parameters.get("type", "object") != "object" or not isinstance(declared, dict):
        raise RequestRejected(where, "under `strict` it must be a schema of type object")
    if not isinstance(needed, list) or not {*map(str, needed)} <= declared.keys():
        raise RequestRejected(f"{where}.required", "names of declared properties")
    types = argument_types(parameters)
    tables = {name: parameters[name] for name in TABLES if name in parameters}
    values = {}
    for name, schema in declared.items():
        here = f"{where}.properties.{name}"
        if not name or name.strip(SPACE) != name or KEY_END in name:
            raise RequestRejected(here, "no name that an argument could have")
        text = _text(here, schema, types.get(name, frozenset()), tables)
        values[name] = Value(text, name in needed)
    return values


def _text(where: str, schema: Any, types: Types, tables: Json) -> Literals | Plain | Checked:
    if not isinstance(schema, dict):
        raise RequestRejected(where, "must be a schema, an object")
    if isinstance(values := schema.get("enum"), list) and values:
        return _literals(where, values, types)
    if "const" in schema:
        return _literals(where, [schema["const"]], types)
    if types == STRING and "$ref" not in schema:
        return Plain(_regexes(where, schema))
    if "string" in types:
        if not types <= SCALARS or not _bare(schema):
            words = "under `strict`, a text may be mixed with null, boolean, integer and number"
            raise RequestRejected(where, f"{words}, of no further condition, and with nothing else")
        return Plain()
    _check_references(where, schema)
    if VALUE_END in msgspec.json.encode(schema | tables).decode():
        raise RequestRejected(where, f"{VALUE_END} cannot be written in an argument")
    return Checked(schema_part(schema | tables))


def _literals(where: str, values: list[Any], types: Types) -> Literals:
    texts = []
    for value in values:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if isinstance(value, str) and not types:
            text = msgspec.json.encode(value).decode()
        if VALUE_END in text or not text or msgspec.json.decode(written(text, types)) != value:
            raise RequestRejected(where, f"{value!r} cannot be written as an argument")
        texts.append(text)
    return Literals(tuple(texts))


def _regexes(where: str, schema: Json) -> tuple[str, ...]:
    if not _bare(schema) and (more := sorted(schema.keys() - TEXT_WORDS)):
        raise RequestRejected(f"{where}.{more[0]}", "not supported for a text under `strict`")
    found = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        if not all(isinstance(one, int) for one in (least, most) if one != ""):
            raise RequestRejected(where, "minLength and maxLength must be integers")
        found.append(f"(?s:.{{{least},{most}}})")
    if "pattern" in schema:
        found.append(_somewhere(where, schema["pattern"]))
    return tuple(found)


def _somewhere(where: str, pattern: Any) -> str:
    """JSON Schema's patterns match anywhere in a text."""
    if not isinstance(pattern, str):
        raise RequestRejected(f"{where}.pattern", "must be a text")
    first, _, last = anchored(pattern)
    if (first or last) and "|" in pattern:
        raise RequestRejected(f"{where}.pattern", "anchors together with | are not supported")
    inner = regex_text(pattern)
    return f"{'' if first else ANY}(?:{inner}){'' if last else ANY}"


def _bare(schema: Any) -> bool:
    """Nothing but types, however they are put together."""
    if not isinstance(schema, dict) or not schema.keys() <= NOTES | {"type", "anyOf", "oneOf"}:
        return False
    branches = [schema[word] for word in ("anyOf", "oneOf") if word in schema]
    return all(isinstance(one, list) and all(map(_bare, one)) for one in branches)


def _check_references(where: str, schema: Any) -> None:
    if isinstance(schema, dict):
        target = schema.get("$ref")
        if isinstance(target, str) and not target.startswith(tuple(f"#/{one}/" for one in TABLES)):
            raise RequestRejected(f"{where}.$ref", f"must point into {' or '.join(TABLES)}")
    inner = schema.values() if isinstance(schema, dict) else schema
    if isinstance(schema, dict | list):
        for one in inner:
            _check_references(where, one)
