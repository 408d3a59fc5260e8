"""Draw docs/layersplit.svg from a run: `python runs/plot_layersplit.py FILE.json`.

FILE is what `stanchion bench layersplit --json FILE` wrote. Our lengths are those of the report's
Figure 5 divided by eight. Needs matplotlib (`pip install -e '.[plots]'`).
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

REPORT = {40: 1.10, 120: 2.32}  # the two ends that its text names: thousands of tokens, gain
DIVIDED = 8
NAMES = {"gain_short": 5120, "gain_long": 15360}


def gains(measures: list[dict[str, object]]) -> dict[int, tuple[float, float, float]]:
    """By length: the ratio of medians, and the smallest and largest of the pairs of runs."""
    found = {}
    for one in measures:
        name = str(one["name"])
        length = NAMES.get(name) or int(name.removeprefix("gain_")) if _is_gain(name) else 0
        if length:
            ours, other = one["ours"], one["other"]
            assert isinstance(ours, list) and isinstance(other, list)
            ratios = [first / then for first, then in zip(ours, other, strict=True)]
            middle = statistics.median(ours) / statistics.median(other)
            found[length] = middle, min(ratios), max(ratios)
    return found


def _is_gain(name: str) -> bool:
    return name in NAMES or re.fullmatch(r"gain_\d+", name) is not None


def predicted(measures: list[dict[str, object]]) -> dict[int, float]:
    said = next(str(one["note"]) for one in measures if one["name"] == "predicted_gain_long")
    return {int(at): float(gain) for at, gain in re.findall(r"(\d+): (\d+\.\d+)", said)}


def main(run: Path) -> None:
    measures = json.loads(run.read_text())["measures"]
    found, said = gains(measures), predicted(measures)
    figure, axes = plt.subplots(figsize=(7, 4))
    lengths = sorted(found)
    middles = [found[at][0] for at in lengths]
    errors = [
        [found[at][0] - found[at][1] for at in lengths],
        [found[at][2] - found[at][0] for at in lengths],
    ]
    axes.errorbar(lengths, middles, yerr=errors, marker="o", capsize=4, label="measured, CP 2")
    axes.plot(sorted(said), [said[at] for at in sorted(said)], "x--", label="predicted before")
    theirs = [1000 * at / DIVIDED for at in REPORT]
    axes.plot(theirs, list(REPORT.values()), "s:", label="report, Figure 5: 40K and 120K")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"tokens of a request (the report's divided by {DIVIDED})")
    axes.set_ylabel("throughput, LayerSplit over replicated")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(
        Path(__file__).parent.parent / "docs" / "layersplit.svg", metadata={"Date": None}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
