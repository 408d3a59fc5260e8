"""`stanchion bench monitor`: what is found of the sick, what is done to the healthy.

The labelled set (see `labelled`) is made once in a folder and read from then on; made-up answers
(see `madeup`) are added: healthy ones that look odd, loops, random characters. The same folds as in
the gateway run over what each answer said, message by message:

* `report-literal`, `report`, `calibrated`, `text`: a suspicion counts as found;
* each mode of the gateway: found means that the answer was not completed; *in time* that no token
  from the onset on had been released. A witness answers at once, since how long it takes depends on
  the load.

The baseline is learnt from healthy answers that are not judged. Sizes are fixed here.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from rich.progress import Progress

from stanchion.cli.bench import madeup
from stanchion.cli.bench.judges import MODES, RULES, Judges, Learner, scale_of
from stanchion.cli.bench.labelled import (
    FAULTS,
    PAGE_TOKENS,
    POOL,
    SHARD,
    TEXT_IS_RIGHT,
    Said,
    fault_file,
    kept,
    make_faulty,
    make_healthy,
    shards,
)
from stanchion.cli.bench.measure import Measure
from stanchion.core.errors import ConfigError
from stanchion.engine.assemble import assemble
from stanchion.engine.scheduler import Limits
from stanchion.gateway.monitor.guard import Mode
from stanchion.gateway.tokens import load_vocabulary
from stanchion.lab.corpus import corpus
from stanchion.lab.stats import Rate
from stanchion.model.load import load_glm
from stanchion.model.text import Model

WITNESSED_MODES: tuple[Mode, ...] = ("balanced", "guarded", "strict")
UNDRAWN: tuple[Mode, ...] = ("report", "balanced", "guarded")


@dataclass(frozen=True)
class Sizes:
    """`learning`: the first so many healthy answers, which are not judged. `strict_every`: strict
    asks a witness for each answer; of the healthy, one in so many shows that it clears them."""

    learning: int
    healthy: int
    faulty: int  # of each kind
    fault_seconds: float
    made_up: int  # of each kind
    clean_runs: int
    strict_every: int


FULL = Sizes(3_000, 30_000, 300, 3600.0, 300, 100, 30)
QUICK = Sizes(30, 60, 5, 30.0, 5, 5, 10)


@dataclass
class Tally:
    """Of one kind of answers, by rule and mode."""

    found: dict[str, int] = field(default_factory=dict)
    of: dict[str, int] = field(default_factory=dict)
    in_time: dict[str, int] = field(default_factory=dict)
    from_onset: dict[str, list[int]] = field(default_factory=dict)
    either: int = 0  # suspected by any rule, or found by strict
    either_found: int = 0  # of those, found by strict

    def add(self, judges: Judges, answer: Said, modes: Sequence[Mode]) -> None:
        rules = {rule: judges.suspected(answer, rule) for rule in RULES}
        for rule, at in rules.items():
            self._count(rule, at, answer)
        for mode in modes:
            said = judges.mode(answer, mode)
            name = in_mode(mode)
            self._count(name, said.at if said.found else None, answer)
            self.in_time[name] = self.in_time.get(name, 0) + said.in_time
            if mode == "strict":
                self.either_found += said.found
                self.either += said.found or any(at is not None for at in rules.values())

    def _count(self, what: str, at: int | None, answer: Said) -> None:
        self.of[what] = self.of.get(what, 0) + 1
        self.found[what] = self.found.get(what, 0) + (at is not None)
        if at is not None and answer.onset is not None and at > answer.onset:
            self.from_onset.setdefault(what, []).append(at - answer.onset)

    def rate(self, what: str) -> Rate:
        return Rate(self.found.get(what, 0), self.of.get(what, 0))


def in_mode(mode: Mode) -> str:
    """The name of what a mode does, beside the rules'."""
    return f"mode_{mode}"


class Bench:
    """`folder`: where the set is, or is made; None: a small one, made anew."""

    def __init__(self, model_folder: Path, sizes: Sizes, folder: Path | None) -> None:
        self._model_folder = model_folder
        self._sizes = sizes
        self._folder = folder
        kinds = ["healthy", "healthy_greedy", *FAULTS, *madeup.KINDS]
        self.measures: dict[str, Callable[[], Measure]] = {
            "false_aborts": self.false_aborts,
            "recall_witnessed": self.recall_witnessed,
        }
        for mode in WITNESSED_MODES:
            name = f"tokens_from_onset_p50_{mode}"
            self.measures[name] = partial(self.tokens_from_onset, name, mode)
        for kind in kinds:
            for what in (*RULES, *map(in_mode, MODES)):
                if kind not in madeup.KINDS or what in RULES:
                    name = f"{kind}:{what}"
                    self.measures[name] = partial(self.rate, name, kind, what)

    def prepare(self, names: Sequence[str]) -> None:
        """Make what is missing of the set, and judge all of it."""
        if self._folder is None and self._sizes is FULL:
            raise ConfigError(
                "bench monitor wants --set FOLDER: the labelled set is made there once, which takes"
                " hours of one core, and read from then on (--quick makes a small one of its own)"
            )
        _ = self.tallies

    # ---- measures ---------------------------------------------------------------------------

    def false_aborts(self) -> Measure:
        """Healthy answers that `balanced` did not let go on."""
        rate = self._healthy(in_mode("balanced"))
        measure = Measure("false_aborts", f"of {rate.trials}", "value", gate=0, at_least=False)
        measure.ours, measure.note = [float(rate.events)], rate.words()
        return measure

    def recall_witnessed(self) -> Measure:
        """Of the sick answers that any rule suspects, or strict sees: those that strict finds."""
        sick = [self.tallies[one] for one in FAULTS if one != TEXT_IS_RIGHT]
        rate = Rate(sum(one.either_found for one in sick), sum(one.either for one in sick))
        measure = Measure("recall_witnessed", "of them", "value", gate=0.95, aim=0.99)
        measure.ours = [] if rate.value is None else [rate.value]
        every = self._sick(in_mode("strict"))
        measure.note = f"{rate.words()}; of all that are sick, strict finds {every.words()}"
        return measure

    def tokens_from_onset(self, name: str, mode: Mode) -> Measure:
        away = [
            one
            for fault in FAULTS
            if fault != TEXT_IS_RIGHT
            for one in self.tallies[fault].from_onset.get(in_mode(mode), ())
        ]
        measure = Measure(name, "tokens", "value")
        if away:
            measure.ours = [float(statistics.median(away))]
        measure.note = f"{len(away)} answers, sick and found after their onset"
        return measure

    def rate(self, name: str, kind: str, what: str) -> Measure:
        rate = self.tallies[kind].rate(what)
        measure = Measure(name, "found", "value")
        measure.ours = [] if rate.value is None else [rate.value]
        measure.note = rate.words()
        if what in self.tallies[kind].in_time:
            measure.note += f"; {self.tallies[kind].in_time[what]} in time"
        return measure

    def _healthy(self, what: str) -> Rate:
        both = [self.tallies[kind].rate(what) for kind in ("healthy", "healthy_greedy")]
        return Rate(sum(one.events for one in both), sum(one.trials for one in both))

    def _sick(self, what: str) -> Rate:
        every = [self.tallies[one].rate(what) for one in FAULTS if one != TEXT_IS_RIGHT]
        return Rate(sum(one.events for one in every), sum(one.trials for one in every))

    # ---- the set, judged --------------------------------------------------------------------

    @cached_property
    def tallies(self) -> dict[str, Tally]:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._judge(self._folder)
        with tempfile.TemporaryDirectory() as made:
            return self._judge(Path(made))

    def _judge(self, folder: Path) -> dict[str, Tally]:
        sizes = self._sizes
        with Progress(auto_refresh=False) as progress:
            self.make(folder, progress)
            judges = self.judges(folder)
            tallies = {kind: Tally() for kind in ("healthy", "healthy_greedy")}
            task = progress.add_task("judging", total=sizes.healthy)
            for at, answer in enumerate(self._healthy_answers(folder)):
                kind = "healthy_greedy" if answer.start.sampling.greedy else "healthy"
                modes = MODES if at % sizes.strict_every == 0 else UNDRAWN
                tallies[kind].add(judges, answer, modes)
                progress.update(task, advance=1, refresh=at % 100 == 0)
            for fault in FAULTS:
                tallies[fault] = Tally()
                for answer in kept(fault_file(folder, fault))[: sizes.faulty]:
                    tallies[fault].add(judges, answer, MODES)
            for kind in madeup.KINDS:
                tallies[kind] = Tally()
                for answer in madeup.answers(kind, sizes.made_up, judges.vocabulary):
                    tallies[kind].add(judges, answer, ())
        return tallies

    def make(self, folder: Path, progress: Progress) -> None:
        """What is missing of the set."""
        sizes = self._sizes
        healthy = sizes.learning + sizes.healthy
        text = corpus(self._model_folder)
        task = progress.add_task("healthy answers", total=healthy)
        make_healthy(
            self._model,
            text,
            healthy,
            folder,
            lambda made: progress.update(task, advance=made, refresh=True),
        )
        task = progress.add_task("faults", total=len(FAULTS))
        pool = [one for path in shards(folder) for one in kept(path)][:POOL]
        for fault in FAULTS:
            progress.update(task, description=fault, refresh=True)
            if not fault_file(folder, fault).exists():
                seconds = sizes.fault_seconds
                make_faulty(self._model, fault, pool, sizes.faulty, seconds, folder)
            progress.advance(task)

    def _healthy_answers(self, folder: Path) -> Iterator[Said]:
        sizes = self._sizes
        last = sizes.learning + sizes.healthy
        for number, path in enumerate(shards(folder)):
            for at, answer in enumerate(kept(path), number * SHARD):
                if sizes.learning <= at < last:
                    yield answer

    def judges(self, folder: Path) -> Judges:
        """With what is learnt from the healthy answers that are not judged."""
        sizes = self._sizes
        learner = Learner(Limits().draft_tokens, self._model.vocabulary)
        clean: list[Said] = []
        every = max(1, sizes.learning // sizes.clean_runs)
        for number, path in enumerate(shards(folder)):
            for at, answer in enumerate(kept(path), number * SHARD):
                if at < sizes.learning:
                    learner.add(answer)
                    if at % every == 0:
                        clean.append(answer)
            if (number + 1) * SHARD >= sizes.learning:
                break
        cold = assemble(self._model, Limits(), 4096).engine
        vocabulary = load_vocabulary(self._model_folder)
        baseline = learner.baseline(*self._loaded[1:])
        return Judges(vocabulary, baseline, scale_of(cold, clean), cold)

    @cached_property
    def _model(self) -> Model:
        return self._loaded[0]

    @cached_property
    def _loaded(self) -> tuple[Model, str, str]:
        model, name, revision, _ = load_glm(self._model_folder, PAGE_TOKENS, deterministic=True)
        return model, name, revision
