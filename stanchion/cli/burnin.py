"""`stanchion verify --url U`: is a deployment, whichever engine it is, right under load?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from stanchion.core.errors import ConfigError
from stanchion.gateway.monitor.witness import Confirmed, Unwitnessed
from stanchion.lab import corpus
from stanchion.lab.burnin import Judged, Storm, worst
from stanchion.lab.burnin_run import BurnIn, Found
from stanchion.lab.replay_client import client
from stanchion.lab.stats import PER, Rate

QUIET_REQUESTS = 40
SHOWN = 10
ACCEPTANCE_SHARE = 0.05  # of a lower acceptance that is a finding (fault report D09's bound)
TEXT_CHARACTERS = 90


def burn_in(url: str, api_key: str, storm: Storm, quiet: int, json_file: str | None) -> int:
    """Exit code: 0 nothing found, 1 something. Raise ConfigError where it could not be run, or says
    nothing: what was not answered or not looked at is never taken for clean."""
    console = Console()
    out = None if json_file is None else _writable(Path(json_file))
    with Progress(console=console) as progress:
        found = asyncio.run(_run(url, api_key, storm, quiet, progress))
    _tell(found, console)
    if out is not None:
        out.write_text(json.dumps(told(found), indent=1) + "\n")
    if suspects(found) or lost_drafts(found) is not None:
        return 1
    if (why := says_nothing(found)) is not None:
        raise ConfigError(why)
    return 0


def _writable(path: Path) -> Path:
    """Before the storm, not after it. Raise ConfigError."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None
    return path


async def _run(url: str, api_key: str, storm: Storm, quiet: int, progress: Progress) -> Found:
    tasks: dict[str, TaskID] = {}

    def said(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done)

    async with client(url, api_key) as http:
        return await BurnIn(http, storm, "\n".join(corpus.texts()), said).run(quiet)


# ---- what was found -------------------------------------------------------------------------


def suspects(found: Found) -> list[Judged]:
    return [one for one in found.every if one.suspect]


def says_nothing(found: Found) -> str | None:
    """Why finding nothing means nothing, if it does: most requests failed, or most answers of a
    server that gives scores could not be witnessed."""
    failed = sum(found.failed.values())
    if found.completed <= failed:
        common = max(found.failed, key=lambda why: found.failed[why], default="nobody stayed")
        return f"{found.completed} requests were answered and {failed} failed: {common}"
    witnessed = confirmed(found).trials
    if found.means.scores and 2 * witnessed < found.completed:
        return f"only {witnessed} of {found.completed} answers could be witnessed"
    return None


def confirmed(found: Found) -> Rate:
    witnessed = [one for one in found.every if not isinstance(one.verdict, Unwitnessed)]
    return Rate(sum(isinstance(one.verdict, Confirmed) for one in witnessed), len(witnessed))


def parted(found: Found) -> tuple[Rate, int]:
    """Greedy answers whose text is another than alone; and how many more are near ties."""
    solo = [one for one in found.every if one.solo is not None]
    noise = sum(one.solo == "noise" for one in solo)
    return Rate(sum(one.solo == "parted" for one in solo), len(solo)), noise


def lost_drafts(found: Found) -> str | None:
    """In words, if the same greedy answers had fewer drafts accepted in the storm than alone."""
    acceptance = found.acceptance
    if not acceptance.solo or not sum(acceptance.solo):
        return None
    storm, solo = (sum(one) / len(one) for one in (acceptance.storm, acceptance.solo))
    lower = sum(one < 0 for one in acceptance.differences())
    higher = sum(one > 0 for one in acceptance.differences())
    fewer = 1 - storm / solo
    # A sign test: if nothing were lost, a difference would go either way alike.
    chance = Rate(lower, lower + higher).interval().low if lower + higher else 0.0
    if fewer <= ACCEPTANCE_SHARE or chance <= 0.5:
        return None
    return (
        f"{storm:.3f} drafts a step in the storm, {solo:.3f} alone, of the same "
        f"{len(acceptance.solo)} answers: {100 * fewer:.0f} % fewer"
    )


def told(found: Found) -> dict[str, Any]:
    """For the JSON."""
    rate, (texts, noise) = confirmed(found), parted(found)
    return {
        "model": found.means.model,
        "scores": found.means.scores,
        "cache_salt": found.means.salted,
        "noise": {"drift": found.scale.drift, "threshold": found.scale.threshold,
                  "quiet_answers": found.quiet},
        "asked": found.asked,
        "completed": found.completed,
        "left": found.left,
        "fillers": found.fillers,
        "failed": found.failed,
        "confirmed": _rate(rate),
        "parted": _rate(texts),
        "parted_by_noise": noise,
        "unstable": found.unstable,
        "unwitnessed": found.completed - rate.trials,
        "acceptance": lost_drafts(found),
        "drafts_a_step": {"answers": len(found.acceptance.solo),
                          "storm": _mean(found.acceptance.storm),
                          "solo": _mean(found.acceptance.solo)},
        "failpoints": sorted(found.failpoints),
        "worst": [_case(one) for one in worst(found.every, SHOWN)],
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(rate: Rate) -> dict[str, Any]:
    if rate.value is None:
        return {"events": 0, "of": 0}
    bounds = rate.interval()
    return {"events": rate.events, "of": rate.trials, "per_10000": PER * rate.value,
            "low": PER * bounds.low, "high": PER * bounds.high}  # fmt: skip


def _case(one: Judged) -> dict[str, Any]:
    verdict = one.verdict
    return {
        "request": one.result.request,
        "onset": verdict.onset if isinstance(verdict, Confirmed) else one.parted_at,
        "evidence": verdict.evidence if isinstance(verdict, Confirmed) else "another text alone",
        "text": one.result.said,
    }


def _tell(found: Found, console: Console) -> None:
    rate, (texts, noise) = confirmed(found), parted(found)
    table = Table(title=f"burn-in of {found.means.model}")
    table.add_column("what")
    table.add_column("how many", overflow="fold")
    failed, noise_of = sum(found.failed.values()), found.scale
    asked = f"{found.asked}: {found.completed} answered, {found.left} left by their clients,"
    drift = f"{noise_of.drift:.2g} nats a token, {noise_of.threshold:.2g} in all"
    rows: Sequence[tuple[str, str]] = [
        ("asked", f"{asked} {found.fillers} fillers, {failed} failed"),
        ("its noise", f"{drift} ({found.quiet} quiet answers)"),
        ("confirmed", rate.words()),
        ("other text than alone", f"{texts.words()}; {noise} more are near ties"),
        ("not witnessed", f"{found.completed - rate.trials}"),
        ("acceptance", lost_drafts(found) or "nothing lost"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for one in worst(found.every, SHOWN):
        case = _case(one)
        said = case["text"][:TEXT_CHARACTERS]
        console.print(f"{case['request']}: from token {case['onset']}, {case['evidence']}")
        console.print(f"    {said!r}", highlight=False, markup=False)
    for why, count in sorted(found.failed.items(), key=lambda one: -one[1])[:SHOWN]:
        console.print(f"failed {count} times: {why}", markup=False)
    if not found.means.scores:
        console.print("this server gives no token ids and log-probabilities: texts alone count")
