"""What goes back to a client of Anthropic's Messages API, whole or as events. Pure.

`message_stop` is written by `done` alone, and only for an answer that ended well. A call that was
cut is an open block whose JSON does not end in a stream, and its own text in a whole answer, where
a `tool_use` block would have to look complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from stanchion.core.errors import Bug, RequestRejected, ServeError
from stanchion.core.messages import PromptScores
from stanchion.gateway.anthropic import in_own_words
from stanchion.gateway.choice import ChoiceFold, Piece
from stanchion.gateway.dialect import Headers
from stanchion.gateway.markup import (
    CallArguments,
    CallClosed,
    CallCut,
    CallOpened,
    Content,
    Part,
    Reasoning,
)
from stanchion.gateway.openai import Ask
from stanchion.gateway.replies import prompt_tokens, spec_fields

Json = dict[str, Any]
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def event(body: Json) -> bytes:
    name: str = body["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


class Anthropic:
    """The dialect."""

    def writer(
        self, ask: Ask, request: str, created: int, folds: Sequence[ChoiceFold]
    ) -> MessageReply:
        (fold,) = folds
        return MessageReply(ask, request, fold)

    def error(self, error: ServeError, request: str) -> Json:
        """Anthropic's shape, with our `code`, `param` and `retryable` beside it."""
        if isinstance(error, RequestRejected):
            error = in_own_words(error)
        told: Json = {
            "type": _TYPES.get(error.status, "api_error"),
            "message": str(error),
            "code": error.code,
            "retryable": error.retry,
        }
        if isinstance(error, RequestRejected):
            told["param"] = error.field
        return {"type": "error", "error": told, "request_id": request}

    def failed(self, error: ServeError, request: str) -> bytes:
        return event(self.error(error, request))

    def marks(self, request: str) -> Headers:
        return [(b"request-id", request.encode())]


class MessageReply:
    def __init__(self, ask: Ask, request: str, fold: ChoiceFold) -> None:
        self._ask = ask
        self._request = request
        self._fold = fold
        self._block: type[Part] | None = None  # the kind of the one that is open
        self._blocks = 0  # that were opened

    # Streamed.

    def opening(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        return event({"type": "message_start", "message": message}) + self.idle()

    def delta(self, index: int, piece: Piece) -> bytes:
        return b"".join(map(event, self._events(piece.parts)))

    def final(self, index: int) -> bytes:
        told = {
            "type": "message_delta",
            "delta": self._ending(),
            "usage": self._usage(),
        } | spec_fields([self._fold])
        return b"".join(map(event, [*self._close(), told]))

    def done(self) -> bytes:
        self._ending()
        return event({"type": "message_stop"})

    def idle(self) -> bytes:
        return event({"type": "ping"})

    def _events(self, parts: Iterable[Part]) -> Iterable[Json]:
        for part in parts:
            match part:
                case Reasoning():
                    yield from self._in(Reasoning, {"type": "thinking", **_THOUGHT})
                    yield self._change({"type": "thinking_delta", "thinking": part.text})
                case Content():
                    yield from self._in(Content, {"type": "text", "text": ""})
                    yield self._change({"type": "text_delta", "text": part.text})
                case CallOpened():
                    yield from self._close()
                    yield from self._in(CallOpened, self._call(part))
                case CallArguments():
                    yield self._change({"type": "input_json_delta", "partial_json": part.text})
                case CallClosed() | CallCut():
                    yield from self._close()

    def _in(self, kind: type[Part], block: Json) -> Iterable[Json]:
        if self._block is not kind:
            yield from self._close()
            self._block = kind
            self._blocks += 1
            yield {"type": "content_block_start", "index": self._at, "content_block": block}

    def _change(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._at, "delta": delta}

    def _close(self) -> Iterable[Json]:
        if self._block is not None:
            self._block = None
            yield {"type": "content_block_stop", "index": self._at}

    @property
    def _at(self) -> int:
        return self._blocks - 1

    # Whole.

    def whole(self, pieces: Sequence[Piece], scores: Sequence[PromptScores | None]) -> bytes:
        ending = self._ending()
        (piece,) = pieces
        message = self._message(self._content(piece.parts)) | ending | spec_fields([self._fold])
        return msgspec.json.encode(message)

    def _content(self, parts: Sequence[Part]) -> list[Json]:
        blocks: list[Json] = []
        call: Json = {}
        arguments: list[str] = []
        for part in parts:
            match part:
                case Reasoning():
                    blocks.append({"type": "thinking", **_THOUGHT, "thinking": part.text})
                case Content():
                    _add_text(blocks, part.text)
                case CallOpened():
                    call, arguments = self._call(part), []
                case CallArguments():
                    arguments.append(part.text)
                case CallClosed():
                    blocks.append(call | {"input": msgspec.json.decode("".join(arguments))})
                case CallCut():
                    _add_text(blocks, part.raw)
        return blocks

    # Both.

    def _call(self, part: CallOpened) -> Json:
        name = f"toolu_{self._request}_{part.index}"
        return {"type": "tool_use", "id": name, "name": part.name, "input": {}}

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": f"msg_{self._request}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
            "content": content,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        """In this API the prompt is what the cache had, what was written to it, and the rest."""
        prompt, cached = prompt_tokens(self._ask, [self._fold]), self._fold.cached_tokens
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._fold.completion_tokens,
        }

    def _ending(self) -> Json:
        end = self._fold.end
        if end is None:
            raise Bug("the end of a message that has not ended well")
        matched = end.matched if isinstance(end.matched, str) else None
        if self._fold.called:
            reason = "tool_use"
        elif end.reason == "length":
            reason = "max_tokens"
        else:
            reason = "end_turn" if matched is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": matched}


# Thoughts that nobody signed: whoever sends them back need not prove where they are from.
_THOUGHT: Json = {"thinking": "", "signature": ""}


def _add_text(blocks: list[Json], text: str) -> None:
    if blocks and blocks[-1]["type"] == "text":
        blocks[-1]["text"] += text
    else:
        blocks.append({"type": "text", "text": text})
