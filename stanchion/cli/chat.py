"""`stanchion chat`: a conversation in the terminal with any server of OpenAI's chat API.

Streams each reply, then tells its speed and the running acceptance of speculation. Reads turns line
by line, so that a script may pipe them in. A reply without its end marker is an error and is not
kept in the conversation: half an answer would mislead all that follow.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import urlsplit

from rich.console import Console

HELP = "/reset forgets the conversation, /quit leaves; anything else is said to the model"
WAIT_S = 600.0
# A model's text must not steer the terminal: control characters but newline and tab are shown.
_SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclass(frozen=True)
class Chat:
    """What the command line said."""

    url: str
    model: str | None = None  # the first that the server lists, if absent
    api_key: str | None = field(default=None, repr=False)
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None


class ChatFailed(Exception):
    """The server refused, cut the reply off, or is not there."""


@dataclass
class Told:
    """What one reply came to, filled in as it comes."""

    text: str = ""
    thought: bool = False  # reasoning has come
    usage: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    first: float | None = None
    last: float = 0.0


def run(
    *,
    url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    api_key: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    turns: TextIO | None = None,
    output: TextIO | None = None,
) -> int:
    """0 if every reply was whole; 1 if any failed."""
    chat = Chat(url, model, api_key, system, temperature, max_tokens)
    turns = turns or sys.stdin
    console = Console(file=output, highlight=False, soft_wrap=True)
    try:
        model = chat.model or _first_model(chat)
    except ChatFailed as error:
        console.print(f"{chat.url}: {error}", style="red", markup=False)
        return 1
    if turns.isatty():
        console.print(f"{model} at {chat.url}. {HELP}", style="dim", markup=False)
    return _converse(chat, model, turns, console)


def _converse(chat: Chat, model: str, turns: TextIO, console: Console) -> int:
    opening = [{"role": "system", "content": chat.system}] if chat.system else []
    messages = list(opening)
    failed = 0
    for turn in _lines(turns):
        match turn.split():
            case []:
                continue
            case ["/quit" | "/exit"]:
                break
            case ["/reset"]:
                messages = list(opening)
                console.print("forgotten", style="dim")
                continue
            case [command, *_] if command.startswith("/"):
                console.print(HELP, style="dim")
                continue
        said = [*messages, {"role": "user", "content": turn}]
        try:
            reply = _reply(chat, model, said, console)
        except ChatFailed as error:
            failed = 1
            console.print(f"\n{error}", style="red", markup=False)
        except KeyboardInterrupt:
            console.print("\ncut off by you; not kept", style="dim")
        else:
            messages = [*said, {"role": "assistant", "content": reply}]
    return failed


def _lines(turns: TextIO) -> Iterator[str]:
    """One turn a line; at a terminal with a prompt and line editing."""
    while True:
        try:
            line = input("> ") + "\n" if turns.isatty() else turns.readline()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line.removesuffix("\n")


def _reply(chat: Chat, model: str, messages: list[dict[str, str]], console: Console) -> str:
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True, "include_spec": True},
    }
    given = {"temperature": chat.temperature, "max_tokens": chat.max_tokens}
    body |= {name: value for name, value in given.items() if value is not None}
    told = Told(began=time.monotonic())
    for chunk in _events(chat, body):
        for part, style in _take(told, chunk):
            console.print(part.translate(_SHOWN), end="", markup=False, style=style)
    console.print()
    console.print(_summary(told), style="dim", markup=False)
    return told.text


def _take(told: Told, chunk: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """What is new, and the style of each part. Reasoning is shown, timed, and not kept."""
    told.usage = chunk.get("usage") or told.usage
    told.spec = {name: chunk[name] for name in chunk if name.startswith("spec_")} or told.spec
    for choice in chunk["choices"]:
        delta = choice["delta"]
        thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
        if thought or text:
            told.last = time.monotonic()
            told.first = told.first or told.last
        if thought:
            told.thought = True
            yield thought, "dim"
        if text:
            parted = "\n\n" if told.thought and not told.text else ""
            told.text += text
            yield parted + text, None


def _summary(told: Told) -> str:
    """What was not measured is not said."""
    tokens = int(told.usage.get("completion_tokens", 0))
    parts = [f"{tokens} tokens"]
    if told.first is not None:
        if tokens > 1 and told.last > told.first:
            parts.append(f"{(tokens - 1) / (told.last - told.first):.1f} tokens/s")
        parts.append(f"first after {told.first - told.began:.2f} s")
    if cached := (told.usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
        parts.append(f"{cached} of {told.usage['prompt_tokens']} prompt tokens cached")
    if length := told.spec.get("spec_accept_length"):
        parts.append(f"acceptance {length:.2f} tokens a step")
    if (rate := told.spec.get("spec_accept_rate")) is not None:
        parts.append(f"{rate:.0%} of drafts")
    return " · ".join(parts)


# ---- HTTP -----------------------------------------------------------------------------------


def _first_model(chat: Chat) -> str:
    with _Answer(chat, "GET", "/models", None) as answer:
        try:
            return str(json.loads(answer.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatFailed("this is no server of OpenAI's API") from None


def _events(chat: Chat, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with _Answer(chat, "POST", "/chat/completions", body) as answer:
        try:
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield _whole_event(json.loads(line[6:]))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatFailed(f"the reply was cut off: {error}") from None
    raise ChatFailed("the reply was cut off: no end marker came")


def _whole_event(chunk: dict[str, Any]) -> dict[str, Any]:
    if "error" in chunk:
        raise ChatFailed(_words(chunk, "the reply failed"))
    return chunk


def _words(body: Any, otherwise: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else otherwise


class _Answer:
    """One request's answer, as a context: leaving it closes the connection, which also tells a
    server that nobody waits any more."""

    def __init__(self, chat: Chat, method: str, path: str, body: dict[str, Any] | None) -> None:
        url = urlsplit(chat.url if "//" in chat.url else f"http://{chat.url}")
        secure = url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        if not url.hostname:
            raise ChatFailed("this is no URL")
        self._connection = kind(url.hostname, url.port, timeout=WAIT_S)
        self._method = method
        self._path = url.path.rstrip("/").removesuffix("/v1") + "/v1" + path
        self._body = None if body is None else json.dumps(body).encode()
        self._headers = {"content-type": "application/json"}
        if chat.api_key:
            self._headers["authorization"] = f"Bearer {chat.api_key}"

    def __enter__(self) -> http.client.HTTPResponse:
        try:
            self._connection.request(self._method, self._path, self._body, self._headers)
            answer = self._connection.getresponse()
            if answer.status == 200:
                return answer
            told = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ChatFailed(f"no answer: {error}") from None
        self._connection.close()
        try:
            words = _words(json.loads(told), f"HTTP {answer.status}")
        except ValueError:
            words = f"HTTP {answer.status}"
        raise ChatFailed(words)

    def __exit__(self, *error: object) -> None:
        self._connection.close()
