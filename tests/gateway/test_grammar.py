"""What a client asks of an answer's form: which texts follow it, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from stanchion.core.errors import RequestRejected
from stanchion.core.grammar import (
    COPIES_MAX,
    GRAMMAR_BYTES_MAX,
    LEVELS_MAX,
    NESTED_MAX,
    RULES_MAX,
    Tally,
    bare,
    check_schema,
    regex_copies,
)
from stanchion.core.matching import GrammarFault, Grammars
from stanchion.core.messages import Start
from stanchion.core.outcome import Completed, Rejected
from stanchion.core.request import Sampling
from stanchion.gateway.anthropic import MessagesBody, chat_of
from stanchion.gateway.body import ChatBody, decode
from stanchion.gateway.choice import ChoiceFold, Style
from stanchion.gateway.conversation import check_tools, tool_types
from stanchion.gateway.grammar import grammar_of
from stanchion.gateway.markup import CallArguments, CallOpened, Content, Markup
from stanchion.gateway.tokens import Vocabulary
from stanchion.sim.choices import seeded
from tests.engine.rig import finish, hashed_engine
from tests.engine.test_grammar import prompt
from tests.engine.test_grammar import schema as random_schema

from .conftest import Gateway, running
from .glm import as_tokens, glm_special, glm_vocabulary
from .worker import EOS, FakeWorker, end, say

Json = dict[str, Any]
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
READ = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 2},
        "line": {"type": "integer"},
        "mode": {"enum": ["fast", "slow", 3]},
        "note": {"type": ["string", "null"]},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "required": ["path", "line"],
    "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
}
NO_REASONING = Markup(thought=True, reasoning=True)


def tool(name: str, parameters: Json, strict: bool = False) -> Json:
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


def call(name: str, **arguments: str) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def body_of(**fields: Any) -> ChatBody:
    said = {"messages": [{"role": "user", "content": "hi"}], **fields}
    body = decode(json.dumps(said).encode(), ChatBody)
    check_tools(body, True)
    return body


@pytest.fixture(params=[False, True], ids=["plain", "special"])
def words(request: pytest.FixtureRequest) -> tuple[Vocabulary, bool, Grammars]:
    vocabulary = glm_special() if request.param else glm_vocabulary()
    grammars = Grammars(vocabulary.pieces, vocabulary.special, vocabulary.eos_ids, vocabulary.size)
    return vocabulary, request.param, grammars


def follower(
    words: tuple[Vocabulary, bool, Grammars], markup: Markup, **fields: Any
) -> Callable[[str], bool]:
    """Is a text a whole answer under the grammar of such a body?"""
    vocabulary, special, grammars = words
    grammar = grammar_of(body_of(**fields), markup, vocabulary)
    assert grammar is not None

    def follows(text: str) -> bool:
        matcher = grammars.matcher(grammar.text)
        try:
            matcher.say(as_tokens(text, special))
        except GrammarFault:
            return False
        return bool(matcher.allowed()[EOS // 8] >> EOS % 8 & 1)

    return follows


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
            ['{"a":1}', '{"a": 12}'],
            ['{"a":"1"}', "{}", '{"a":1}x', "x", '{"a":1', '{"a":  1}', '{"a":1 }'],
        ),
        (
            {"response_format": {"type": "json_object"}},
            ["{}", '{"x": [1, {"y": null}]}'],
            ["[]", "1", '{"x"}', "{} ", "{ }"],
        ),
        ({"structured_outputs": {"regex": "^[a-c]+/x$"}}, ["abc/x"], ["abc", "d/x", "a/xx", ""]),
        ({"guided_choice": ["yes", 'n"o']}, ["yes", 'n"o'], ["ye", "yesn"]),
        (
            {"structured_outputs": {"grammar": 'start: "a" rest\nrest: "b"{2} | /c+/ // end'}},
            ["abb", "accc"],
            ["ab", "abbb", "bb"],
        ),
        ({"guided_json": json.dumps({"enum": [1, "b"]})}, ["1", '"b"'], ["b", "2"]),
    ],
)
def test_content_follows_what_was_asked(
    fields: Json,
    right: list[str],
    wrong: list[str],
    words: tuple[Vocabulary, bool, Grammars],
) -> None:
    follows = follower(words, NO_REASONING, **fields)
    assert [text for text in right if not follows(text)] == []
    assert [text for text in wrong if follows(text)] == []
    thinking = follower(words, Markup(reasoning=True, thinking=True), **fields)
    assert thinking(f"is it < or </thin?</think>\n{right[0]}")
    assert not thinking(right[0]) and not thinking(f"hm</think>{wrong[0]}")
    may_think = follower(words, Markup(reasoning=True), **fields)
    assert may_think(right[0]) and may_think(f"<think>hm</think>{right[0]}")


GOOD = call("read", path="a<b>.py", line="7")
LIST = call("list", anything="[at all")
TOOLS = [tool("read", READ, strict=True), tool("list", {"type": "object"})]


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"tool_choice": "required"},
            [GOOD, f"\n{LIST}", GOOD + LIST, f"{GOOD}\n{GOOD}", call("list")],
            ["", "hello", f"hello {GOOD}", f"{GOOD} and so", call("other"), "<tool_call>list"],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "read"}}},
            [
                GOOD,
                GOOD.replace("\n", ""),
                call("read", path="ab", line="7", mode="slow"),
                call("read", path="ab", line="7", mode="3", note="null"),
                call("read", path="ab", line="7", note="any <arg text", tags='["a", "b"]'),
            ],
            [
                GOOD + GOOD,
                LIST,
                call("read", path="ab"),
                call("read", line="7", path="ab"),
                call("read", path="a", line="7"),
                call("read", path="ab", line="seven"),
                call("read", path="ab", line="7", mode="quick"),
                call("read", path="ab", line="7", tags="a"),
                call("read", path="ab", line="7", other="a"),
            ],
        ),
        (
            {"tool_choice": "auto"},
            ["", "hello", f"I look.\n{GOOD}\n{LIST} done", "a <tool_cal>"],
            [f"I look. {call('read', path='ab')}", "<tool_call>other</tool_call>", "<tool_call>"],
        ),
        ({"parallel_tool_calls": False}, ["hello", GOOD], [GOOD + GOOD]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
            ['{"a":1}', GOOD, GOOD + LIST],
            ["hello", f'{GOOD}{{"a":1}}', call("read", path="ab")],
        ),
    ],
)
def test_calls_follow_what_was_asked(
    fields: Json,
    right: list[str],
    wrong: list[str],
    words: tuple[Vocabulary, bool, Grammars],
) -> None:
    follows = follower(words, NO_REASONING, tools=TOOLS, **fields)
    assert [text for text in right if not follows(text)] == []
    assert [text for text in wrong if follows(text)] == []


def test_a_marker_that_is_spelled_is_no_way_around_a_special_token() -> None:
    vocabulary = glm_special()
    grammars = Grammars(vocabulary.pieces, vocabulary.special, vocabulary.eos_ids, vocabulary.size)
    grammar = grammar_of(body_of(tools=TOOLS), NO_REASONING, vocabulary)
    assert grammar is not None
    with pytest.raises(GrammarFault):
        grammars.matcher(grammar.text).say(list(b"I look. <tool_call>"))


def test_nothing_asked_is_no_grammar() -> None:
    vocabulary = glm_vocabulary()
    plain = [tool("list", {"type": "object"})]
    for fields in ({}, {"tools": plain}, {"tools": TOOLS, "tool_choice": "none"}):
        assert grammar_of(body_of(**fields), NO_REASONING, vocabulary) is None
    assert grammar_of(body_of(response_format={"type": "text"}), None, vocabulary) is None


T = {"type": "function", "function": {"name": "t"}}


def test_answers_of_the_engine_are_calls_that_follow_their_schemas() -> None:
    """What the model says under random strict tools, read by the folds of the gateway."""
    vocabulary = glm_special()
    size = vocabulary.size
    grammars = Grammars(vocabulary.pieces, vocabulary.special, vocabulary.eos_ids, size)
    starts, bodies = [], []
    for seed in range(100):
        choices = seeded(seed)
        inner = {f"k{place}": random_schema(choices, 2) for place in range(1 + choices.pick(3))}
        parameters = {"type": "object", "properties": inner, "additionalProperties": False}
        parameters["required"] = list(inner)[choices.pick(2) :]
        body = body_of(tools=[tool("t", parameters, strict=True)], tool_choice=T)
        try:
            grammar = grammar_of(body, NO_REASONING, vocabulary)
        except RequestRejected as refused:
            assert "strict" in str(refused) or "cannot be written" in str(refused)
            continue
        assert grammar is not None
        bodies.append(body)
        starts.append(
            Start(
                request=f"{seed}",
                tokens=prompt(seed),
                sampling=Sampling(max_tokens=300, temperature=0.9, seed=seed),
                grammar=grammar.text,
            )
        )
    heard = finish(hashed_engine(grammars=grammars), starts)
    whole = sum(valid_calls(heard[start.request], body) for start, body in zip(starts, bodies))
    print(f"{whole} of {len(starts)} whole, {100 - len(starts)} schemas refused")
    assert len(starts) > 50 and whole > 0.8 * len(starts)


def valid_calls(heard: Any, body: ChatBody) -> bool:
    vocabulary, tools = glm_special(), body.tools or ()
    markup = Markup(reasoning=True, thought=True, tools=tool_types(tools))
    fold = ChoiceFold(Style(vocabulary.pieces, end_ids=frozenset({EOS}), markup=markup))
    parts = [*fold.push(heard.tokens, heard.logprobs, ()).parts]
    parts += fold.finish(heard.ends[0].outcome).parts
    if heard.ends[0].outcome != Completed("stop"):
        return False
    assert fold.called and not any(isinstance(part, Content) for part in parts)
    opened = [part.index for part in parts if isinstance(part, CallOpened)]
    for index in opened:
        said = (one.text for one in parts if isinstance(one, CallArguments) and one.index == index)
        jsonschema.validate(json.loads("".join(said)), tools[0].function.parameters)
    return True


# ---- what is refused ------------------------------------------------------------------------


def nested(depth: int) -> Json:
    inner: Json = {"type": "null"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


def chain(length: int) -> Json:
    links = {
        f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}}


def of_schema(schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


SCHEMA = "response_format.json_schema.schema"
REGEX = "structured_outputs.regex"
LARK = "structured_outputs.grammar"
REFUSED = [
    (of_schema(nested(100)), SCHEMA),
    (of_schema(chain(LEVELS_MAX)), SCHEMA),
    (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), SCHEMA),
    (of_schema({"type": "array", "maxItems": 2**64}), SCHEMA),
    (of_schema({"type": "array", "maxItems": 2**63}), SCHEMA),
    (of_schema({"type": "array", "minItems": -1}), SCHEMA),
    (of_schema({"type": "string", "maxLength": 10**9}), SCHEMA),
    (of_schema({"type": "integer", "multipleOf": 1000003}), SCHEMA),
    (of_schema({"type": "number", "multipleOf": 0.123456789}), SCHEMA),
    (of_schema({"type": "string", "pattern": "((a{100}){100}){100}"}), SCHEMA),
    (of_schema({"type": "string", "pattern": "("}), SCHEMA),
    (of_schema({"$ref": "http://localhost/a.json"}), SCHEMA),
    (of_schema({"$ref": "file:///etc/passwd"}), SCHEMA),
    (of_schema({"properties": {f"p{n}": {} for n in range(5000)}}), SCHEMA),
    (of_schema({"enum": ["x" * 2**17]}), SCHEMA),
    (of_schema({"not": {"type": "null"}}), SCHEMA),
    (of_schema(True), SCHEMA),
    (of_schema(None), SCHEMA),
    ({"response_format": {"type": "json"}}, "response_format.type"),
    ({"response_format": 5}, "response_format.type"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a{1000000}"}}, REGEX),
    ({"structured_outputs": {"regex": "(" * 60_000}}, REGEX),
    ({"structured_outputs": {"regex": "(?=a)b"}}, REGEX),
    ({"structured_outputs": {"grammar": "start: a\na: b\nb: a"}}, LARK),
    ({"structured_outputs": {"grammar": "start: A\nA: B\nB: A"}}, LARK),
    ({"structured_outputs": {"grammar": "start: " + "(" * 60_000}}, LARK),
    ({"structured_outputs": {"grammar": "start: a\n" + 'a: "x"\n' * (RULES_MAX + 1)}}, LARK),
    ({"structured_outputs": {"grammar": 'start: a{3000}\na: "x"{3000}'}}, LARK),
    ({"structured_outputs": {"grammar": "root ::= a"}}, LARK),
    ({"structured_outputs": {"grammar": "start: %json {}"}}, LARK),
    ({"structured_outputs": {"grammar": "start: <[256]>"}}, LARK),
    ({"structured_outputs": {"grammar": "start: @other"}}, LARK),
    ({"structured_outputs": {"grammar": "start: a\na[max_tokens=3]: /a+/"}}, LARK),
    ({"structured_outputs": {"grammar": "x" * GRAMMAR_BYTES_MAX}}, LARK),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeWorker, Gateway]]:
    address = f"ipc://{tmp_path_factory.mktemp('grammar')}/worker"
    with FakeWorker(address) as worker, running(worker, glm_special()) as gateway:
        yield worker, gateway


def post(gateway: Gateway, **fields: Any) -> httpx.Response:
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}
    return gateway.client.post("/v1/chat/completions", json=said)


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(
    fields: Json, field: str, served: tuple[FakeWorker, Gateway]
) -> None:
    worker, gateway = served
    worker.reset()
    reply = post(gateway, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field, reply.text
    assert not worker.starts


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"type": "array"}, ""),
        ({"properties": {"a": 5}}, ".properties.a"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, ".properties.a.format"),
        ({"properties": {"a": {"type": ["string", "array"]}}}, ".properties.a"),
        (
            {
                "properties": {
                    "a": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}
                }
            },
            ".properties.a",
        ),
        ({"properties": {"a": {"enum": ["</arg_value>"]}}}, ".properties.a"),
        ({"properties": {"a": {"const": {"b": "</arg_value>"}}}}, ".properties.a"),
        ({"properties": {"a": {"$ref": "#"}}}, ".properties.a.$ref"),
        ({"properties": {"a": {"type": "integer", "multipleOf": 10**7}}}, ".properties.a"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, ".properties.a"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, ".properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, ""),
        ({"properties": {" a": {"type": "string"}}}, ".properties. a"),
        ({"properties": {"a": {"type": "null"}}, "required": ["b"]}, ".required"),
    ],
)
def test_a_strict_tool_that_cannot_be_held_to_is_refused_by_name(
    parameters: Json, field: str, served: tuple[FakeWorker, Gateway]
) -> None:
    reply = post(served[1], tools=[tool("t", parameters, strict=True)])
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == f"tools[0].function.parameters{field}", reply.text


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "write"}}, "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice"),
    ],
)
def test_a_choice_that_there_is_not_is_refused(
    choice: Any, param: str, served: tuple[FakeWorker, Gateway]
) -> None:
    reply = post(served[1], tools=TOOLS, tool_choice=choice)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_the_worker_is_told_and_its_refusal_is_the_clients_error(
    served: tuple[FakeWorker, Gateway],
) -> None:
    worker, gateway = served
    worker.reset()
    worker.plan = lambda start: [end(start, Rejected("grammar", "too much"))]
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="too much"):
        client.chat.completions.create(
            model="hashed", n=2, messages=[{"role": "user", "content": "hi"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": OBJECT, "strict": True},
            },
        )  # fmt: skip
    # Both were sent; the second may reach the worker behind the first one's refusal.
    assert worker.wait_for(lambda: len(worker.starts) == 2)
    assert {json.loads(one.grammar or "")["grammars"][1]["name"] for one in worker.starts} == {
        "content"
    }


def test_a_forced_call_is_read_as_one(served: tuple[FakeWorker, Gateway]) -> None:
    worker, gateway = served
    worker.reset()
    said = as_tokens(f"hm</think>{GOOD}", True)
    worker.plan = lambda start: [say(start, [*said, EOS]), end(start, Completed("stop"))]
    for choice in ("required", {"type": "function", "function": {"name": "read"}}):
        (choice_said,) = post(gateway, tools=TOOLS, tool_choice=choice).json()["choices"]
        assert choice_said["finish_reason"] == "tool_calls"
        (made,) = choice_said["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"path": "a<b>.py", "line": 7}
    assert all(one.grammar for one in worker.starts)


def test_compiling_holds_nobody_up(served: tuple[FakeWorker, Gateway]) -> None:
    """The worst that the bounds let through, while others are served."""
    worker, gateway = served
    worker.reset()
    doubled = "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(30)) + 'A30: "x"'
    slow = {"structured_outputs": {"grammar": doubled}}
    took = []

    def ask_slowly() -> None:
        assert post(gateway, **slow).status_code == 400

    threads = [threading.Thread(target=ask_slowly) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        assert post(gateway).status_code == 200
        took.append(time.monotonic() - began)
    assert len(took) > 1


def test_anthropic_words_come_to_the_same() -> None:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}

    def of(**fields: Any) -> ChatBody:
        said = {
            "model": "m",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "read", "input_schema": schema, "strict": True}],
            **fields,
        }
        return chat_of(decode(json.dumps(said).encode(), MessagesBody))

    vocabulary = glm_special()
    made = of(output_config={"format": {"type": "json_schema", "schema": OBJECT}})
    same = body_of(tools=[tool("read", schema, True)], **of_schema(OBJECT))
    assert grammar_of(made, None, vocabulary) == grammar_of(same, None, vocabulary)
    for theirs, ours in (
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "read"}, {"type": "function", "function": {"name": "read"}}),
    ):
        made = of(tool_choice=theirs)
        same = body_of(tools=[tool("read", schema, True)], tool_choice=ours)
        assert grammar_of(made, None, vocabulary) == grammar_of(same, None, vocabulary)


def test_bounds_are_what_they_say() -> None:
    check_schema(nested(NESTED_MAX // 2 - 1), Tally())
    check_schema(chain(100), Tally())
    tally = Tally()
    check_schema({"maxItems": COPIES_MAX, "properties": {"maxItems": {"type": "null"}}}, tally)
    assert tally.copies == COPIES_MAX
    assert regex_copies(r"[]{9}]{3}\{7}\p{L}{2}(ab{2}){3}x{2,}") == 2 + 1 + (1 + 6) + 1
    assert bare('a: "b{9}" /c{9}/ // d{9}') == 'a: "" ""  '
