"""An OpenAI body made into an `Ask`: what to run, and how the client wants to read it. Pure.

Everything that a request could get wrong is refused here, before a worker hears of it, with the
field and its true bound. What we do not serve yet is refused by name: nothing is ignored that
would have changed the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stanchion.core.errors import NotFound, RequestRejected
from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.gateway.body import (
    CHOICES_MAX,
    PROMPTS_MAX,
    ChatBody,
    CompletionBody,
)
from stanchion.gateway.choice import Style
from stanchion.gateway.conversation import (
    check_tools,
    shown_tools,
    templated,
    templated_tools,
    tool_types,
)
from stanchion.gateway.detok import decode
from stanchion.gateway.markup import REASONING_MARKERS, THINK, THOUGHT, TOOL_MARKERS, Markup
from stanchion.gateway.stops import StopSet

if TYPE_CHECKING:
    from stanchion.gateway.tokens import Vocabulary

RESERVED = {"self", "messages", "tools", "documents"}  # what a template gets from elsewhere
COMPLETION_TOKENS = 16  # OpenAI's default for completions
PROMPT_TAIL_TOKENS = 32  # enough for `<think>` and line breaks, a byte a token


@dataclass(frozen=True)
class Limits:
    """What this server and its worker can take."""

    model: str
    context_max: int
    pool_tokens: int
    vocabulary: int
    eos_ids: tuple[int, ...]
    choices_max: int
    generated_tokens_max: int
    chat_tokens: int
    tools: bool = False  # the model's format of tool calls is known
    reasoning: bool = False  # and that of its reasoning

    @property
    def tokens_max(self) -> int:
        return min(self.context_max, self.pool_tokens)

    @property
    def tokens_max_is(self) -> str:
        held = self.pool_tokens < self.context_max
        return "the KV pool's size" if held else "the model's context"


@dataclass(frozen=True)
class Ask:
    chat: bool
    model: str
    prompts: tuple[list[int], ...]
    n: int
    sampling: tuple[Sampling, ...]  # one a prompt: what fits may differ
    style: Style
    salt: str
    stream: bool
    priority: int | None = None  # None: its client did not say
    with_usage: bool = False
    with_spec: bool = False
    with_ids: bool = False
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    echo: bool = False
    tools: bool = False  # the prompt declares some
    grammar: str | None = None  # of each of its answers

    @property
    def with_scores(self) -> bool:
        return self.with_logprobs or self.with_prompt_logprobs

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // self.n]

    def starts(
        self, tenant: str, mint: Callable[[], str], session: str = "", priority: int = 0
    ) -> list[Start]:
        return [
            Start(
                request=mint(),
                tokens=self.prompt_of(choice),
                sampling=_seeded(self.sampling[choice // self.n], choice % self.n),
                tenant=tenant,
                salt=self.salt,
                session=session,
                priority=priority,
                grammar=self.grammar,
            )
            for choice in range(self.choices)
        ]


def _seeded(sampling: Sampling, choice: int) -> Sampling:
    """Choices of one request differ: choice i of seed s draws as seed s + i (as in vLLM)."""
    if sampling.seed is None or choice == 0:
        return sampling
    seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63
    changed = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**(changed | {"seed": seed}))


# ---- first: what needs no tokens ------------------------------------------------------------


def check(body: ChatBody | CompletionBody, limits: Limits) -> None:
    """Refuse what can be refused at once: the model's name and the features not served."""
    check_model(body.model, limits)
    for field, changes in _features(body):
        if changes:
            raise RequestRejected(field, "not supported by this server yet; leave it out")
    if body.stream_options is not None and not body.stream:
        raise RequestRejected("stream_options", "only where `stream` is true")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestRejected("prompt_logprobs", "not with `stream`; ask without")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestRejected("top_logprobs", "only where `logprobs` is true")
        check_tools(body, limits.tools)
    elif body.echo and body.stream and body.logprobs is not None:
        raise RequestRejected("echo", "not with both `stream` and `logprobs`")


def check_model(model: str | None, limits: Limits) -> None:
    if model is not None and model != limits.model:
        raise NotFound(f"there is no model {model!r} here; there is {limits.model!r}")


def _features(body: ChatBody | CompletionBody) -> Iterable[tuple[str, bool]]:
    for field in ("logits_processors", "kv_transfer_params"):
        yield field, getattr(body, field) is not None
    yield "use_beam_search", bool(body.use_beam_search)
    if isinstance(body, CompletionBody):
        yield "suffix", body.suffix not in (None, "")
        yield "best_of", body.best_of is not None and body.best_of > (body.n or 1)
        return
    yield "functions", body.functions not in (None, [])
    yield "function_call", body.function_call not in (None, "none", "auto")
    yield "modalities", body.modalities not in (None, ["text"])
    yield "audio", body.audio is not None
    yield "chat_template", body.chat_template is not None
    yield "continue_final_message", bool(body.continue_final_message)


# ---- second: tokens (a long text should be done on a thread) --------------------------------


def tokenise(
    body: ChatBody | CompletionBody, vocabulary: Vocabulary, limits: Limits
) -> tuple[list[int], ...]:
    if isinstance(body, ChatBody):
        return (_chat_tokens(body, vocabulary, limits),)
    special = body.add_special_tokens is not False
    prompts = _prompts(body.prompt)
    return tuple(
        _encode(prompt, "prompt", special, vocabulary, limits)
        if isinstance(prompt, str)
        else _checked_ids(prompt, "prompt", limits)
        for prompt in prompts
    )


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        raise RequestRejected("prompt", "a string, a list of ids, or a list of one kind of these")
    if len(prompt) > PROMPTS_MAX:
        raise RequestRejected("prompt", f"{len(prompt)} prompts; at most {PROMPTS_MAX} at once")
    return prompt


def chat_text(body: ChatBody, vocabulary: Vocabulary) -> str:
    """The prompt that a chat becomes. Raise RequestRejected."""
    settings: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if taken := sorted(RESERVED & settings.keys()):
        raise RequestRejected("chat_template_kwargs", f"{taken[0]} is not yours to set")
    if body.reasoning_effort is not None:
        settings["reasoning_effort"] = body.reasoning_effort
    settings["add_generation_prompt"] = body.add_generation_prompt is not False
    settings["tools"] = templated_tools(shown_tools(body)) or None
    return vocabulary.render(templated(body.messages), **settings)


def _chat_tokens(body: ChatBody, vocabulary: Vocabulary, limits: Limits) -> list[int]:
    text = chat_text(body, vocabulary)
    return _encode(text, "messages", bool(body.add_special_tokens), vocabulary, limits)


def _encode(
    text: str, field: str, special: bool, vocabulary: Vocabulary, limits: Limits
) -> list[int]:
    check_length(text, field, vocabulary, limits)
    return _checked_ids(vocabulary.encode(text, special), field, limits)


def check_length(text: str, field: str, vocabulary: Vocabulary, limits: Limits) -> None:
    """Refuse what is too long whatever its tokens are, without tokenising megabytes."""
    if len(text) > limits.tokens_max * vocabulary.piece_bytes_max:
        said = f"over {limits.tokens_max} tokens, which is {limits.tokens_max_is}"
        raise RequestRejected(field, said)


def _checked_ids(ids: list[int], field: str, limits: Limits) -> list[int]:
    if not ids:
        raise RequestRejected(field, "empty; at least one token is needed")
    if min(ids) < 0 or max(ids) >= limits.vocabulary:
        raise RequestRejected(field, f"token ids must be from 0 to {limits.vocabulary - 1}")
    return ids


# ---- third: the ask -------------------------------------------------------------------------


def ask(
    body: ChatBody | CompletionBody,
    prompts: tuple[list[int], ...],
    vocabulary: Vocabulary,
    limits: Limits,
) -> Ask:
    n = body.n or 1
    choices_max = min(CHOICES_MAX * 2, limits.choices_max)
    if n * len(prompts) > choices_max:
        raise RequestRejected("n", f"{n * len(prompts)} answers asked for; at most {choices_max}")
    sampling = tuple(
        _sampling(body, len(prompt), vocabulary.defaults, limits) for prompt in prompts
    )
    if n * sum(one.max_tokens for one in sampling) > limits.generated_tokens_max:
        raise RequestRejected(
            "n", f"answers times max_tokens is over the bound of {limits.generated_tokens_max}"
        )
    chat = isinstance(body, ChatBody)
    options = body.stream_options
    return Ask(
        chat=chat,
        model=limits.model,
        prompts=prompts,
        n=n,
        sampling=sampling,
        style=_style(body, prompts[0], sampling[0], vocabulary, limits),
        salt=body.cache_salt or "",
        priority=body.priority,
        stream=bool(body.stream),
        with_usage=bool(options and options.include_usage),
        with_spec=bool(options and options.include_spec),
        with_ids=bool(body.return_token_ids),
        with_logprobs=bool(body.logprobs) if chat else body.logprobs is not None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        tools=isinstance(body, ChatBody) and bool(shown_tools(body)),
    )


def _style(
    body: ChatBody | CompletionBody,
    prompt: list[int],
    sampling: Sampling,
    vocabulary: Vocabulary,
    limits: Limits,
) -> Style:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    eos = () if sampling.ignore_eos else limits.eos_ids
    markup = _markup(body, prompt, vocabulary, limits) if isinstance(body, ChatBody) else None
    skipped = vocabulary.special if body.skip_special_tokens is not False else frozenset()
    return Style(
        pieces=vocabulary.pieces,
        skipped=skipped - _markers(markup, vocabulary),
        stops=StopSet(stops),
        include_stop=bool(body.include_stop_str_in_output),
        end_ids=frozenset((*eos, *sampling.stop_ids)),
        eos_ids=frozenset(eos),
        min_tokens=sampling.min_tokens,
        markup=markup,
    )


def _markup(
    body: ChatBody, prompt: list[int], vocabulary: Vocabulary, limits: Limits
) -> Markup | None:
    tools = shown_tools(body)
    if not (tools or limits.reasoning):
        return None
    tail = decode(vocabulary.pieces, prompt[-PROMPT_TAIL_TOKENS:]).rstrip()
    return Markup(
        reasoning=limits.reasoning,
        thinking=limits.reasoning and tail.endswith(THINK),
        thought=limits.reasoning and tail.endswith(THOUGHT),
        tools=tool_types(tools) if tools else None,
        calls_max=1 if body.parallel_tool_calls is False else None,
    )


def _markers(markup: Markup | None, vocabulary: Vocabulary) -> frozenset[int]:
    """The special tokens that are no layout to skip, since they are what is read."""
    if markup is None:
        return frozenset()
    words: tuple[str, ...] = REASONING_MARKERS if markup.reasoning else ()
    words += TOOL_MARKERS if markup.tools is not None else ()
    wanted = {word.encode() for word in words}
    return frozenset(one for one in vocabulary.special if vocabulary.pieces[one] in wanted)


def _sampling(
    body: ChatBody | CompletionBody, prompt: int, defaults: Mapping[str, float], limits: Limits
) -> Sampling:
    max_tokens = _max_tokens(body, prompt, limits)
    said = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    given: dict[str, Any] = {**defaults, **said}
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise RequestRejected("min_tokens", f"at most max_tokens, which is {max_tokens}")
    if body.top_k is not None:
        given["top_k"] = body.top_k if body.top_k > 0 else None
    if body.logit_bias:
        given["logit_bias"] = _bias(body.logit_bias, limits)
    if body.stop_token_ids:
        given["stop_ids"] = tuple(known_ids("stop_token_ids", body.stop_token_ids, limits))
    logprobs = _logprobs(body)
    if logprobs is not None:
        given["logprobs"] = logprobs
        if isinstance(body, CompletionBody) and body.echo:
            given.setdefault("prompt_logprobs", logprobs)
    return Sampling(max_tokens=max_tokens, **given)


_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "prompt_logprobs",
    "draft_tokens",
)


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _bias(bias: dict[int, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    known_ids("logit_bias", bias, limits)
    return tuple(sorted(bias.items()))


def known_ids(field: str, ids: Iterable[int], limits: Limits) -> Iterable[int]:
    if max(ids, default=0) >= limits.vocabulary:
        raise RequestRejected(field, f"token ids must be from 0 to {limits.vocabulary - 1}")
    return ids


def _max_tokens(body: ChatBody | CompletionBody, prompt: int, limits: Limits) -> int:
    chat = isinstance(body, ChatBody)
    wanted = body.max_tokens
    field = "max_tokens"
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            wanted, field = body.max_completion_tokens, "max_completion_tokens"
        if wanted == 0:
            raise RequestRejected(field, "must be at least 1")
    room = limits.tokens_max - prompt
    said = f"{limits.tokens_max} tokens, which is {limits.tokens_max_is}"
    if room < (1 if wanted is None else min(wanted, 1)):
        raise RequestRejected(
            "messages" if chat else "prompt",
            f"{prompt} tokens and room for an answer are over {said}",
        )
    if wanted is None:
        return min(limits.chat_tokens if chat else COMPLETION_TOKENS, room)
    if wanted > room:
        raise RequestRejected(
            field, f"{prompt} prompt tokens + {wanted} = {prompt + wanted}, over {said}"
        )
    return wanted
