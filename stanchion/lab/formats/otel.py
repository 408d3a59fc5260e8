"""OpenTelemetry spans of generative AI: one JSON document with `spans`, each with `gen_ai.*`.

Messages are there as text, so these traces have content. Their tokens are counted by whoever made
them; no hashes. A trace id is taken for a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stanchion.core.errors import TraceError
from stanchion.core.recording import Content, Finish, Header, Recorded, Times
from stanchion.lab.formats.lines import LINE_BYTES_MAX, decoded, opened
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.trace import Trace, checked

OPERATIONS = ("chat", "text_completion", "generate_content")
FINISH: dict[str, Finish] = {
    "stop": "stop", "end_turn": "stop", "length": "length", "max_tokens": "length",
    "tool_calls": "tool_calls", "tool_use": "tool_calls",
}  # fmt: skip


class Span(Struct, frozen=True, kw_only=True):
    trace_id: str
    span_id: str
    start_time: datetime
    end_time: datetime
    attributes: dict[str, Any]
    parent_span_id: str | None = None

    def first(self, *names: str) -> Any:
        return next((self.attributes[name] for name in names if name in self.attributes), None)


class Document(Struct, frozen=True):
    spans: list[Span]


def read(path: Path, options: Options) -> Trace:
    with opened(path) as stream:
        raw = stream.read(LINE_BYTES_MAX + 1)
    if len(raw) > LINE_BYTES_MAX:
        raise TraceError(path, None, f"a document of more than {LINE_BYTES_MAX} bytes")
    spans = decoded(path, None, raw, Document).spans
    asked = [one for one in spans if one.first("gen_ai.operation.name") in OPERATIONS]
    if not asked:
        raise TraceError(path, None, "spans: none of them is a request to a model")
    for one in asked:
        if one.start_time.tzinfo is None or one.end_time.tzinfo is None:
            raise TraceError(path, None, f"span {one.span_id}: a time without a zone")
    asked.sort(key=lambda one: one.start_time)
    origin = asked[0].start_time.timestamp()
    model = str(asked[0].first("gen_ai.request.model") or "")
    header = Header(source="otel", model=model, level="content", origin_unix_s=origin)
    return Trace(header, lambda left_out: _requests(path, asked, origin))


def _requests(path: Path, spans: list[Span], origin: float) -> Iterator[Recorded]:
    turns: dict[str, int] = {}
    ended: dict[str, float] = {}
    for number, one in enumerate(spans, start=1):
        arrival, end = one.start_time.timestamp() - origin, one.end_time.timestamp() - origin
        before = ended.get(one.trace_id)
        model = str(one.first("gen_ai.request.model") or "")
        output = _count(path, one, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
        inputs = _count(path, one, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
        if inputs is None:
            raise TraceError(path, None, f"span {one.span_id}: gen_ai.usage.input_tokens: missing")
        reason = one.first("gen_ai.response.finish_reason", "gen_ai.response.finish_reasons")
        made = Recorded(
            request=one.span_id,
            session=one.trace_id,
            turn=turns.get(one.trace_id, 0),
            think_s=None if before is None else max(0.0, arrival - before),
            api="chat",
            model=model,
            times=Times(arrival=arrival, end=end),
            input_tokens=inputs,
            output_tokens=output,
            max_tokens=output,
            finish=FINISH.get(str(reason[0] if isinstance(reason, list) and reason else reason)),
            content=_content(path, one, model),
        )
        turns[one.trace_id] = made.turn + 1
        ended[one.trace_id] = max(end, before or 0.0)
        yield checked(path, number, made, None)


def _count(path: Path, one: Span, *names: str) -> int | None:
    value = one.first(*names)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TraceError(path, None, f"span {one.span_id}: {names[0]} must be a number")
    return value


def _content(path: Path, one: Span, model: str) -> Content | None:
    asked, said = one.first("gen_ai.input.messages"), one.first("gen_ai.output.messages")
    if asked is None:
        return None
    answers = _messages(path, one, said) if said is not None else []
    text = "".join(str(message.get("content") or "") for message in answers)
    return Content(body={"model": model, "messages": _messages(path, one, asked)}, text=text)


def _messages(path: Path, one: Span, said: Any) -> list[dict[str, Any]]:
    where = f"span {one.span_id}: messages"
    try:
        if isinstance(said, str):
            return msgspec.json.decode(said, type=list[dict[str, Any]])
        return msgspec.convert(said, list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(path, None, f"{where}: {error}") from None
