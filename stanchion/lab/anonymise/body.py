"""The leaves of a request's body, and the body with others in their places. Pure.

What is kept is an allow-list: roles, kinds, the words of JSON schema, switches and numbers of
sampling. All other strings are leaves (`text`), names (`name`) or values of unknown kind (`value`).
Fields that the API does not know are not there any more: they were never read.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import structs

from stanchion.core.errors import RequestRejected
from stanchion.core.recording import Api
from stanchion.gateway.anthropic import MessagesBody, chat_of
from stanchion.gateway.body import (
    CalledFunction,
    ChatBody,
    CompletionBody,
    Function,
    Message,
    Part,
    Tool,
    ToolCall,
    decode,
)
from stanchion.gateway.conversation import ROLES, forced

SCHEMA_WORDS = frozenset(
    {
        "$defs", "$ref", "$schema", "additionalProperties", "allOf", "anyOf", "const", "default",
        "definitions", "description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum",
        "format", "items", "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum",
        "multipleOf", "not", "nullable", "oneOf", "pattern", "patternProperties", "properties",
        "propertyNames", "required", "title", "type", "uniqueItems",
    }
)  # fmt: skip
TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
DRAFTS = "http://json-schema.org/", "https://json-schema.org/"
DRAFT_CHARACTERS_MAX = 50
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # by names
INNER = frozenset({"items", "additionalProperties", "not", "propertyNames"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "items"})
EFFORTS = frozenset({"minimal", "low", "medium", "high", "max", "xhigh"})
SWITCHES = frozenset({"enable_thinking", "thinking", "clear_thinking", "preserve_thinking"})
EXACT = frozenset({"pattern", "format"})  # read by programs, so a word that is no expression
Json = Any


class Put(Protocol):
    """What stands in a leaf's place."""

    def text(self, said: str) -> str:
        """Of a message: it may have lines."""

    def line(self, said: str) -> str:
        """Inside JSON."""

    def name(self, said: str) -> str: ...
    def number(self, said: int | float) -> int | float: ...
    def secret(self, said: str) -> str:
        """Of what is never part of a prompt (a stop string, a salt)."""


def typed(api: Api, body: dict[str, Any]) -> ChatBody | CompletionBody:
    """As the gateway reads it; Anthropic's messages as the chat that says the same. Raise
    RequestRejected."""
    raw = msgspec.json.encode(body)
    match api:
        case "completions":
            return decode(raw, CompletionBody)
        case "messages":
            return chat_of(decode(raw, MessagesBody))
        case _:
            return decode(raw, ChatBody)


def replaced(body: ChatBody, put: Put) -> ChatBody:
    """The same chat with other leaves. Raise RequestRejected where it is none."""
    kept = shared(body, put)
    return ChatBody(
        messages=[_message(one, put) for one in body.messages],
        tools=None if body.tools is None else [_tool(one, put) for one in body.tools],
        tool_choice=_choice(body, put),
        max_completion_tokens=body.max_completion_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        add_generation_prompt=body.add_generation_prompt,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning_effort if body.reasoning_effort in EFFORTS else None,
        chat_template_kwargs=_switches(body),
        **kept,
    )


# ---- what both bodies have ------------------------------------------------------------------

KEPT = (
    "stream", "stream_options", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k",
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "draft_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "ignore_eos",
    "prompt_logprobs", "return_token_ids",
)  # fmt: skip


def shared(body: ChatBody | CompletionBody, put: Put) -> dict[str, Any]:
    """Token ids of biases and stops are left out: they say which words were meant."""
    kept = {name: getattr(body, name) for name in KEPT}
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    kept["stop"] = None if stops is None else [put.secret(one) for one in stops]
    kept["cache_salt"] = None if body.cache_salt is None else put.secret(body.cache_salt)
    return kept


def plain(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """As JSON, without what is absent."""
    return {name: value for name, value in msgspec.to_builtins(body).items() if value is not None}


def _choice(body: ChatBody, put: Put) -> str | dict[str, Any] | None:
    if name := forced(body):
        return {"type": "function", "function": {"name": put.name(name)}}
    return body.tool_choice


def _switches(body: ChatBody) -> dict[str, Any] | None:
    given = body.chat_template_kwargs or {}
    found = {
        name: value for name, value in given.items() if name in SWITCHES and isinstance(value, bool)
    }
    return found or None


# ---- messages -------------------------------------------------------------------------------


def _message(said: Message, put: Put) -> Message:
    if said.role not in ROLES:
        raise RequestRejected("role", "unknown")
    calls = said.tool_calls
    return Message(
        role=said.role,
        content=_content(said.content, put),
        name=None if said.name is None else put.name(said.name),
        reasoning_content=_text(said.reasoning_content, put),
        tool_calls=None if calls is None else [_call(one, put) for one in calls],
        tool_call_id=None if said.tool_call_id is None else put.name(said.tool_call_id),
    )


def _text(said: str | None, put: Put) -> str | None:
    return None if said is None else put.text(said)


def _content(said: str | list[Part] | None, put: Put) -> str | list[Part] | None:
    if isinstance(said, list):
        return [Part(type="text", text=_text(one.text, put)) for one in said]
    return _text(said, put)


def _call(said: ToolCall, put: Put) -> ToolCall:
    arguments = said.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            raise RequestRejected("arguments", "not the text of a JSON object") from None
    made = CalledFunction(name=put.name(said.function.name), arguments=value(arguments, put))
    return ToolCall(
        function=made, id=None if said.id is None else put.name(said.id), type="function"
    )


def value(said: Json, put: Put) -> Json:
    """JSON of unknown meaning: its shape is kept, and nothing else."""
    match said:
        case dict():
            return {put.name(name): value(one, put) for name, one in said.items()}
        case list():
            return [value(one, put) for one in said]
        case str():
            return put.line(said)
        case bool() | None:
            return said
        case _:
            return put.number(said)


# ---- tools ----------------------------------------------------------------------------------


def _tool(said: Tool, put: Put) -> Tool:
    function = said.function
    made = Function(
        name=put.name(function.name),
        description=None if function.description is None else put.line(function.description),
        parameters=None if function.parameters is None else schema(function.parameters, put),
        strict=function.strict,
    )
    return structs.replace(said, type="function", function=made)


def schema(said: Json, put: Put) -> Json:
    """A JSON schema: its words and structure are kept; names and texts are not."""
    if not isinstance(said, dict):
        return value(said, put)
    return {
        (name if name in SCHEMA_WORDS else put.name(name)): _keyword(name, one, put)
        for name, one in said.items()
    }


def _keyword(name: str, said: Json, put: Put) -> Json:
    if name in NAMED and isinstance(said, dict):
        return {put.name(one): schema(inner, put) for one, inner in said.items()}
    if name in LISTS and isinstance(said, list):
        return [schema(one, put) for one in said]
    if name in INNER:
        return schema(said, put)
    if name == "required" and isinstance(said, list):
        return [put.name(one) if isinstance(one, str) else value(one, put) for one in said]
    if name == "type" and (said in TYPES if isinstance(said, str) else _types(said)):
        return said
    if name == "$ref" and isinstance(said, str):
        return "/".join(
            one if one in SCHEMA_WORDS | {"#"} else put.name(one) for one in said.split("/")
        )
    if name in EXACT and isinstance(said, str):
        return put.name(said)
    if name == "$schema" and isinstance(said, str) and len(said) <= DRAFT_CHARACTERS_MAX:
        return f"{DRAFTS[0]}schema#" if said.startswith(DRAFTS) else put.line(said)
    return value(said, put)


def _types(said: Json) -> bool:
    return isinstance(said, list) and all(isinstance(one, str) and one in TYPES for one in said)
