"""What the monitor finds, and what it costs to be healthy. `python runs/monitor_set.py [--json F]`

The embedded model on the real engine. Healthy: answers to stretches of source text at temperatures
0.7 and 0.8, one in ten greedy (which loops by itself, so it is a trial for the monitor). Sick: the
same requests on an engine whose failpoint brings a historic fault back, where the answer is not the
one that a right engine gives to the same request; on a CPU that one does not depend on the batch,
so every difference is damage. `foreign_write` is done by hand: within its first 64 tokens, half of
the prompt's pages of every second answer get the rows of another request, as a late write of a
request that was aborted leaves them (the report's fault 1). One arm is no sickness:
`restore_without_draft` leaves the draft layer's state out, so its text is right and only its
acceptance suffers.

The same folds as in the gateway run over what each answer said, message by message:

* `report-literal`, `report`, `calibrated`, `text`: a suspicion counts as found;
* each mode of the gateway: found means that the answer was not completed; *in time* means that no
  token from the onset on had been released, so that a retry would have gone unnoticed. A witness
  answers at once, since how long it takes depends on the load.

The baseline is learnt from the first third of the healthy answers, the false alarms are those of
the others. Rates have exact 95 % intervals (Clopper and Pearson). `--baseline F` writes a baseline
from all healthy answers. All of it is a function of the sizes and of the seeds in this file, but
for the arms, where what is damaged depends on the machine's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault1 import interval
from msgspec.structs import replace

from stanchion.cli.settings import model_folder
from stanchion.core.messages import Ended, PromptScores, Start, Tokens
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.device.stream import Pages
from stanchion.engine.assemble import Parts, assemble
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.gateway.choice import Style
from stanchion.gateway.monitor.baseline import RANKS, Baseline, Clean, learn, rank, write
from stanchion.gateway.monitor.fold import Acceptance, Monitor, Reading, Rules
from stanchion.gateway.monitor.guard import Contract, Drop, Guard, Mode, Restart, Witness
from stanchion.gateway.monitor.report import NOTHING, gained
from stanchion.gateway.monitor.witness import Scale, calibrate, gap, judge
from stanchion.gateway.tokens import Vocabulary, load_vocabulary
from stanchion.kv.schema import DOORS
from stanchion.lab.corpus import corpus
from stanchion.model.load import load_glm
from stanchion.model.text import Model

PAGE_TOKENS, PREFIX_TOKENS, TAIL_TOKENS, OUTPUT = 16, 512, 24, 256
TAILS = 10  # requests that share a prefix
TOGETHER = 16
ARM_TOGETHER = 4
DEVICE_PAGES = 5 * ((PREFIX_TOKENS + TAIL_TOKENS + OUTPUT) // PAGE_TOKENS + 2)
HOST_PAGES = 6000
DELAY_S = 0.003
RUNS_A_SICK = 8  # an arm gives up after so many requests for each sick answer that is wanted
ARMS: dict[str, str] = {  # failpoint: the door whose loads are held back
    "index_read_before_ready": "index",
    "attend_read_before_ready": "attend",
    "restore_without_index": "",
    "foreign_write": "",
    "restore_without_draft": "",
}
TEXT_IS_RIGHT = "restore_without_draft"
FOREIGN = "foreign_write"  # no failpoint: what fault 1 leaves behind, done by hand
FOREIGN_PAGES = 16
MODES: tuple[Mode, ...] = ("report", "balanced", "guarded", "strict")
RULES: tuple[str, ...] = ("report-literal", "report", "calibrated", "text")


@dataclass
class Said:
    """One answer, as its worker told it."""

    start: Start
    messages: list[Tokens] = field(default_factory=list)
    ended: Ended | None = None
    cold: list[float] | None = None  # scores of its output, computed again
    onset: int | None = None  # the first token whose score is not the cold one

    @property
    def tokens(self) -> list[int]:
        return [token for one in self.messages for token in one.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [score for one in self.messages for score in one.logprobs]


# ---- answers --------------------------------------------------------------------------------


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


def serve(
    engine: Engine,
    wanted: Iterator[Start],
    together: int,
    meddle: Callable[[], None] = lambda: None,
) -> Iterator[Said]:
    """Answers as they end; names are made new, so that a request may come again. `meddle` is called
    between the steps."""
    open_: dict[str, Said] = {}
    number = 0
    more = True
    while more or open_:
        heard = []
        while more and len(open_) < together:
            one = next(wanted, None)
            if one is None:
                more = False
                break
            name = f"n{number}"
            number += 1
            open_[name] = Said(one)
            heard.append(
                Start(request=name, tokens=one.tokens, sampling=one.sampling, salt=one.salt)
            )
        meddle()
        for said in engine.step(heard):
            if isinstance(said, Tokens):
                open_[said.request].messages.append(said)
            elif isinstance(said, Ended):
                done = open_.pop(said.request)
                done.ended = said
                yield done


def cold_scores(engine: Engine, answer: Said) -> None:
    """Sets `cold` and `onset` from a right engine that finds nothing cached."""
    prompt = answer.start.tokens
    sampling = Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    said = engine.step([Start(request="w", tokens=prompt + answer.tokens, sampling=sampling)])
    found: list[float] = []
    while not any(isinstance(one, Ended) for one in said):
        found += [score for one in said if isinstance(one, PromptScores) for score in one.logprobs]
        said = engine.step([])
    found += [score for one in said if isinstance(one, PromptScores) for score in one.logprobs]
    engine.tree.flush()
    answer.cold = found[len(prompt) - 1 :]
    pairs = enumerate(zip(answer.logprobs, answer.cold, strict=True))
    answer.onset = next((at for at, (was, now) in pairs if was != now), None)


def accepted_steps(answer: Said, drafts: int) -> list[int]:
    """Drafts accepted in each verify step that had all of them."""
    steps, before = [], NOTHING
    for one in answer.messages:
        if one.spec is not None:
            step, before = gained(before, one.spec), one.spec
            if step is not None and step.verify_steps == 1 and step.proposed == drafts:
                steps.append(step.accepted)
    return steps


def baseline_of(
    answers: Sequence[Said], drafts: int, vocabulary: int, named: tuple[str, str]
) -> Baseline:
    ranks = [0] * RANKS
    for one in answers:
        known = set(one.start.tokens)
        for token in one.tokens:
            if token not in known:
                ranks[rank(token, vocabulary)] += 1
    steps = [accepted_steps(one, drafts) for one in answers]
    return learn(*named, drafts, "any", steps, ranks, vocabulary)


# ---- what is made of them -------------------------------------------------------------------


@dataclass(frozen=True)
class Judges:
    """The gateway's folds, over answers that are recorded."""

    vocabulary: Vocabulary
    baseline: Baseline
    scale: Scale
    cold: Engine

    def monitor(self, answer: Said, rule: str) -> Monitor:
        style = self.style
        acceptance: Acceptance = "none" if rule == "text" else rule  # type: ignore[assignment]
        rules = Rules(acceptance, rule in ("text", "calibrated"), self.baseline)
        return Monitor(
            rules, Reading(answer.start.tokens, style.pieces, style.skipped, style.end_ids)
        )

    @property
    def style(self) -> Style:
        return Style(self.vocabulary.pieces, self.vocabulary.special)

    def suspected(self, answer: Said, rule: str) -> int | None:
        """At so many tokens; `calibrated` alone, without the text witnesses."""
        monitor = self.monitor(answer, rule)
        if rule == "calibrated":
            monitor._looks = False
        for one in answer.messages:
            if found := monitor.push(one.tokens, one.logprobs, one.spec):
                return found[0].at
        return None

    def mode(self, answer: Said, mode: Mode) -> Verdict:
        """How the gateway's machine takes it, reader and witness at hand all the time."""
        rule = "report" if mode == "report" else "calibrated"
        guard = Guard(Contract(mode, True), lambda: self.monitor(answer, rule))
        verdict = Verdict()
        for at, one in enumerate(answer.messages):
            readings = [(len(one.tokens), one.spec)] if one.spec is not None else []
            last = at == len(answer.messages) - 1
            effects = guard.came(
                one.tokens, one.logprobs, (), readings, Completed("length") if last else None
            )
            while effects:
                effect, *effects = effects
                if isinstance(effect, Witness):
                    verdict.witnesses += 1
                    if answer.cold is None:
                        cold_scores(self.cold, answer)
                    assert answer.cold is not None
                    scores = answer.logprobs[: effect.tokens], answer.cold[: effect.tokens]
                    effects += guard.verdict(judge(*scores, self.scale))
                elif isinstance(effect, Drop | Restart):
                    verdict.found = True
                    verdict.at = verdict.at or len(guard.tokens)
                    verdict.in_time = isinstance(effect, Restart)
            verdict.found |= guard.failed is not None
            if verdict.found:
                verdict.at = sum(len(one.tokens) for one in answer.messages[: at + 1])
                return verdict
            guard.released = guard.limit
        return verdict


@dataclass
class Verdict:
    found: bool = False
    in_time: bool = False
    at: int = 0
    witnesses: int = 0


@dataclass
class Tally:
    """Of one kind of answers, by rule and mode: how many were found, of how many."""

    kind: str
    answers: int = 0
    found: dict[str, int] = field(default_factory=dict)
    of: dict[str, int] = field(default_factory=dict)
    in_time: dict[str, int] = field(default_factory=dict)
    witnesses: dict[str, int] = field(default_factory=dict)
    from_onset: dict[str, list[int]] = field(default_factory=dict)

    def add(self, judges: Judges, answer: Said, modes: Sequence[Mode] = MODES) -> None:
        self.answers += 1
        for rule in RULES:
            at = judges.suspected(answer, rule)
            self._count(rule, at is not None, at or 0, answer)
        for mode in modes:
            said = judges.mode(answer, mode)
            name = f"mode {mode}"
            self._count(name, said.found, said.at, answer)
            self.in_time[name] = self.in_time.get(name, 0) + said.in_time
            self.witnesses[name] = self.witnesses.get(name, 0) + said.witnesses

    def _count(self, what: str, found: bool, at: int, answer: Said) -> None:
        self.of[what] = self.of.get(what, 0) + 1
        self.found[what] = self.found.get(what, 0) + found
        if found and answer.onset is not None and at > answer.onset:
            self.from_onset.setdefault(what, []).append(at - answer.onset)

    def rows(self) -> Iterator[dict[str, Any]]:
        for what in (*RULES, *(f"mode {mode}" for mode in MODES)):
            low, high = interval(self.found.get(what, 0), self.of.get(what, 1))
            away = self.from_onset.get(what, [])
            yield {
                "kind": self.kind,
                "by": what,
                "found": self.found.get(what, 0),
                "of": self.of.get(what, 0),
                "low": low,
                "high": high,
                "in_time": self.in_time.get(what),
                "witnesses": self.witnesses.get(what),
                "tokens_from_onset_p50": statistics.median(away) if away else None,
            }


def table(tallies: Sequence[Tally]) -> str:
    lines = ["| answers | by | found | 95 % | in time | tokens from onset, median |"]
    lines.append("|---|---|---|---|---|---|")
    for one in tallies:
        for row in one.rows():
            low, high = (f"{100 * row[edge]:.2f}" for edge in ("low", "high"))
            in_time = "" if row["in_time"] is None else f"{row['in_time']}"
            p50 = row["tokens_from_onset_p50"]
            away = "" if p50 is None else f"{p50:g}"
            lines.append(
                f"| {row['kind']} | {row['by']} | {row['found']} of {row['of']} "
                f"| {low} to {high} % | {in_time} | {away} |"
            )
    return "\n".join(lines)


# ---- arms -----------------------------------------------------------------------------------


def arm(model: Model, failpoint: str, wanted: Iterator[Start]) -> Iterator[Said]:
    door = ARMS[failpoint]
    doors = {(one.layer, one.door) for one in model.schema.buffers if one.door == door}
    limits, armed = Limits(running_max=ARM_TOGETHER), frozenset({failpoint})
    if failpoint == FOREIGN:
        parts = assemble(model, limits, 4096)
        apart = (replace(one, salt=f"{number}") for number, one in enumerate(wanted))
        yield from serve(parts.engine, apart, ARM_TOGETHER, Meddler(parts))
        return
    plan = TierPlan(HOST_PAGES, failpoints=armed, delays_s=dict.fromkeys(doors, DELAY_S))
    engine = assemble(model, limits, DEVICE_PAGES, tiers=plan).engine
    assert engine.tiered is not None
    try:
        yield from serve(engine, wanted, ARM_TOGETHER)
    finally:
        engine.tiered.tiers.close()


@dataclass
class Meddler:
    """Writes over pages that are in use, behind the doors but without their right."""

    parts: Parts
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(31))
    due: dict[str, int] = field(default_factory=dict)  # at so many tokens; past the end: never

    def __call__(self) -> None:
        running = [one for one in self.parts.engine.running.values() if one.phase == "decode"]
        for one in running:
            if one.name not in self.due:
                spared = bool(self.rng.integers(2))
                self.due[one.name] = OUTPUT if spared else 1 + int(self.rng.integers(64))
            others = [other for other in running if other is not one]
            if others and OUTPUT > one.generated >= self.due[one.name]:
                self.due[one.name] = OUTPUT
                self._write(others[0].pages[:FOREIGN_PAGES], one.pages[:FOREIGN_PAGES])

    def _write(self, source: Pages, target: Pages) -> None:
        store, stream = self.parts.store, self.parts.stream
        rows_from, rows_to = (
            torch.from_numpy(
                (pages[:, None].astype(np.int64) * PAGE_TOKENS + np.arange(PAGE_TOKENS)).ravel()
            )
            for pages in (source, target)
        )
        for layer in range(store.schema.layers):
            for door in DOORS:
                with stream.writing(store.behind(layer, door), target) as view:
                    for tensor in view.rows.values():
                        tensor[rows_to] = tensor[rows_from].clone()


def again_and_again(every: Sequence[Start], seed: int) -> Iterator[Start]:
    rng = np.random.default_rng(seed)
    while True:
        yield every[int(rng.integers(len(every)))]


@dataclass
class Sizes:
    healthy: int
    sick: int
    pool: int
    seconds: float  # for each arm
    arms: Sequence[str]

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Sizes:
        pool = min(arguments.pool, arguments.healthy)
        return cls(
            arguments.healthy,
            arguments.sick,
            pool,
            arguments.arm_seconds,
            arguments.arm or list(ARMS),
        )


def sick_of(
    model: Model, failpoint: str, right: Sequence[Said], sizes: Sizes, judges: Judges
) -> list[Tally]:
    """Those that are sick; and, apart, the right answers of the arm whose text is right."""
    oracle = {one.start.request: one.tokens for one in right}
    sick, same = Tally(f"sick: {failpoint}"), Tally(f"right text: {failpoint}")
    wanted = again_and_again([one.start for one in right], 23)
    began, ran = time.monotonic(), 0
    for answer in arm(model, failpoint, wanted):
        ran += 1
        differs = answer.tokens != oracle[answer.start.request]
        if differs or failpoint == TEXT_IS_RIGHT:
            cold_scores(judges.cold, answer)
            (sick if differs and failpoint != TEXT_IS_RIGHT else same).add(judges, answer)
        enough = max(sick.answers, same.answers) >= sizes.sick
        late = time.monotonic() - began > sizes.seconds or ran >= RUNS_A_SICK * sizes.sick
        if enough or late:
            break
    print(f"{failpoint}: {sick.answers} sick, {same.answers} alike, of {ran}", flush=True)
    return [one for one in (sick, same) if one.answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=30_000, help="healthy answers")
    parser.add_argument("--sick", type=int, default=300, help="sick answers of each kind")
    parser.add_argument("--pool", type=int, default=600, help="requests that the arms draw from")
    parser.add_argument("--arm-seconds", type=float, default=3600.0, help="for each arm, at most")
    parser.add_argument("--arm", choices=ARMS, action="append", help="these alone")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--baseline", metavar="FILE", help="write the baseline of healthy answers")
    arguments = parser.parse_args()
    with torch.inference_mode():
        rows = measure(Sizes.read(arguments), arguments.baseline)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


def measure(sizes: Sizes, baseline_file: str | None) -> dict[str, Any]:
    folder = model_folder("tiny")
    model, name, revision, _ = load_glm(folder, PAGE_TOKENS, deterministic=True)
    vocabulary = load_vocabulary(folder)
    drafts = Limits().draft_tokens
    every = starts(corpus(folder), sizes.healthy)
    engine = assemble(model, Limits(running_max=TOGETHER), 4096).engine
    began = time.monotonic()
    healthy = list(serve(engine, iter(every), TOGETHER))
    print(f"{len(healthy)} healthy answers in {time.monotonic() - began:.0f} s", flush=True)
    cold = assemble(model, Limits(), 4096).engine
    healthy.sort(key=lambda one: int(one.start.request))
    train, test = healthy[: sizes.healthy // 3], healthy[sizes.healthy // 3 :]
    size = model.vocabulary
    learnt = baseline_of(train, drafts, size, (name, revision))
    scale = _scale(cold, train)
    judges = Judges(vocabulary, learnt, scale, cold)
    if baseline_file:
        whole = baseline_of(healthy, drafts, size, (name, revision))
        clean = Clean(
            model=name,
            revision=revision,
            drift=scale.drift,
            threshold=scale.threshold,
            runs=scale.runs,
        )
        Path(baseline_file).write_bytes(write([whole], [clean]))
    print(
        f"baseline: {learnt.low:.3f} to {learnt.high:.3f} of {drafts} a step; {scale}", flush=True
    )
    tallies = [Tally("healthy"), Tally("healthy, greedy")]
    for at, one in enumerate(test):
        # Strict asks a witness for each: one in ten is enough to see that it clears them.
        modes = MODES if at % 10 == 0 else MODES[:-1]
        tallies[one.start.sampling.greedy].add(judges, one, modes)
    print(table(tallies), flush=True)
    pool = sorted(healthy[: sizes.pool], key=lambda one: int(one.start.request))
    for failpoint in sizes.arms:
        tallies += sick_of(model, failpoint, pool, sizes, judges)
    print(table(tallies[2:]))
    settings = {"healthy": sizes.healthy, "sick": sizes.sick, "pool": sizes.pool, "output": OUTPUT}
    return {
        "settings": settings,
        "baseline": {"low": learnt.low, "high": learnt.high, "answers": learnt.answers},
        "rows": [row for one in tallies for row in one.rows()],
    }


def _scale(cold: Engine, clean: Sequence[Said]) -> Scale:
    """From every tenth clean answer."""
    gaps = []
    for answer in clean[::10]:
        cold_scores(cold, answer)
        assert answer.cold is not None
        gaps.append([gap(was, now) for was, now in zip(answer.logprobs, answer.cold, strict=True)])
    return calibrate(gaps)


if __name__ == "__main__":
    main()
