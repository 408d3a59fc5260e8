"""Every field of a recording has a privacy class; one without any fails here (D32)."""

from __future__ import annotations

from typing import Annotated, get_type_hints

import msgspec
import pytest
from msgspec import Struct, structs

from stanchion.core.recording import Header, Recorded, Times, classes, reached, structs_in


class Inner(Struct):
    kept: Annotated[int, "shape"]
    preview: str


class Outer(Struct):
    inner: Annotated[tuple[Inner, ...] | None, "parts"]
    note: Annotated[str, "no class of ours"]


def unclassified(kind: type[Struct]) -> list[str]:
    return [
        f"{one.__name__}.{field.name}"
        for one in reached(kind)
        for field in structs.fields(one)
        if field.name not in classes(one)
    ]


@pytest.mark.parametrize("kind", [Header, Recorded])
def test_every_field_has_a_privacy_class(kind: type[Struct]) -> None:
    assert unclassified(kind) == []


def test_a_field_without_a_class_is_found() -> None:
    assert unclassified(Outer) == ["Outer.note", "Inner.preview"]


def test_parts_are_structs_and_structs_are_parts() -> None:
    for one in reached(Recorded):
        for field in structs.fields(one):
            holds = any(True for _ in structs_in(get_type_hints(one)[field.name]))
            assert (classes(one)[field.name] == "parts") == holds, (one, field.name)


def test_what_is_not_known_stays_unknown() -> None:
    one = Recorded(request="a", session="s", times=Times(arrival=0.25), input_tokens=3)
    read = msgspec.json.decode(msgspec.json.encode(one), type=Recorded)
    assert read == one
    assert read.output_tokens is None and read.times.end is None
