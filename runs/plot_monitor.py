"""Draw docs/monitor.svg from a run: `python runs/plot_monitor.py FILE.json`.

FILE is what `stanchion bench monitor --json FILE` wrote. Above: of the answers that are sick, how
many each rule suspected or each mode did not let go on. Below: the same of the healthy ones, where
every one is a false alarm. Lines are exact 95 % intervals. Needs matplotlib
(`pip install -e '.[plots]'`).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

BY = {
    "report-literal": "report, literally", "report": "report", "calibrated": "calibrated",
    "text": "text witnesses", "mode_balanced": "balanced: suspicion, then the witness",
    "mode_guarded": "guarded", "mode_strict": "strict: always the witness",
}  # fmt: skip
SICK = {
    "index_read_before_ready": "index read early", "attend_read_before_ready": "KV read early",
    "restore_without_index": "index not restored", "foreign_write": "another's KV",
    "restore_without_draft": "draft state lost\n(text is right)",
}  # fmt: skip
HEALTHY = {"healthy": "sampled, 0.7 and 0.8", "healthy_greedy": "greedy"}
_NOTE = re.compile(r"([\d.]+) \(([\d.]+) to ([\d.]+)\) per 10,000; ([\d,]+) of ([\d,]+)")


class Rate(NamedTuple):
    share: float
    low: float
    high: float
    words: str


def rates(measures: list[dict[str, Any]]) -> dict[tuple[str, str], Rate]:
    """By kind of answer and by rule or mode."""
    found = {}
    for one in measures:
        kind, _, by = str(one["name"]).partition(":")
        if by and (said := _NOTE.search(str(one["note"]))):
            share, low, high = (float(part) / 10_000 for part in said.groups()[:3])
            found[kind, by] = Rate(share, low, high, f"{said[4]} of {said[5]}")
    return found


def draw(axes: Any, kinds: dict[str, str], found: dict[tuple[str, str], Rate]) -> None:
    width = 0.8 / len(BY)
    for place, (by, words) in enumerate(BY.items()):
        for row, kind in enumerate(kinds):
            if (rate := found.get((kind, by))) is None:
                continue
            at = row - 0.4 + (place + 0.5) * width
            colour = f"C{place}"
            axes.barh(at, rate.share, width * 0.9, color=colour, label=words if not row else None)
            axes.plot([rate.low, rate.high], [at, at], color="black", linewidth=0.8)
            axes.annotate(rate.words, (max(rate.high, 0), at), (3, 0), textcoords="offset points",
                          va="center", fontsize=6)  # fmt: skip
    axes.set_yticks(range(len(kinds)), list(kinds.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)


def main(run: Path) -> None:
    found = rates(json.loads(run.read_text())["measures"])
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 10), gridspec_kw={"height_ratios": [len(SICK), len(HEALTHY)]}
    )
    draw(above, SICK, found)
    above.set_title("sick answers: share that was found")
    above.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=3)
    draw(below, HEALTHY, found)
    below.set_title("healthy answers: share that raised an alarm, or was cut off (modes)")
    figure.tight_layout()
    figure.savefig(Path(__file__).parent.parent / "docs" / "monitor.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
