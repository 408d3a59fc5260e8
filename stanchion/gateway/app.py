"""The HTTP API: a table of routes, each with who may call it, and what each does.

Deny by default: a path that is not in the table asks for a key like any other, and only then is
told that it does not exist. Paths are compared whole, never by prefix. Every error leaves as
OpenAI's error object; what we did not foresee costs its own call a 500 and no other call anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from stanchion.core.errors import NotFound, Overloaded, PeerLost, ServeError
from stanchion.gateway import journal, openai
from stanchion.gateway.auth import Keys
from stanchion.gateway.body import ChatBody, CompletionBody, chat_body, completion_body
from stanchion.gateway.failures import Draining
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.generate import Generation, mint
from stanchion.gateway.metrics import CONTENT_TYPE, Metrics
from stanchion.gateway.openai import Ask, Limits
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import SMALL_TEXT_CHARACTERS, Vocabulary
from stanchion.gateway.web import Budget, Call, Gone, Headers, Held, Receive, Scope, Send

Endpoint = Callable[[Call, str], Awaitable[None]]
TOKENISING_THREADS = 2
OPEN_CALLS_A_SEQUENCE = 2  # calls that may be arriving while those in flight are answered

CLIENT_LEFT = 499  # for metrics only: nobody was there to be told


@dataclass(frozen=True)
class Route:
    method: Literal["GET", "POST"]
    path: str
    access: Literal["open", "key"]
    endpoint: Endpoint


class InternalError(ServeError):
    """Not foreseen. The client learns no more than that."""


class App:
    def __init__(self, settings: GatewaySettings, vocabulary: Vocabulary, fleet: Fleet) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._fleet = fleet
        self._keys = Keys(settings.api_keys)
        self._threads = ThreadPoolExecutor(TOKENISING_THREADS, "tokenise")
        self._bodies = Budget(settings.bodies_bytes_max)
        self.metrics = Metrics(fleet)
        self.open_calls = 0
        self.draining = False
        self.routes = (
            Route("GET", "/health", "open", self._health),
            Route("GET", "/ready", "open", self._ready),
            Route("GET", "/metrics", "key", self._metrics),
            Route("GET", "/v1/models", "key", self._models),
            Route("POST", "/v1/chat/completions", "key", self._chat),
            Route("POST", "/v1/completions", "key", self._completions),
        )
        self._table: dict[tuple[str, str], Route] = {
            (route.method, route.path): route for route in self.routes
        }

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- the edge ---------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http", scope["type"]
        call = Call(scope, receive, send, mint(), marks=self._marks())
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route = self._table.get((method, scope["path"]))
        try:
            await self._answer(call, route)
        except Gone:
            return
        except ServeError as error:
            await self._refuse(call, error)
        except Exception as error:  # noqa: BLE001 (the edge: one call's fault stays its own)
            line = journal.Line(event="internal", request=call.name, error=_kind(error))
            journal.write(line, logging.ERROR)
            await self._refuse(call, InternalError("internal error"))
        finally:
            self.metrics.reply(route.path if route else "other", call.status or CLIENT_LEFT)
            self._fleet.changed.set()

    def _marks(self) -> Headers:
        """Armed failpoints mark every reply: nobody should take these answers for real ones."""
        armed = self._fleet.failpoints
        return [(b"x-stanchion-failpoints", ",".join(armed).encode())] if armed else []

    async def _answer(self, call: Call, route: Route | None) -> None:
        if route is not None and route.access == "open":
            await route.endpoint(call, "")
            return
        tenant = self._keys.tenant(call.headers)
        if route is None:
            raise NotFound("no such route")
        await route.endpoint(call, tenant)

    async def _refuse(self, call: Call, error: ServeError) -> None:
        if not call.started:
            await call.error(error, self._settings.retry_after_s)

    # ---- small routes -----------------------------------------------------------------------

    async def _health(self, call: Call, tenant: str) -> None:
        await call.json(200, {"status": "alive"})

    async def _ready(self, call: Call, tenant: str) -> None:
        now = asyncio.get_running_loop().time()
        reasons = self._fleet.why_not_ready(now)
        if self.draining:
            reasons.insert(0, "draining")
        missing = self._fleet.troubles(now)  # told even where the others can serve without it
        body = {"ready": not reasons, "why_not": reasons, "missing": missing}
        await call.json(503 if reasons else 200, body)

    async def _metrics(self, call: Call, tenant: str) -> None:
        await call.whole(200, CONTENT_TYPE, self.metrics.text())

    async def _models(self, call: Call, tenant: str) -> None:
        limits = self._limits()
        model = {
            "id": limits.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "stanchion",
            "max_model_len": limits.tokens_max,
        }
        await call.json(200, {"object": "list", "data": [model]})

    # ---- generation -------------------------------------------------------------------------

    async def _chat(self, call: Call, tenant: str) -> None:
        await self._generate(call, tenant, chat_body)

    async def _completions(self, call: Call, tenant: str) -> None:
        await self._generate(call, tenant, completion_body)

    async def _generate(
        self, call: Call, tenant: str, parse: Callable[[bytes], ChatBody | CompletionBody]
    ) -> None:
        self._admit()
        self.open_calls += 1
        try:
            with Held(self._bodies) as held:
                raw = await call.body(self._settings.body_bytes_max, self._settings.body_s, held)
                body = parse(raw)
                del raw
                ask = await self._ask(body)
            # Read again: it may have changed while the body came and was tokenised.
            self._admit()
            generation = Generation(call, ask, tenant, self._fleet, self.metrics)
            began = time.monotonic()
            error = await generation.run()
            self._log(call, tenant, ask, generation, time.monotonic() - began)
            if error is not None:
                raise error
        finally:
            self.open_calls -= 1

    def _admit(self) -> None:
        if self.draining:
            raise Draining("the server is stopping")
        self._fleet.room(1)
        bound = self._settings.in_flight_max * OPEN_CALLS_A_SEQUENCE
        if self.open_calls >= bound:
            raise Overloaded(f"{bound} calls are open", self._settings.retry_after_s)

    async def _ask(self, body: ChatBody | CompletionBody) -> Ask:
        limits = self._limits()
        openai.check(body, limits)
        if openai.text_characters(body) <= SMALL_TEXT_CHARACTERS:
            prompts = openai.tokenise(body, self._vocabulary, limits)
        else:
            loop = asyncio.get_running_loop()
            prompts = await loop.run_in_executor(
                self._threads, openai.tokenise, body, self._vocabulary, limits
            )
        return openai.ask(body, prompts, self._vocabulary, limits)

    def _limits(self) -> Limits:
        hello = self._fleet.hello
        if hello is None:
            raise PeerLost("no worker is ready")
        return Limits(
            model=self._settings.served_model_name or hello.model,
            context_max=hello.context_max,
            pool_tokens=hello.pages * hello.page_tokens,
            vocabulary=hello.vocabulary,
            eos_ids=hello.eos_ids,
            choices_max=self._settings.in_flight_max,
            generated_tokens_max=self._settings.generated_tokens_max,
            chat_tokens=self._settings.chat_tokens,
        )

    def _log(
        self, call: Call, tenant: str, ask: Ask, generation: Generation, seconds: float
    ) -> None:
        line = journal.Line(
            event="generation",
            request=call.name,
            tenant=tenant,
            route=call.scope["path"],
            outcome=generation.outcome(),
            choices=ask.choices,
            prompt_tokens=sum(map(len, ask.prompts)),
            cached_tokens=sum(fold.cached_tokens for fold in generation.folds[:: ask.n]),
            completion_tokens=sum(fold.tokens for fold in generation.folds),
            milliseconds=round(seconds * 1000, 1),
        )
        journal.write(line)


def _kind(error: BaseException) -> str:
    """The class of an error; of a group, those inside it. Its words may hold content."""
    if isinstance(error, BaseExceptionGroup):
        return ",".join(map(_kind, error.exceptions))
    return type(error).__name__
