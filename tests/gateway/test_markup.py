"""GLM's markup is read the same for every cut of the text (D19), and nothing of it is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stanchion.core.outcome import Completed, PeerLost
from stanchion.gateway.choice import ChoiceFold, Style
from stanchion.gateway.markup import (
    CALL,
    CallArguments,
    CallClosed,
    CallCut,
    CallOpened,
    Content,
    Markup,
    MarkupFold,
    Part,
    Reasoning,
    merged,
)
from stanchion.gateway.stops import StopSet
from stanchion.gateway.toolschema import STRING, argument_types, escaped, written

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "rows": {"type": "array", "items": {"type": "object"}},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        "mode": {"enum": ["fast", "slow"]},
    },
}
TOOLS = {"write": argument_types(SCHEMA), "now": {}}
BYTES = tuple(bytes([byte]) for byte in range(256))
BOTH = Markup(reasoning=True, tools=TOOLS)


def call(name: str, arguments: dict[str, str], lines: bool) -> str:
    """As GLM-4.5 (with line breaks) or GLM-4.7 and GLM-5 write it."""
    end = "\n" if lines else ""
    said = "".join(
        f"<arg_key>{key}</arg_key>{end}<arg_value>{value}</arg_value>{end}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{end}{said}</tool_call>"


NASTY = (
    '{"a": [1, "}"]}\n"quoted" \\ <tool_call> </tool_call> <arg_key> </arg_valu <think> é 汉 👩‍👧'
)
CALLS = [
    ("write", {"path": "/tmp/x", "text": NASTY}),
    ("write", {"count": "3", "rows": '[{"a": {"b": [1, 2]}}, {}]', "path": ""}),
    ("write", {"maybe": "null", "either": "7.50", "mode": "fast", "text": "1"}),
    ("now", {}),
    ("undeclared", {"n": "12", "s": "plain", "o": '{"x": "</tool_call>"}'}),
]
EXPECTED = [
    {"path": "/tmp/x", "text": NASTY},
    {"count": 3, "rows": [{"a": {"b": [1, 2]}}, {}], "path": ""},
    {"maybe": None, "either": 7.5, "mode": "fast", "text": "1"},
    {},
    {"n": 12, "s": "plain", "o": {"x": "</tool_call>"}},
]


def cuts(text: str, sizes: Sequence[int]) -> Iterator[str]:
    at = turn = 0
    while at < len(text):
        yield text[at : at + sizes[turn % len(sizes)]]
        at, turn = at + sizes[turn % len(sizes)], turn + 1


def read(text: str, sizes: Sequence[int], markup: Markup = BOTH) -> tuple[Part, ...]:
    fold = MarkupFold(markup)
    parts = [part for piece in cuts(text, sizes) for part in fold.push(piece)]
    return merged([*parts, *fold.finish()])


def whole(text: str, markup: Markup = BOTH) -> tuple[Part, ...]:
    return read(text, [max(1, len(text))], markup)


def arguments_of(parts: Sequence[Part], index: int) -> str:
    return "".join(
        part.text for part in parts if isinstance(part, CallArguments) and part.index == index
    )


# ---- whole calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_call_is_read_by_its_schema(number: int, lines: bool):
    parts = whole(call(*CALLS[number], lines))
    assert parts[0] == CallOpened(0, CALLS[number][0]) and parts[-1] == CallClosed(0)
    assert json.loads(arguments_of(parts, 0)) == EXPECTED[number]


@pytest.mark.parametrize("lines", [True, False])
def test_two_hundred_random_cuts_read_as_one(lines: bool):
    picks = random.Random(19)
    end = "\n" if lines else ""
    text = f"{end}<think>hm <tool_call>\n\n</think>{end}I will.\n" + end.join(
        call(*one, lines) for one in CALLS
    )
    expected = whole(text)
    assert expected[:2] == (Reasoning("hm <tool_call>"), Content("I will."))
    for index, arguments in enumerate(EXPECTED):
        assert json.loads(arguments_of(expected, index)) == arguments
    for _ in range(200):
        assert read(text, [picks.randint(1, 40) for _ in range(picks.randint(1, 30))]) == expected
    for size in range(1, 9):
        assert read(text, [size]) == expected


def test_fifty_thousand_characters_of_arguments_come_as_they_are_written():
    body = (NASTY + "x" * 50) * 500
    text = call("write", {"path": "a", "text": body}, False)
    fold, said, longest = MarkupFold(BOTH), "", 0
    for piece in cuts(text, [3]):
        new = "".join(part.text for part in fold.push(piece) if isinstance(part, CallArguments))
        said, longest = said + new, max(longest, len(new))
    fold.finish()
    assert json.loads(said) == {"path": "a", "text": body}
    assert len(body) > 50_000 and longest < 100 and fold.complete


def test_a_parser_that_takes_one_step_a_delta_loses_calls():
    """The wrong way (sglang#37634): a state advances once for each delta that comes."""

    def one_step(pieces: Sequence[str]) -> list[str]:
        names, buffer, inside = [], "", False
        for piece in pieces:
            buffer += piece
            if not inside and CALL in buffer:
                buffer, inside = buffer.split(CALL, 1)[1], True
            elif inside and "</tool_call>" in buffer:
                name, buffer = buffer.split("</tool_call>", 1)
                names, inside = [*names, name], False
        return names

    text = call("now", {}, False) * 3
    assert one_step(list(text)) == ["now"] * 3
    assert one_step([text]) == []  # speculation brought all of it at once
    for sizes in ([1], [len(text)]):
        opened = [part.name for part in read(text, sizes) if isinstance(part, CallOpened)]
        assert opened == ["now"] * 3


# ---- every cut of anything ------------------------------------------------------------------

WORDS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<tool_", "write", "now", "\n", " ", "<", "path", "count", "7", '"', "{", "é",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)
MARKUPS = st.builds(
    Markup,
    reasoning=st.booleans(),
    thinking=st.booleans(),
    thought=st.booleans(),
    tools=st.sampled_from([None, TOOLS]),
    calls_max=st.sampled_from([None, 1]),
)


@given(TEXTS, SIZES, MARKUPS)
@example(" " * 300 + "<think>x", [1], BOTH)
@example("<tool_call>" + " " * 300 + "now</tool_call>", [7], BOTH)
@example("x" + "\n" * 600 + "<tool_call>now</tool_call>", [5], BOTH)
def test_every_cut_of_any_text_reads_the_same(text: str, sizes: list[int], markup: Markup):
    assert read(text, sizes, markup) == whole(text, markup)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@given(TEXTS, SIZES)
def test_arguments_parse_if_and_only_if_their_call_was_closed(text: str, sizes: list[int]):
    parts = read(text, sizes)
    closed = {part.index for part in parts if isinstance(part, CallClosed)}
    cut = {part.index for part in parts if isinstance(part, CallCut)}
    opened = {part.index for part in parts if isinstance(part, CallOpened)}
    assert opened == closed | cut and not closed & cut
    for index in opened:
        assert _is_json(arguments_of(parts, index)) is (index in closed)


class _Always(dict):
    """Whatever it is asked for, it is this."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self._value = value

    def get(self, key, default=None):
        return self._value


ALL_TEXT = Markup(tools=_Always(_Always(STRING)))  # every argument of every tool is a string


def _rebuilt(parts: Sequence[Part]) -> str:
    """The text that these parts were read from, without its layout."""
    said: list[str] = []
    for part in parts:
        match part:
            case Content(text) | CallCut(_, text):
                said.append(text)
            case CallOpened(index, name) if CallClosed(index) in parts:
                pairs = json.loads(arguments_of(parts, index), object_pairs_hook=list)
                said.append(
                    f"<tool_call>{name}"
                    + "".join(
                        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
                        for key, value in pairs
                    )
                    + "</tool_call>"
                )
    return "".join("".join(said).split())


@given(TEXTS)
@example("<tool_call>now<arg_key>a</arg_key><arg_value>b</arg_value><arg_key>a</arg_key>x")
@example(" ".join(call(name, arguments, True) for name, arguments in CALLS) + "<tool_call>now")
def test_nothing_but_layout_is_lost(text: str):
    assert _rebuilt(whole(text, ALL_TEXT)) == "".join(text.split())


@given(st.text(st.sampled_from("ab<>/_ \n"), max_size=40), SIZES)
def test_text_without_markup_is_content_to_the_last_character(text: str, sizes: list[int]):
    assert "".join(part.text for part in read(text, sizes)) == text  # type: ignore[union-attr]


@settings(max_examples=60)
@given(
    TEXTS,
    st.lists(st.sampled_from(["now", "</think>", "_call>", "wr", "\n7", "é"]), max_size=2),
    MARKUPS,
    st.sampled_from([Completed("stop"), Completed("length"), PeerLost("gone")]),
)
def test_a_choice_is_the_same_for_every_batch_of_tokens(text, stops, markup, ended):
    """Characters, then stops, then markup: the three folds together keep the law."""
    style = Style(BYTES, stops=StopSet(stops), markup=markup)

    def told(size: int) -> tuple:
        fold, parts = ChoiceFold(style), []
        tokens = text.encode()
        for at in range(0, len(tokens), size):
            parts += fold.push(tokens[at : at + size], [], []).parts
        parts += fold.finish(ended).parts
        return merged(parts), fold.tokens, fold.end, fold.failed, fold.called, fold.calls

    alone = told(1)
    assert all(told(size) == alone for size in (2, 3, 5, 7, max(1, len(text.encode()))))
    *_, end, failed, called, (_, cut) = alone
    assert (end is None) != (failed is None)
    assert not called or (end is not None and end.reason == "stop" and not cut)


# ---- what is no call ------------------------------------------------------------------------

BROKEN = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>two words</tool_call>",
    "<tool_call>now</arg_value></tool_call>",
    '<tool_call>{"name": "now"}</tool_call>',
    "<tool_call>" + "n" * 129 + "</tool_call>",
    "use <tool_call> like this",
    "a </tool_call> without a beginning, <arg_key>too</arg_key>",
]


@pytest.mark.parametrize("text", BROKEN)
def test_markup_that_is_no_call_is_content(text: str):
    assert whole(text) == (Content(text),)


def test_a_call_after_a_marker_that_was_none_is_still_read():
    parts = whole("<tool_call><tool_call>now</tool_call>")
    assert parts == (
        Content("<tool_call>"),
        CallOpened(0, "now"),
        CallArguments(0, "{}"),
        CallClosed(0),
    )


def test_a_call_that_goes_on_with_something_else_is_cut_and_the_rest_is_content():
    text = "<tool_call>write<arg_key>path</arg_key><arg_value>x</arg_value> oops</tool_call>"
    parts = whole(text)
    assert parts[2:] == (
        CallCut(0, "<tool_call>write<arg_key>path</arg_key><arg_value>x</arg_value> "),
        Content("oops</tool_call>"),
    )
    fold = MarkupFold(BOTH)
    fold.push(text + call("now", {}, False))
    fold.finish()
    assert (fold.opened, fold.closed, fold.complete) == (2, 1, False)


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_call_cut_anywhere_is_never_whole(number: int):
    text = call(*CALLS[number], True)
    for length in range(len(CALL), len(text)):
        fold = MarkupFold(BOTH)
        parts = merged([*fold.push(text[:length]), *fold.finish()])
        assert not fold.complete
        if fold.opened:
            assert parts[-1] == CallCut(0, text[:length])
            assert not _is_json(arguments_of(parts, 0))
        else:
            assert parts == (Content(text[:length]),)


# ---- reasoning ------------------------------------------------------------------------------


def test_reasoning_that_the_prompt_opened():
    markup = Markup(reasoning=True, thinking=True)
    assert whole("\nhm\n</think>\n\nyes ", markup) == (Reasoning("hm"), Content("yes "))
    assert whole("hm, and no end", markup) == (Reasoning("hm, and no end"),)
    assert whole("</think>yes", markup) == (Content("yes"),)


def test_reasoning_that_the_prompt_ended():
    assert whole("\n\nyes", Markup(reasoning=True, thought=True)) == (Content("yes"),)


def test_a_think_that_is_not_the_first_word_is_content():
    assert whole("yes <think>no</think>") == (Content("yes <think>no</think>"),)


def test_without_a_parser_for_reasoning_its_markers_are_content():
    assert whole("<think>a</think>b", Markup(tools=TOOLS)) == (Content("<think>a</think>b"),)


def test_after_the_last_wanted_call_the_answer_is_over():
    fold = MarkupFold(Markup(tools=TOOLS, calls_max=1))
    parts = fold.push(call("now", {}, False) * 2 + "more")
    assert parts[-1] == CallClosed(0) and fold.over and fold.complete
    assert fold.push("more") == () and fold.finish() == ()


# ---- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("7", {"type": "string"}, "7"),
        ("7", {"type": "integer"}, 7),
        ("7", {"type": ["string", "integer"]}, 7),
        ("7", {"anyOf": [{"type": "string"}, {"type": "number"}]}, 7),
        ('"7"', {"type": ["string", "null"]}, '"7"'),
        ("null", {"type": ["string", "null"]}, None),
        ("true", {}, True),
        ("True", {"type": "boolean"}, "True"),
        ("plain", {}, "plain"),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("007", {"type": "integer"}, "007"),
        (" 12345678901234567890123 ", {"type": "integer"}, 12345678901234567890123),
        ("fast", {"enum": ["fast", 3]}, "fast"),
        ("3", {"enum": ["fast", 3]}, 3),
        ("3", {"enum": ["3"]}, "3"),
        ("{}", {"$ref": "#/$defs/x"}, {}),
    ],
)
def test_a_value_is_what_its_schema_says(text: str, schema: dict, expected: object):
    types = argument_types({"properties": {"x": schema}}).get("x", frozenset())
    assert json.loads(written(text, types)) == expected


def test_values_nested_beyond_reason_are_text():
    deep = "[" * 100_000 + "]" * 100_000
    assert json.loads(written(deep, frozenset({"array"}))) == deep
    loop: dict = {"anyOf": []}
    loop["anyOf"].append(loop)
    assert argument_types({"properties": {"x": loop}}) == {}


@given(st.text(), st.integers(0, 20))
def test_escaping_is_cut_where_the_text_is(text: str, at: int):
    assert escaped(text[:at]) + escaped(text[at:]) == escaped(text)
    assert json.loads(f'"{escaped(text)}"') == text
