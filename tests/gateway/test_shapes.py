"""Whole or streamed, in whatever batches, either API tells the same of an answer (D19, D20)."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core.outcome import Completed
from stanchion.gateway.choice import ChoiceFold, Piece, Style
from stanchion.gateway.dialect import Dialect
from stanchion.gateway.markup import merged
from stanchion.gateway.messages import Anthropic
from stanchion.gateway.replies import OpenAI

from .conftest import events
from .test_markup import BOTH, BYTES, TEXTS
from .test_messages import sent
from .test_replies import an_ask
from .test_tools import flat, is_object, joined

ENDS = st.sampled_from([Completed("stop"), Completed("length")])
BATCHES = st.integers(1, 40)
STYLE = Style(BYTES, markup=BOTH)


def told(dialect: Dialect, text: str, batch: int, ended: Completed) -> tuple[str, dict[str, Any]]:
    """The answer as a stream, and as a whole."""
    ask, fold, pieces = an_ask(style=STYLE), ChoiceFold(STYLE), []
    writer = dialect.writer(ask, "id", 0, [fold])
    stream, tokens = writer.opening(), text.encode()
    for at in range(0, len(tokens), batch):
        pieces.append(fold.push(tokens[at : at + batch], [], []))
        stream += writer.delta(0, pieces[-1])
    pieces.append(fold.finish(ended))
    stream += writer.delta(0, pieces[-1]) + writer.final(0) + writer.done()
    whole = Piece(merged(part for piece in pieces for part in piece.parts))
    written = dialect.writer(ask, "id", 0, [fold]).whole([whole], [None])
    return stream.decode(), json.loads(written)


@settings(max_examples=60)
@given(TEXTS, BATCHES, ENDS)
def test_openais_stream_adds_up_to_its_whole(text: str, batch: int, ended: Completed):
    stream, whole = told(OpenAI(), text, batch, ended)
    assert joined(events(stream)) == flat(whole["choices"][0])


@settings(max_examples=60)
@given(TEXTS, BATCHES, ENDS)
def test_anthropics_stream_adds_up_to_its_whole(text: str, batch: int, ended: Completed):
    stream, whole = told(Anthropic(), text, batch, ended)
    blocks, ending, cut = _blocks(sent(stream))
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert [block for block in blocks if block["type"] == "tool_use"] == calls
    assert {name: whole[name] for name in ("stop_reason", "stop_sequence")} == ending
    assert (whole["stop_reason"] == "tool_use") <= (bool(calls) and not cut)
    if not cut:  # what was cut is told as text, where a block would have to look whole
        assert blocks == whole["content"]


def _blocks(told: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """What a client has at the end: its blocks, how it ended, how many calls are not whole."""
    blocks: list[dict[str, Any]] = []
    ending: dict[str, Any] = {}
    for event in told:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                delta = event["delta"]
                for name, part in (("text", "text"), ("thinking", "thinking")):
                    if name in delta:
                        blocks[-1][part] += delta[name]
                blocks[-1]["json"] += delta.get("partial_json", "")
            case "message_delta":
                ending = event["delta"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    cut = [block for block in calls if not is_object(block["json"])]
    kept = [block for block in blocks if block not in cut]
    for block in kept:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return kept, ending, len(cut)


@settings(max_examples=40)
@given(TEXTS, ENDS)
def test_both_apis_agree_on_how_it_ended(text: str, ended: Completed):
    _, openai = told(OpenAI(), text, 3, ended)
    _, anthropic = told(Anthropic(), text, 3, ended)
    names = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert names[openai["choices"][0]["finish_reason"]] == anthropic["stop_reason"]
