"""The one place that writes success markers writes none for anything but success."""

from __future__ import annotations

import json

import pytest
from msgspec.json import encode

from stanchion.core import outcome
from stanchion.core.errors import Bug
from stanchion.core.messages import Spec
from stanchion.core.request import Sampling
from stanchion.gateway.choice import ChoiceFold, Style
from stanchion.gateway.failures import failure
from stanchion.gateway.openai import Ask
from stanchion.gateway.replies import OpenAI, Reply, Words, spec_fields

from .conftest import events

BYTES = tuple(bytes([byte]) for byte in range(256))
BAD = [
    outcome.Cancelled("client"),
    outcome.Cancelled("monitor"),
    outcome.Rejected("n", "no"),
    outcome.Overloaded("full", 1.0),
    outcome.PeerLost("gone"),
    outcome.OutputSuspect("nan"),
]


def an_ask(**changed) -> Ask:
    given = {
        "chat": True,
        "model": "m",
        "prompts": ([1, 2],),
        "n": 1,
        "sampling": (Sampling(max_tokens=9),),
        "style": Style(BYTES),
        "salt": "",
        "stream": True,
        "with_usage": False,
        "with_spec": False,
        "with_ids": False,
        "with_logprobs": False,
        "with_prompt_logprobs": False,
        "echo": False,
    }
    return Ask(**(given | changed))


def looks_complete(stream: bytes) -> bool:
    """What a client of OpenAI's API takes for a whole answer."""
    return b"[DONE]" in stream or b'"finish_reason":"' in stream


@pytest.mark.parametrize("ended", BAD)
def test_no_success_marker_can_be_written_for_a_failure(ended: outcome.Outcome):
    fold = ChoiceFold(Style(BYTES))
    piece = fold.push(b"hi", [-1.0, -1.0], [[], []])
    reply = Reply(an_ask(), "id", 0, [fold])
    written = reply.delta(0, piece)
    fold.finish(ended)
    for marker in (lambda: reply.final(0), reply.done, lambda: reply.whole([piece], [None])):
        with pytest.raises(Bug):
            marker()
    assert not looks_complete(written + OpenAI().failed(failure(ended), "id"))


def test_the_old_way_of_telling_an_abort_is_caught():
    """vllm#57082: an engine's abort became a finish reason and a normal end marker."""
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}
    assert looks_complete(b"data: " + encode(finish) + b"\n\ndata: [DONE]\n\n")


def test_done_waits_for_every_choice():
    folds = [ChoiceFold(Style(BYTES)), ChoiceFold(Style(BYTES))]
    reply = Reply(an_ask(n=2), "id", 0, folds)
    folds[0].finish(outcome.Completed("stop"))
    with pytest.raises(Bug):
        reply.done()
    folds[1].finish(outcome.Completed("length"))
    assert reply.done() == b"data: [DONE]\n\n"


def test_a_completed_answer_is_no_failure():
    with pytest.raises(Bug):
        failure(outcome.Completed("stop"))


def test_acceptance_of_several_choices_sums_their_counters():
    folds = [ChoiceFold(Style(BYTES)) for _ in range(3)]
    folds[0].spec = Spec(verify_steps=1, tokens=4, proposed=3, accepted=3)
    folds[1].spec = Spec(verify_steps=3, tokens=4, proposed=9, accepted=1)
    assert spec_fields(folds) == {
        "spec_accept_length": 2.0,
        "spec_accept_rate": 4 / 12,
        "spec_accept_prefix": 1.0,
        "spec_verify_steps": 4,
    }
    assert spec_fields(folds[2:]) == {}
    folds[2].spec = Spec(verify_steps=5, tokens=5, proposed=0, accepted=0)
    assert spec_fields(folds[2:]) == {}


def test_tokens_with_different_bytes_have_different_keys():
    words = Words((b"\xe4", b"\xe5", b"a", "é".encode()))
    assert [words.key(token) for token in range(4)] == ["bytes:\\xe4", "bytes:\\xe5", "a", "é"]
    assert words.text(0) == words.text(1) == "\ufffd"  # what naming them by text would give


def test_a_chunk_has_exactly_openais_keys():
    fold = ChoiceFold(Style(BYTES))
    reply = Reply(an_ask(with_usage=True), "id", 7, [fold])
    (opening,) = events(reply.opening().decode())
    assert opening == {
        "id": "chatcmpl-id",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        "usage": None,
    }
    piece = fold.push(b"hi", [-1.0, -1.0], [[], []])
    (chunk,) = events(reply.delta(0, piece).decode())
    assert chunk["choices"][0]["delta"] == {"content": "hi"}
    assert reply.delta(0, fold.push(b"", [], [])) == b""
    fold.finish(outcome.Completed("length"))
    final = events(reply.final(0).decode())[0]["choices"][0]
    assert (final["delta"], final["finish_reason"]) == ({}, "length")
    usage = json.loads(reply.done().split(b"\n\n")[0][6:])
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 4
