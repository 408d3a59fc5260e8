"""Answers made up for the monitor, as in the labelled set of fault report D16: right ones that look
odd, and loops and garbage that no engine's fault is needed for.

Who answered is made up too: so many drafts accepted in each step, one log-probability for all
tokens. So these are for the rules alone; there is nothing that a witness could compute again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random

from stanchion.cli.bench.labelled import Said, Told
from stanchion.core.messages import Spec, Start
from stanchion.core.request import Sampling
from stanchion.gateway.tokens import Vocabulary

DRAFTS = 3
USUAL = (1, 3, 0, 2, 3, 1, 2)  # drafts accepted, step after step
ALL, NONE = (DRAFTS,), (0,)
LINES, ROWS, LOOP_TOKENS = 400, 200, 900
TALE = (
    "昔々あるところにお爺さんとお婆さんが住んでいました。你好世界，今天天气很好，我们去公园散步吧。"
)
SCRIPTS = ((0x400, 0x4FF), (0x905, 0x939), (0x4E00, 0x9FFF), (0xE01, 0xE2E), (0x10D0, 0x10FA))

Made = tuple[str, str, Sequence[int] | None]  # prompt, answer, drafts accepted: None: no drafts


def _file(rng: Random) -> str:
    return "".join(
        f"def part_{at}(value, other={rng.randrange(91)}):\n    return value + {at} * other\n"
        for at in range(LINES // 2)
    )


def _copy(rng: Random) -> Made:
    text = _file(rng)
    return f"copy this:\n{text}", text, ALL


def _rows(rng: Random) -> Made:
    rows = [{"id": at, "name": f"row {rng.randrange(999)}", "flags": [0, 1]} for at in range(ROWS)]
    return "rows as JSON", json.dumps(rows), USUAL


def _base64(rng: Random) -> Made:
    return "the file, as base64", base64.b64encode(rng.randbytes(2000)).decode(), USUAL


def _table(rng: Random) -> Made:
    rows = "".join(f"| {at} | {rng.randrange(9)} |\n" for at in range(ROWS))
    return "a table", f"| a | b |\n|---|---|\n{rows}", USUAL


def _tale(rng: Random) -> Made:
    said = ("".join(rng.choices(TALE, k=rng.randint(8, 24))) for _ in range(30))
    return "tell me a tale", "。".join(said), USUAL


def _undrafted(rng: Random) -> Made:
    return "write a file", _file(rng), None


def _lost_drafts(rng: Random) -> Made:
    return "write a file", _file(rng), NONE


def _loop(rng: Random, period: int) -> Made:
    unit = _file(rng)[:period] if period > 1 else rng.choice("x0!.-")
    return "go on", unit * (LOOP_TOKENS // period * 4), ALL


def _garbage(rng: Random) -> Made:
    text = "".join(chr(rng.randint(*rng.choice(SCRIPTS))) for _ in range(300))
    return "write a file", text, NONE


_MAKERS: dict[str, Callable[[Random], Made]] = {
    "made_up_copy": _copy,
    "made_up_json_rows": _rows,
    "made_up_base64": _base64,
    "made_up_table": _table,
    "made_up_cjk_prose": _tale,
    "made_up_no_drafts": _undrafted,
    "made_up_lost_drafts": _lost_drafts,
    "made_up_loop_1": lambda rng: _loop(rng, 1),
    "made_up_loop_7": lambda rng: _loop(rng, 7),
    "made_up_loop_92": lambda rng: _loop(rng, 92),
    "made_up_garbage": _garbage,
}
KINDS = tuple(_MAKERS)


def answers(kind: str, count: int, vocabulary: Vocabulary) -> Iterator[Said]:
    for seed in range(count):
        prompt, text, accepted = _MAKERS[kind](Random(f"{kind} {seed}"))
        yield _said(f"{kind} {seed}", prompt, text, accepted, vocabulary)


def _said(
    name: str, prompt: str, text: str, accepted: Sequence[int] | None, vocabulary: Vocabulary
) -> Said:
    asked, tokens = (vocabulary.encode(one, special=False) for one in (prompt, text))
    start = Start(request=name, tokens=asked, sampling=Sampling(max_tokens=len(tokens)))
    said = Said(start, [Told(tokens[:1], [-1.0], None)], completed=True)
    spec, step = Spec(0, 0, 0, 0), 0
    while spec.tokens + 1 < len(tokens):
        first = 1 + spec.tokens
        took = accepted[step % len(accepted)] if accepted is not None else 0
        took = min(took, len(tokens) - first - 1)
        spec = Spec(
            spec.verify_steps + 1,
            spec.tokens + took + 1,
            spec.proposed + (DRAFTS if accepted is not None else 0),
            spec.accepted + took,
        )
        new = tokens[first : first + took + 1]
        told = None if accepted is None else spec
        said.messages.append(Told(new, [-1.0] * len(new), told))
        step += 1
    return said
