"""Scripted servers of other makers: the other end of their wires, written a second time.

Each knows one answer, `liar.TEXT`, over the byte vocabulary, and cold scores that are a function of
(token, place). What is sent is a list of parts: bytes, a gate (`threading.Event`) that holds what
follows back, or `CUT`, which tears the connection. `edit` changes the events of an answer.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from stanchion.gateway.upstream.wire import Kind

from .liar import TEXT, TOKENS, cold
from .worker import EOS, WAIT_S

CUT = object()
Body = dict[str, Any]
Events = list[Any]  # JSON objects, raw bytes, gates, CUT


@dataclass
class Refusal:
    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Foreign:
    kind: Kind
    batch: int = 3
    owned: bool = True  # /v1/models says what it is
    model: str = "m"
    edit: Callable[[Events, Body], Events] = lambda events, body: events
    refuse: list[Refusal | object] = field(default_factory=list)  # the next calls, in order
    junk: tuple[int, Sequence[int]] | None = None  # (onset, tokens): what it says instead of TEXT
    scores: Callable[[int, int], float] = cold  # of its witness
    aborts: bool = False  # vLLM: it has the route
    cumulative: bool = True  # SGLang's streams
    spec: tuple[int, int, int] | None = None  # verify steps, proposed, accepted
    asked: list[tuple[str, Body]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: int = 0  # connections that were closed before their answer was over
    health: int = 200
    looks: int = 0  # at its health
    port: int = 0

    def __post_init__(self) -> None:
        self._heard = threading.Condition()
        self._up = threading.Event()

    # ---- the thread -------------------------------------------------------------------------

    def __enter__(self) -> Foreign:
        self._up.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(WAIT_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._up.set()
        await self._stop.wait()
        await runner.cleanup()

    def wait_for(self, met: Callable[[], bool]) -> bool:
        with self._heard:
            return self._heard.wait_for(met, WAIT_S)

    def bodies(self, path: str) -> list[Body]:
        return [body for asked, body in self.asked if asked == path]

    # ---- routes -----------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        if request.method == "GET":
            return self._fact(path)
        body = await request.json()
        with self._heard:
            self.asked.append((path, body))
            self.headers.append(dict(request.headers))
            self._heard.notify_all()
        if path in ("/inference/v1/abort_requests", "/abort_request"):
            known = self.kind == "sglang" or self.aborts
            return web.Response(status=200 if known else 403)
        if self.refuse:
            refusal = self.refuse.pop(0)
            if refusal is CUT:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            assert isinstance(refusal, Refusal)
            text = json.dumps(refusal.body) if refusal.body is not None else ""
            return web.Response(status=refusal.status, text=text, headers=refusal.headers)
        return await self._answer(request, path, body)

    def _fact(self, path: str) -> web.Response:
        owner = self.kind if self.owned and self.kind != "openai" else "somebody"
        model = {"id": self.model, "object": "model", "owned_by": owner}
        if self.kind != "openai":
            model["max_model_len"] = 8192
        facts: dict[str, Any] = {"/v1/models": {"object": "list", "data": [model]}}
        if self.kind == "vllm":
            facts |= {"/version": {"version": "0.32.0"}, "/health": {}}
        if self.kind == "sglang":
            info = {"disaggregation_bootstrap_port": 8998, "model_path": "/m", "version": "0.5"}
            facts |= {"/get_server_info": info, "/health": {}}
        if path == "/health" and self.kind != "openai":
            self.looks += 1
            return web.Response(status=self.health)
        if path == "/metrics" and self.kind == "vllm":
            return web.Response(text=METRICS)
        if path not in facts:
            return web.Response(status=404)
        return web.json_response(facts[path])

    async def _answer(self, request: web.Request, path: str, body: Body) -> web.StreamResponse:
        events = self.edit(self._events(path, body), body)
        if not body.get("stream"):
            (whole,) = events
            raw = whole if isinstance(whole, bytes) else json.dumps(whole).encode()
            return web.Response(body=raw, content_type="application/json")
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await reply.prepare(request)
            for event in events:
                if event is CUT:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                if isinstance(event, threading.Event):
                    while not event.is_set():
                        await asyncio.sleep(0.005)
                        if request.transport is None or request.transport.is_closing():
                            raise ConnectionResetError
                    continue
                raw = (
                    event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
                )
                await reply.write(raw)
        except (ConnectionResetError, asyncio.CancelledError):
            with self._heard:
                self.left += 1
                self._heard.notify_all()
            raise
        return reply

    # ---- what it says -----------------------------------------------------------------------

    def _events(self, path: str, body: Body) -> Events:
        if path == "/generate":
            return self._generate(body)
        if path == "/v1/chat/completions":
            return text_events([{"role": "assistant"}, {"content": TEXT}], batch=self.batch)
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return completion_events(TEXT, self.batch)
        return self._completion(prompt, body)

    def _tokens(self, known: int, most: int) -> tuple[list[int], list[float]]:
        """The answer behind so many known tokens, and what it logs."""
        clean = TOKENS[known - 1 :]
        scores = [cold(token, known + at) for at, token in enumerate(clean)]
        if self.junk is not None and known == 1:
            onset, tokens = self.junk
            clean = [*TOKENS[:onset], *tokens]
            scores = [
                cold(token, known + at) - (3.0 if at >= onset else 0.0)
                for at, token in enumerate(clean)
            ]
        return clean[:most], scores[:most]

    def _completion(self, prompt: list[int], body: Body) -> Events:
        handed = body.get("kv_transfer_params")
        tokens, scores = self._tokens(len(prompt), body["max_tokens"])
        reason = "stop" if tokens[-1:] == [EOS] else "length"
        if body.get("stream"):
            events: Events = []
            for at in range(0, len(tokens), self.batch):
                ids, logged = tokens[at : at + self.batch], scores[at : at + self.batch]
                last = at + self.batch >= len(tokens)
                choice = _vllm_choice(ids, logged, body, reason if last else None)
                events.append({"choices": [choice]})
            usage: Body = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}
            if self.spec is not None:
                steps, proposed, accepted = self.spec
                usage["metrics"] = {
                    "speculative_decoding": {
                        "num_spec_steps": steps,
                        "num_draft_tokens": proposed,
                        "num_accepted_draft_tokens": accepted,
                    }
                }
            return [*events, usage, b"data: [DONE]\n\n"]
        whole: Body = {"choices": [_vllm_choice(tokens, scores, body, reason)]}
        if handed and handed.get("do_remote_decode"):
            whole["kv_transfer_params"] = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
        if "prompt_logprobs" in body:
            k = body["prompt_logprobs"]
            whole["choices"][0]["prompt_logprobs"] = [None] + [
                _scores(token, self.scores(token, place), k)
                for place, token in enumerate(prompt)
                if place
            ]
        return [whole]

    def _generate(self, body: Body) -> Events:
        prompt, sampling = body["input_ids"], body["sampling_params"]
        tokens, scores = self._tokens(len(prompt), sampling["max_new_tokens"])
        reason = {"type": "stop" if tokens[-1:] == [EOS] else "length"}
        logged = [[score, token, None] for token, score in zip(tokens, scores)]
        meta: Body = {"finish_reason": reason, "cached_tokens": 1}
        if body.get("logprob_start_len") == 0:
            meta["input_token_logprobs"] = [
                [self.scores(token, place) if place else None, token, None]
                for place, token in enumerate(prompt)
            ]
        edges = range(self.batch, len(tokens) + self.batch, self.batch)
        if not body.get("stream"):
            edges = range(len(tokens), len(tokens) + 1)
        events: Events = []
        before = 0
        for edge in edges:
            first = 0 if self.cumulative else before
            last = edge >= len(tokens)
            event_meta: Body = {"completion_tokens": min(edge, len(tokens)), "finish_reason": None}
            if body.get("return_logprob"):
                event_meta["output_token_logprobs"] = logged[first:edge]
            if last:
                event_meta |= meta
                if self.spec is not None:
                    names = "spec_verify_ct spec_num_proposed_drafts spec_num_correct_drafts"
                    event_meta |= dict(zip(names.split(), self.spec))
            events.append({"output_ids": tokens[first:edge], "meta_info": event_meta})
            before = edge
        return [*events, b"data: [DONE]\n\n"] if body.get("stream") else events


METRICS = """\
# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prompt_tokens_total{engine="0"} 70.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
"""


def _vllm_choice(ids: Sequence[int], logged: Sequence[float], body: Body, reason: Any) -> Body:
    choice: Body = {"text": "?", "token_ids": list(ids), "finish_reason": reason}
    if "logprobs" in body:
        k = body["logprobs"]
        choice["logprobs"] = {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": list(logged),
            "top_logprobs": [
                {f"token_id:{token}": score}
                | {f"token_id:{(token + more) % 256}": score - more for more in range(1, k)}
                for token, score in zip(ids, logged)
            ],
        }
    return choice


def _scores(token: int, score: float, k: int) -> Body:
    more = {str((token + one) % 256): {"logprob": score - one} for one in range(1, k)}
    return {str(token): {"logprob": score}} | more


def cuts(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 22,
    "prompt_tokens_details": {"cached_tokens": 5},
}


def completion_events(text: str, batch: int) -> Events:
    said = [{"choices": [{"text": part, "finish_reason": None}]} for part in cuts(text, batch)]
    return [*said, {"choices": [{"text": "", "finish_reason": "stop"}]}, *_tail()]


def text_events(
    deltas: Sequence[Body], reason: Literal["stop", "tool_calls", "length"] = "stop", batch: int = 3
) -> Events:
    """A chat's, with each long text in so many characters a chunk."""
    events: Events = []
    for delta in deltas:
        content = delta.get("content")
        parts = [{"content": part} for part in cuts(content, batch)] if content else [delta]
        events += [{"choices": [{"delta": part, "finish_reason": None}]} for part in parts]
    return [*events, {"choices": [{"delta": {}, "finish_reason": reason}]}, *_tail()]


def _tail() -> Events:
    return [{"choices": [], "usage": USAGE}, b"data: [DONE]\n\n"]


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)
