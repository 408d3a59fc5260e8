"""What is sent for a recorded request: a path and a JSON body. Pure.

Content that was recorded is sent as it was, in OpenAI's terms, to the model that is there. Without
content the prompt is made of the block hashes. Answers end as the model ends them: nothing here
sets `ignore_eos`, and a recorded one is dropped, since a model that is kept from ending says things
that no fault is needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from stanchion.core.errors import ConfigError, ServeError
from stanchion.core.recording import Recorded
from stanchion.core.request import Sampling
from stanchion.gateway.anthropic import MessagesBody, chat_of
from stanchion.gateway.body import decode
from stanchion.lab.replay_plan import Step
from stanchion.lab.replay_text import Scale, Stretches, prompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Api = Literal["chat", "completions"]
Salting = Literal["field", "none"]
Extra = Literal["ids", "logprobs", "spec"]
DROPPED = ("ignore_eos", "n", "best_of", "stream_options")
Json = dict[str, Any]


@dataclass(frozen=True)
class Bodies:
    """`extras`: what to ask the server for besides text. `max_tokens`: no answer gets more.
    `answer_tokens`: what made prompts ask for, instead of what was recorded.
    `salted`: copies say `cache_salt`; made prompts differ between copies anyway. `as_ids`: made
    prompts are sent as token ids, where the server takes them (completions)."""

    model: str
    api: Api | None = None  # of made prompts, and None: as recorded, else completions
    extras: frozenset[Extra] = frozenset()
    temperature: float | None = None
    max_tokens: int | None = None
    answer_tokens: int | None = None
    salted: bool = True
    as_ids: bool = False
    stretches: Callable[[], Stretches] | None = field(default=None, repr=False)
    scale: Scale = field(default_factory=lambda: Scale(1, 1))

    def of(self, step: Step) -> tuple[str, Json]:
        """Path and body. Raise ConfigError, naming the request, for content that is no body."""
        one = step.recorded
        if one.content is not None:
            path, body = _recorded(one, one.content.body)
        else:
            path, body = self._made(step)
        return path, self._finished(step, path, body)

    def again(self, body: Mapping[str, Any], salt: str) -> Json:
        """A body that was sent before, to be asked alone from a cold cache."""
        again = dict(body) | {"model": self.model}
        return again | ({"cache_salt": salt} if self.salted else {})

    def _made(self, step: Step) -> tuple[str, Json]:
        one = step.recorded
        if self.stretches is None:
            raise ConfigError(f"{one.request}: no content was recorded, and there is no corpus")
        stretches = self.stretches()
        tokens = prompt(one, stretches, self.scale, step.salt)
        body: Json = dict(_sampling(one.sampling))
        wanted = one.output_tokens if one.output_tokens is not None else one.max_tokens
        if self.answer_tokens is not None:
            body["max_tokens"] = self.answer_tokens
        elif wanted is not None:
            body["max_tokens"] = max(1, self.scale.of(wanted))
        api = self.api or (one.api if one.api in ("chat", "completions") else "completions")
        if api == "chat":
            said = {"role": "user", "content": stretches.text(tokens)}
            return CHAT, body | {"messages": [said]}
        return COMPLETIONS, body | {"prompt": tokens if self.as_ids else stretches.text(tokens)}

    def _finished(self, step: Step, path: str, body: Json) -> Json:
        body = {name: value for name, value in body.items() if name not in DROPPED}
        options: Json = {"include_usage": True}
        body |= {"model": self.model, "stream": True, "stream_options": options}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens is not None:
            asked = body.get("max_tokens", body.get("max_completion_tokens"))
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = min(asked or self.max_tokens, self.max_tokens)
        if body.get("temperature") != 0 and body.get("seed") is None:
            body["seed"] = _seed(step)
        if "ids" in self.extras:
            body["return_token_ids"] = True
        if "logprobs" in self.extras:
            body |= {"logprobs": True} if path == CHAT else {"logprobs": 0}
        if "spec" in self.extras:
            options["include_spec"] = True
        if self.salted and step.salt:
            body["cache_salt"] = step.salt
        return body


def _recorded(one: Recorded, body: Mapping[str, Any]) -> tuple[str, Json]:
    if one.api != "messages":
        path = COMPLETIONS if one.api == "completions" or "prompt" in body else CHAT
        return path, dict(body)
    try:
        chat = chat_of(decode(msgspec.json.encode(body), MessagesBody))
    except ServeError as error:
        raise ConfigError(f"{one.request}: its content is no request: {error}") from None
    said = msgspec.to_builtins(chat)
    return CHAT, {name: value for name, value in said.items() if value is not None}


# What a server may be asked for in a body. The rest of a Sampling is the replay's to decide.
_SENT = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "min_tokens",
)  # fmt: skip


def _sampling(sampling: Sampling | None) -> Json:
    """Greedy where nothing was recorded: the same prompt then has one answer."""
    if sampling is None:
        return {"temperature": 0.0}
    plain = Sampling(max_tokens=0)
    said = {name: getattr(sampling, name) for name in _SENT}
    kept = {name: value for name, value in said.items() if value != getattr(plain, name)}
    return {"temperature": sampling.temperature} | kept


def _seed(step: Step) -> int:
    """Of the request and its copy: asked again, a sampled answer is drawn the same way."""
    said = f"{step.recorded.request} {step.copy}".encode()
    return int.from_bytes(blake2b(said, digest_size=4).digest(), "little") >> 1
