"""Text handed through: prompts for servers that take text, as tokens that are its bytes. Pure.

A completion's prompt is its bytes. A chat is not rendered here, its server does that: its messages
and tools travel as one JSON text between two tokens that no client can write. Answers come back as
bytes too, with calls and reasoning in GLM's markup, so that the folds read them as any answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from stanchion.core.messages import Start
from stanchion.core.outcome import Rejected
from stanchion.gateway.markup import (
    CALL,
    CALLED,
    KEY,
    KEY_END,
    VALUE,
    VALUE_END,
    CallArguments,
    CallClosed,
    CallOpened,
    Content,
    Markup,
    MarkupFold,
    merged,
)
from stanchion.gateway.template import ChatTemplate
from stanchion.gateway.tokens import Vocabulary
from stanchion.gateway.toolschema import STRING, Types, argument_types
from stanchion.gateway.upstream.wire import Wrong

CHAT, CHAT_END, END = 256, 257, 258
NAMES = (b"<|chat|>", b"<|chat_end|>", b"<|end|>")
MARK = "\ud800"  # half a character: JSON, and so a client, cannot say it

# The markers stand here since the answers have them: see `calls_markup`.
_TEMPLATE = """
{#- <think> </think> <tool_call> <arg_key> -#}
{{- mark }}{{ {"messages": messages, "tools": tools} | tojson -}}
"""


def text_vocabulary() -> Vocabulary:
    def encode(text: str, special: bool) -> list[int]:
        if text.startswith(MARK):
            return [CHAT, *text.removeprefix(MARK).encode(), CHAT_END]
        return list(text.encode())

    return Vocabulary(
        pieces=(*(bytes([byte]) for byte in range(256)), *NAMES),
        special=frozenset((CHAT, CHAT_END, END)),
        eos_ids=(END,),
        encoder=encode,
        template=ChatTemplate(_TEMPLATE, {"mark": MARK}),
    )


class Chat(Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def prompt(start: Start) -> Chat | str:
    """What a request was about. Raise Wrong if these tokens are no text."""
    tokens = start.tokens
    if tokens[0] == CHAT and tokens[-1] == CHAT_END:
        try:
            return msgspec.json.decode(bytes(tokens[1:-1]), type=Chat)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            raise Wrong(Rejected("messages", "these tokens are no chat")) from None
    try:
        return bytes(tokens).decode()
    except ValueError:  # ids beyond bytes, or bytes that are no UTF-8
        raise Wrong(Rejected("prompt", "behind this server prompts are text, not ids")) from None


def messages(chat: Chat) -> list[dict[str, Any]]:
    """With arguments as the text that OpenAI's API wants."""
    return [_message(one) for one in chat.messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_call(one) for one in calls]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = msgspec.json.encode(function["arguments"]).decode()
    return {**call, "function": {**function, "arguments": arguments}}


# ---- calls ----------------------------------------------------------------------------------


def tool_types(chat: Chat) -> dict[str, dict[str, Types]]:
    functions = [one.get("function", {}) for one in chat.tools or ()]
    return {one.get("name", ""): argument_types(one.get("parameters")) for one in functions}


def call_markup(name: str, arguments: str, tools: Mapping[str, Mapping[str, Types]]) -> str | None:
    """A whole call as GLM writes it. None if it would not be read as this call with these
    arguments: what is handed on is what the server said, or nothing."""
    try:
        said = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    types = tools.get(name, {})
    pairs = "".join(
        f"{KEY}{key}{KEY_END}{VALUE}{_value(value, types.get(key))}{VALUE_END}"
        for key, value in said.items()
    )
    text = f"{CALL}{name}{pairs}{CALLED}"
    return text if _read(text, tools) == [(name, said)] else None


def cut_markup(name: str) -> str:
    """The beginning of a call that never became whole."""
    return f"{CALL}{name}{KEY}"


def _value(value: object, types: Types | None) -> str:
    if isinstance(value, str) and types == STRING:
        return value
    return msgspec.json.encode(value).decode()


def _read(text: str, tools: Mapping[str, Mapping[str, Types]]) -> list[tuple[str, Any]]:
    """The calls that the fold makes of it; none where anything else is there."""
    fold = MarkupFold(Markup(tools=tools))
    found: list[tuple[str, Any]] = []
    name, arguments = "", ""
    parts: Sequence[object] = merged((*fold.push(text), *fold.finish()))
    for part in parts:
        match part:
            case CallOpened():
                name, arguments = part.name, ""
            case CallArguments():
                arguments += part.text
            case CallClosed():
                found.append((name, msgspec.json.decode(arguments)))
            case Content(text=words) if not words.strip():
                continue
            case _:
                return []
    return found
