"""Words that must not come out: planted in every field that a request and its answer have. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import msgspec

from stanchion.core.recording import Api, Content, Recorded, Times
from stanchion.core.request import Sampling
from stanchion.lab.anonymise.key import Key

WORD = "canary"
Plant = Callable[[], str]


def planting(word: str = WORD) -> Plant:
    """A function that gives another word each time."""
    numbers = count()
    return lambda: f"{word}{next(numbers):04}x"


def chat(plant: Plant, tools: bool) -> dict[str, Any]:
    """A body of the chat API with a canary in every field that can hold one."""
    schema = {
        "type": "object",
        "title": plant(),
        "$ref": f"#/$defs/{plant()}",
        plant(): plant(),
        "properties": {
            plant(): {
                "type": "string",
                "description": plant(),
                "enum": [plant(), plant()],
                "default": plant(),
                "pattern": plant(),
                "format": plant(),
                "examples": [{plant(): plant()}],
            }
        },
        "required": [plant()],
    }
    function = {"name": plant(), "description": plant(), "parameters": schema}
    call = {"name": plant(), "arguments": msgspec.json.encode({plant(): [plant()]}).decode()}
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": f"{plant()} and {plant()}", "name": plant()},
            {"role": "user", "content": [{"type": "text", "text": f"/home/{plant()}/a.py"}]},
            {
                "role": "assistant",
                "content": plant(),
                "reasoning_content": plant(),
                "tool_calls": [{"id": plant(), "type": plant(), "function": call}],
            },
            {"role": "tool", "content": f"<{plant()}>\n\n{plant()}", "tool_call_id": plant()},
            {"role": "user", "content": f"{plant()}"},
        ],
        "stop": [plant()],
        "user": plant(),
        "cache_salt": plant(),
        "metadata": {plant(): plant()},
        "chat_template_kwargs": {plant(): plant()},
        "reasoning_effort": plant(),
        plant(): {plant(): [plant()]},
    }
    if tools:
        body["tools"] = [{"type": "function", "function": function}]
    return body


def completion(plant: Plant) -> dict[str, Any]:
    return {
        "prompt": f"def {plant()}():\n    return '{plant()}'\n\n{plant()}",
        "stop": plant(),
        "user": plant(),
        plant(): plant(),
    }


def record(
    plant: Plant, api: Api, body: dict[str, Any], tokens: int, page_tokens: int | None
) -> Recorded:
    """A request with that body, and canaries in all else."""
    size = page_tokens or tokens + 1
    return Recorded(
        request=plant(),
        session=plant(),
        parent=plant(),
        agent=plant(),
        tenant=plant(),
        api=api,
        times=Times(arrival=0.0),
        input_tokens=tokens,
        sampling=Sampling(max_tokens=9, stop_ids=(1, 2), logit_bias=((3, 4.0),)),
        blocks=tuple(f"{at:016x}" for at in range(tokens // size)) if page_tokens else (),
        tail_tokens=tokens % size if page_tokens else 0,
        outcome=plant(),
        content=Content(
            body=body,
            text=f"{plant()}\n{plant()}",
            reasoning=plant(),
            calls=(f'{plant()}({{"{plant()}": "{plant()}"}})',),
            tokens=(1, 2, 3),
            logprobs=(-0.1, -0.2, -0.3),
        ),
    )


def leaked(written: Iterable[bytes], word: str = WORD) -> Iterator[str]:
    """Each canary that is there, in any case."""
    size = len(word) + 5
    for raw in written:
        text = raw.decode(errors="replace").lower()
        at = text.find(word)
        while at >= 0:
            yield text[at : at + size]
            at = text.find(word, at + 1)


# ---- secrets, of kinds that are well known --------------------------------------------------

LOWER, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
ALL = LOWER + LOWER.upper() + DIGITS


def secrets(key: Key, rounds: int) -> list[str]:
    """Made-up secrets and personal data, of twenty kinds a round."""
    numbers = count()

    def some(length: int, alphabet: str = ALL) -> str:
        drawn = b"".join(key.draw("canary", b"%d" % next(numbers)) for _ in range(length // 32 + 1))
        return "".join(alphabet[one % len(alphabet)] for one in drawn[:length])

    def octet() -> str:
        return str(20 + int(some(2, DIGITS)))

    made: list[str] = []
    for _ in range(rounds):
        made += [
            f"AKIA{some(16, LOWER.upper() + DIGITS)}",
            f"ghp_{some(36)}",
            f"xoxb-{some(12, DIGITS)}-{some(12, DIGITS)}-{some(24)}",
            f"sk_live_{some(24)}",
            f"glpat-{some(20)}",
            f"SG.{some(22)}.{some(43)}",
            f"npm_{some(36)}",
            f"-----BEGIN RSA PRIVATE KEY-----\n{some(64)}\n-----END RSA PRIVATE KEY-----",
            f"postgres://admin:{some(16)}@db.internal:5432/main",
            f'password = "{some(14)}"',
            f"api_key: '{some(40)}'",
            f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI{some(20)}.{some(43)}",
            f"{some(6, LOWER)}.{some(8, LOWER)}@{some(7, LOWER)}.com",
            f"{some(6, LOWER)}+{some(5, LOWER)}@mail.{some(7, LOWER)}.org",
            f"+49 {some(3, DIGITS)} {some(4, DIGITS)} {some(4, DIGITS)}",
            f"+1 (415) 555-{some(4, DIGITS)}",
            f"({some(3, DIGITS)}) 555-{some(4, DIGITS)}",
            f"8.{octet()}.{octet()}.{octet()}",
            f"2001:db8:{some(4, DIGITS)}:{some(4, DIGITS)}:{some(4, DIGITS)}:{some(4, DIGITS)}:1:2",
            f"the secret is {some(44)} as you know",
        ]
    return made
