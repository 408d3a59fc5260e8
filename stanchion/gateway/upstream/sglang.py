"""SGLang: token ids in, token ids out over /generate. Pure.

Written against its documented wire (GenerateReqInput, `meta_info`); it has met a scripted stand-in
only, never a real server. A stream's `output_ids` are all ids so far, or with
`--incremental-streaming-output` the new ones: `completion_tokens` tells which, and both are read.

A pair: prefill and decode are asked at the same time and meet in a room of the prefill server's
bootstrap. The answer is the decode server's; scores of the prompt are the prefill server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from stanchion.core.messages import Ended, PromptScores, Spec, Start, Tokens, TopToken
from stanchion.core.outcome import Completed, Outcome, PeerLost
from stanchion.gateway.connection import Signal
from stanchion.gateway.upstream.wire import (
    Asked,
    Load,
    Message,
    Samples,
    Seen,
    Wrong,
    best,
    decoded,
    fault,
    finished,
    room,
    salt,
    score_of,
)

GENERATE = "/generate"


class _Finish(Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _Meta(Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    input_token_logprobs: list[list[float | int | str | None]] | None = None
    input_top_logprobs: list[list[list[float | int | str | None]] | None] | None = None
    output_token_logprobs: list[list[float | int | str | None]] | None = None
    output_top_logprobs: list[list[list[float | int | str | None]] | None] | None = None
    spec_verify_ct: int = 0
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_accept_token_num: int | None = None  # as older versions call these two
    spec_draft_token_num: int | None = None


class _Error(Struct):
    message: str | None = None
    code: int | str | None = None


class _Said(Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Error | None = None


@dataclass(frozen=True)
class Sglang:
    """`watched`: scores are wanted of every answer."""

    vocabulary: int
    watched: bool
    metrics: str | None = "/metrics"

    @property
    def signals(self) -> tuple[Signal, ...]:
        scores: tuple[Signal, ...] = ("logprobs",) if self.watched else ()
        return ("token_ids", *scores, "witness")

    # ---- what is said -----------------------------------------------------------------------

    def ask(self, start: Start) -> Asked:
        return Asked(GENERATE, self._body(start) | {"stream": True})

    def score(self, start: Start) -> Asked:
        body = self._body(start)
        body["sampling_params"]["max_new_tokens"] = max(1, start.sampling.max_tokens)
        body |= {"return_logprob": True, "logprob_start_len": 0, "stream": False}
        top = max(start.sampling.prompt_logprobs or 0, start.sampling.logprobs or 0)
        return Asked(GENERATE, body | {"top_logprobs_num": top})

    def met(self, asked: Asked, start: Start, host: str, port: int | None) -> Asked:
        """The same to either server of a pair: where they meet."""
        body = {**(asked.body or {}), "bootstrap_host": host, "bootstrap_room": room(start.request)}
        return Asked(asked.path, body | ({} if port is None else {"bootstrap_port": port}))

    def abort(self, request: str) -> Asked | None:
        return Asked("/abort_request", {"rid": request})

    def _body(self, start: Start) -> dict[str, Any]:
        one = start.sampling
        sampling: dict[str, Any] = {
            "max_new_tokens": one.max_tokens,
            "min_new_tokens": one.min_tokens,
            "temperature": 0.0 if one.greedy else one.temperature,
            "top_p": one.top_p,
            "top_k": one.top_k or -1,
            "min_p": one.min_p,
            "presence_penalty": one.presence_penalty,
            "frequency_penalty": one.frequency_penalty,
            "repetition_penalty": one.repetition_penalty,
            "stop_token_ids": list(one.stop_ids),
            "ignore_eos": one.ignore_eos,
        }
        if one.seed is not None:
            sampling["sampling_seed"] = one.seed
        if one.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in one.logit_bias}
        body: dict[str, Any] = {
            "rid": start.request,
            "input_ids": start.tokens,
            "sampling_params": sampling,
        }
        if self._scores(start):
            body |= {"return_logprob": True, "top_logprobs_num": one.logprobs or 0}
        if (salted := salt(start)) is not None:
            body["extra_key"] = salted
        return body

    def _scores(self, start: Start) -> bool:
        return self.watched or start.sampling.logprobs is not None

    # ---- what comes back --------------------------------------------------------------------

    def reader(self, start: Start) -> Reading:
        return Reading(start, self._scores(start), Seen(start, self.vocabulary))

    def scored(self, start: Start, raw: bytes) -> Sequence[Message]:
        return self.scored_pair(start, raw, raw)

    def scored_pair(self, start: Start, prefilled: bytes, raw: bytes) -> Sequence[Message]:
        """`prefilled`: what the server that computed the prompt said."""
        said = decoded(prefilled, _Said)
        if said.error is not None:
            raise Wrong(fault(said.error.code, said.error.message))
        scores = prompt_scores(start, said.meta_info)
        if start.sampling.max_tokens == 0:
            return [scores, Ended(request=start.request, outcome=Completed("length"))]
        reader = Reading(start, True, Seen(start, self.vocabulary))
        return [scores, *reader.read(raw), *reader.end()]

    def load(self, text: str) -> Load:
        found = Samples.of(text, _NAMES)
        tokens = found.count("sglang:max_total_num_tokens")
        return Load(
            running=found.count("sglang:num_running_reqs"),
            waiting=found.count("sglang:num_queue_reqs"),
            prefill_tokens=found.count("sglang:prompt_tokens_total"),
            cached_tokens=found.count("sglang:cached_tokens_total"),
            preempted=found.count("sglang:num_retracted_reqs"),
            verify_steps=found.count("sglang:spec_verify_calls_total"),
            pages=tokens,
            used=min(1.0, max(0.0, found.sums.get("sglang:token_usage", 0.0))),
        )


_NAMES = frozenset(
    {
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:prompt_tokens_total",
        "sglang:cached_tokens_total", "sglang:num_retracted_reqs", "sglang:token_usage",
        "sglang:spec_verify_calls_total", "sglang:max_total_num_tokens",
    }
)  # fmt: skip


@dataclass
class Reading:
    start: Start
    scores: bool
    seen: Seen
    _outcome: Outcome = field(default_factory=lambda: finished(None))
    _meta: _Meta = field(default_factory=_Meta)

    def read(self, event: bytes) -> Sequence[Message]:
        said = decoded(event, _Said)
        if said.error is not None:
            raise Wrong(fault(said.error.code, said.error.message))
        self._meta = meta = said.meta_info
        if meta.finish_reason is not None:
            self._outcome = _ending(meta.finish_reason)
        fresh = self._fresh(said.output_ids or [], meta.completion_tokens)
        if not fresh:
            return []
        self.seen.take(fresh)
        logprobs, top = self._scored(fresh, meta)
        request = self.start.request
        return [
            Tokens(
                request=request,
                tokens=fresh,
                logprobs=logprobs,
                top=top,
                cached_tokens=max(0, meta.cached_tokens),
            )
        ]

    def _fresh(self, ids: list[int], total: int | None) -> list[int]:
        """What was not said before."""
        before = self.seen.tokens
        if total is None:
            raise Wrong(PeerLost("the server does not count the answer's tokens"))
        if len(ids) == total >= before:
            return ids[before:]
        if before + len(ids) == total:
            return ids
        raise Wrong(PeerLost(f"{len(ids)} ids behind {before} are not {total} tokens"))

    def _scored(
        self, fresh: list[int], meta: _Meta
    ) -> tuple[list[float], list[list[TopToken]] | None]:
        if not self.scores:
            return [], None
        said = (meta.output_token_logprobs or [])[-len(fresh) :]
        pairs = [_pair(one) for one in said]
        if [token for token, _ in pairs] != fresh:
            raise Wrong(PeerLost("the server's scores are of other tokens"))
        wanted = self.start.sampling.logprobs
        if wanted is None:
            return [score for _, score in pairs], None
        tops = (meta.output_top_logprobs or [])[-len(fresh) :]
        if wanted and len(tops) != len(fresh):
            raise Wrong(PeerLost(f"{len(tops)} lists of scores for {len(fresh)} tokens"))
        lists = tops or [None] * len(fresh)
        top = [best([_pair(of) for of in one or []], wanted) for one in lists]
        return [score for _, score in pairs], top

    def end(self) -> Sequence[Message]:
        spec = _spec(self._meta)
        ended = Ended(
            request=self.start.request,
            outcome=self._outcome,
            cached_tokens=max(0, self._meta.cached_tokens),
            spec=spec,
        )
        if spec is None:
            return [ended]
        # The counters come once, at the end: one reading for the monitor, behind all tokens.
        return [Tokens(request=self.start.request, tokens=[], logprobs=[], spec=spec), ended]


def prompt_scores(start: Start, meta: _Meta) -> PromptScores:
    pairs = [_pair(one) for one in meta.input_token_logprobs or []]
    if [token for token, _ in pairs] != start.tokens:
        raise Wrong(PeerLost("the server gives no scores of the prompt, or of another one"))
    wanted = start.sampling.prompt_logprobs or 0
    tops = meta.input_top_logprobs or [None] * len(pairs)
    if len(tops) != len(pairs):
        raise Wrong(PeerLost(f"{len(tops)} lists of scores for {len(pairs)} tokens"))
    return PromptScores(
        request=start.request,
        logprobs=[score for _, score in pairs[1:]],
        top=[best([_pair(of) for of in one or []], wanted) for one in tops[1:]],
    )


def _pair(said: Sequence[float | int | str | None]) -> tuple[int, float]:
    match said:
        case [float() | int() | None as score, int() as token, *_]:
            return token, score_of(score)
        case _:
            raise Wrong(PeerLost("the server said a score that is none"))


def _ending(said: _Finish) -> Outcome:
    if said.type != "abort":
        return finished(said.type)
    return fault(said.status_code, said.message or "the server aborted it")


def _spec(meta: _Meta) -> Spec | None:
    """From the counters of the whole answer. Without both of them nothing is made up."""
    correct = meta.spec_num_correct_drafts
    accepted = meta.spec_accept_token_num if correct is None else correct
    named = meta.spec_num_proposed_drafts
    proposed = meta.spec_draft_token_num if named is None else named
    steps = meta.spec_verify_ct
    if accepted is None or proposed is None or steps <= 0:
        return None
    if not 0 <= accepted <= proposed:
        raise Wrong(PeerLost("the server's counters of drafts contradict themselves"))
    return Spec(steps, steps + accepted, proposed, accepted)
