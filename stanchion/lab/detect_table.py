"""What detectors are worth: how often they agree, and what they find of what is there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from stanchion.lab.detect import Finding
from stanchion.lab.results import Result
from stanchion.lab.stats import PER, Rate
from stanchion.lab.stats_sessions import Corrected, Sessions, bootstrap, corrected

SHOWN_CHARACTERS = 240
BEFORE_CHARACTERS = 60


@dataclass(frozen=True)
class Worth:
    """One detector. `recall` and `alarms` are None where no reference was at hand; `precision`
    where it found nothing."""

    name: str
    found: Rate
    recall: Rate | None
    alarms: Rate | None  # among the healthy
    precision: Rate | None


def detectors(findings: Sequence[Finding]) -> list[str]:
    """Those that had something to go by, in the order in which they are told."""
    names = dict.fromkeys(name for one in findings for name in one.by)
    return [name for name in names if any(one.by.get(name) is not None for one in findings)]


def worth(name: str, findings: Sequence[Finding]) -> Worth:
    told = [one for one in findings if one.by.get(name) is not None]
    sick = [bool(one.by[name]) for one in told if one.truth == "differs"]
    well = [bool(one.by[name]) for one in told if one.truth == "same"]
    known = bool(sick or well)
    hits = sum(sick) + sum(well)
    return Worth(
        name=name,
        found=Rate(sum(bool(one.by[name]) for one in told), len(told)),
        recall=Rate(sum(sick), len(sick)) if known else None,
        alarms=Rate(sum(well), len(well)) if known else None,
        precision=Rate(sum(sick), hits) if hits else None,
    )


def kappa(first: str, second: str, findings: Sequence[Finding]) -> float | None:
    """Cohen's: agreement beyond chance. None where there is nothing to agree on, as when neither
    of them ever found anything."""
    both = [
        (bool(one.by[first]), bool(one.by[second]))
        for one in findings
        if one.by.get(first) is not None and one.by.get(second) is not None
    ]
    if not both:
        return None
    total = len(both)
    agreed = sum(one == two for one, two in both) / total
    mine = sum(one for one, _ in both) / total
    theirs = sum(two for _, two in both) / total
    chance = mine * theirs + (1 - mine) * (1 - theirs)
    return None if chance == 1.0 else (agreed - chance) / (1 - chance)


def sessions(findings: Sequence[Finding], name: str) -> Sessions:
    """Events by session: by the reference (`truth`), or by a detector."""
    if name == "truth":
        known = [one for one in findings if one.truth != "unknown"]
        return Sessions.of((_whose(one), one.truth == "differs") for one in known)
    told = [one for one in findings if one.by.get(name) is not None]
    return Sessions.of((_whose(one), bool(one.by[name])) for one in told)


def _whose(one: Finding) -> str:
    """Copies of a session share no cache, so they are sessions of their own."""
    return f"{one.session}#{one.copy}"


def true_rate(one: Worth) -> Corrected | None:
    """The rate of sick answers that a detector's count stands for, by its recall and its false
    alarms here. None where these are not known, or say nothing."""
    if one.recall is None or one.alarms is None or not one.recall.trials or not one.alarms.trials:
        return None
    if (one.recall.value or 0.0) <= (one.alarms.value or 0.0):
        return None
    return corrected(one.found, one.recall, one.alarms)


def suspects(findings: Sequence[Finding], most: int) -> list[Finding]:
    """The most suspect first: what differs from the reference, then by votes, then by name."""
    ranked = sorted(
        (one for one in findings if one.votes or one.truth == "differs"),
        key=lambda one: (one.truth != "differs", -one.votes, one.request, one.copy),
    )
    return ranked[:most]


# ---- Markdown -------------------------------------------------------------------------------


def table(findings: Sequence[Finding]) -> str:
    rows = [
        "| detector | found | per 10,000 | recall | false alarms | precision |",
        "|---|---|---|---|---|---|",
    ]
    for name in detectors(findings):
        one = worth(name, findings)
        cells = [name, f"{one.found.events:,} of {one.found.trials:,}", _per(one.found)]
        cells += [_share(rate) for rate in (one.recall, one.alarms, one.precision)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def agreement(findings: Sequence[Finding]) -> str:
    """Pairs that agree or disagree beyond chance; those with nothing to agree on are left out."""
    rows = ["| detectors | kappa |", "|---|---|"]
    names = [name for name in detectors(findings) if worth(name, findings).found.events]
    for first, second in combinations(names, 2):
        value = kappa(first, second, findings)
        if value is not None:
            rows.append(f"| {first}, {second} | {value:.2f} |")
    return "\n".join(rows) if len(rows) > 2 else "No two detectors found anything."


def truth_words(findings: Sequence[Finding]) -> str:
    told = sessions(findings, "truth")
    rate = told.total
    unknown = len(findings) - rate.trials
    if not rate.trials:
        return "No answer could be compared with a reference."
    clustered = bootstrap(told)
    said = f"Other than the reference: {rate.words()}"
    if clustered is not None:
        low, high = PER * clustered.low, PER * clustered.high
        said += f"; {low:.2f} to {high:.2f} with whole sessions drawn"
    return said + (f". {unknown:,} could not be compared." if unknown else ".")


def side_by_side(one: Finding, said: Result, right: Result | None) -> str:
    """One suspect answer to read, around the place where it goes wrong."""
    marks = ", ".join(name for name, voted in one.by.items() if voted) or "none"
    lines = [
        f"### {one.request}, copy {one.copy}",
        f"{one.tokens:,} tokens; {one.truth} from token {one.onset}; detectors: {marks}",
    ]
    lines += [f"* {evidence}" for evidence in one.evidence]
    first = _first_difference(said.said, right.said) if right is not None else 0
    lines += ["", "said:", _quoted(said.said, first)]
    if right is not None:
        lines += ["", "reference:", _quoted(right.said, first)]
    return "\n".join(lines)


def _first_difference(said: str, right: str) -> int:
    shared = min(len(said), len(right))
    return next((at for at in range(shared) if said[at] != right[at]), shared)


def _quoted(text: str, around: int) -> str:
    """An excerpt that cannot end its own fence."""
    first = max(0, around - BEFORE_CHARACTERS)
    shown = text[first : first + SHOWN_CHARACTERS]
    return "\n".join("    " + line for line in repr(shown).splitlines())


def _per(rate: Rate) -> str:
    if rate.value is None:
        return ""
    bounds = rate.interval()
    return f"{PER * rate.value:.1f} ({PER * bounds.low:.1f} to {PER * bounds.high:.1f})"


def _share(rate: Rate | None) -> str:
    if rate is None or rate.value is None:
        return ""
    bounds = rate.interval()
    spread = f"{100 * bounds.low:.1f} to {100 * bounds.high:.1f}"
    return f"{100 * rate.value:.1f} % ({spread}), {rate.events} of {rate.trials}"
