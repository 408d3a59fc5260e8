"""What a benchmark says: measures with raw runs of both sides, and the table made from them.

Nothing printed is stored: medians, ratios and intervals come from the raw runs in the JSON. Of
rates the gain is ours / other, of times other / ours; a cost is ours / other. A bound is what the
mean of a cost over pairs of runs stays below, at 95 % confidence. A gate must hold; an aim may be
missed, with its distance and reason in docs/LOG.md.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np

Kind = Literal["rate", "time", "cost", "bound", "value"]
PACKAGES = ("stanchion", "torch", "numba", "numpy", "transformers", "llvmlite", "nixl")
RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass
class Measure:
    """One figure. `target` is a gate or an aim on the ratio, or on the value where no other is."""

    name: str
    unit: str
    kind: Kind
    ours: list[float] = field(default_factory=list)
    other: list[float] | None = None
    gate: float | None = None
    aim: float | None = None
    at_least: bool = True
    note: str = ""

    @property
    def result(self) -> float:
        """The ratio of medians, or the median where there is nothing beside it."""
        if not self.ours:
            return math.nan  # it could not be measured here; the note says why
        if self.kind == "bound":
            return upper_bound(self._ratios())
        ours = statistics.median(self.ours)
        return ours if self.other is None else self._ratio(ours, statistics.median(self.other))

    def interval(self) -> tuple[float, float]:
        """The smallest and largest of the paired runs' ratios: what one run may show."""
        if self.other is None:
            return min(self.ours), max(self.ours)
        ratios = self._ratios()
        return min(ratios), max(ratios)

    def meets(self, target: float | None) -> bool | None:
        if target is None or not self.ours:
            return None
        return self.result >= target if self.at_least else self.result <= target

    def _ratios(self) -> list[float]:
        assert self.other is not None
        return [self._ratio(ours, other) for ours, other in zip(self.ours, self.other)]

    def _ratio(self, ours: float, other: float) -> float:
        return other / ours if self.kind == "time" else ours / other


Run = Callable[[], float]


def interleave(
    measure: Measure, ours: Run, other: Run | None, repeats: int, warm: bool = True
) -> Measure:
    """One unrecorded run of each side, then `repeats` of both in turn."""
    if warm:
        ours()
    if other is not None:
        measure.other = []
        if warm:
            other()
    for _ in range(repeats):
        measure.ours.append(ours())
        if other is not None and measure.other is not None:
            measure.other.append(other())
    return measure


def paired(measure: Measure, ours: Run, other: Run, pairs: int) -> Measure:
    """As `interleave`, but every second pair begins with the other side."""
    measure.other = []
    ours()
    other()
    for at in range(pairs):
        if at % 2:
            measure.other.append(other())
            measure.ours.append(ours())
        else:
            measure.ours.append(ours())
            measure.other.append(other())
    return measure


def upper_bound(ratios: Sequence[float]) -> float:
    """What their mean stays below, at 95 % confidence, one-sided: by a bootstrap with a fixed
    seed, so the same runs give the same bound."""
    sample = np.array(ratios)
    picks = np.random.default_rng(7).integers(len(sample), size=(RESAMPLES, len(sample)))
    return float(np.quantile(sample[picks].mean(1), CONFIDENCE))


def machine() -> dict[str, object]:
    """The processor's name, its cores and the memory: enough to know what a figure is worth."""
    described: dict[str, object] = {"platform": platform.platform(), "python": sys.version}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        described |= {"processor": names[0] if names else "", "cores": len(names)}
    return described


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def write(measures: list[Measure], path: Path, settings: dict[str, object]) -> None:
    """The JSON: machine, versions, settings, and every measure with its raw runs."""
    rows = []
    for one in measures:
        row = {key: value for key, value in asdict(one).items() if key not in ("at_least",)}
        target = one.gate if one.gate is not None else one.aim
        if target is not None:
            row["at_least" if one.at_least else "at_most"] = target
        rows.append(row)
    said = {
        "machine": machine(), "versions": versions(), "settings": settings, "measures": rows
    }  # fmt: skip
    path.write_text(json.dumps(said, indent=1) + "\n")


def table(measures: list[Measure]) -> str:
    """A Markdown table, unmet targets last."""
    head = "| measure | ours | other | result | runs | gate | aim |\n|---|---|---|---|---|---|---|"
    rows = [_row(one) for one in sorted(measures, key=_unmet)]
    return "\n".join([head, *rows])


def _unmet(one: Measure) -> tuple[bool, bool]:
    return one.meets(one.gate) is False, one.meets(one.aim) is False


def _row(one: Measure) -> str:
    if not one.ours:
        return f"| {one.name} | absent | | | 0 | | |"
    low, high = one.interval()
    digits = 4 if one.kind == "bound" else 3
    other = "" if one.other is None else f"{statistics.median(one.other):.4g} {one.unit}"
    sign = "" if one.other is None else "x"
    cells = [
        one.name,
        f"{statistics.median(one.ours):.4g} {one.unit}",
        other,
        f"**{one.result:.{digits}g}{sign}** ({low:.3g} to {high:.3g})",
        str(len(one.ours)),
        _target(one, one.gate),
        _target(one, one.aim),
    ]
    return "| " + " | ".join(cells) + " |"


def _target(one: Measure, target: float | None) -> str:
    if target is None:
        return ""
    sign = "at least" if one.at_least else "at most"
    return f"{sign} {target:g}: {'holds' if one.meets(target) else 'MISSED'}"
