"""What one streamed reply says, read as it comes: bytes and moments in, a `Heard` out. Pure.

Chunks are not tokens: a chunk may carry three, or none. So tokens are counted from ids or from the
server's usage, and where neither comes their number is not known. The first token is the first
piece of any kind that the model wrote (reasoning, a call, content); the first content is apart.

A reply is *completed* only if its choice has a finish reason; one that then holds nothing at all
is *empty*; one that breaks off, or carries an error, has *failed*, whatever it said before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from stanchion.core.messages import Spec
from stanchion.lab.results import Ending, Point

POINT_STEPS = 16  # verify steps between two points, at least: a monitor's window has 64
EVENT_BYTES_MAX = 1 << 24
ERROR_CHARACTERS = 500


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Score(Struct):
    logprob: float | None = None


class _Scores(Struct):
    content: list[_Score] | None = None
    token_logprobs: list[float | None] | None = None


class _Choice(Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Scores | None = None


class _Cached(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Speculation(Struct):
    num_spec_steps: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_draft_tokens: int | None = None
    acceptance_histogram: list[int] | None = None


class _Metrics(Struct):
    speculative_decoding: _Speculation | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    metrics: _Metrics | None = None
    spec_accept_length: float | None = None
    spec_accept_rate: float | None = None
    spec_accept_prefix: float | None = None
    spec_verify_steps: int | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
How = Literal["closed", "broken", "left"]


@dataclass
class Heard:
    """What is known of a reply so far."""

    first_byte: float | None = None
    first_token: float | None = None
    first_content: float | None = None
    last_token: float | None = None
    gap_s_max: float | None = None
    finish: str | None = None
    error: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    accepts: list[int] = field(default_factory=list)
    pieces: int = 0  # chunks with something of the answer in them

    @property
    def so_far(self) -> int:
        """Tokens that came, as well as is known: a client without ids counts pieces."""
        return len(self.tokens) or self.pieces

    @property
    def counted(self) -> int | None:
        """Tokens that the server counted, or gave ids of: so also of an answer that was cut off."""
        if self.output_tokens is not None:
            return self.output_tokens
        return len(self.tokens) or None

    def calls_in_order(self) -> tuple[str, ...]:
        return tuple("".join(self.calls[at]) for at in sorted(self.calls))


class StreamFold:
    """Feed it what the connection gives, with the moment; `ending` once, at the end."""

    def __init__(self) -> None:
        self.heard = Heard()
        self._rest = b""
        self._last_point: Point | None = None
        self._ended = False

    def push(self, at: float, data: bytes) -> None:
        heard = self.heard
        if heard.first_byte is None:
            heard.first_byte = at
        self._rest += data
        if len(self._rest) > EVENT_BYTES_MAX:
            heard.error = heard.error or f"an event of over {EVENT_BYTES_MAX:,} bytes"
            self._rest = b""
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(at, line[5:].strip())

    def ending(self, how: How, why: str = "") -> Ending:
        """`left`: we closed the connection. Must be asked once nothing more will come."""
        heard = self.heard
        if self._last_point is not None:
            if heard.points[-1].spec == self._last_point.spec:
                del heard.points[-1]
            heard.points.append(self._last_point)
        if heard.error:
            return "failed"
        if how == "left":
            return "aborted"
        if how == "broken" or heard.finish is None:
            # With nothing but a usage and no finish reason, a server has answered nothing.
            if how == "closed" and heard.first_token is None and self._ended:
                return "empty"
            heard.error = why or "the stream ended without a finish reason"
            return "failed"
        return "empty" if heard.first_token is None else "completed"

    # ---- one event --------------------------------------------------------------------------

    def _event(self, at: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as error:
            self.heard.error = self.heard.error or f"an event that is no chunk: {error}"
            return
        if chunk.error is not None:
            self.heard.error = error_words(chunk.error)
        if chunk.usage is not None:
            self._usage(chunk.usage)
        for choice in chunk.choices:
            if choice.index == 0:
                self._choice(at, choice)
        if chunk.spec_verify_steps is not None or chunk.metrics is not None:
            self._spec(at, chunk)

    def _usage(self, usage: _Usage) -> None:
        heard = self.heard
        heard.input_tokens = usage.prompt_tokens
        heard.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            heard.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _choice(self, at: float, choice: _Choice) -> None:
        heard, delta = self.heard, choice.delta
        content = (delta.content if delta is not None else choice.text) or ""
        thought = (delta.reasoning_content or delta.reasoning or "") if delta is not None else ""
        calls = (delta.tool_calls or ()) if delta is not None else ()
        if content:
            heard.texts.append(content)
            if heard.first_content is None:
                heard.first_content = at
        if thought:
            heard.reasonings.append(thought)
        for call in calls:
            self._call(call)
        heard.tokens += choice.token_ids or ()
        if choice.logprobs is not None:
            self._scores(choice.logprobs)
        if content or thought or calls or choice.token_ids:
            self._piece(at)
        if choice.finish_reason is not None:
            heard.finish = choice.finish_reason

    def _piece(self, at: float) -> None:
        heard = self.heard
        heard.pieces += 1
        if heard.first_token is None:
            heard.first_token = at
        elif heard.last_token is not None:
            heard.gap_s_max = max(heard.gap_s_max or 0.0, at - heard.last_token)
        heard.last_token = at

    def _call(self, call: _Call) -> None:
        if call.function is not None:
            parts = self.heard.calls.setdefault(call.index, [])
            if call.function.name:
                parts.append(call.function.name + " ")
            parts.append(call.function.arguments or "")

    def _scores(self, scores: _Scores) -> None:
        if scores.content is not None:
            found = [one.logprob for one in scores.content]
        else:
            found = scores.token_logprobs or []
        self.heard.logprobs += found

    def _spec(self, at: float, chunk: _Chunk) -> None:
        spec = _running(chunk)
        if spec is None:
            return
        if chunk.metrics is not None and chunk.metrics.speculative_decoding is not None:
            self.heard.accepts = chunk.metrics.speculative_decoding.acceptance_histogram or []
        point = Point(at, self.heard.so_far, spec)
        kept = self.heard.points
        if not kept or spec.verify_steps - kept[-1].spec.verify_steps >= POINT_STEPS:
            kept.append(point)
        self._last_point = point


def _running(chunk: _Chunk) -> Spec | None:
    """Counters of a chunk: stanchion's running ones, or vLLM's of the last chunk."""
    steps = chunk.spec_verify_steps
    length, rate, prefix = (
        chunk.spec_accept_length, chunk.spec_accept_rate, chunk.spec_accept_prefix
    )  # fmt: skip
    if steps and length is not None and prefix is not None:
        accepted = round(prefix * steps)
        # Where no draft was accepted, nothing says how many there were: one a step is the least,
        # and any number gives the rate of 0 that was said.
        proposed = round(accepted / rate) if rate else steps
        return Spec(steps, round(length * steps), proposed, accepted)
    said = chunk.metrics.speculative_decoding if chunk.metrics is not None else None
    if said is None or not said.num_spec_steps:
        return None
    accepted = said.num_accepted_draft_tokens or 0
    return Spec(
        said.num_spec_steps,
        said.num_spec_steps + accepted,
        said.num_draft_tokens or 0,
        accepted,
    )


def error_words(error: Any) -> str:
    """Of an error object, in whichever of the shapes that servers use."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:ERROR_CHARACTERS] or "an error without words"


def refusal(status: int, raw: bytes) -> str:
    """What the body of a reply with an error status says."""
    try:
        said = msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return f"{status} {raw[:ERROR_CHARACTERS].decode('utf-8', 'replace')}"
    inner = said.get("error", said) if isinstance(said, dict) else said
    return f"{status} {error_words(inner)}"
