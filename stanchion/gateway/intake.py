"""From a call's body to an `Ask`: within bounds, by the API's own words, tokenised once.

Long texts are tokenised on threads, so that the loop goes on with everybody else's streams.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from stanchion.core.errors import Overloaded, PeerLost, RequestRejected
from stanchion.core.matching import Grammars
from stanchion.gateway import openai
from stanchion.gateway.body import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from stanchion.gateway.body import decode as decode_body
from stanchion.gateway.detok import decode
from stanchion.gateway.failures import Draining
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.grammar import Grammar, constrained, grammar_of
from stanchion.gateway.markup import CALL, KEY, THINK, THOUGHT, Markup
from stanchion.gateway.openai import Ask, Limits
from stanchion.gateway.replies import Json, Words
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import SMALL_TEXT_CHARACTERS, Vocabulary
from stanchion.gateway.web import Budget, Call, Held

Body = ChatBody | CompletionBody
Made = TypeVar("Made")
TOKENISING_THREADS = 2
COMPILE_S = 10.0  # what fuel bounds already, on a machine that stands still
COMPILED_KEPT = 256
OPEN_CALLS_A_SEQUENCE = 2  # calls that may be arriving while those in flight are answered


class Intake:
    def __init__(self, settings: GatewaySettings, vocabulary: Vocabulary, fleet: Fleet) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._fleet = fleet
        self._threads = ThreadPoolExecutor(TOKENISING_THREADS, "tokenise")
        self._bodies = Budget(settings.bodies_bytes_max)
        self._tools = self._reads(settings.tool_call_parser, CALL, KEY)
        self._reasoning = self._reads(settings.reasoning_parser, THINK, THOUGHT)
        self._grammars: Grammars | None = None  # made by the first request that needs it
        self._compiled: OrderedDict[str, None] = OrderedDict()
        self.draining = False
        self.open_calls = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _reads(self, parser: str, *words: str) -> bool:
        """Is this markup the model's? Its chat template says so by writing it."""
        template = self._vocabulary.template
        return parser == "glm" or (
            parser == "auto" and template is not None and template.mentions(*words)
        )

    @contextmanager
    def open_call(self) -> Iterator[None]:
        """For a call with a body of some size: so many may be open at once."""
        bound = self._settings.in_flight_max * OPEN_CALLS_A_SEQUENCE + self._settings.waiting_max
        if self.open_calls >= bound:
            raise Overloaded(f"{bound} calls are open", self._settings.retry_after_s)
        self.open_calls += 1
        try:
            yield
        finally:
            self.open_calls -= 1

    def admit(self, sequences: int) -> None:
        """Raise unless so many new ones may be generated now."""
        if self.draining:
            raise Draining("the server is stopping")
        self._fleet.room(sequences)

    def limits(self) -> Limits:
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
            tools=self._tools,
            reasoning=self._reasoning,
        )

    # ---- bodies -----------------------------------------------------------------------------

    async def raw(self, call: Call, held: Held) -> bytes:
        return await call.body(self._settings.body_bytes_max, self._settings.body_s, held)

    async def ask(self, call: Call, parse: Callable[[bytes], Body]) -> Ask:
        """What is to be generated, and how it is to be read."""
        with Held(self._bodies) as held:
            raw = await self.raw(call, held)
            body, size = parse(raw), len(raw)
            if self._settings.record_content:
                call.raw = raw
            del raw
            limits = self.limits()
            openai.check(body, limits)
            prompts = await self._tokens(body, size, limits)
            ask = openai.ask(body, prompts, self._vocabulary, limits)
            if not constrained(body):
                return ask
            return replace(ask, grammar=await self._grammar(body, ask.style.markup, limits))

    async def _grammar(self, body: Body, markup: Markup | None, limits: Limits) -> str | None:
        """Compiled once here, on a thread, so that no worker meets what cannot be followed."""

        def made() -> Grammar | None:
            grammar = grammar_of(body, markup, self._vocabulary)
            if grammar is not None and grammar.text not in self._compiled:
                self._compile(grammar, limits)
            return grammar

        try:
            async with asyncio.timeout(COMPILE_S):
                grammar = await self._on_thread(made)
        except TimeoutError:
            words = f"its grammar takes more than {COMPILE_S:g} s to compile"
            raise RequestRejected("response_format", words) from None
        if grammar is None:
            return None
        self._compiled.pop(grammar.text, None)
        self._compiled[grammar.text] = None
        if len(self._compiled) > COMPILED_KEPT:
            self._compiled.popitem(last=False)
        return grammar.text

    def _compile(self, grammar: Grammar, limits: Limits) -> None:
        words = self._vocabulary
        if self._grammars is None:
            self._grammars = Grammars(
                words.pieces, words.special, limits.eos_ids, limits.vocabulary
            )
        grammar.compile(self._grammars.check)

    async def count(self, call: Call, parse: Callable[[bytes], Body]) -> list[int]:
        """The prompt's tokens, for who wants no more."""
        with Held(self._bodies) as held:
            raw = await self.raw(call, held)
            body, limits = parse(raw), self.limits()
            openai.check(body, limits)
            (prompt,) = await self._tokens(body, len(raw), limits)
            return prompt

    async def _tokens(self, body: Body, size: int, limits: Limits) -> tuple[list[int], ...]:
        if size <= SMALL_TEXT_CHARACTERS:
            return openai.tokenise(body, self._vocabulary, limits)
        return await self._on_thread(lambda: openai.tokenise(body, self._vocabulary, limits))

    async def _on_thread(self, make: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    # ---- texts and tokens, in vLLM's shapes -------------------------------------------------

    async def tokenize(self, call: Call) -> Json:
        with Held(self._bodies) as held:
            raw = await self.raw(call, held)
            body = decode_body(raw, TokenizeBody)
            tokens = await self._tokenized(body, len(raw))
        words = Words(self._vocabulary.pieces)
        return {
            "count": len(tokens),
            "max_model_len": self.limits().tokens_max,
            "tokens": tokens,
            "token_strs": list(map(words.text, tokens)) if body.return_token_strs else None,
        }

    async def _tokenized(self, body: TokenizeBody, size: int) -> list[int]:
        limits = self.limits()
        openai.check_model(body.model, limits)
        if (body.prompt is None) == (body.messages is None):
            raise RequestRejected("prompt", "either `prompt` or `messages`, and not both")
        if body.messages is None:
            text, special = body.prompt or "", body.add_special_tokens is not False
            openai.check_length(text, "prompt", self._vocabulary, limits)
            return await self._on_thread(lambda: self._vocabulary.encode(text, special))
        chat = ChatBody(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=body.add_special_tokens,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        openai.check(chat, limits)
        (tokens,) = await self._tokens(chat, size, limits)
        return tokens

    async def detokenize(self, call: Call) -> Json:
        with Held(self._bodies) as held:
            body = decode_body(await self.raw(call, held), DetokenizeBody)
        limits = self.limits()
        openai.check_model(body.model, limits)
        openai.known_ids("tokens", body.tokens, limits)
        pieces = self._vocabulary.pieces
        return {"prompt": await self._on_thread(lambda: decode(pieces, body.tokens))}
