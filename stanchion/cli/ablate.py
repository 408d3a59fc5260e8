"""`stanchion ablate`: runs a plan's arms in turn, each on its own server, and judges them once.

A block that is done stays done: the same command goes on where it was. Every block has a server
started for it, so no arm meets another's cache.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from stanchion.cli.arms import LOG, serving
from stanchion.cli.detect import Asked as Look
from stanchion.cli.detect import detect
from stanchion.cli.replay import replay
from stanchion.cli.replay_asked import Asked, make_plan
from stanchion.cli.settings import output_folder
from stanchion.core.errors import ConfigError
from stanchion.lab.ablate import Ablated, Arm, Plan, analyse, check_size, order, read, words
from stanchion.lab.detect_table import sessions
from stanchion.lab.results import RUN, read_header
from stanchion.lab.stats_sessions import Sessions

ABLATED, PLAN, REFERENCE = "ablate.json", "plan.json", "reference"


def ablate(path: Path, out: Path, quiet: bool = False) -> Ablated:
    """Raise ConfigError for a plan that cannot be run, or is not the one that `out` was begun
    with."""
    plan = _read(path)
    print(check_size(plan))
    _begin(plan, out)
    copies, first = _size(plan)
    right = _reference(plan, out, copies, first, quiet)
    turns = order(plan)
    found: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in plan.arms}
    late = 0
    for turn, (block, name) in enumerate(turns):
        folder = out / f"block-{block:03d}-{list(plan.arms).index(name):02d}"
        arm = plan.arms[name]
        said = _asked(plan, arm, folder, name, copies, first, (block, plan.blocks))
        print(f"{turn + 1} of {len(turns)}: block {block + 1}, {name}", flush=True)
        late += not _run(said, arm, quiet)
        told = detect(Look(folder, right, quiet=True))
        _merge(found[name], sessions(told.findings, plan.event))
    arms = {name: Sessions(counts) for name, counts in found.items()}
    told_ = analyse(plan, arms, len(turns), late)
    (out / ABLATED).write_bytes(msgspec.json.format(msgspec.json.encode(told_), indent=1) + b"\n")
    (out / "ablate.md").write_text(words(told_) + "\n")
    return told_


def dry(path: Path) -> str:
    """What the plan's size can show, and the order of its blocks."""
    plan = _read(path)
    turns = "\n".join(f"block {block + 1}: {name}" for block, name in order(plan))
    return f"{check_size(plan)}\n{turns}"


def _read(path: Path) -> Plan:
    try:
        return read(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _begin(plan: Plan, out: Path) -> None:
    """The plan is kept, and a run that goes on must be of the same: sizes are not changed once
    results may have been seen."""
    output_folder(out)
    kept, raw = out / PLAN, msgspec.json.encode(plan)
    if kept.exists() and kept.read_bytes() != raw:
        raise ConfigError(f"{out} was begun with another plan; a changed one wants a new folder")
    kept.write_bytes(raw)


def _size(plan: Plan) -> tuple[int, int]:
    """Copies of the trace, and how many of its requests, that come to at least `requests`."""
    plain = {"trace": plan.trace, "url": "", "out": ""}
    whole, _ = make_plan(_settings(plain))
    copies = -(-plan.requests // len(whole.steps))
    first = -(-plan.requests // copies)
    for part in range(plan.blocks):
        try:
            make_plan(_settings(plain | {"first": first, "part": (part, plan.blocks)}))
        except ConfigError:
            raise ConfigError(
                f"block is {plan.block}: sessions go whole, and some of this trace are longer than "
                "that; give a larger one"
            ) from None
    return copies, first


def _asked(
    plan: Plan, arm: Arm, folder: Path, name: str, copies: int, first: int, part: tuple[int, int]
) -> Asked:
    return _settings(
        {"url": "", **plan.replay, **arm.replay}
        | {"trace": plan.trace, "out": str(folder), "arm": name, "seed": plan.seed}
        | {"copies": copies, "first": first, "part": part}
    )


def _settings(said: dict[str, Any]) -> Asked:
    try:
        return msgspec.convert(said, Asked)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the plan's settings of replay: {error}") from None


def _reference(plan: Plan, out: Path, copies: int, first: int, quiet: bool) -> Path | None:
    """All questions of all arms, one at a time, on the server whose answers are right."""
    if plan.reference is None:
        return None
    folder = out / REFERENCE
    said = _asked(plan, plan.reference, folder, REFERENCE, copies, first, (0, 1))
    alone = msgspec.structs.replace(said, concurrency=1, speed="1000000", aborts=False)
    print("the reference: all questions, one at a time", flush=True)
    _run(msgspec.structs.replace(alone, lateness_max_s=86_400.0), plan.reference, quiet)
    return folder


def _run(said: Asked, arm: Arm, quiet: bool) -> bool:
    """Is the run valid? One that is over is not made again, whatever became of it."""
    folder = Path(said.out)
    if (folder / RUN).exists() and (valid := read_header(folder).valid) is not None:
        return valid
    log = folder.parent / f"{folder.name}-{LOG}"
    with serving(shlex.split(arm.serve), log) as url:
        return bool(replay(msgspec.structs.replace(said, url=url), quiet).valid)


def _merge(into: dict[str, tuple[int, int]], more: Sessions) -> None:
    for name, (events, trials) in more.counts.items():
        had = into.get(name, (0, 0))
        into[name] = had[0] + events, had[1] + trials
