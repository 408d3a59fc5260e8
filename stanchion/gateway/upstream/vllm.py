"""vLLM: token ids in, token ids out over /v1/completions. Pure. Read against vLLM 0.32.

Prompts are sent as ids and answers come as ids (`return_token_ids`), so text is made by the same
folds as that of our own workers. Scores are raw ones (`--logprobs-mode raw_logprobs`, its default).
A request that wants prompt scores reads no prefix cache there, and a salt of its own sees to it
that nothing of it is cached where anybody else looks.

A pair (NixlConnector): the prefill server is asked for one token and says where the KV lies; the
decode server is told so, and fetches it. The first token is the decode server's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    number,
    salt,
    score_of,
)

COMPLETIONS = "/v1/completions"
TOKEN_ID = "token_id:"


class _Logprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []


class _Score(Struct):
    logprob: float | None = None


class _Choice(Struct):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, _Score] | None] | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _Speculation(Struct):
    num_spec_steps: int = 0
    num_accepted_draft_tokens: int = 0
    num_draft_tokens: int = 0


class _Metrics(Struct):
    speculative_decoding: _Speculation | None = None


class _Error(Struct):
    message: str | None = None
    code: int | str | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: _Error | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True)
class Vllm:
    """`watched`: scores are wanted of every answer. `aborts`: it has a route for that."""

    model: str
    vocabulary: int
    watched: bool
    aborts: bool = False
    metrics: str | None = "/metrics"

    @property
    def signals(self) -> tuple[Signal, ...]:
        scores: tuple[Signal, ...] = ("logprobs",) if self.watched else ()
        return ("token_ids", *scores, "witness")

    # ---- what is said -----------------------------------------------------------------------

    def ask(self, start: Start) -> Asked:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return Asked(COMPLETIONS, self._body(start) | stream)

    def score(self, start: Start) -> Asked:
        one = start.sampling
        scores = {"prompt_logprobs": one.prompt_logprobs or 0, "max_tokens": max(1, one.max_tokens)}
        return Asked(COMPLETIONS, self._body(start) | scores)

    def prefill(self, start: Start) -> Asked:
        """To the prefill server of a pair. No end token may end it: it would keep the KV then."""
        body = self._body(start)
        body |= {"max_tokens": 1, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": []}
        body.pop("logprobs", None)
        body["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        return Asked(COMPLETIONS, body)

    def decode(self, start: Start, prefilled: bytes) -> Asked:
        """To the decode server, with what the prefill server said."""
        handed = decoded(prefilled, _Chunk).kv_transfer_params
        if not handed:
            raise Wrong(PeerLost("the prefill server handed no KV over: has it a connector?"))
        asked = self.ask(start)
        return Asked(asked.path, {**(asked.body or {}), "kv_transfer_params": handed})

    def abort(self, request: str) -> Asked | None:
        if not self.aborts:
            return None
        return Asked("/inference/v1/abort_requests", {"request_ids": [f"cmpl-{request}-0"]})

    def _body(self, start: Start) -> dict[str, Any]:
        one = start.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": start.tokens,
            "request_id": start.request,
            "max_tokens": one.max_tokens,
            "min_tokens": one.min_tokens,
            "temperature": 0.0 if one.greedy else one.temperature,
            "top_p": one.top_p,
            "top_k": one.top_k or 0,
            "min_p": one.min_p,
            "presence_penalty": one.presence_penalty,
            "frequency_penalty": one.frequency_penalty,
            "repetition_penalty": one.repetition_penalty,
            "stop_token_ids": list(one.stop_ids),
            "ignore_eos": one.ignore_eos,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if one.seed is not None:
            body["seed"] = one.seed
        if one.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in one.logit_bias}
        if self.watched or one.logprobs is not None:
            body["logprobs"] = one.logprobs or 0
        if (salted := salt(start)) is not None:
            body["cache_salt"] = salted
        return body

    # ---- what comes back --------------------------------------------------------------------

    def reader(self, start: Start) -> Reading:
        return Reading(self, start, Seen(start, self.vocabulary))

    def scored(self, start: Start, raw: bytes) -> Sequence[Message]:
        said = decoded(raw, _Chunk)
        if len(said.choices) != 1:
            raise Wrong(PeerLost(f"{len(said.choices)} answers came, one was asked for"))
        scores = prompt_scores(start, said.choices[0].prompt_logprobs)
        if start.sampling.max_tokens == 0:
            return [scores, Ended(request=start.request, outcome=Completed("length"))]
        reader = self.reader(start)
        return [scores, *reader.read(raw), *reader.end()]

    def load(self, text: str) -> Load:
        found = Samples.of(text, _NAMES)
        facts = found.labels.get("vllm:cache_config_info", {})
        pages = number(facts.get("num_gpu_blocks", "")) or 0
        page_tokens = number(facts.get("block_size", "")) or 0
        return Load(
            running=found.count("vllm:num_requests_running"),
            waiting=found.count("vllm:num_requests_waiting"),
            prefill_tokens=found.count("vllm:prompt_tokens_total"),
            cached_tokens=found.count("vllm:prefix_cache_hits_total"),
            preempted=found.count("vllm:num_preemptions_total"),
            verify_steps=found.count("vllm:spec_decode_num_drafts_total"),
            proposed=found.count("vllm:spec_decode_num_draft_tokens_total"),
            accepted=found.count("vllm:spec_decode_num_accepted_tokens_total"),
            pages=pages if page_tokens else 0,
            page_tokens=page_tokens or 1,
            used=min(1.0, max(0.0, found.sums.get("vllm:kv_cache_usage_perc", 0.0))),
        )


_NAMES = frozenset(
    {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens_total",
        "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:kv_cache_usage_perc",
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total", "vllm:cache_config_info",
    }
)  # fmt: skip


@dataclass
class Reading:
    wire: Vllm
    start: Start
    seen: Seen
    _outcome: Outcome = field(default_factory=lambda: finished(None))
    _cached: int = 0
    _spec: Spec | None = None

    def read(self, event: bytes) -> Sequence[Message]:
        said = decoded(event, _Chunk)
        if said.error is not None:
            raise Wrong(fault(said.error.code, said.error.message))
        if said.usage is not None and said.usage.prompt_tokens_details is not None:
            self._cached = said.usage.prompt_tokens_details.cached_tokens or 0
        if said.metrics is not None and said.metrics.speculative_decoding is not None:
            self._spec = _spec(said.metrics.speculative_decoding)
        if len(said.choices) > 1:
            raise Wrong(PeerLost("several answers came, one was asked for"))
        return [message for choice in said.choices for message in self._choice(choice)]

    def _choice(self, choice: _Choice) -> list[Message]:
        if choice.finish_reason is not None:
            self._outcome = finished(choice.finish_reason)
        ids = choice.token_ids
        if ids is None:
            if choice.text:
                raise Wrong(PeerLost("the server says no token ids (return_token_ids)"))
            return []
        self.seen.take(ids)
        if not ids:
            return []
        scores, top = self._scores(ids, choice.logprobs)
        said = Tokens(request=self.start.request, tokens=ids, logprobs=scores, top=top)
        return [said]

    def _scores(
        self, ids: Sequence[int], said: _Logprobs | None
    ) -> tuple[list[float], list[list[TopToken]] | None]:
        if said is None:
            if self.wire.watched or self.start.sampling.logprobs is not None:
                raise Wrong(PeerLost("the server gives no log-probabilities"))
            return [], None
        if len(said.token_logprobs) != len(ids):
            raise Wrong(PeerLost(f"{len(said.token_logprobs)} scores for {len(ids)} tokens"))
        scores = list(map(score_of, said.token_logprobs))
        wanted = self.start.sampling.logprobs
        if wanted is None:
            return scores, None
        tops = said.top_logprobs or [None] * len(ids)
        if len(tops) != len(ids):
            raise Wrong(PeerLost(f"{len(tops)} lists of scores for {len(ids)} tokens"))
        return scores, [best(_named(one or {}), wanted) for one in tops]

    def end(self) -> Sequence[Message]:
        request = self.start.request
        ended = Ended(
            request=request, outcome=self._outcome, cached_tokens=self._cached, spec=self._spec
        )
        if self._spec is None or self._spec.verify_steps == 0:
            return [ended]
        # The counters come once, at the end: one reading for the monitor, behind all tokens.
        return [Tokens(request=request, tokens=[], logprobs=[], spec=self._spec), ended]


def prompt_scores(start: Start, said: list[dict[str, _Score] | None] | None) -> PromptScores:
    if said is None or len(said) != len(start.tokens):
        raise Wrong(PeerLost("the server gives no scores of the prompt, or not of all of it"))
    wanted = start.sampling.prompt_logprobs or 0
    logprobs: list[float] = []
    top: list[list[TopToken]] = []
    for token, one in zip(start.tokens[1:], said[1:]):
        if one is None or str(token) not in one:
            raise Wrong(PeerLost("the server scored another prompt"))
        logprobs.append(score_of(one[str(token)].logprob))
        scores = [(number(key), score_of(of.logprob)) for key, of in one.items()]
        top.append(best([(key, of) for key, of in scores if key is not None], wanted))
    return PromptScores(request=start.request, logprobs=logprobs, top=top)


def _named(scores: dict[str, float | None]) -> list[tuple[int, float]]:
    ids = [(number(name.removeprefix(TOKEN_ID)), one) for name, one in scores.items()]
    return [(token, score_of(one)) for token, one in ids if token is not None]


def _spec(said: _Speculation) -> Spec | None:
    steps, accepted = said.num_spec_steps, said.num_accepted_draft_tokens
    if steps < 0 or not 0 <= accepted <= said.num_draft_tokens:
        raise Wrong(PeerLost("the server's counters of drafts contradict themselves"))
    return Spec(steps, steps + accepted, said.num_draft_tokens, accepted)
