"""What a tool's schema says of its arguments, as far as GLM's format needs it. Pure.

GLM writes an argument's value as plain text where it is a string and as JSON otherwise, without
saying which: only the schema knows. Where it does not (no type, a reference, a tool that nobody
declared), text that is JSON is taken for JSON, as vLLM's and SGLang's parsers do.
"""

from __future__ import annotations

from typing import Any

import msgspec

Types = frozenset[str]  # of JSON Schema; empty: nothing is known

STRING: Types = frozenset({"string"})
BRANCHES_DEPTH_MAX = 4
_BRANCHES = ("anyOf", "oneOf", "allOf")


def argument_types(parameters: Any) -> dict[str, Types]:
    """By name, for each argument that the schema declares a type for."""
    declared = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(declared, dict):
        return {}
    return {name: types for name, one in declared.items() if (types := _types(one, 0))}


def written(text: str, types: Types) -> str:
    """An argument's text as a JSON value, always a valid one."""
    if types == STRING:
        return _string(text)
    found = text.strip()
    kinds = _kinds(found)
    plain = "string" in types and ("string" in kinds or not kinds & types)
    # JSON stays as it was written: no digit of a number is lost.
    return _string(text) if plain or not kinds else found


def escaped(text: str) -> str:
    """Inside of a JSON string. Cutting the text anywhere cuts the result in the same places."""
    return _string(text)[1:-1]


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _types(schema: Any, depth: int) -> Types:
    if not isinstance(schema, dict) or depth > BRANCHES_DEPTH_MAX:
        return frozenset()
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset({said})
    if isinstance(said, list):
        return frozenset(one for one in said if isinstance(one, str))
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset().union(*map(_names, values))
    for word in _BRANCHES:
        if isinstance(branches := schema.get(word), list) and branches:
            found = [_types(branch, depth + 1) for branch in branches]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def _kinds(text: str) -> Types:
    """The schema's words for a JSON text; none if it is no JSON."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return frozenset()
    return _names(value)


def _names(value: Any) -> Types:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return STRING
        case None:
            return frozenset({"null"})
        case dict():
            return frozenset({"object"})
        case _:
            return frozenset({"array"})
