"""What a benchmark says: measures with raw runs of both sides, and the table made from them.

Nothing printed is stored: medians, ratios and intervals come from the raw runs in the JSON. Of
rates the gain is ours / other, of times other / ours; a cost is ours / other. A gate must hold; an
aim may be missed, with its distance and reason in docs/LOG.md.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

Kind = Literal["rate", "time", "cost", "value"]
PACKAGES = ("stanchion", "torch", "numba", "numpy", "transformers", "llvmlite")


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
        ours = statistics.median(self.ours)
        return ours if self.other is None else self._ratio(ours, statistics.median(self.other))

    def interval(self) -> tuple[float, float]:
        """The smallest and largest of the paired runs' ratios: what one run may show."""
        if self.other is None:
            return min(self.ours), max(self.ours)
        ratios = [self._ratio(ours, other) for ours, other in zip(self.ours, self.other)]
        return min(ratios), max(ratios)

    def meets(self, target: float | None) -> bool | None:
        if target is None:
            return None
        return self.result >= target if self.at_least else self.result <= target

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
    low, high = one.interval()
    other = "" if one.other is None else f"{statistics.median(one.other):.4g} {one.unit}"
    sign = "" if one.other is None else "x"
    cells = [
        one.name,
        f"{statistics.median(one.ours):.4g} {one.unit}",
        other,
        f"**{one.result:.3g}{sign}** ({low:.3g} to {high:.3g})",
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
