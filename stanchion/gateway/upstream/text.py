"""Any server with OpenAI's API: chats and completions, text in and text out. Pure.

Its text becomes byte tokens, so stop strings, parsers and text witnesses work. There are no ids of
its own, no scores and no counters of drafts: no witness can be asked, and a verdict is never
`clean`. Usage is the server's own count. Only fields that a request sets are sent, since a strict
server refuses those that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from stanchion.core.messages import Counted, Ended, Start, Tokens
from stanchion.core.outcome import Completed, Outcome, OutputSuspect, PeerLost, Rejected
from stanchion.core.request import Sampling
from stanchion.gateway.connection import Signal
from stanchion.gateway.markup import THINK, THOUGHT
from stanchion.gateway.toolschema import Types
from stanchion.gateway.upstream import passage
from stanchion.gateway.upstream.wire import Asked, Load, Message, Wrong, decoded, fault, finished

TOKEN_TEXT_MAX = 256  # bytes of text for each token asked for, and so many tokens more
CALLS_MAX = 128
NO_SCORES = Rejected("prompt_logprobs", "this server gives no log-probabilities")


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
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(Struct):
    message: str | None = None
    code: int | str | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Error | str | None = None


@dataclass(frozen=True)
class Text:
    model: str
    signals: tuple[Signal, ...] = ()
    metrics: str | None = None

    def ask(self, start: Start) -> Asked:
        said = passage.prompt(start)
        body = {
            "model": self.model,
            "max_tokens": start.sampling.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_changed(start.sampling),
        }
        if isinstance(said, str):
            return Asked("/v1/completions", {**body, "prompt": said})
        body["messages"] = passage.messages(said)
        if said.tools:
            body["tools"] = said.tools
        return Asked("/v1/chat/completions", body)

    def reader(self, start: Start) -> Reading:
        said = passage.prompt(start)
        given = None if isinstance(said, str) or not said.tools else passage.tool_types(said)
        return Reading(start, given)

    def score(self, start: Start) -> Asked:
        raise Wrong(NO_SCORES)

    def scored(self, start: Start, raw: bytes) -> Sequence[Message]:
        raise Wrong(NO_SCORES)

    def abort(self, request: str) -> Asked | None:
        return None

    def load(self, text: str) -> Load:
        return Load()


_SAME_NAME = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
)


def _changed(sampling: Sampling) -> dict[str, Any]:
    if sampling.logit_bias or sampling.stop_ids:
        name = "logit_bias" if sampling.logit_bias else "stop_token_ids"
        raise Wrong(Rejected(name, "behind this server there are no token ids"))
    if sampling.logprobs is not None:
        raise Wrong(Rejected("logprobs", "this server gives no log-probabilities"))
    plain = Sampling(max_tokens=sampling.max_tokens)
    said = {
        name: value
        for name in _SAME_NAME
        if (value := getattr(sampling, name)) != getattr(plain, name)
    }
    return {"temperature": sampling.temperature, **said}


@dataclass
class _Open:
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass
class Reading:
    start: Start
    tools: dict[str, dict[str, Types]] | None
    _outcome: Outcome = field(default_factory=lambda: finished(None))
    _usage: _Usage | None = None
    _calls: dict[int, _Open] = field(default_factory=dict)
    _thinking: bool = False
    _bytes: int = 0

    def read(self, event: bytes) -> Sequence[Message]:
        said = decoded(event, _Chunk)
        if said.error is not None:
            error = _Error(said.error) if isinstance(said.error, str) else said.error
            raise Wrong(fault(error.code, error.message))
        self._usage = said.usage or self._usage
        choices = said.choices or []
        if len(choices) > 1:
            raise Wrong(PeerLost("several answers came, one was asked for"))
        text = "".join(map(self._choice, choices))
        return [self._said(text)] if text else []

    def _choice(self, choice: _Choice) -> str:
        text = (choice.text or "") + (self._delta(choice.delta) if choice.delta else "")
        if choice.finish_reason is not None:
            self._outcome = finished(choice.finish_reason)
            text += self._shut() + self._called(isinstance(self._outcome, Completed))
        return text

    def _delta(self, delta: _Delta) -> str:
        text = ""
        if thought := delta.reasoning_content or delta.reasoning:
            text += thought if self._thinking else THINK + thought
            self._thinking = True
        if content := delta.content or delta.refusal:
            text += self._shut() + content
        for call in delta.tool_calls or ():
            self._call(call)
        return text

    def _shut(self) -> str:
        was, self._thinking = self._thinking, False
        return THOUGHT if was else ""

    def _call(self, said: _Call) -> None:
        call = self._calls.setdefault(said.index, _Open())
        if len(self._calls) > CALLS_MAX:
            raise Wrong(OutputSuspect(f"the server makes more than {CALLS_MAX} calls"))
        if said.function is not None:
            call.name = call.name or said.function.name or ""
            call.arguments.append(said.function.arguments or "")
            self._count(said.function.arguments or "")

    def _called(self, ended: bool) -> str:
        """The calls, in their order. Only the last one may have been cut off, by the length."""
        length = ended and self._outcome == Completed("length")
        calls, self._calls = [self._calls[index] for index in sorted(self._calls)], {}
        if calls and self.tools is None:
            raise Wrong(OutputSuspect("the server calls a tool, and was given none"))
        said: list[str] = []
        for place, call in enumerate(calls):
            arguments = "".join(call.arguments)
            text = passage.call_markup(call.name, arguments, self.tools or {})
            if text is None and length and place == len(calls) - 1:
                text = passage.cut_markup(call.name)
            if text is None:
                raise Wrong(OutputSuspect("the server made a call whose arguments are no object"))
            said.append(text)
        return "".join(said)

    def _said(self, text: str) -> Tokens:
        self._count(text)
        return Tokens(request=self.start.request, tokens=list(text.encode()), logprobs=[])

    def _count(self, text: str) -> None:
        """A server is not let to say without end what it was asked to say in so many tokens."""
        self._bytes += len(text)
        asked = self.start.sampling.max_tokens
        if self._bytes > TOKEN_TEXT_MAX * (asked + TOKEN_TEXT_MAX):
            raise Wrong(OutputSuspect(f"the server said far more than {asked} tokens"))

    def end(self) -> Sequence[Message]:
        usage = self._usage
        if usage is None:
            return [Ended(request=self.start.request, outcome=self._outcome)]
        asked = self.start.sampling.max_tokens
        if usage.completion_tokens > asked:
            said = f"the server said {usage.completion_tokens} tokens, {asked} were asked for"
            raise Wrong(OutputSuspect(said))
        details = usage.prompt_tokens_details or _Details()
        ended = Ended(
            request=self.start.request,
            outcome=self._outcome,
            cached_tokens=max(0, details.cached_tokens or 0),
            counted=Counted(max(0, usage.prompt_tokens), max(0, usage.completion_tokens)),
        )
        return [ended]
