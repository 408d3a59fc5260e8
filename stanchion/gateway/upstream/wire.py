"""What is said to a server of some kind, and how its words are read. Pure: no connection here.

Each kind (vLLM, SGLang, any server with OpenAI's API) has a file of its own. It makes the bodies of
requests from a `Start`, and messages of ours from what comes back. A server is not trusted: what it
may not say raises `Wrong`, which carries how the request ends.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import nan
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from stanchion.core.messages import Ended, PromptScores, Start, Tokens, TopToken
from stanchion.core.outcome import (
    Completed,
    Outcome,
    OutputSuspect,
    Overloaded,
    PeerLost,
    Rejected,
)

Kind = Literal["vllm", "sglang", "openai"]
Sight = Literal["there", "silent", "gone"]
Message = Tokens | PromptScores | Ended
Decoded = TypeVar("Decoded")

WORDS_MAX = 300  # characters of a server's own words that are handed on
RETRY_AFTER_S = 1.0
RETRY_AFTER_MAX_S = 3600.0
LINE_BYTES = 2**20  # of one event, besides what grows with prompt and answer
PROMPT_TOKEN_BYTES = 16  # servers repeat the prompt's ids
DIGITS_MAX = 15
TOKEN_BYTES = 160  # an id, a score and its words, as JSON
EVERYBODY = ("", "default")  # the tenants of a gateway without keys


class Wrong(Exception):
    """The attempt is over, and the server is `there`, `silent` or `gone` as far as that shows."""

    def __init__(self, outcome: Outcome, server: Sight = "there") -> None:
        super().__init__(str(outcome))
        self.outcome = outcome
        self.server = server


@dataclass(frozen=True)
class Asked:
    """A POST of JSON; a GET where there is no body."""

    path: str
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Found:
    """What a server says of itself."""

    kind: Kind
    model: str
    context_max: int
    bootstrap_port: int | None = None  # SGLang: where prefill and decode meet
    draft_tokens: int = 0


@dataclass(frozen=True)
class Load:
    """From its /metrics: what it says of them, by our names. Absent is 0 or no pages."""

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    verify_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    pages: int = 0
    page_tokens: int = 1
    used: float = 0.0  # of the pages, 0 to 1


class Reader(Protocol):
    """Of one answer that is streamed."""

    def read(self, event: bytes) -> Sequence[Message]:
        """What one event says. Raise Wrong."""

    def end(self) -> Sequence[Message]:
        """The end mark came. The last message is `Ended`, and says if the answer is not whole."""


# ---- what all kinds share -------------------------------------------------------------------


def decoded(raw: bytes, what: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(raw, type=what)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Wrong(PeerLost(f"the server said what makes no sense: {error}")) from None


def line_bytes_max(start: Start) -> int:
    """Of one event of an answer."""
    one = start.sampling
    each = TOKEN_BYTES * (2 + (one.logprobs or 0))
    return LINE_BYTES + PROMPT_TOKEN_BYTES * len(start.tokens) + each * one.max_tokens


def whole_bytes_max(start: Start) -> int:
    """Of an answer in one piece, with scores of its prompt."""
    each = TOKEN_BYTES * (2 + (start.sampling.prompt_logprobs or 0))
    return line_bytes_max(start) + each * len(start.tokens)


def salt(start: Start) -> str | None:
    """What splits the server's prefix cache. Tenants share nothing, as with our own workers."""
    if start.tenant in EVERYBODY and not start.salt:
        return None
    said = msgspec.json.encode([start.tenant, start.salt])
    return blake2b(said, digest_size=16, person=b"upstream").hexdigest()


def room(request: str) -> int:
    """A number of 63 bits, another one for each attempt."""
    return int.from_bytes(blake2b(request.encode(), digest_size=8).digest(), "big") >> 1


@dataclass
class Seen:
    """The tokens of one answer so far, held against what was asked for."""

    start: Start
    vocabulary: int
    tokens: int = 0

    def take(self, ids: Sequence[int]) -> None:
        self.tokens += len(ids)
        if self.tokens > max(1, self.start.sampling.max_tokens):
            asked = self.start.sampling.max_tokens
            raise Wrong(OutputSuspect(f"the server said more than the {asked} tokens asked for"))
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise Wrong(OutputSuspect("the server said a token that its model does not have"))


def score_of(value: float | None) -> float:
    """JSON has no NaN: a score that is none comes as null. Raise Wrong."""
    try:
        return nan if value is None else float(value)
    except OverflowError:
        raise Wrong(PeerLost("the server said a score that is none")) from None


def number(text: str) -> int | None:
    """A count that is written out. None if it is none, or beyond all that is counted."""
    return int(text) if text.isdecimal() and len(text) <= DIGITS_MAX else None


def best(scores: Iterable[tuple[int, float]], count: int) -> list[TopToken]:
    ranked = sorted(scores, key=lambda one: (-one[1], one[0]))
    return [TopToken(token, logprob) for token, logprob in ranked[:count]]


def finished(reason: str | None) -> Outcome:
    """How an answer ended, by the words that these servers share."""
    match reason:
        case "stop" | "length":
            return Completed("stop" if reason == "stop" else "length")
        case "tool_calls" | "function_call":
            return Completed("stop")
        case "content_filter":
            return Rejected("prompt", "the server's filter stopped the answer")
        case "repetition":
            return OutputSuspect("the server found that the answer repeats itself")
        case None:
            return PeerLost("the answer has no end")
        case _:
            return PeerLost(f"the server ended the answer: {reason[:WORDS_MAX]}")


# ---- what a server says when it does not answer ---------------------------------------------


class _Fault(msgspec.Struct):
    message: str | None = None
    param: str | None = None
    code: int | str | None = None


class _Refusal(msgspec.Struct):
    error: _Fault | str | None = None
    message: str | None = None
    detail: str | None = None
    code: int | str | None = None


def refusal(status: int, retry_after: str | None, body: bytes) -> Outcome:
    """How a request ends whose server answered with a status that is no success."""
    field_, words = _words(body)
    if status in (429, 503):
        return Overloaded(words or f"the server is full ({status})", _seconds(retry_after))
    if status in (400, 413, 422):
        return Rejected(field_, words or f"the server refused it ({status})")
    # No client is at fault for a key, a route or a model that the gateway was told of.
    return PeerLost(f"the server answered {status}: {words}" if words else f"it answered {status}")


def fault(code: int | str | None, words: str | None) -> Outcome:
    """The same of an error amid a stream."""
    body = msgspec.json.encode({"message": words or ""})
    return refusal(number(str(code)[: DIGITS_MAX + 1]) or 500, None, body)


def _words(body: bytes) -> tuple[str, str]:
    try:
        said = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return "request", ""
    fault_ = said.error if isinstance(said.error, _Fault) else _Fault()
    plain = said.error if isinstance(said.error, str) else None
    words = fault_.message or plain or said.message or said.detail or ""
    return (fault_.param or "request")[:WORDS_MAX], words[:WORDS_MAX]


def _seconds(retry_after: str | None) -> float:
    try:
        seconds = float(retry_after or RETRY_AFTER_S)
    except ValueError:  # a date: nobody here sends one
        return RETRY_AFTER_S
    return min(max(0.0, seconds), RETRY_AFTER_MAX_S) if seconds == seconds else RETRY_AFTER_S


# ---- /metrics -------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.ASCII)
_LABEL = re.compile(r'(\w+)="([^"]*)"', re.ASCII)


@dataclass
class Samples:
    """Prometheus' text, as far as it is wanted: sums by name, and labels of what says facts."""

    sums: dict[str, float] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(text: str, wanted: Collection[str]) -> Samples:
        found = Samples()
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match is None or (name := match[1]) not in wanted:
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if value == value:
                found.sums[name] = found.sums.get(name, 0.0) + value
            found.labels[name] = dict(_LABEL.findall(match[2] or ""))
        return found

    def count(self, *names: str) -> int:
        """The first of these that is there."""
        value = next((self.sums[name] for name in names if name in self.sums), 0.0)
        return int(min(max(0.0, value), 2.0**53))
