"""A record without content, by the privacy class of each field. Pure.

An allow-list: what has no class is a Bug, never kept. Structure stays exactly: who shares how much
with whom, lengths, gaps, the order of a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from stanchion.core.errors import Bug
from stanchion.core.recording import Header, Level, Privacy, Recorded, classes
from stanchion.lab.anonymise.key import Key

WORD = re.compile(r"[a-z_]{0,32}")  # all that a closed set of ours can say
Some = TypeVar("Some", bound=Struct)
Rule = Callable[[Any], Any]


@dataclass(frozen=True)
class Shield:
    """`time_step_s`: all times are rounded down to it; 0 keeps them exactly."""

    key: Key
    time_step_s: float = 0.0

    def record(self, one: Recorded) -> Recorded:
        """Without content; what was chained per tenant stays so."""
        bare = structs.replace(one, content=None)
        return self._shielded(bare, self._rules(one.tenant))

    def header(self, header: Header, level: Level) -> Header:
        """No wall clock: only differences of times are left."""
        return structs.replace(header, origin_unix_s=None, level=level)

    def _rules(self, tenant: str) -> Mapping[Privacy, Rule]:
        return {
            "shape": _shape,
            "time": self._time,
            "public": lambda value: value,
            "name": self._name,
            "hash": _hashed(self.key.hasher(tenant)),
        }

    def _shielded(self, one: Some, rules: Mapping[Privacy, Rule]) -> Some:
        known, changed = classes(type(one)), dict[str, Any]()
        for field in structs.fields(one):
            privacy, value = known.get(field.name), getattr(one, field.name)
            if privacy is None:
                raise Bug(f"{type(one).__name__}.{field.name} has no privacy class")
            if privacy == "parts":
                changed[field.name] = self._parts(value, rules)
            elif privacy == "content":
                if field.default is msgspec.NODEFAULT:
                    raise Bug(f"{type(one).__name__}.{field.name}: content that cannot be left out")
                changed[field.name] = field.default
            else:
                changed[field.name] = None if value is None else rules[privacy](value)
        return structs.replace(one, **changed)

    def _parts(self, value: Any, rules: Mapping[Privacy, Rule]) -> Any:
        if isinstance(value, tuple):
            return tuple(self._shielded(one, rules) for one in value)
        return None if value is None else self._shielded(value, rules)

    def _time(self, value: float) -> float:
        step = self.time_step_s
        return floor(value / step) * step if step else value

    def _name(self, value: str | int) -> str | int:
        if isinstance(value, int):
            return self.key.number("seed", str(value).encode()) >> 1
        return self.key.name(value)


def _hashed(hasher: Callable[[str], str]) -> Rule:
    return lambda value: hasher(value) if isinstance(value, str) else tuple(map(hasher, value))


def _shape(value: Any) -> Any:
    """Numbers as they are; a word that no closed set of ours has is `other`."""
    if isinstance(value, str) and not WORD.fullmatch(value):
        return "other"
    return value
