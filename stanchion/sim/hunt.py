"""Hunt for runs that go wrong: seeded clusters, each of another shape, until the seeds are used up.

A seed gives the plan and all picks, so one number replays a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stanchion.core.errors import Bug
from stanchion.sim.choices import Choices, seeded
from stanchion.sim.cluster import Plan, run


@dataclass
class Report:
    requests: int = 0
    runs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.requests += other.requests
        self.runs += other.runs
        self.counts += other.counts
        self.wrong += other.wrong


def plan_of(choices: Choices, base: Plan) -> Plan:
    """Calm or troubled, roomy or tight, one pair or several: a tenth of all is without trouble."""

    def one_of(*values: int) -> int:
        return values[choices.pick(len(values))]

    plan = replace(
        base,
        prefills=one_of(1, 2, 3),
        decodes=one_of(1, 2, 2),
        pages=one_of(20, 40, 80),
        page_tokens=one_of(2, 4, 8),
        chunk_tokens=one_of(3, 12, 24, 64),
        rdma=bool(choices.pick(2)),
        fences=bool(choices.pick(2)),
    )
    if not choices.pick(10):
        return replace(plan, leaves=0, stops=0, kills=0, losses=0, repeats=0)
    return replace(
        plan,
        leaves=one_of(0, 60, 150),
        stops=one_of(0, 500, 2000),
        kills=one_of(0, 1500, 4000),
        losses=one_of(0, 5, 30),
        repeats=one_of(0, 5, 30),
        strays=one_of(0, 0, 100),
    )


def hunt(seeds: Iterable[int], base: Plan | None = None, vary: bool = True) -> Report:
    """Run them all, each by a plan of its own, or all by `base`. What is wrong names its seed."""
    report = Report()
    for seed in seeds:
        choices = seeded(seed)
        plan = plan_of(choices, base or Plan()) if vary else base or Plan()
        try:
            cluster = run(plan, choices)
        except (AssertionError, Bug) as error:
            report.wrong.append(f"seed {seed}: {error}")
            continue
        report.runs += 1
        report.requests += plan.requests
        report.counts.update(cluster.counts)
        report.wrong += [f"seed {seed}: {line}" for line in cluster.wrong()]
    return report
