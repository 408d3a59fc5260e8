"""`stanchion bench NAME`: run, print the table, write the JSON. Exit code 1 if a gate is missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import Progress

from stanchion.cli.bench.measure import Measure, table, write
from stanchion.cli.settings import model_folder
from stanchion.core.errors import ConfigError


class Bench(Protocol):
    @property
    def measures(self) -> Mapping[str, Callable[[], Measure]]: ...
    def prepare(self, names: Sequence[str]) -> None:
        """Load what these measures need, before the first of them."""


@dataclass(frozen=True)
class Folders:
    """`labelled`: of the monitor's set; `peers`: where others' programs are, to stand beside."""

    labelled: Path | None = None
    peers: Path | None = None


def run(
    name: str,
    quick: bool,
    json_file: str | None,
    only: str | None,
    folders: Folders = Folders(),
) -> int:
    torch.set_num_threads(1)
    with torch.inference_mode():
        bench = _bench(name, quick, folders)
        if only is not None and only not in bench.measures:
            raise ConfigError(f"no measure {only}; there are: {', '.join(bench.measures)}")
        measures = run_all(f"bench {name}", bench, only)
    print(table(measures))
    for one in measures:
        if one.note:
            print(f"{one.name}: {one.note}")
    if json_file is not None:
        write(measures, Path(json_file), {"quick": quick, "threads": 1})
    return 1 if any(one.meets(one.gate) is False for one in measures) else 0


def run_all(title: str, bench: Bench, only: str | None) -> list[Measure]:
    names = [only] if only else list(bench.measures)
    bench.prepare(names)
    measures = []
    # No thread that draws: it would take the interpreter ten times a second from what is measured.
    with Progress(auto_refresh=False) as progress:
        task = progress.add_task(title, total=len(names))
        for name in names:
            progress.update(task, description=name, refresh=True)
            measures.append(bench.measures[name]())
            progress.console.print(f"{name}: {measures[-1].result:.4g}", highlight=False)
            progress.advance(task)
    return measures


def _bench(name: str, quick: bool, folders: Folders) -> Bench:
    # Each needs what the other does without.
    if name == "engine":
        from stanchion.cli.bench import engine

        return engine.Bench(model_folder("tiny"), engine.QUICK if quick else engine.FULL)
    if name == "tiers":
        from stanchion.cli.bench import tiers

        return tiers.Bench(model_folder("tiny"), tiers.QUICK if quick else tiers.FULL)
    if name == "layersplit":
        from stanchion.cli.bench import layersplit

        return layersplit.Bench(
            model_folder("tiny"), layersplit.QUICK if quick else layersplit.FULL
        )
    if name == "monitor":
        from stanchion.cli.bench import monitor

        wanted = monitor.QUICK if quick else monitor.FULL
        return monitor.Bench(model_folder("tiny"), wanted, folders.labelled)
    if name == "gateway":
        from stanchion.cli.bench import gateway

        pace = gateway.QUICK if quick else gateway.FULL
        return gateway.Bench(model_folder("tiny"), pace, folders.peers)
    if name == "recording":
        from stanchion.cli.bench import recording

        return recording.Bench(model_folder("tiny"), recording.QUICK if quick else recording.FULL)
    if name == "replay":
        from stanchion.cli.bench import replay

        return replay.Bench(model_folder("tiny"), replay.QUICK if quick else replay.FULL)
    from stanchion.cli.bench import handoff

    return handoff.Bench(model_folder("tiny"), handoff.QUICK if quick else handoff.FULL)
