"""Random chats of agents with other words: as long, and sharing pages exactly as before."""

from __future__ import annotations

import argparse
import inspect
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stanchion.core.recording import Content, Recorded, Times
from stanchion.gateway.openai import chat_text
from stanchion.gateway.tokens import Vocabulary, byte_vocabulary
from stanchion.lab.anonymise.body import typed
from stanchion.lab.anonymise.key import Key
from stanchion.lab.anonymise.pool import library, names, pool
from stanchion.lab.anonymise.surrogate import Surrogates
from stanchion.lab.anonymise.tokenised import Tokenised
from stanchion.lab.anonymise.words import Words
from stanchion.lab.structure import page_hits, sharing

from ..gateway.glm import glm_special
from .traffic import vocabulary

SOURCE = inspect.getsource(inspect) + inspect.getsource(argparse)
VOCABULARIES = {"tiny": vocabulary, "bytes": byte_vocabulary, "glm": glm_special}


def text(lucky: random.Random, length: int) -> str:
    """A piece of a file: sometimes with space at its edges, other letters, tabs."""
    at = lucky.randrange(len(SOURCE) - length)
    said = SOURCE[at : at + length]
    match lucky.randrange(10):
        case 0:
            return "\n    " + said
        case 1:
            return said + "\n\n"
        case 2:
            return "ünï " + said + " 漢字"
        case 3:
            return said.replace(" ", "\t")
        case _:
            return said


def tool(lucky: random.Random, number: int) -> dict[str, Any]:
    properties = {
        f"p{place}": {"type": "string", "description": text(lucky, lucky.randrange(1, 60))}
        for place in range(lucky.randrange(1, 4))
    }
    schema = {"type": "object", "properties": properties, "required": ["p0"]}
    said = {"name": f"t_{number}", "description": text(lucky, 90), "parameters": schema}
    return {"type": "function", "function": said}


def chats(lucky: random.Random, tools: bool) -> Iterator[dict[str, Any]]:
    """Sessions with the same tools and one of two system prompts; each turn, and now and then the
    turn before with a longer last message."""
    shown = [tool(lucky, number) for number in range(lucky.randrange(1, 5))]
    systems = [{"role": "system", "content": text(lucky, lucky.randrange(1, 900))} for _ in "ab"]
    for _ in range(4):
        messages: list[dict[str, Any]] = [lucky.choice(systems)]
        messages.append({"role": "user", "content": text(lucky, lucky.choice([1, 2, 20, 900]))})
        for turn in range(lucky.randrange(1, 5)):
            body = {"messages": messages, "tools": shown} if tools else {"messages": messages}
            yield body
            *before, last = messages
            longer = {**last, "content": last["content"] + text(lucky, lucky.randrange(1, 50))}
            yield {**body, "messages": [*before, longer]}
            values = {"p0": text(lucky, 40), "n": lucky.randrange(10**6), "l": [True, None, "x"]}
            call = {"name": "t_0", "arguments": json.dumps(values)}
            calls = [{"id": f"c{turn}", "type": "function", "function": call}]
            said = {"role": "assistant", "content": text(lucky, 30), "tool_calls": calls}
            result = text(lucky, lucky.choice([1, 10, 700]))
            done = {"role": "tool", "content": result, "tool_call_id": f"c{turn}"}
            messages = [*messages, said, done]


def surrogates(vocabulary: Vocabulary, page_tokens: int) -> Surrogates:
    tokenised, pieces = Tokenised(vocabulary), library(150_000)
    parts = pool(tokenised, pieces, True), pool(tokenised, pieces, False)
    words = Words(Key(b"k" * 32), tokenised, *parts, names(tokenised, pieces))
    return Surrogates(vocabulary, tokenised, words, page_tokens)


def check(name: str, page_tokens: int, seeds: range) -> None:
    vocabulary = VOCABULARIES[name]()
    maker = surrogates(vocabulary, page_tokens)
    assert vocabulary.template is not None
    hits = 0
    for seed in seeds:
        before, after = [], []
        for body in chats(random.Random(seed), vocabulary.template.mentions("tools")):
            ids = maker.tokenised.ids(chat_text(typed("chat", body), vocabulary))  # type: ignore[arg-type]
            one = Recorded(
                request="r", session="s", tenant=str(seed), api="chat", times=Times(arrival=0.0),
                input_tokens=len(ids), content=Content(body=body),
            )  # fmt: skip
            made = maker.content(one)
            assert made is not None, (seed, maker.why)
            assert len(made[1]) == len(ids) and not np.array_equal(made[1], ids)
            before.append(pages(ids, page_tokens))
            after.append(pages(made[1], page_tokens))
        assert page_hits(after) == page_hits(before), seed
        assert sharing(after) == sharing(before), seed
        hits += sum(page_hits(before))
    assert hits > 100 * len(seeds)


def pages(ids: Any, page_tokens: int) -> list[bytes]:
    whole = len(ids) // page_tokens
    return [ids[: (at + 1) * page_tokens].tobytes() for at in range(whole)]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_chats_share_pages_exactly_as_before(name: str) -> None:
    check(name, 16, range(2))


@pytest.mark.soak
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_many_chats_share_pages_exactly_as_before(name: str, page_tokens: int) -> None:
    check(name, page_tokens, range(100, 140))
