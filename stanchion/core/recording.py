"""What a recording says of a request: types, and what each field may give away.

A recording is a folder: `header.json`, and segments `events-000001.jsonl` with one `Recorded` a
line, written when its request has ended. Times are seconds on one monotonic clock, from the
recording's origin. What is not known is None, never 0.

Every field has a privacy class, as its annotation. Whoever exports a recording goes by the classes,
so what has none cannot leave (and fails a test):

* `shape`    numbers and words of a closed set: kept
* `time`     when something happened: kept, or made coarser
* `public`   the operator's own words (model, worker): kept
* `name`     stands for a client, a session, a request: a keyed pseudonym
* `hash`     keyed hash of content: hashed again with the export's key
* `content`  what was said, in whatever form: never leaves as it is
* `parts`    a struct whose fields have classes of their own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Struct, structs

from stanchion.core.messages import Spec
from stanchion.core.request import Sampling

Privacy = Literal["shape", "time", "public", "name", "hash", "content", "parts"]
PRIVACY: tuple[Privacy, ...] = get_args(Privacy)
FORMAT = 1
HEADER = "header.json"
SEGMENTS = "events-*.jsonl"

Source = Literal["stanchion", "mooncake", "weka", "azure", "tracelab", "otel"]
Level = Literal["content", "none", "hashes", "surrogate", "secrets"]
Api = Literal["chat", "completions", "messages", ""]
Kind = Literal["system", "tools", "user", "assistant", "reasoning", "tool_result", "other"]
Finish = Literal["stop", "length", "tool_calls"]


class Header(Struct, frozen=True, kw_only=True, tag="recording"):
    """`tokenizer` and `template` are digests of what the model's folder has, "" if unknown.

    `block_tokens`: what one hash of `Recorded.blocks` covers; None where there are none.
    `origin_unix_s`: the wall clock at the origin of all times. `level` says what is left of
    content: all (`content`), nothing (`none`: hashes of the recorder), or what anonymising left.
    """

    format: Annotated[int, "shape"] = FORMAT
    source: Annotated[Source, "shape"]
    model: Annotated[str, "public"]
    tokenizer: Annotated[str, "public"] = ""
    template: Annotated[str, "public"] = ""
    block_tokens: Annotated[int | None, "shape"] = None
    origin_unix_s: Annotated[float | None, "time"] = None
    level: Annotated[Level, "shape"]
    failpoints: Annotated[tuple[str, ...], "public"] = ()


class Times(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds from the origin. `send`: to a worker; the others: to the client."""

    arrival: Annotated[float, "time"]
    send: Annotated[float | None, "time"] = None
    first_byte: Annotated[float | None, "time"] = None
    first_token: Annotated[float | None, "time"] = None
    first_content: Annotated[float | None, "time"] = None
    end: Annotated[float | None, "time"] = None


class Segment(Struct, frozen=True):
    """A stretch of the prompt. The sum of a prompt's segments is its `input_tokens`."""

    kind: Annotated[Kind, "shape"]
    tokens: Annotated[int, "shape"]


class ClientAbort(Struct, frozen=True, kw_only=True):
    """The client left, so many seconds after the arrival and after so many tokens."""

    at_s: Annotated[float, "time"]
    after_tokens: Annotated[int, "shape"]


class Attempt(Struct, frozen=True, kw_only=True):
    """One try at the answer. `tokens` came of it; `verdict`: of a witness, or the suspicion."""

    worker: Annotated[str, "public"]
    outcome: Annotated[str, "shape"]
    tokens: Annotated[int, "shape"]
    verdict: Annotated[str | None, "shape"] = None


class Content(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`body`: the request's JSON as it was sent, without headers. The rest is the output."""

    body: Annotated[dict[str, Any], "content"]
    text: Annotated[str, "content"] = ""
    reasoning: Annotated[str, "content"] = ""
    calls: Annotated[tuple[str, ...], "content"] = ()
    tokens: Annotated[tuple[int, ...], "content"] = ()
    logprobs: Annotated[tuple[float, ...], "content"] = ()


class Recorded(Struct, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    """One request. Where it had several `choices`, the rest speaks of the first of them.

    `turn` counts from 0 within a session; `think_s` is what the client waited between the end of
    the session's previous request and this arrival. `blocks`: chained hashes, one for each whole
    block of `Header.block_tokens` tokens; `tail`: of the `tail_tokens` left, chained as well.
    `accepts[i]`: verify steps that accepted i drafts. `outcome`: a tag of `core.outcome`, ""
    where it is unknown.
    """

    request: Annotated[str, "name"]
    session: Annotated[str, "name"]
    parent: Annotated[str | None, "name"] = None
    agent: Annotated[str | None, "name"] = None
    turn: Annotated[int, "shape"] = 0
    think_s: Annotated[float | None, "time"] = None
    tenant: Annotated[str, "name"] = ""
    api: Annotated[Api, "shape"] = ""
    model: Annotated[str, "public"] = ""
    times: Annotated[Times, "parts"]
    input_tokens: Annotated[int, "shape"]
    output_tokens: Annotated[int | None, "shape"] = None
    cached_tokens: Annotated[int | None, "shape"] = None
    max_tokens: Annotated[int | None, "shape"] = None
    choices: Annotated[int, "shape"] = 1
    stream: Annotated[bool, "shape"] = False
    sampling: Annotated[Sampling | None, "parts"] = None
    blocks: Annotated[tuple[str, ...], "hash"] = ()
    tail_tokens: Annotated[int, "shape"] = 0
    tail: Annotated[str | None, "hash"] = None
    segments: Annotated[tuple[Segment, ...], "parts"] = ()
    aborted: Annotated[ClientAbort | None, "parts"] = None
    attempts: Annotated[tuple[Attempt, ...], "parts"] = ()
    spec: Annotated[Spec | None, "parts"] = None
    accepts: Annotated[tuple[int, ...], "shape"] = ()
    outcome: Annotated[str, "shape"] = ""
    finish: Annotated[Finish | None, "shape"] = None
    content: Annotated[Content | None, "parts"] = None


# Structs that belong to others: their fields' classes, here.
_OTHERS: dict[type[Struct], dict[str, Privacy]] = {
    Sampling: {
        "max_tokens": "shape",
        "min_tokens": "shape",
        "temperature": "shape",
        "top_p": "shape",
        "top_k": "shape",
        "min_p": "shape",
        "presence_penalty": "shape",
        "frequency_penalty": "shape",
        "repetition_penalty": "shape",
        "logit_bias": "content",
        "seed": "name",
        "stop_ids": "content",
        "ignore_eos": "shape",
        "logprobs": "shape",
        "prompt_logprobs": "shape",
        "draft_tokens": "shape",
    },
    Spec: {
        "verify_steps": "shape",
        "tokens": "shape",
        "proposed": "shape",
        "accepted": "shape",
    },
}


@cache
def classes(kind: type[Struct]) -> Mapping[str, Privacy]:
    """The privacy class of each field of `kind`; a field that has none is missing here."""
    if kind in _OTHERS:
        return _OTHERS[kind]
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Privacy] = {}
    for one in structs.fields(kind):
        hint = hints[one.name]
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        for mark in marks:
            if mark in PRIVACY:
                found[one.name] = mark
    return found


def reached(kind: type[Struct]) -> Iterator[type[Struct]]:
    """`kind` and every struct that its fields are made of, each once."""
    seen: list[type[Struct]] = [kind]
    for one in seen:
        for hint in get_type_hints(one).values():
            seen += [found for found in structs_in(hint) if found not in seen]
        yield one


def structs_in(hint: Any) -> Iterator[type[Struct]]:
    """The structs that a type names, however deep in tuples and unions."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for inner in get_args(hint):
        yield from structs_in(inner)
