"""What goes back to the client: OpenAI's objects, whole or in chunks, from pieces of choices. Pure.

A finish reason is written only for a choice that has an `End`, and `[DONE]` only by `done`, which
refuses to be called while any choice has none. Every other ending is an `error` object.
Missing values are absent, never 0: a reply that drafted nothing has no `spec_` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from stanchion.core.acceptance import accept_length, accept_prefix, accept_rate
from stanchion.core.errors import Bug, NotFound, RequestRejected, ServeError
from stanchion.core.messages import PromptScores, Spec, TopToken
from stanchion.gateway.choice import ChoiceFold, Piece, Scored
from stanchion.gateway.detok import TextFold, decode
from stanchion.gateway.dialect import Headers
from stanchion.gateway.markup import CallArguments, CallOpened, Content, Part, Reasoning
from stanchion.gateway.openai import Ask

CALL_ID_CHARACTERS = 24  # of ours: with the rest it is under the 40 that other servers take back
LOGPROB_MIN = -9999.0  # JSON has no minus infinity; this is what vLLM writes
Json = dict[str, Any]
encode = msgspec.json.encode


def event(body: Json) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


# ---- errors ---------------------------------------------------------------------------------

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_TYPES |= {405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error"}


def error_body(error: ServeError) -> Json:
    """OpenAI's error shape, with `retryable`: may the same request succeed later?"""
    told: Json = {
        "message": str(error),
        "type": _TYPES.get(error.status, "server_error"),
        "param": error.field if isinstance(error, RequestRejected) else None,
        "code": error.code,
        "retryable": error.retry,
    }
    if isinstance(error, NotFound) and "model" in str(error):
        told |= {"param": "model", "code": "model_not_found"}
    return {"error": told}


# ---- parts that both shapes share -----------------------------------------------------------


def spec_fields(folds: Sequence[ChoiceFold]) -> Json:
    """Running acceptance over all choices, from their counters (never means of means)."""
    specs = [fold.spec for fold in folds if fold.spec is not None]
    total = Spec(
        verify_steps=sum(spec.verify_steps for spec in specs),
        tokens=sum(spec.tokens for spec in specs),
        proposed=sum(spec.proposed for spec in specs),
        accepted=sum(spec.accepted for spec in specs),
    )
    if not total.proposed:
        return {}
    fields = {
        "spec_accept_length": accept_length(total),
        "spec_accept_rate": accept_rate(total),
        "spec_accept_prefix": accept_prefix(total),
        "spec_verify_steps": total.verify_steps,
    }
    return {name: value for name, value in fields.items() if value is not None}


def prompt_tokens(ask: Ask, folds: Sequence[ChoiceFold]) -> int:
    """As the server counted them, where it counts in other tokens than ours."""
    firsts = zip(ask.prompts, folds[:: ask.n])
    return sum(len(ids) if fold.counted is None else fold.counted.prompt for ids, fold in firsts)


def usage(ask: Ask, folds: Sequence[ChoiceFold]) -> Json:
    """A prompt counts once, however many answers it has; so does what the cache had of it."""
    prompt = prompt_tokens(ask, folds)
    completion = sum(fold.completion_tokens for fold in folds)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(fold.cached_tokens for fold in folds[:: ask.n])
        },
    }


class Words:
    """How tokens are written in log-probabilities."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def raw(self, token: int) -> bytes:
        return self._pieces[token] if token < len(self._pieces) else b""

    def text(self, token: int) -> str:
        return self.raw(token).decode("utf-8", "replace")

    def key(self, token: int) -> str:
        """Distinct for distinct bytes, also where they are no text (OpenAI's notation)."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def one(self, token: int, logprob: float | None) -> Json:
        raw = self.raw(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }

    def chat(self, scored: Sequence[Scored]) -> Json:
        content = [
            self.one(one.token, one.logprob)
            | {"top_logprobs": [self.one(top.token, top.logprob) for top in one.top]}
            for one in scored
        ]
        return {"content": content, "refusal": None}

    def legacy(self, scored: Sequence[Scored]) -> Json:
        return {
            "tokens": [self.key(one.token) for one in scored],
            "token_logprobs": [_finite(one.logprob) for one in scored],
            "top_logprobs": [self._tops(one) for one in scored],
            "text_offset": [one.offset for one in scored],
        }

    def _tops(self, one: Scored) -> Json | None:
        if one.logprob is None:
            return None
        tops = {self.key(top.token): _finite(top.logprob) for top in one.top}
        return {self.key(one.token): _finite(one.logprob)} | tops

    def prompt(self, tokens: Sequence[int], scores: PromptScores) -> list[Json | None]:
        """vLLM's form: nothing for the first token, then a map by id with the token itself."""
        told: list[Json | None] = [None]
        for token, logprob, tops in zip(tokens[1:], scores.logprobs, scores.top, strict=True):
            listed = {top.token: (rank, top.logprob) for rank, top in enumerate(tops, start=1)}
            # A token outside the list has a rank that nobody counted: null, not a number.
            shown = {token: listed.get(token, (None, logprob))} | listed
            told.append(
                {
                    str(one): {
                        "logprob": _finite(score),
                        "rank": rank,
                        "decoded_token": self.text(one),
                    }
                    for one, (rank, score) in shown.items()
                }
            )
        return told


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_MIN)


# ---- the two shapes -------------------------------------------------------------------------


class OpenAI:
    """The dialect."""

    def writer(self, ask: Ask, request: str, created: int, folds: Sequence[ChoiceFold]) -> Reply:
        return Reply(ask, request, created, folds)

    def error(self, error: ServeError, request: str) -> Json:
        return error_body(error)

    def failed(self, error: ServeError, request: str) -> bytes:
        """The message begins with the status that the reply cannot have any more: so do those of
        OpenAI's client where there is one, and agents tell by it whether to try again."""
        told = error_body(error)
        told["error"]["message"] = f"{error.status} {error}"
        return event(told)

    def marks(self, request: str) -> Headers:
        return []


class Reply:
    """Writes one request's reply. `folds` are its choices, read for usage and acceptance."""

    def __init__(self, ask: Ask, request: str, created: int, folds: Sequence[ChoiceFold]) -> None:
        self._ask = ask
        self._folds = folds
        self._words = Words(ask.style.pieces)
        self._request = request
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head: Json = {
            "id": ("chatcmpl-" if ask.chat else "cmpl-") + request,
            "object": kind + (".chunk" if ask.chat and ask.stream else ""),
            "created": created,
            "model": ask.model,
        }

    # Streamed.

    def opening(self) -> bytes:
        """Roles, and what belongs to the prompt."""
        ask = self._ask
        chunks = []
        for index in range(ask.choices):
            if not (ask.chat or ask.echo or ask.with_ids):
                continue
            text = (Content(self._echo(index)),) if ask.echo else ()
            choice = self._choice(index, text, ())
            if ask.chat:
                choice["delta"] = {"role": "assistant", "content": ""}
            chunks.append(self._chunk([choice], self._prompt_ids() if index == 0 else {}))
        return b"".join(map(event, chunks))

    def delta(self, index: int, piece: Piece) -> bytes:
        seen = piece.scored if self._ask.with_logprobs or self._ask.with_ids else ()
        choice = self._choice(index, piece.parts, piece.scored)
        if not (choice.get("delta") or choice.get("text") or seen):
            return b""
        return event(self._chunk([choice], {}))

    def final(self, index: int) -> bytes:
        choice = self._choice(index, (), ()) | self._finish(index)
        return event(self._chunk([choice], spec_fields(self._folds)))

    def done(self) -> bytes:
        if any(fold.end is None for fold in self._folds):
            raise Bug("the success marker, while a choice has not ended well")
        told = usage(self._ask, self._folds)
        chunk = self._head | {"choices": [], "usage": told} | spec_fields(self._folds)
        return (event(chunk) if self._ask.with_usage else b"") + b"data: [DONE]\n\n"

    def idle(self) -> bytes:
        return b": waiting\n\n"  # a comment: clients of event streams skip it

    def _chunk(self, choices: list[Json], extra: Json) -> Json:
        unknown = {"usage": None} if self._ask.with_usage else {}
        running = spec_fields(self._folds) if self._ask.with_spec else {}
        return self._head | {"choices": choices} | unknown | running | extra

    def _choice(self, index: int, parts: Sequence[Part], scored: Sequence[Scored]) -> Json:
        choice: Json = {"index": index}
        if self._ask.chat:
            choice["delta"] = self._delta(index, parts)
        else:
            choice["text"] = _text(parts, Content)
        choice |= {"logprobs": self._logprobs(scored), "finish_reason": None}
        if self._ask.with_ids:
            choice["token_ids"] = [one.token for one in scored]
        return choice

    def _delta(self, index: int, parts: Sequence[Part]) -> Json:
        """A call that was cut (`CallCut`) needs no word: its arguments do not end."""
        told: Json = {
            "reasoning_content": _text(parts, Reasoning),
            "content": _text(parts, Content),
            "tool_calls": self._calls(index, parts),
        }
        return {name: value for name, value in told.items() if value}

    def _calls(self, choice: int, parts: Sequence[Part]) -> list[Json]:
        calls: dict[int, Json] = {}
        for part in parts:
            if isinstance(part, CallOpened):
                calls[part.index] = {
                    "index": part.index,
                    "id": f"call_{self._request[:CALL_ID_CHARACTERS]}_{choice}_{part.index}",
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
            elif isinstance(part, CallArguments):
                call = calls.setdefault(part.index, {"index": part.index, "function": {}})
                call["function"].setdefault("arguments", "")
                call["function"]["arguments"] += part.text
        return list(calls.values())

    # Whole.

    def whole(self, pieces: Sequence[Piece], scores: Sequence[PromptScores | None]) -> bytes:
        choices = [
            self._whole_choice(index, piece, scores[index // self._ask.n])
            for index, piece in enumerate(pieces)
        ]
        told = {"choices": choices, "usage": usage(self._ask, self._folds)}
        extra = self._prompt_ids() | spec_fields(self._folds)
        if self._ask.chat and self._ask.with_prompt_logprobs:
            extra["prompt_logprobs"] = self._prompt_scores(0, scores[0])
        return encode(self._head | told | extra)

    def _whole_choice(self, index: int, piece: Piece, scores: PromptScores | None) -> Json:
        choice = self._choice(index, piece.parts, piece.scored)
        if self._ask.chat:
            choice["message"] = self._message(choice.pop("delta"))
        elif self._ask.echo:
            echoed = self._echo(index)
            choice["text"] = echoed + piece.text
            if self._ask.with_logprobs:
                shifted = _shifted(piece.scored, len(echoed))
                choice["logprobs"] = self._words.legacy(
                    (*self._echo_scored(index, scores), *shifted)
                )
        if not self._ask.chat and self._ask.with_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_scores(index, scores)
        if not self._ask.chat and self._ask.with_ids:
            choice["prompt_token_ids"] = self._ask.prompt_of(index)
        return choice | self._finish(index)

    @staticmethod
    def _message(delta: Json) -> Json:
        calls = delta.pop("tool_calls", [])
        content = delta.pop("content", None if calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None} | delta
        if calls:
            named = ("id", "type", "function")
            message["tool_calls"] = [{name: call[name] for name in named} for call in calls]
        return message

    # Both.

    def _finish(self, index: int) -> Json:
        fold = self._folds[index]
        if fold.end is None:
            raise Bug("a finish reason for a choice that has not ended well")
        reason = "tool_calls" if fold.called else fold.end.reason
        finish: Json = {"finish_reason": reason, "stop_reason": fold.end.matched}
        if fold.draft_record is not None:
            finish["spec_draft_record"] = fold.draft_record
        return finish

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        if not self._ask.with_logprobs or not scored:
            return None
        return self._words.chat(scored) if self._ask.chat else self._words.legacy(scored)

    def _prompt_ids(self) -> Json:
        known = self._ask.with_ids and len(self._ask.prompts) == 1
        return {"prompt_token_ids": self._ask.prompts[0]} if known else {}

    def _prompt_scores(self, index: int, scores: PromptScores | None) -> list[Json | None] | None:
        if not self._ask.with_prompt_logprobs:
            return None
        nothing = PromptScores(request="", logprobs=[], top=[])  # a prompt of one token has none
        return self._words.prompt(self._ask.prompt_of(index), scores or nothing)

    def _echo(self, index: int) -> str:
        style = self._ask.style
        return decode(style.pieces, self._ask.prompt_of(index), style.skipped)

    def _echo_scored(self, index: int, scores: PromptScores | None) -> list[Scored]:
        prompt = self._ask.prompt_of(index)
        logprobs = [None, *(scores.logprobs if scores else ())]
        tops: list[list[TopToken]] = [[], *(scores.top if scores else ())]
        return [
            Scored(token, logprob, top, offset)
            for token, logprob, top, offset in zip(
                prompt, logprobs, tops, self._echo_offsets(prompt), strict=True
            )
        ]

    def _echo_offsets(self, prompt: Sequence[int]) -> list[int]:
        text = TextFold(self._ask.style.pieces, self._ask.style.skipped)
        ends = list(accumulate(len(text.push(token)) for token in prompt))
        return [0, *ends[:-1]]


def _text(parts: Sequence[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _shifted(scored: Sequence[Scored], by: int) -> list[Scored]:
    return [Scored(one.token, one.logprob, one.top, one.offset + by) for one in scored]
