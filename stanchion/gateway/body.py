"""OpenAI's request bodies, every field typed and bounded; and errors that name field and bound.

The bounds of sampling fields are those of `core.request.Sampling` (a test compares them). A field
that is `null` is a field that is absent. Unknown fields are ignored, as vLLM does; known features
that we do not serve yet are in the type, so that `openai` can refuse them by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from stanchion.core.errors import RequestRejected
from stanchion.core.messages import PROMPT_TOKENS_MAX
from stanchion.core.request import (
    LOGIT_BIAS_MAX,
    NAME_CHARACTERS_MAX,
    STOP_IDS_MAX,
    TOP_LOGPROBS_MAX,
    Bias,
    Priority,
    TokenId,
)
from stanchion.gateway.bounds import bound_in_words

CHOICES_MAX = 64
PROMPTS_MAX = 64
STOPS_MAX = 16
STOP_CHARACTERS_MAX = 256
MESSAGES_MAX = 4096
TOOLS_MAX = 1024
CALLS_MAX = 256  # in one message
DESCRIPTION_CHARACTERS_MAX = 2**20
MODEL_CHARACTERS_MAX = 512

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Count = Annotated[int, Meta(ge=0, le=2**24)]
Positive = Annotated[int, Meta(ge=1, le=2**24)]
TopLogprobs = Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)]
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARACTERS_MAX)]
Short = Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)]


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_spec: bool | None = None


class Shared(Struct, frozen=True, kw_only=True):
    """What both bodies have in common."""

    model: Annotated[str, Meta(max_length=MODEL_CHARACTERS_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=LOGIT_BIAS_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_IDS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    cache_salt: Short | None = None
    draft_tokens: Annotated[int, Meta(ge=0, le=5)] | None = None
    priority: Priority | None = None
    # What the content has to be: see `structured`.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Not served yet, so refused where they would change the answer.
    logits_processors: Any = None
    use_beam_search: bool | None = None
    kv_transfer_params: Any = None


class Part(Struct, frozen=True):
    type: str
    text: str | None = None


class CalledFunction(Struct, frozen=True):
    name: Short
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, frozen=True):
    function: CalledFunction
    id: Short | None = None
    type: Short | None = None


class Message(Struct, frozen=True, kw_only=True):
    role: Annotated[str, Meta(max_length=32)]
    content: str | list[Part] | None = None
    name: Short | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=CALLS_MAX)] | None = None
    tool_call_id: Short | None = None
    function_call: Any = None


class Function(Struct, frozen=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: Annotated[str, Meta(max_length=DESCRIPTION_CHARACTERS_MAX)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    type: Short
    function: Function


Scalar = bool | int | float | str | None


class ChatBody(Shared, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], Meta(max_length=32)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Short | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Short | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: bool | None = None


class CompletionBody(Shared, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | int | list[TokenId]], Meta(max_length=PROMPT_TOKENS_MAX)]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: Any = None
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """vLLM's `/tokenize`: of a prompt, or of a chat as it would be rendered."""

    model: Annotated[str, Meta(max_length=MODEL_CHARACTERS_MAX)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], Meta(max_length=32)] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=PROMPT_TOKENS_MAX)]
    model: Annotated[str, Meta(max_length=MODEL_CHARACTERS_MAX)] | None = None


Body = TypeVar("Body", bound=Struct)

_PATH = re.compile(r" - at (?:`key` in )?`\$\.([A-Za-z_0-9.\[\]]+?)`$")
_FIELD = re.compile(r"^Object (?:missing required field|contains unknown field) `(\w+)`(.*)$")
# Names that Python's json writes and JSON does not have.
_NOT_JSON = re.compile(rb'"([A-Za-z_0-9]{1,64})"\s*:\s*(-?(?:NaN|Infinity|inf|nan))\b')


def decode(raw: bytes, body: type[Body]) -> Body:
    try:
        return msgspec.json.decode(raw, type=body)
    except msgspec.ValidationError as error:
        raise _named(str(error), body) from None
    except msgspec.DecodeError as error:
        if found := _NOT_JSON.search(raw):
            name, literal = (part.decode() for part in found.groups())
            words = f"{literal} is no JSON number; {bound_in_words(body, name)}"
            raise RequestRejected(name, words) from None
        raise RequestRejected("body", f"not valid JSON: {error}") from None
    except RecursionError:
        raise RequestRejected("body", "nested too deeply") from None


def _named(message: str, body: type) -> RequestRejected:
    """msgspec says what and where; a client also needs the bound."""
    path = _PATH.search(message)
    what = message[: path.start()] if path else message
    where = path.group(1) if path else "body"
    if unknown := _FIELD.match(what):
        where = unknown.group(1) if where == "body" else f"{where}.{unknown.group(1)}"
        what = "required, and missing" if "missing" in what else "not a field that is known here"
        return RequestRejected(where, what)
    return RequestRejected(where, f"{what}; {bound_in_words(body, re.split(r'[.[]', where)[0])}")
