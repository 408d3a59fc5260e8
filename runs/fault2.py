"""Fault 2 on real threads: dose and response. `python runs/fault2.py [--json F] [--part NAME]`

A device too small for the traffic's prefixes, a host that has them all: most requests begin with a
prefix that is loaded, layer by layer, while their new tokens are computed. With the failpoint the
index doors forget to wait for the load, as the report describes; without it they wait. The dose is
a declared delay of each layer's index rows: it stands for a load stream under pressure.

`hash` runs the hash model in a worker process through `stanchion verify`; `embedded` runs the
embedded model, whose answers on a CPU depend on no batch, in this process: an answer is wrong if it
is not the one that the request gets alone and cold. There, `spec_accept_length` is given for right
and wrong answers, and so is |log-probability logged - log-probability of the same token computed
again, cold|: the mean of each answer's largest.

A rate is wrong answers among whole ones, per 10,000, with its exact 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault1 import Rate, rate_of

from stanchion.cli.plan import Asked
from stanchion.cli.settings import model_folder
from stanchion.cli.verify import run
from stanchion.core.config import Config, load
from stanchion.core.messages import Ended, PromptScores, Start, Tokens
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.lab.corpus import corpus
from stanchion.model.load import load_glm
from stanchion.model.text import Model

FAULT = "index_read_before_ready"
DELAYS_MS = (0.0, 0.1, 0.3, 1.0, 3.0)
LOADS = (1, 4, 16, 48)
SETTINGS = ["kv.memory_gib=0.001", "kv.host_cache_gib=0.02"]
TRAFFIC = Asked(seed=1, context=2048, variety=1000, abort_one_in=8)

PREFIXES, TAILS, PREFIX_TOKENS, OUTPUT = 12, 5, 512, 24
DEVICE_PAGES = 5 * (PREFIX_TOKENS // 16 + 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["hash", "load", "embedded", "right"], action="append")
    parser.add_argument("--requests", type=int, default=4000, help="hash model, each dose and arm")
    parser.add_argument("--embedded-requests", type=int, default=300, help="each dose and arm")
    parser.add_argument("--right-requests", type=int, default=30_000, help="without the failpoint")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    parts = asked.part or ["hash", "load", "embedded", "right"]
    rows: list[dict[str, Any]] = []
    if "hash" in parts:
        rows += hashed([(delay, 16) for delay in DELAYS_MS], asked.requests)
    if "load" in parts:
        rows += hashed([(0.0, clients) for clients in LOADS], asked.requests)
    if "embedded" in parts:
        with torch.inference_mode():
            rows += embedded(asked.embedded_requests)
    if "right" in parts:
        report = verify(DELAYS_MS[-2], 32, asked.right_requests, "")
        rows.append({"part": "right", **vars(rate_of(report)), "lost": report.lost})
        print(f"without the failpoint: {rate_of(report).words()}, {report.lifted} pages lifted")
    if asked.json:
        Path(asked.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


# ---- the hash model, in a worker process -----------------------------------------------------


def verify(delay_ms: float, clients: int, requests: int, failpoint: str) -> Any:
    slow = ",".join(f"{layer}/index:{delay_ms}" for layer in (0, 1, 3)) if delay_ms else ""
    config = load(Config(), "", [*SETTINGS, f"lab.slow_load={slow}"])
    config = replace(config, lab=replace(config.lab, failpoints=failpoint))
    return run(config, replace(TRAFFIC, requests=requests, concurrency=clients), quiet=True)


def hashed(doses: list[tuple[float, int]], requests: int) -> list[dict[str, Any]]:
    print("| delay of index rows, ms | clients | with the failpoint, per 10,000 | without it |")
    print("|---|---|---|---|")
    rows = []
    for delay_ms, clients in doses:
        said = []
        for failpoint in (FAULT, ""):
            report = verify(delay_ms, clients, requests, failpoint)
            said.append(rate_of(report).words())
            rows.append(
                {
                    "part": "hash", "delay_ms": delay_ms, "clients": clients,
                    "failpoint": failpoint, "lifted": report.lifted, **vars(rate_of(report)),
                }
            )  # fmt: skip
        print(f"| {delay_ms:g} | {clients} | " + " | ".join(said) + " |", flush=True)
    return rows


# ---- the embedded model, in this process -----------------------------------------------------


@dataclass
class Got:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: Ended | None = None


def embedded(requests: int) -> list[dict[str, Any]]:
    folder = model_folder("tiny")
    model = load_glm(folder, 16, deterministic=True)[0]
    every = list(_starts(corpus(folder)))
    cold = assemble(model, Limits(), 4096).engine
    right = {one.request: _alone(cold, one) for one in every}
    print("| delay, ms | arm | wrong, per 10,000 | accept length right / wrong | largest gap |")
    print("|---|---|---|---|---|")
    rows = []
    for delay_ms in DELAYS_MS:
        for failpoint in (FAULT, ""):
            rows.append(_arm(model, cold, every, right, delay_ms, failpoint, requests))
            print(_words(rows[-1]), flush=True)
    return rows


def _starts(text: list[int]) -> Iterator[Start]:
    rng = np.random.default_rng(5)
    for prefix in range(PREFIXES):
        first = int(rng.integers(len(text) - 2 * PREFIX_TOKENS))
        for tail in range(TAILS):
            more = first + PREFIX_TOKENS + 16 * tail
            tokens = text[first : first + PREFIX_TOKENS] + text[more : more + 8 + tail]
            sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
            yield Start(request=f"{prefix}.{tail}", tokens=tokens, sampling=sampling)


def _alone(engine: Engine, start: Start) -> Got:
    got = Got()
    said = engine.step([start])
    while got.ended is None:
        for one in said:
            _take(got, one)
        said = engine.step([])
    engine.tree.flush()
    return got


def _take(got: Got, said: Any) -> None:
    if isinstance(said, Tokens):
        got.tokens += said.tokens
        got.logprobs += said.logprobs
    elif isinstance(said, Ended):
        got.ended = said


def _arm(
    model: Model,
    cold: Engine,
    every: list[Start],
    right: dict[str, Got],
    delay_ms: float,
    failpoint: str,
    requests: int,
) -> dict[str, Any]:
    doors = {(one.layer, one.door) for one in model.schema.buffers if one.door == "index"}
    plan = TierPlan(
        2000,
        failpoints=frozenset(filter(None, [failpoint])),
        delays_s=dict.fromkeys(doors, delay_ms / 1000) if delay_ms else {},
    )
    engine = assemble(model, Limits(running_max=4), DEVICE_PAGES, tiers=plan).engine
    assert engine.tiered is not None
    rng = np.random.default_rng(9)
    names = [every[at] for at in rng.integers(len(every), size=requests)]
    got = _serve(engine, names)
    wrong, lengths, gaps = 0, {True: [], False: []}, {True: [], False: []}  # type: ignore[var-annotated]
    for at, start in enumerate(names):
        answer, expected = got[f"{at}"], right[start.request]
        assert answer.ended is not None and isinstance(answer.ended.outcome, Completed)
        same = answer.tokens == expected.tokens and answer.logprobs == expected.logprobs
        wrong += not same
        spec = answer.ended.spec
        if spec is not None:
            lengths[same].append(spec.tokens / spec.verify_steps)
        if not same or at % 10 == 0:
            again = _scores(cold, start.tokens, answer.tokens)
            gaps[same].append(max(abs(a - b) for a, b in zip(answer.logprobs, again)))
    lifted = engine.tiered.tiers.counters.lifted
    engine.tiered.tiers.close()
    return {
        "part": "embedded", "delay_ms": delay_ms, "failpoint": failpoint, "wrong": wrong,
        "whole": requests, "lifted": lifted,
        "accept_length": {str(same): _mean(found) for same, found in lengths.items()},
        "gap": {str(same): _mean(found) for same, found in gaps.items()},
    }  # fmt: skip


def _serve(engine: Engine, names: list[Start]) -> dict[str, Got]:
    """Four at a time, in order."""
    got = {f"{at}": Got() for at in range(len(names))}
    given = 0
    while given < len(names) or engine.busy:
        heard = []
        while given < len(names) and len(engine.running) + len(engine.waiting) + len(heard) < 4:
            one = names[given]
            heard.append(Start(request=f"{given}", tokens=one.tokens, sampling=one.sampling))
            given += 1
        for said in engine.step(heard):
            assert isinstance(said, Tokens | PromptScores | Ended)
            _take(got[said.request], said)
    return got


def _scores(cold: Engine, prompt: list[int], output: list[int]) -> list[float]:
    """What the model gives the same output tokens when it computes all of it again."""
    sampling = Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    start = Start(request="again", tokens=prompt + output, sampling=sampling)
    found: list[float] = []
    said = cold.step([start])
    while True:
        for one in said:
            if isinstance(one, PromptScores):
                found += one.logprobs
            elif isinstance(one, Ended):
                cold.tree.flush()
                return found[len(prompt) - 1 :]
        said = cold.step([])


def _mean(found: list[float]) -> float | None:
    return statistics.fmean(found) if found else None


def _words(row: dict[str, Any]) -> str:
    def pair(values: dict[str, float | None]) -> str:
        return " / ".join("-" if one is None else f"{one:.3g}" for one in values.values())

    rate = Rate(row["wrong"], row["whole"]).words()
    arm = row["failpoint"] or "right"
    said = [f"{row['delay_ms']:g}", arm, rate, pair(row["accept_length"]), pair(row["gap"])]
    return "| " + " | ".join(said) + " |"


if __name__ == "__main__":
    main()
