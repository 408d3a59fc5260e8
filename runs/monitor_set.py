"""Make the labelled set of `stanchion bench monitor`: `python runs/monitor_set.py FOLDER`

It takes hours of one core and can be interrupted; what the set is, is told in `cli/bench/labelled`.
`--digests F` writes SHA-256 of its files: those of the healthy answers are the same on any machine
with the same Python and kernels. `--baseline F` writes the baseline and the witness's scale that
are learnt from the healthy answers which the benchmark does not judge.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.progress import Progress

from stanchion.cli.bench.labelled import digests
from stanchion.cli.bench.monitor import FULL, Bench
from stanchion.cli.settings import model_folder
from stanchion.gateway.monitor.baseline import Clean, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digests", type=Path, metavar="FILE")
    parser.add_argument("--baseline", type=Path, metavar="FILE")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(model_folder("tiny"), FULL, asked.folder)
    torch.set_num_threads(1)
    with torch.inference_mode(), Progress() as progress:
        bench.make(asked.folder, progress)
        if asked.baseline is not None:
            judges = bench.judges(asked.folder)
            learnt, scale = judges.baseline, judges.scale
            clean = Clean(
                model=learnt.model,
                revision=learnt.revision,
                drift=scale.drift,
                threshold=scale.threshold,
                runs=scale.runs,
            )
            asked.baseline.write_bytes(write([learnt], [clean]))
    if asked.digests is not None:
        asked.digests.write_text(json.dumps(digests(asked.folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
