"""The HTTP API: a table of routes, each with who may call it, and what each does.

Deny by default: a path that is not in the table asks for a key like any other, and only then is
told that it does not exist. Paths are compared whole, never by prefix; what comes after
`/v1/models/` is compared with the model's name. Every error leaves in the shape of the API that was
called; what we did not foresee costs its own call a 500 and no other call anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from stanchion.core.errors import NotFound, ServeError
from stanchion.gateway import journal
from stanchion.gateway.admin import Admin
from stanchion.gateway.anthropic import CountBody, MessagesBody, chat_of, check_version
from stanchion.gateway.auth import AdminKeys, Keys
from stanchion.gateway.body import ChatBody, CompletionBody, decode
from stanchion.gateway.dialect import Dialect, Headers
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.generate import Generation, mint
from stanchion.gateway.intake import Body, Intake
from stanchion.gateway.messages import Anthropic
from stanchion.gateway.metrics import CONTENT_TYPE, Metrics
from stanchion.gateway.openai import Ask
from stanchion.gateway.priority import Priorities, Range, ranges
from stanchion.gateway.quota import Quota, Quotas, own_quotas
from stanchion.gateway.record.course import Course
from stanchion.gateway.record.recorder import Entry
from stanchion.gateway.record.start import recorder, told
from stanchion.gateway.replies import Json, OpenAI
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import Vocabulary
from stanchion.gateway.waiting import Waiting
from stanchion.gateway.web import Budget, Call, Gone, Held, Receive, Scope, Send

Endpoint = Callable[[Call, str], Awaitable[None]]
Parse = Callable[[bytes], Body]
OPENAI, ANTHROPIC = OpenAI(), Anthropic()
MODELS = "/v1/models/"
ADMIN_BYTES_MAX = 2**20

CLIENT_LEFT = 499  # for metrics only: nobody was there to be told


@dataclass(frozen=True)
class Route:
    method: Literal["GET", "POST"]
    path: str
    access: Literal["open", "key", "admin"]
    endpoint: Endpoint
    dialect: Dialect = OPENAI


class InternalError(ServeError):
    """Not foreseen. The client learns no more than that."""


class App:
    def __init__(self, settings: GatewaySettings, vocabulary: Vocabulary, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._keys = Keys(settings.api_keys)
        self._admin_keys = AdminKeys(settings.admin_keys)
        default = Quota(settings.requests_per_minute, settings.tokens_per_minute)
        self._quotas = Quotas(default, own_quotas(settings.quotas))
        usual = Range(best=settings.priority_best)
        self._priorities = Priorities(usual, ranges(settings.priorities))
        self._running: dict[str, Generation] = {}  # by our own id of the call
        self._admin = Admin(fleet, self._running, lambda: self.on_drain())
        self.on_drain: Callable[[], None] = lambda: None  # the server was told to stop
        self.intake = Intake(settings, vocabulary, fleet)
        self._recorder = recorder(settings, vocabulary, fleet)
        self.waiting = Waiting(settings.waiting_max, settings.waiting_s)
        self.metrics = Metrics(fleet, self.waiting.line, self._recorder)
        self.routes = self._routes()
        self._table: dict[tuple[str, str], Route] = {
            (route.method, route.path): route for route in self.routes
        }

    def _routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/health", "open", self._health),
            Route("GET", "/ready", "open", self._ready),
            Route("GET", "/metrics", "key", self._metrics),
            Route("GET", "/v1/models", "key", self._models),
            Route("GET", MODELS + "{id}", "key", self._one_model),
            Route("POST", "/v1/chat/completions", "key", self._chat),
            Route("POST", "/v1/completions", "key", self._completions),
            Route("POST", "/v1/messages", "key", self._messages, ANTHROPIC),
            Route("POST", "/v1/messages/count_tokens", "key", self._count, ANTHROPIC),
            Route("POST", "/tokenize", "key", self._tokenize),
            Route("POST", "/detokenize", "key", self._detokenize),
            Route("POST", "/admin/drain", "admin", self._drain),
            Route("POST", "/admin/abort", "admin", self._abort),
            Route("POST", "/admin/flush", "admin", self._flush),
            Route("POST", "/admin/quarantine", "admin", self._quarantine),
            Route("GET", "/admin/state", "admin", self._state),
        )

    def close(self) -> None:
        self.intake.close()
        if self._recorder is not None:
            self._recorder.close()

    # ---- the edge ---------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http", scope["type"]
        route = self._route(scope)
        dialect = route.dialect if route else OPENAI
        call = Call(scope, receive, send, mint())
        call.marks = [*self._marks(), *dialect.marks(call.name)]
        try:
            await self._answer(call, route)
        except Gone:
            return
        except ServeError as error:
            await self._refuse(call, dialect, error)
        except Exception as error:  # noqa: BLE001 (the edge: one call's fault stays its own)
            line = journal.Line(event="internal", request=call.name, error=_kind(error))
            journal.write(line, logging.ERROR)
            await self._refuse(call, dialect, InternalError("internal error"))
        finally:
            self.metrics.reply(route.path if route else "other", call.status or CLIENT_LEFT)
            self._fleet.changed.set()

    def _route(self, scope: Scope) -> Route | None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path = scope["path"]
        if path.startswith(MODELS) and path != MODELS:
            path = MODELS + "{id}"
        return self._table.get((method, path))

    def _marks(self) -> Headers:
        """Armed failpoints mark every reply: nobody should take these answers for real ones."""
        armed = self._fleet.failpoints
        return [(b"x-stanchion-failpoints", ",".join(armed).encode())] if armed else []

    async def _answer(self, call: Call, route: Route | None) -> None:
        tenant = ""
        match route.access if route else "key":
            case "open":
                pass
            case "admin":
                self._admin_keys.check(call.headers)
            case _:
                tenant = self._keys.tenant(call.headers)
        if route is None:
            raise NotFound("no such route")
        await route.endpoint(call, tenant)

    async def _refuse(self, call: Call, dialect: Dialect, error: ServeError) -> None:
        if not call.started:
            body = dialect.error(error, call.name)
            await call.error(error, body, self._settings.retry_after_s)

    # ---- small routes -----------------------------------------------------------------------

    async def _health(self, call: Call, tenant: str) -> None:
        await call.json(200, {"status": "alive"})

    async def _ready(self, call: Call, tenant: str) -> None:
        now = asyncio.get_running_loop().time()
        reasons = self._fleet.why_not_ready(now)
        if self.intake.draining:
            reasons.insert(0, "draining")
        missing = self._fleet.troubles(now)  # told even where the others can serve without it
        body = {"ready": not reasons, "why_not": reasons, "missing": missing}
        await call.json(503 if reasons else 200, body)

    async def _metrics(self, call: Call, tenant: str) -> None:
        await call.whole(200, CONTENT_TYPE, self.metrics.text())

    async def _models(self, call: Call, tenant: str) -> None:
        await call.json(200, {"object": "list", "data": [self._model()]})

    async def _one_model(self, call: Call, tenant: str) -> None:
        model, asked = self._model(), call.scope["path"].removeprefix(MODELS)
        if asked != model["id"]:
            raise NotFound(f"there is no model {asked!r} here; there is {model['id']!r}")
        await call.json(200, model)

    def _model(self) -> Json:
        limits = self.intake.limits()
        return {
            "id": limits.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "stanchion",
            "max_model_len": limits.tokens_max,
        }

    async def _tokenize(self, call: Call, tenant: str) -> None:
        with self.intake.open_call():
            await call.json(200, await self.intake.tokenize(call))

    async def _detokenize(self, call: Call, tenant: str) -> None:
        with self.intake.open_call():
            await call.json(200, await self.intake.detokenize(call))

    async def _count(self, call: Call, tenant: str) -> None:
        check_version(call.headers.get(b"anthropic-version"))
        with self.intake.open_call():
            prompt = await self.intake.count(call, _count_body)
            await call.json(200, {"input_tokens": len(prompt)})

    # ---- admin ------------------------------------------------------------------------------

    async def _drain(self, call: Call, tenant: str) -> None:
        await call.json(200, self._admin.drain(await self._admin_body(call)))

    async def _abort(self, call: Call, tenant: str) -> None:
        await call.json(200, self._admin.abort(await self._admin_body(call)))

    async def _flush(self, call: Call, tenant: str) -> None:
        await call.json(200, self._admin.flush(await self._admin_body(call)))

    async def _quarantine(self, call: Call, tenant: str) -> None:
        await call.json(200, self._admin.quarantine(await self._admin_body(call)))

    async def _state(self, call: Call, tenant: str) -> None:
        await call.json(200, self._admin.state())

    async def _admin_body(self, call: Call) -> bytes:
        with Held(Budget(ADMIN_BYTES_MAX)) as held:
            return await call.body(ADMIN_BYTES_MAX, self._settings.body_s, held)

    # ---- generation -------------------------------------------------------------------------

    async def _chat(self, call: Call, tenant: str) -> None:
        await self._generate(call, tenant, _chat_body, OPENAI)

    async def _completions(self, call: Call, tenant: str) -> None:
        await self._generate(call, tenant, _completion_body, OPENAI)

    async def _messages(self, call: Call, tenant: str) -> None:
        check_version(call.headers.get(b"anthropic-version"))
        await self._generate(call, tenant, _messages_body, ANTHROPIC)

    async def _generate(self, call: Call, tenant: str, parse: Parse, dialect: Dialect) -> None:
        with self.intake.open_call():
            course = Course(time.monotonic(), keeps=self._settings.record_content)
            self.intake.admit(0 if self._settings.waiting_max else 1)
            self._quotas.admit(tenant, time.monotonic())
            ask = await self.intake.ask(call, parse)
            priority = self._priorities.of(tenant, ask.priority)
            # Looked at again: it may have changed while the body came and was tokenised.
            await self.waiting.turn(call, priority, lambda: self.intake.admit(ask.choices))
            generation = Generation(
                call, ask, tenant, dialect, self._fleet, self.metrics, course, priority
            )
            entry = self._arrived(call, ask, tenant, course)
            self._running[call.name] = generation
            began = time.monotonic()
            try:
                error = await generation.run()
            finally:
                del self._running[call.name]
                self.waiting.ring()
                if self._recorder is not None and entry is not None:
                    self._recorder.ended(entry, generation.over())
                used = generation.prompt_tokens + generation.generated_tokens
                self.metrics.billed(tenant, generation.prompt_tokens, generation.generated_tokens)
                self._quotas.used(tenant, used, time.monotonic())
            self._log(call, tenant, ask, generation, time.monotonic() - began)
            if error is not None:
                raise error

    def _arrived(self, call: Call, ask: Ask, tenant: str, course: Course) -> Entry | None:
        if self._recorder is None:
            return None
        return self._recorder.arrived(told(call, ask, tenant), course)

    def _log(
        self, call: Call, tenant: str, ask: Ask, generation: Generation, seconds: float
    ) -> None:
        worker, why = generation.routed()
        line = journal.Line(
            event="generation",
            worker=worker,
            routed=why,
            request=call.name,
            tenant=tenant,
            route=call.scope["path"],
            outcome=generation.outcome(),
            choices=ask.choices,
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=sum(fold.cached_tokens for fold in generation.folds[:: ask.n]),
            completion_tokens=generation.generated_tokens,
            milliseconds=round(seconds * 1000, 1),
        )
        journal.write(line)


def _chat_body(raw: bytes) -> ChatBody:
    return decode(raw, ChatBody)


def _completion_body(raw: bytes) -> CompletionBody:
    return decode(raw, CompletionBody)


def _messages_body(raw: bytes) -> ChatBody:
    return chat_of(decode(raw, MessagesBody))


def _count_body(raw: bytes) -> ChatBody:
    return chat_of(decode(raw, CountBody))


def _kind(error: BaseException) -> str:
    """The class of an error; of a group, those inside it. Its words may hold content."""
    if isinstance(error, BaseExceptionGroup):
        return ",".join(map(_kind, error.exceptions))
    return type(error).__name__
