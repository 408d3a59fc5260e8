"""What is said to foreign servers and how it is read: the pure half."""

from __future__ import annotations

import json
from itertools import pairwise
from math import isnan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.cli.front import front, front_settings
from stanchion.core.config import Config, load
from stanchion.core.errors import ConfigError
from stanchion.core.messages import Start
from stanchion.core.outcome import OutputSuspect, Overloaded, PeerLost, Rejected
from stanchion.core.request import Sampling
from stanchion.gateway.upstream.events import Events
from stanchion.gateway.upstream.passage import (
    CHAT,
    CHAT_END,
    Chat,
    _read,
    call_markup,
    prompt,
    text_vocabulary,
)
from stanchion.gateway.upstream.place import place, places
from stanchion.gateway.upstream.sglang import Sglang
from stanchion.gateway.upstream.text import Text
from stanchion.gateway.upstream.vllm import Vllm
from stanchion.gateway.upstream.wire import Samples, Wrong, fault, number, refusal, room, salt


def start(tokens: list[int] | None = None, **more: Any) -> Start:
    sampling = Sampling(max_tokens=more.pop("max_tokens", 8), **more.pop("sampling", {}))
    return Start(request="r", tokens=tokens or [1, 2], sampling=sampling, **more)


# ---- events ---------------------------------------------------------------------------------

STREAM = b': comment\n\ndata: {"a":1}\n\nevent: x\r\ndata:  two \r\n\r\n'
STREAM += b"data:three\n\nid: 1\ndata: [DONE]\n\n"
SAID = [b'{"a":1}', b"two", b"three", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_for_every_cut(places: list[int]) -> None:
    edges = [0, *sorted(places), len(STREAM)]
    events = Events(100)
    found = [one for a, b in pairwise(edges) for one in events.push(STREAM[a:b])]
    assert found == SAID


@pytest.mark.parametrize("size", [1, 7, 101, 1000])
def test_a_line_is_bounded_whether_it_ends_or_not(size: int) -> None:
    for raw in (b"x" * 101, b"data: " + b"y" * 100 + b"\n"):
        events = Events(100)
        with pytest.raises(Wrong, match="more than 100 bytes"):
            for at in range(0, len(raw), size):
                events.push(raw[at : at + size])
    assert Events(100).push(b"x" * 100 + b"\n" + b"y" * 100) == []


# ---- places ---------------------------------------------------------------------------------


def test_a_place_says_what_it_is() -> None:
    found = place(" vllm:http://h:8000/v1/ ", "both")
    assert (found.url, found.kind, found.name, found.host) == (
        "http://h:8000",
        "vllm",
        "h:8000",
        "h",
    )
    assert place("https://api.example.com", "both").kind is None
    roles = [(one.name, one.role) for one in places("", "http://a:1,http://b:1", "http://c:1")]
    assert roles == [("a:1", "prefill"), ("b:1", "prefill"), ("c:1", "decode")]


@pytest.mark.parametrize(
    "said",
    [
        "h:8000",
        "ftp://h",
        "http://",
        "http://u:p@h",
        "http://h?x=1",
        "http://h:99999",
        "http://a b",
    ],
)
def test_what_is_no_place(said: str) -> None:
    with pytest.raises(ConfigError, match="no server's address"):
        place(said, "both")


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (("", "", ""), "--upstream URL"),
        (("", "http://a:1", ""), "at least one of each"),
        (("http://a:1,http://a:1", "", ""), "named twice"),
    ],
)
def test_what_is_no_cluster(named: tuple[str, str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        places(*named)


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["upstream.urls=http://127.0.0.1:1", "upstream.tokenizer=/nowhere"], "tokenizer.json"),
        (["upstream.urls=http://127.0.0.1:1", "upstream.poll_s=0"], "upstream.poll_s"),
        (["upstream.urls=http://127.0.0.1:1", "gateway.host=0.0.0.0"], "API key"),
        ([], "no upstream is named"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(sets: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        front(load(Config(), "", sets), ())


# ---- refusals, numbers, metrics -------------------------------------------------------------


def test_refusals_by_status() -> None:
    body = json.dumps({"error": {"message": "m" * 1000, "param": "top_k"}}).encode()
    rejected = refusal(400, None, body)
    assert isinstance(rejected, Rejected)
    assert rejected.field == "top_k" and len(rejected.message) == 300
    assert refusal(429, "7", b"") == Overloaded("the server is full (429)", 7.0)
    for header in ("nan", "soon", None):
        said = refusal(503, header, b"\xff")
        assert isinstance(said, Overloaded) and said.retry_after_s == 1.0
    assert isinstance(refusal(429, "1e99", b""), Overloaded)
    assert refusal(429, "1e99", b"").retry_after_s == 3600.0  # type: ignore[union-attr]
    assert all(isinstance(refusal(status, None, b""), PeerLost) for status in (401, 404, 500, 302))
    assert isinstance(fault("9" * 5000, "x"), PeerLost)
    assert isinstance(fault(400, "x"), Rejected)


def test_numbers_are_bounded() -> None:
    assert [number(one) for one in ("12", "", "-1", "1.5", "9" * 16, "9" * 5000)] == [
        12, None, None, None, None, None,
    ]  # fmt: skip


def test_samples_sum_over_labels_and_pass_over_garbage() -> None:
    text = 'a{x="1"} 2\na{x="2"} 3.5\nb nan\nc{k="v"} 1\nd x\n# a 9\n\x00\nother 4\n'
    found = Samples.of(text, {"a", "b", "c", "d"})
    assert (found.count("a"), found.count("b"), found.count("z", "c")) == (5, 0, 1)
    assert found.labels["c"] == {"k": "v"}
    huge = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1' % ("9" * 5000)
    assert Vllm("m", 9, True).load(huge).pages == 0


def test_tenants_and_salts_split_the_cache() -> None:
    made = [
        salt(start(tenant=tenant, salt=word))
        for tenant in ("default", "a", "b")
        for word in ("", "x")
    ]
    assert made[0] is None and len({*made}) == 6
    assert salt(start(tenant="")) is None
    assert room("a") != room("b") and 0 <= room("a") < 2**63


# ---- answers --------------------------------------------------------------------------------


def test_names_of_tokens_that_are_none_are_no_tokens() -> None:
    reader = Vllm("m", 9, True).reader(start(sampling={"logprobs": 2}))
    top = {"token_id:3": -1.0, "token_id:" + "9" * 5000: -0.1, "x": -0.2, "token_id:4": None}
    choice = {"token_ids": [3], "logprobs": {"token_logprobs": [None], "top_logprobs": [top]}}
    (said,) = reader.read(json.dumps({"choices": [choice]}).encode())
    assert isnan(said.logprobs[0])  # type: ignore[union-attr]
    assert {one.token for one in said.top[0]} == {3, 4}  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    "pair", [["x", 1, None], [1.0], [-1.0, "1"], [-1.0, None], [10**400, 1, None], []]
)
def test_scores_that_are_none(pair: list[Any]) -> None:
    reader = Sglang(9, True).reader(start())
    event = {
        "output_ids": [1],
        "meta_info": {"completion_tokens": 1, "output_token_logprobs": [pair]},
    }
    with pytest.raises(Wrong):
        reader.read(json.dumps(event).encode())


@pytest.mark.parametrize("ids", [[2, 2], [1, 2, 3], []])
def test_scores_of_another_prompt(ids: list[int]) -> None:
    vllm = Vllm("m", 9, True)
    said = [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])] if ids else None
    raw = json.dumps({"choices": [{"prompt_logprobs": said}]}).encode()
    asked = start([1, 3], sampling={"prompt_logprobs": 0})
    with pytest.raises(Wrong, match=r"scores of the prompt|another prompt"):
        vllm.scored(asked, raw)
    pairs = [[-1.0, token, None] for token in ids]
    raw = json.dumps({"meta_info": {"input_token_logprobs": pairs}}).encode()
    with pytest.raises(Wrong, match="scores of the prompt"):
        Sglang(9, True).scored(asked, raw)


@pytest.mark.parametrize("counts", [(-1, 0, 0), (5, 3, 4), (5, 3, -1)])
def test_counters_that_contradict_themselves(counts: tuple[int, int, int]) -> None:
    steps, proposed, accepted = counts
    spec = {
        "num_spec_steps": steps,
        "num_draft_tokens": proposed,
        "num_accepted_draft_tokens": accepted,
    }
    event = json.dumps({"metrics": {"speculative_decoding": spec}}).encode()
    with pytest.raises(Wrong, match="contradict"):
        Vllm("m", 9, True).reader(start()).read(event)


def test_an_sglang_abort_is_what_it_says() -> None:
    for code, kind in ((400, Rejected), (503, Overloaded), (None, PeerLost)):
        finish = {"type": "abort", "message": "m", "status_code": code}
        event = {"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": finish}}
        reader = Sglang(9, False).reader(start())
        assert reader.read(json.dumps(event).encode()) == []
        assert isinstance(reader.end()[-1].outcome, kind)  # type: ignore[union-attr]


def test_ids_that_do_not_add_up() -> None:
    reader = Sglang(9, False).reader(start())
    event = {"output_ids": [1, 2, 3], "meta_info": {"completion_tokens": 2}}
    with pytest.raises(Wrong, match="are not 2 tokens"):
        reader.read(json.dumps(event).encode())


# ---- text -----------------------------------------------------------------------------------


@given(st.text())
def test_a_completion_is_its_bytes(text: str) -> None:
    vocabulary = text_vocabulary()
    tokens = vocabulary.encode(text, True)
    assert max(tokens, default=0) < CHAT
    if tokens:
        assert prompt(start(tokens)) == text


def test_a_chat_is_between_two_tokens_that_no_text_has() -> None:
    vocabulary = text_vocabulary()
    messages = [{"role": "user", "content": "<|chat|>\u2603"}]
    tokens = vocabulary.encode(vocabulary.render(messages, tools=None), False)
    assert (tokens[0], tokens[-1]) == (CHAT, CHAT_END)
    assert prompt(start(tokens)) == Chat(messages)
    for bad in ([CHAT, 65, CHAT_END], [CHAT, 300, CHAT_END], [*tokens, 65], [0xFF]):
        with pytest.raises(Wrong) as raised:
            prompt(start(bad))
        assert isinstance(raised.value.outcome, Rejected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
TYPES = {"f": {"s": frozenset({"string"}), "i": frozenset({"integer"})}}


@given(st.dictionaries(st.sampled_from(["s", "i", "x", "a b"]) | st.text(max_size=5), JSON))
def test_a_call_is_handed_on_as_it_is_or_not_at_all(arguments: dict[str, Any]) -> None:
    text = call_markup("f", json.dumps(arguments), TYPES)
    if text is not None:
        assert _read(text, TYPES) == [("f", arguments)]


def test_ordinary_calls_are_handed_on() -> None:
    for arguments in ({"s": "a\n</b>", "i": 3, "x": {"y": [1, "2"]}}, {}, {"x": "7", "s": '"q"'}):
        assert call_markup("f", json.dumps(arguments), TYPES) is not None
    for raw in ("[1]", "{", '{"s": "</arg_value>"}'):
        assert call_markup("f", raw, TYPES) is None


def test_a_tool_that_nobody_gave_is_not_called() -> None:
    vocabulary = text_vocabulary()
    tokens = vocabulary.encode(vocabulary.render([], tools=None), False)
    reader = Text("m").reader(start(tokens))
    call = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    event = {"choices": [{"delta": call, "finish_reason": "tool_calls"}]}
    with pytest.raises(Wrong) as raised:
        reader.read(json.dumps(event).encode())
    assert isinstance(raised.value.outcome, OutputSuspect)


def test_a_server_in_a_long_prompt_stands_no_more_still_than_it_may_be_silent() -> None:
    """Nothing tells how far it is: half a minute without a step is no sign of anything here."""
    config = load(Config(), "", ["upstream.read_s=120"])
    servers = places("vllm:http://127.0.0.1:1,vllm:http://127.0.0.1:2", "", "")
    assert front_settings(config, (), (), servers).stall_s == 120
    hasty = load(config, "", ["upstream.read_s=1"])
    assert front_settings(hasty, (), (), servers).stall_s == 30
