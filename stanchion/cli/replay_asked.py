"""What `stanchion replay` was asked for, and what that makes of trace and server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from stanchion.cli.settings import model_folder
from stanchion.core.errors import ConfigError
from stanchion.core.recording import Content, Recorded, Times
from stanchion.gateway.tokens import byte_vocabulary, load_vocabulary
from stanchion.lab import corpus
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.sniff import read
from stanchion.lab.replay_body import Api, Bodies, Extra
from stanchion.lab.replay_client import HttpClient
from stanchion.lab.replay_plan import Plan, cut_out, one_by_one, pace, plan, spread
from stanchion.lab.replay_text import Scale, Stretches
from stanchion.lab.replay_timing import LATENESS_MAX_S
from stanchion.lab.results import Loop, read_results

KNOWN: dict[str, frozenset[Extra]] = {  # by who owns the model, as /v1/models says
    "stanchion": frozenset({"ids", "logprobs", "spec"}),
    "vllm": frozenset({"ids", "logprobs"}),
}
Salting = Literal["auto", "on", "off"]


class Asked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the command line said; `solo` names requests of the run that `trace` then is."""

    trace: str
    url: str
    out: str
    api_key: str = ""
    model: str = ""
    arm: str = ""
    loop: Loop = "open"
    speed: str = "1"
    gap_max_s: float | None = None
    spread_s: float = 0.0
    copies: int = 1
    seed: int = 0
    first: int | None = None
    part: tuple[int, int] | None = None  # of the sessions: number, of so many parts
    aborts: bool = True
    concurrency: int | None = None
    timeout_s: float = 600.0
    processes: int = 1
    lateness_max_s: float = LATENESS_MAX_S
    api: Api | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    answer_tokens: int | None = None
    block_tokens: int | None = None
    unit: Literal["ms", "s"] | None = None
    tokenizer: str = "tiny"
    as_ids: bool = False
    salt: Salting = "auto"
    solo: tuple[str, ...] = ()
    times: int = 1

    def check(self) -> None:
        """Raise ConfigError for the first that is out of its bounds."""
        for name, value, least, most in (
            ("processes", self.processes, 1, 256),
            ("concurrency", self.concurrency, 1, 1_000_000),
            ("first", self.first, 1, 1 << 40),
            ("max-tokens", self.max_tokens, 1, 1 << 24),
            ("answer-tokens", self.answer_tokens, 1, 1 << 24),
            ("timeout", self.timeout_s, 0.001, 86_400.0),
            ("lateness-max", self.lateness_max_s, 0.0, 86_400.0),
        ):
            if value is not None and not least <= value <= most:
                raise ConfigError(f"--{name} is {value}; it must be from {least} to {most}")
        if self.solo and self.processes > 1:
            raise ConfigError("--processes: --solo asks one request at a time, in one process")


class Server(Struct, frozen=True):
    """What a server says of itself."""

    model: str
    owner: str


def make_plan(asked: Asked) -> tuple[Plan, int | None]:
    """The whole plan, and the trace's block size. Raise ConfigError or TraceError."""
    if asked.solo:
        return one_by_one(cases(Path(asked.trace), asked.solo), asked.times, asked.seed), None
    recorded = read(Path(asked.trace), Options(unit=asked.unit))
    requests = sorted(recorded, key=lambda one: (one.times.arrival, one.request))[: asked.first]
    if asked.spread_s:
        requests = spread(requests, asked.spread_s)
    if asked.part is not None:
        requests = cut_out(requests, *asked.part)
    made = plan(
        requests, asked.loop, pace(asked.speed, asked.gap_max_s), asked.copies, asked.seed,
        asked.aborts,
    )  # fmt: skip
    return made, recorded.header.block_tokens


def cases(folder: Path, names: Sequence[str]) -> list[Recorded]:
    """Requests of a run, to be asked again with the bodies that they had. A name is a request's,
    or NAME#COPY."""
    wanted = dict.fromkeys(names)
    found = []
    for one in read_results(folder):
        called = {one.request, f"{one.request}#{one.copy}"} & wanted.keys()
        if called and bytes(one.body):
            for name in called:
                del wanted[name]
            body = msgspec.json.decode(one.body)
            found.append(
                Recorded(
                    request=f"{one.request}#{one.copy}",
                    session=one.session,
                    turn=one.turn,
                    times=Times(arrival=0.0),
                    input_tokens=one.input_tokens or 0,
                    content=Content(body=body),
                )
            )
    if wanted:
        raise ConfigError(f"--solo: {folder} has no request {next(iter(wanted))} with its body")
    return found


def make_bodies(asked: Asked, server: Server, block_tokens: int | None) -> Bodies:
    known = KNOWN.get(server.owner, frozenset())
    recorded = block_tokens or 1
    salted = bool(known) if asked.salt == "auto" else asked.salt == "on"
    return Bodies(
        model=asked.model or server.model,
        api=asked.api,
        extras=known,
        temperature=asked.temperature,
        max_tokens=asked.max_tokens,
        answer_tokens=asked.answer_tokens,
        salted=salted,
        as_ids=asked.as_ids,
        stretches=cache(lambda: stretches(asked.tokenizer)),
        scale=Scale(recorded, asked.block_tokens or recorded),
    )


def stretches(tokenizer: str) -> Stretches:
    vocabulary = (
        byte_vocabulary() if tokenizer == "hashed" else load_vocabulary(model_folder(tokenizer))
    )
    return Stretches(vocabulary, corpus.tokens(vocabulary))


async def ask_server(http: HttpClient) -> Server:
    """Its first model, and who owns that. Raise ConfigError where it lists none."""
    said = await http.get("/v1/models")
    try:
        first = said["data"][0]
        return Server(str(first["id"]), str(first.get("owned_by", "")))
    except (KeyError, IndexError, TypeError):
        raise ConfigError("the server lists no model at /v1/models") from None
