"""How large a grammar may be: bounds that hold before anything compiles it. Pure.

A grammar is a JSON text in llguidance's words: `{"grammars": [...]}`, each of them a Lark text or a
JSON Schema. The first one is the whole answer's, a Lark text under `HEAD`: so no token is forced.

A compiler of grammars is held up by more than a text's length: by counts that it writes out
(`maxItems`, `{m,n}`, `multipleOf`), and chains of rules and references, which it descends on its
stack. Measured with llguidance 1.7.6: `maxItems` of 10^6 takes seconds and a gigabyte, and a chain
of 617 references, or of 2,007 rules, ends the process. So both are counted here, on the side that
refuses too much.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

HEAD = '%llguidance {"no_forcing": true}\n'
GRAMMAR_BYTES_MAX = 2**18
SCHEMA_BYTES_MAX = 2**16
REGEX_CHARACTERS_MAX = 4096
NESTED_MAX = 64  # levels of JSON
LEVELS_MAX = 512  # of a schema and all that it refers to, one in the other
RULES_MAX = 256  # of one Lark text
PROPERTIES_MAX = 512  # of one schema
COPIES_MAX = 4096  # what all counts of one grammar come to
LENGTH_MAX = 2**16  # minLength and maxLength: these are not written out
WRITTEN_OUT = frozenset(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Properties", "Contains")
)
ELSEWHERE = ("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef")


class TooLarge(Exception):
    """Says which bound a grammar breaks."""


class Part(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One of a grammar's texts. `name` is what the others call it by."""

    name: str = ""
    lark_grammar: str | None = None
    json_schema: Any = None


class Parts(Struct, forbid_unknown_fields=True):
    grammars: Annotated[list[Part], Meta(min_length=1, max_length=1024)]


@dataclass
class Tally:
    """What the counts of a grammar come to so far."""

    copies: int = 0

    def add(self, count: int) -> None:
        self.copies += count
        if self.copies > COPIES_MAX:
            raise TooLarge(f"its counts of repeats and items come to over {COPIES_MAX}")


def check(text: str) -> None:
    """Raise TooLarge, with the bound in words, for what must not be compiled."""
    if len(text.encode()) > GRAMMAR_BYTES_MAX:
        raise TooLarge(f"over {GRAMMAR_BYTES_MAX} bytes in all")
    try:
        parts = msgspec.json.decode(text, type=Parts)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TooLarge(f"no grammar: {error}") from None
    if not (parts.grammars[0].lark_grammar or "").startswith(HEAD):
        raise TooLarge(f"no grammar of an answer: it begins with {HEAD.strip()}")
    check_whole([msgspec.to_builtins(part) for part in parts.grammars])


def check_whole(parts: Sequence[Mapping[str, Any]]) -> None:
    """The same, of its parts as they stand in the text."""
    tally = Tally()
    for part in parts:
        if "lark_grammar" in part:
            check_lark(part["lark_grammar"], tally)
        if "json_schema" in part:
            check_schema(part["json_schema"], tally)


# ---- JSON Schema ----------------------------------------------------------------------------


def check_schema(schema: Any, tally: Tally) -> None:
    walk = _Walk(schema, tally)
    levels = walk.visit(schema, 0)  # first: whatever is nested deeply cannot be encoded
    size = len(msgspec.json.encode(schema))
    if size > SCHEMA_BYTES_MAX:
        raise TooLarge(f"a schema of {size} bytes; at most {SCHEMA_BYTES_MAX}")
    levels += sum(_depth(_at(schema, target)) or levels for target in walk.targets)
    if levels > LEVELS_MAX:
        raise TooLarge(f"with what it refers to, {levels} levels deep; at most {LEVELS_MAX}")


@dataclass
class _Walk:
    """Every dictionary is taken for a schema: a value in an `enum` may be refused as one."""

    root: Any
    tally: Tally
    targets: set[str] = field(default_factory=set)
    properties: int = 0

    def visit(self, value: Any, depth: int) -> int:
        """How many levels there are from here on."""
        if not isinstance(value, dict | list):
            return 0
        if depth == NESTED_MAX:
            raise TooLarge(f"nested more than {NESTED_MAX} deep")
        if isinstance(value, dict):
            self._schema(value)
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max((self.visit(one, depth + 1) for one in inner), default=0)

    def _schema(self, schema: dict[str, Any]) -> None:
        for word, value in schema.items():
            if word in WRITTEN_OUT or word in ("minLength", "maxLength"):
                self._count(word, value)
            elif word == "multipleOf" and isinstance(value, int | float):
                self.tally.add(_coefficient(value))
            elif word == "pattern" and isinstance(value, str):
                self.tally.add(regex_copies(value))
            elif word == "patternProperties" and isinstance(value, dict):
                self.tally.add(sum(map(regex_copies, value)))
            elif word == "properties" and isinstance(value, dict):
                self._named(len(value))
            elif word == "$ref" and isinstance(value, str):
                self._refers(value)
            elif word in ELSEWHERE and isinstance(value, str):
                raise TooLarge(f"{word}: references are of the form #/...")
            elif word == "$id" and isinstance(value, str) and schema is not self.root:
                raise TooLarge("$id: only the whole schema has one")

    def _count(self, word: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        most = COPIES_MAX if word in WRITTEN_OUT else LENGTH_MAX
        if not 0 <= value <= most:
            raise TooLarge(f"{word} is {value}; from 0 to {most}")
        if word in WRITTEN_OUT:
            self.tally.add(int(value))

    def _named(self, properties: int) -> None:
        self.properties += properties
        if self.properties > PROPERTIES_MAX:
            raise TooLarge(f"over {PROPERTIES_MAX} properties in one schema")

    def _refers(self, target: str) -> None:
        if target != "#" and not target.startswith("#/"):
            raise TooLarge(f"$ref: {target[:64]!r} is not of the form #/...")
        self.targets.add(target)


def _coefficient(number: float) -> int:
    """The digits of a number, without its point: how long a way it is around to a multiple."""
    decimal = Decimal(repr(number)) if isinstance(number, float) else Decimal(number)
    if not decimal.is_finite():
        raise TooLarge("multipleOf: no number")
    _, digits, exponent = decimal.normalize().as_tuple()
    zeros = max(int(exponent), 0)
    if len(digits) + zeros > 9:
        return COPIES_MAX + 1
    return int("".join(map(str, digits)) + "0" * zeros)


def _at(schema: Any, target: str) -> Any:
    """What a JSON pointer leads to; None for nothing."""
    for step in target.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdigit() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict):
            schema = schema.get(name)
        else:
            return None
    return schema


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0)


# ---- regular expressions and Lark -----------------------------------------------------------

_REPEAT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_LARK = re.compile(
    r'(?P<comment>//[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)'
)
_LARK_REPEAT = re.compile(r"~\s*(\d+)(?:\s*\.\.\s*(\d+))?")


def regex_copies(pattern: str) -> int:
    """How many atoms counted repeats add once they are written out. What is no regular expression
    has some number too: whoever compiles it will say so."""
    if len(pattern) > REGEX_CHARACTERS_MAX:
        raise TooLarge(f"a regular expression of over {REGEX_CHARACTERS_MAX} characters")
    if _VERBOSE.search(pattern):
        raise TooLarge("a regular expression with the flag x")
    groups, last, at, copies = [0], 0, 0, 0
    while at < len(pattern):
        start, at = at, at + 1
        match pattern[start]:
            case "(":
                groups.append(0)
                last = 0
            case ")" if len(groups) > 1:
                last = groups.pop()
                groups[-1] += last
            case "{" if found := _REPEAT.match(pattern, start):
                more = last * (_most(found.groups()) - 1)
                copies += more
                groups[-1] += more
                last, at = last + more, found.end()
            case "*" | "+" | "?" | "|" | "^" | "$":
                pass
            case character:
                at = _past(pattern, start) if character in "\\[" else at
                last = 1
                groups[-1] += 1
        if copies > COPIES_MAX:
            raise TooLarge(f"a regular expression whose repeats come to over {COPIES_MAX}")
    return copies


def _most(bounds: tuple[str | None, ...]) -> int:
    given = [bound for bound in bounds if bound]
    if any(len(bound) > 9 for bound in given):
        return COPIES_MAX + 1
    return max((int(bound) for bound in given), default=1) or 1


def _past(pattern: str, at: int) -> int:
    """Where an escape ends, or a class, which may have others inside."""
    if found := _ESCAPE.match(pattern, at):
        return found.end()
    depth, at = 1, at + 1
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":  # at the front it is one of the class
        at += 1
    while at < len(pattern) and depth:
        if found := _ESCAPE.match(pattern, at):
            at = found.end()
            continue
        depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 1
    return at


def bare(lark: str) -> str:
    """A Lark text without what stands in its strings, regular expressions and comments."""
    return _LARK.sub(lambda found: " " if found["comment"] is not None else '""', lark)


def check_lark(lark: str, tally: Tally) -> None:
    """Repeats of rules may stand in one another: they count as if all did, and all were inside."""
    rest = bare(lark)
    if rest.count(":") > RULES_MAX:
        raise TooLarge(f"over {RULES_MAX} rules")
    regexes = [found["regex"] for found in _LARK.finditer(lark) if found["regex"] is not None]
    copies = sum(regex_copies(one.rpartition("/")[0][1:]) for one in regexes)
    times = 1
    for found in (*_REPEAT.finditer(rest), *_LARK_REPEAT.finditer(rest)):
        times = min(times * _most(found.groups()), COPIES_MAX + 1)
    tally.add(copies if times == 1 else times * (copies + len(rest.split())))
