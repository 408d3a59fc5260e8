"""The messages and tools of a chat, as a chat template wants them. Pure.

Templates are written for what `transformers` gives them: content is text, the arguments of a call
are an object, a tool is `{"type": "function", "function": {...}}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stanchion.core.errors import RequestRejected
from stanchion.gateway.body import ChatBody, Message, Tool, ToolCall
from stanchion.gateway.toolschema import Types, argument_types

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
NESTED_MAX = 64
Json = dict[str, Any]


def shown_tools(body: ChatBody) -> Sequence[Tool]:
    """The tools that the model is told of: none of them where it must not call any."""
    return () if body.tool_choice == "none" else body.tools or ()


def forced(body: ChatBody) -> str | None:
    """The tool that must be called: "" for any of them, None where none has to be."""
    choice = body.tool_choice
    if choice == "required":
        return ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise RequestRejected("tool_choice.function.name", "required, and missing")
        return name
    if choice not in (None, "none", "auto"):
        words = "must be none, auto, required, or one function by its name"
        raise RequestRejected("tool_choice", words)
    return None


def check_tools(body: ChatBody, known: bool) -> None:
    """`known`: the model's format of tool calls is."""
    names = {tool.function.name for tool in body.tools or ()}
    must = forced(body)
    if must is not None and (not names or must not in {"", *names}):
        raise RequestRejected("tool_choice", f"there is no tool {must!r} among `tools`")
    for place, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise RequestRejected(f"tools[{place}].type", "must be 'function'")
        check_nesting(f"tools[{place}].function.parameters", tool.function.parameters)
    if shown_tools(body) and not known:
        raise RequestRejected(
            "tools", "the chat template of this model has no format of tool calls that is known"
        )


def tool_types(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Types]]:
    """By tool, by argument: what the schemas say."""
    return {tool.function.name: argument_types(tool.function.parameters) for tool in tools}


def templated_tools(tools: Sequence[Tool]) -> list[Json]:
    return [{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in tools]


def templated(messages: Sequence[Message]) -> list[Json]:
    return [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _message(where: str, message: Message) -> Json:
    if message.role not in ROLES:
        raise RequestRejected(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    if message.function_call:
        raise RequestRejected(f"{where}.function_call", "not supported; use tool_calls")
    if message.tool_calls and message.role != "assistant":
        raise RequestRejected(f"{where}.tool_calls", "only in messages of role 'assistant'")
    if message.content is None and message.role != "assistant":
        raise RequestRejected(f"{where}.content", "required, and missing")
    made: Json = {"role": ROLES[message.role], "content": _content(where, message)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            _call(f"{where}.tool_calls[{place}]", call)
            for place, call in enumerate(message.tool_calls)
        ]
    return made


def _content(where: str, message: Message) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for place, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise RequestRejected(f"{where}.content[{place}]", "only parts of type `text`")
    return "".join(part.text or "" for part in message.content)


def _call(where: str, call: ToolCall) -> Json:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = _object(f"{where}.function.arguments", arguments)
    check_nesting(f"{where}.function.arguments", arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _object(where: str, text: str) -> Json:
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestRejected(where, "must be the text of one JSON object")
    return found


def check_nesting(where: str, value: Any, left: int = NESTED_MAX) -> None:
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return
    if left == 0:
        raise RequestRejected(where, f"nested more than {NESTED_MAX} deep")
    for one in inner:
        check_nesting(where, one, left - 1)
