"""A labelled set for the monitor: answers that are healthy, and answers that are sick, kept as the
worker told them.

The embedded model on the real engine. Healthy: answers to stretches of source text at temperatures
0.7 and 0.8, one in ten greedy (which loops by itself, so it is a trial for the monitor). Sick: the
same requests on an engine whose failpoint brings a historic fault back, where the answer is not the
one that a right engine gives to the same request; on a CPU that one does not depend on the batch,
so every difference is damage. `foreign_write` is no race but what one leaves behind: within its
first 64 tokens, half of the prompt's pages of every second answer get the rows of another request,
as from a late write of a request that was aborted (the report's fault 1). One kind is no sickness:
`restore_without_draft` leaves the draft layer's state out, so its text is right and only its
acceptance suffers.

A folder has one file a shard of healthy answers and one a kind of fault, each written whole or not
at all, so making it can be interrupted. Healthy answers are a function of the standard library's
text and of the seeds here; what is damaged depends on the machine's time as well.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Ended, PromptScores, Spec, Start, Tokens
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.model.text import Model

PAGE_TOKENS, PREFIX_TOKENS, TAIL_TOKENS, OUTPUT = 16, 512, 24, 256
TAILS = 10  # requests that share a prefix
TOGETHER = 16
ARM_TOGETHER = 4
SHARD = 500  # healthy answers a file
POOL = 600  # of which the faulty engines are asked again
DEVICE_PAGES = 5 * ((PREFIX_TOKENS + TAIL_TOKENS + OUTPUT) // PAGE_TOKENS + 2)
HOST_PAGES = 6000
DELAY_S = 0.003
TRIES = 12  # an engine is given up after so many requests for each sick answer that is wanted
DOOR_OF: dict[str, str] = {  # the failpoint: the door whose loads are held back
    "index_read_before_ready": "index",
    "attend_read_before_ready": "attend",
    "restore_without_index": "",
    "foreign_write": "",
    "restore_without_draft": "",
}
FAULTS = tuple(DOOR_OF)
TEXT_IS_RIGHT = "restore_without_draft"
FOREIGN = "foreign_write"  # no race: what fault 1 leaves behind


class Told(Struct, frozen=True, array_like=True):
    """One message of a worker: as `core.messages.Tokens`."""

    tokens: list[int]
    logprobs: list[float]
    spec: Spec | None


class Said(Struct, array_like=True):
    """One answer, as its worker told it."""

    start: Start
    messages: list[Told] = []
    completed: bool = False
    cold: list[float] | None = None  # scores of its output, computed again without any cache
    onset: int | None = None  # the first token whose score is not the cold one

    @property
    def tokens(self) -> list[int]:
        return [token for one in self.messages for token in one.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [score for one in self.messages for score in one.logprobs]


# ---- the folder -----------------------------------------------------------------------------

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(list[Said]).decode


def keep(path: Path, answers: Sequence[Said]) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(_encode(answers))
    os.replace(part, path)


def kept(path: Path) -> list[Said]:
    """Raise ConfigError if the file holds no answers."""
    try:
        return _decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from None


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("healthy-*.msgpack"))


def fault_file(folder: Path, fault: str) -> Path:
    return folder / f"fault-{fault}.msgpack"


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of the set, by name."""
    files = sorted(folder.glob("*.msgpack"))
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


# ---- healthy --------------------------------------------------------------------------------


def starts(text: Sequence[int], count: int) -> list[Start]:
    rng = np.random.default_rng(17)
    made = []
    for at in range(count):
        if at % TAILS == 0:
            first = int(rng.integers(len(text) - 2 * PREFIX_TOKENS))
        more = first + PREFIX_TOKENS + 17 * (at % TAILS)
        tokens = [*text[first : first + PREFIX_TOKENS], *text[more : more + TAIL_TOKENS]]
        heat = 0.0 if at % 10 == 9 else (0.7, 0.8)[at % 2]
        sampling = Sampling(max_tokens=OUTPUT, temperature=heat, seed=at, ignore_eos=True)
        made.append(Start(request=f"{at}", tokens=tokens, sampling=sampling))
    return made


def make_healthy(
    model: Model,
    text: Sequence[int],
    count: int,
    folder: Path,
    made: Callable[[int], None],
) -> None:
    """`made` is told how many answers each new shard has."""
    engine = assemble(model, Limits(running_max=TOGETHER), 4096).engine
    every = starts(text, count)
    for at in range(0, count, SHARD):
        path = folder / f"healthy-{at // SHARD:04}.msgpack"
        wanted = every[at : at + SHARD]
        if not path.exists():
            answers = sorted(
                serve(engine, iter(wanted), TOGETHER), key=lambda one: int(one.start.request)
            )
            keep(path, answers)
        made(len(wanted))


def serve(engine: Engine, wanted: Iterator[Start], together: int) -> Iterator[Said]:
    """Answers as they end; names are made new, so that a request may come again."""
    open_: dict[str, Said] = {}
    number = 0
    more = True
    while more or open_:
        heard = []
        for one in islice(wanted, together - len(open_)):
            name = f"n{number}"
            number += 1
            open_[name] = Said(one)
            heard.append(replace(one, request=name))
        more = more and bool(heard or len(open_) >= together)
        for said in engine.step(heard):
            if isinstance(said, Tokens):
                told = Told(said.tokens, said.logprobs, said.spec)
                open_[said.request].messages.append(told)
            elif isinstance(said, Ended):
                done = open_.pop(said.request)
                done.completed = True
                yield done


def cold_scores(engine: Engine, answer: Said) -> list[float]:
    """Sets `cold` and `onset` from a right engine that finds nothing cached; returns `cold`."""
    prompt = answer.start.tokens
    sampling = Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    heard = [Start(request="w", tokens=prompt + answer.tokens, sampling=sampling)]
    found: list[float] = []
    ended = False
    while not ended:
        for one in engine.step(heard):
            found += one.logprobs if isinstance(one, PromptScores) else ()
            ended = ended or isinstance(one, Ended)
        heard = []
    engine.tree.flush()
    answer.cold = found[len(prompt) - 1 :]
    pairs = enumerate(zip(answer.logprobs, answer.cold, strict=True))
    answer.onset = next((at for at, (was, now) in pairs if was != now), None)
    return answer.cold


# ---- sick -----------------------------------------------------------------------------------


def make_faulty(
    model: Model, fault: str, right: Sequence[Said], count: int, seconds: float, folder: Path
) -> tuple[int, int]:
    """So many answers that differ from the right ones (of the fault whose text is right: that do
    not), or as many as come about in that time. Returns how many, and of how many requests."""
    oracle = {one.start.request: one.tokens for one in right}
    cold = assemble(model, Limits(), 4096).engine
    found: list[Said] = []
    began, asked = time.monotonic(), 0
    for answer in _faulty(model, fault, _again_and_again([one.start for one in right], 23)):
        asked += 1
        differs = answer.tokens != oracle[answer.start.request]
        if differs != (fault == TEXT_IS_RIGHT):
            cold_scores(cold, answer)
            found.append(answer)
        late = time.monotonic() - began > seconds or asked >= TRIES * count
        if len(found) >= count or late:
            break
    keep(fault_file(folder, fault), found)
    return len(found), asked


def _again_and_again(every: Sequence[Start], seed: int) -> Iterator[Start]:
    rng = np.random.default_rng(seed)
    while True:
        yield every[int(rng.integers(len(every)))]


def _faulty(model: Model, fault: str, wanted: Iterator[Start]) -> Iterator[Said]:
    door = DOOR_OF[fault]
    doors = {(one.layer, one.door) for one in model.schema.buffers if one.door == door}
    limits = Limits(running_max=ARM_TOGETHER)
    if fault == FOREIGN:
        parts = assemble(model, limits, 4096, failpoints=frozenset({fault}), foreign_share=0.5)
        apart = (replace(one, salt=f"{number}") for number, one in enumerate(wanted))
        yield from serve(parts.engine, apart, ARM_TOGETHER)
        return
    delays = dict.fromkeys(doors, DELAY_S)
    plan = TierPlan(HOST_PAGES, failpoints=frozenset({fault}), delays_s=delays)
    engine = assemble(model, limits, DEVICE_PAGES, tiers=plan).engine
    assert engine.tiered is not None
    try:
        yield from serve(engine, wanted, ARM_TOGETHER)
    finally:
        engine.tiered.tiers.close()
