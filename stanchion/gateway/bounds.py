"""A field's bound in words, read off its type: what an error tells a client to send instead."""

from __future__ import annotations

from functools import cache
from typing import Any, get_type_hints

import msgspec

_KINDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minLength": "of {} or more characters",
    "maxLength": "of at most {} characters",
    "minItems": "of {} or more items",
    "maxItems": "of at most {} items",
    "maxProperties": "of at most {} entries",
}


@cache
def bound_in_words(body: type, name: str) -> str:
    """`it must be a number at least 0.0 and at most 2.0`"""
    annotation = get_type_hints(body, include_extras=True).get(name)
    if annotation is None:
        return "it must be one JSON object"
    schema = msgspec.json.schema(annotation)
    parts = schema.get("anyOf", [schema])
    return "it must be " + " or ".join(_part(part) for part in parts if part.get("type") != "null")


def _part(schema: dict[str, Any]) -> str:
    kind = _KINDS.get(schema.get("type", ""), "an object")
    limits = [words.format(schema[key]) for key, words in _LIMITS.items() if key in schema]
    inner = schema.get("items") or schema.get("additionalProperties")
    each = f", each {_part(inner)}" if isinstance(inner, dict) and "type" in inner else ""
    return f"{kind} {' and '.join(limits)}".strip() + each
