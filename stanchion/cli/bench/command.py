"""`stanchion bench NAME`: run, print the table, write the JSON. Exit code 1 if a gate is missed."""

from __future__ import annotations

from pathlib import Path

import torch

from stanchion.cli.bench.engine import FULL, QUICK, Bench, run_all
from stanchion.cli.bench.measure import table, write
from stanchion.cli.settings import model_folder
from stanchion.core.errors import ConfigError


def run(quick: bool, json_file: str | None, only: str | None) -> int:
    torch.set_num_threads(1)
    with torch.inference_mode():
        bench = Bench(model_folder("tiny"), QUICK if quick else FULL)
        if only is not None and only not in bench.measures:
            raise ConfigError(f"no measure {only}; there are: {', '.join(bench.measures)}")
        measures = run_all(bench, only)
    print(table(measures))
    for one in measures:
        if one.note:
            print(f"{one.name}: {one.note}")
    if json_file is not None:
        write(measures, Path(json_file), {"quick": quick, "threads": 1})
    return 1 if any(one.meets(one.gate) is False for one in measures) else 0
