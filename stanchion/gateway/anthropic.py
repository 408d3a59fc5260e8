"""Anthropic's Messages body, made into the `ChatBody` that says the same. Pure.

What is checked here is what only this API has; bounds that both have are checked once, behind it,
and have the same names in both. Fields of the API that are unknown here are ignored, as vLLM does;
what would have changed the answer and is not served is refused by name.

Thinking is off unless asked for, as this API has it: `thinking` becomes the template's
`enable_thinking`, and `output_config.effort` its `reasoning_effort`. A budget of thinking tokens
is no bound that anything here could hold the model to; `max_tokens` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from stanchion.core.errors import RequestRejected
from stanchion.core.request import Priority
from stanchion.gateway.body import (
    DESCRIPTION_CHARACTERS_MAX,
    MESSAGES_MAX,
    MODEL_CHARACTERS_MAX,
    STOPS_MAX,
    TOOLS_MAX,
    CalledFunction,
    ChatBody,
    Function,
    Message,
    Positive,
    Short,
    Stop,
    StreamOptions,
    Temperature,
    Tool,
    ToolCall,
)
from stanchion.gateway.conversation import check_nesting

# The older one streams the same events. The newer one has no `temperature`, `top_p` and `top_k`,
# which its own models do not have; ours have them under either.
VERSIONS = ("2026-10-21", "2023-06-01")
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
OTHER_NAMES = (
    ("response_format.json_schema", "output_config.format"),
    ("].function.parameters", "].input_schema"),
)
BLOCKS_MAX = 65_536
# Not an instruction but a note to a billing system, different in each request: at the front of
# the prompt it would leave nothing of a conversation to be found in the cache.
BILLING_NOTE = "x-anthropic-billing-header:"


class Block(Struct, frozen=True, kw_only=True):
    """Any block of content: `type` says which of the fields it has."""

    type: Short
    text: str | None = None
    thinking: str | None = None
    id: Short | None = None
    name: Short | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Short | None = None
    tool_name: Short | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


Blocks = str | Annotated[list[Block], Meta(max_length=BLOCKS_MAX)]


class Turn(Struct, frozen=True):
    role: Short
    content: Blocks


class DeclaredTool(Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    type: Short | None = None
    description: Annotated[str, Meta(max_length=DESCRIPTION_CHARACTERS_MAX)] | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Struct, frozen=True):
    type: Short
    name: Short | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    type: Short
    budget_tokens: Positive | None = None


class OutputConfig(Struct, frozen=True):
    effort: Short | None = None
    format: Any = None


class CountBody(Struct, frozen=True, kw_only=True):
    """What `/v1/messages/count_tokens` takes: all that becomes prompt."""

    model: Annotated[str, Meta(max_length=MODEL_CHARACTERS_MAX)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: Blocks | None = None
    tools: Annotated[list[DeclaredTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Any = None
    container: Any = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    priority: Priority | None = None  # ours, and vLLM's


def check_version(header: bytes | None) -> None:
    """Without the header any will do."""
    if header is not None and header.decode("latin-1") not in VERSIONS:
        raise RequestRejected("anthropic-version", f"must be one of {', '.join(VERSIONS)}")


def chat_of(body: CountBody) -> ChatBody:
    """Raise RequestRejected for what this API has and this server does not."""
    for field in ("mcp_servers", "container"):
        if getattr(body, field) not in (None, []):
            raise RequestRejected(field, "not supported by this server; leave it out")
    config = body.output_config or OutputConfig()
    kind = body.thinking.type if body.thinking else "disabled"
    if kind not in THINKING:
        raise RequestRejected("thinking.type", f"must be one of {', '.join(THINKING)}")
    if body.messages[-1].role == "assistant":
        raise RequestRejected(
            f"messages[{len(body.messages) - 1}].role",
            "the last message cannot be the assistant's: nothing here continues it (prefill)",
        )
    choice = body.tool_choice or ToolChoice("auto")
    own = _generation(body) if isinstance(body, MessagesBody) else {}
    return ChatBody(
        model=body.model,
        messages=[*_system(body.system), *_turns(body.messages)],
        tools=_tools(body.tools) if body.tools else None,
        tool_choice=_choice(choice) if body.tools or body.tool_choice else None,
        parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
        chat_template_kwargs={"enable_thinking": kind != "disabled"},
        reasoning_effort=config.effort,
        response_format=_format(config.format),
        **own,
    )


def in_own_words(error: RequestRejected) -> RequestRejected:
    """What is checked behind `chat_of` is named as it is there."""
    field = error.field
    for theirs, ours in OTHER_NAMES:
        field = field.replace(theirs, ours)
    said = str(error).removeprefix(f"{error.field}: ")
    return RequestRejected(field, said)


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool" if choice.name:
            return {"type": "function", "function": {"name": choice.name}}
        case "tool":
            raise RequestRejected("tool_choice.name", "required, and missing")
        case _:
            raise RequestRejected("tool_choice.type", "must be one of auto, any, tool, none")


def _format(said: Any) -> dict[str, Any] | None:
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("type") != "json_schema":
        raise RequestRejected("output_config.format.type", "must be json_schema")
    return {"type": "json_schema", "json_schema": {"schema": said.get("schema")}}


def _generation(body: MessagesBody) -> dict[str, Any]:
    return {
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "stream_options": StreamOptions() if body.stream else None,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "priority": body.priority,
    }


def _tools(tools: Sequence[DeclaredTool]) -> list[Tool]:
    for place, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise RequestRejected(
                f"tools[{place}].type", "only tools that the client runs; this server runs none"
            )
        check_nesting(f"tools[{place}].input_schema", tool.input_schema)
    return [
        Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))
        for tool in tools
    ]


def _system(system: Blocks | None) -> Iterator[Message]:
    if isinstance(system, str):
        said = system
    else:
        texts = [_text_of(f"system[{place}]", one) for place, one in enumerate(system or ())]
        said = "\n".join(text for text in texts if not _billing_note(text))
    if said:
        yield Message(role="system", content=said)


def _billing_note(text: str) -> bool:
    return text.startswith(BILLING_NOTE) and "\n" not in text.strip()


def _turns(turns: Sequence[Turn]) -> Iterator[Message]:
    for place, turn in enumerate(turns):
        where = f"messages[{place}]"
        blocks = turn.content
        if isinstance(blocks, str):
            blocks = [Block(type="text", text=blocks)]
        match turn.role:
            case "user":
                yield from _user(where, blocks)
            case "assistant":
                yield _assistant(where, blocks)
            case "system":
                yield Message(role="system", content=_joined(f"{where}.content", blocks))
            case _:
                raise RequestRejected(f"{where}.role", "must be one of user, assistant, system")


def _user(where: str, blocks: Sequence[Block]) -> Iterator[Message]:
    """Each result of a tool is a message of its own; so is each run of text between them."""
    texts: list[str] = []
    for number, block in enumerate(blocks):
        here = f"{where}.content[{number}]"
        if block.type != "tool_result":
            texts.append(_text_of(here, block))
            continue
        if texts:
            yield Message(role="user", content="\n".join(texts))
            texts = []
        yield Message(role="tool", content=_result(here, block), tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield Message(role="user", content="\n".join(texts))


def _result(where: str, block: Block) -> str:
    if isinstance(block.content, list):
        return _joined(f"{where}.content", block.content)
    return block.content or ""


def _assistant(where: str, blocks: Sequence[Block]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(blocks):
        here = f"{where}.content[{number}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.name is None or block.id is None:
                raise RequestRejected(here, "a tool_use block has an id, a name and an input")
            check_nesting(f"{here}.input", block.input)
            calls.append(ToolCall(CalledFunction(block.name, block.input or {}), block.id))
        else:
            texts.append(_text_of(here, block))
    return Message(
        role="assistant",
        content="\n".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _joined(where: str, blocks: Sequence[Block]) -> str:
    return "\n".join(_text_of(f"{where}[{place}]", one) for place, one in enumerate(blocks))


def _text_of(where: str, block: Block) -> str:
    if block.type == "tool_reference" and block.tool_name is not None:
        return block.tool_name  # that tool was found; the model has been told of all of them
    if block.type != "text" or block.text is None:
        raise RequestRejected(where, f"blocks of type {block.type!r} are not supported here")
    return block.text
