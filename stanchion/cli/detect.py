"""`stanchion detect`: all detectors over a run, beside a reference; a table, and what to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.progress import track

from stanchion.cli.settings import model_folder
from stanchion.core.errors import ConfigError
from stanchion.gateway.monitor.baseline import Baseline, Baselines, read
from stanchion.gateway.monitor.witness import Scale
from stanchion.gateway.tokens import Vocabulary, byte_vocabulary, load_vocabulary
from stanchion.lab.detect import Eyes, Finding, Reference, compare, find
from stanchion.lab.detect_table import agreement, side_by_side, suspects, table, truth_words
from stanchion.lab.results import Result, RunHeader, read_header, read_results

FOUND = "detect.json"
TO_READ = "detect.md"


class Detected(Struct, frozen=True, kw_only=True):
    """`reference`: the run that was right, "" without one. `by`: how answers were compared."""

    reference: str
    by: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Asked:
    run: Path
    reference: Path | None = None
    witness: bool = False
    tokenizer: str = ""
    baselines: Path | None = None
    top: int = 20
    quiet: bool = False


def detect(asked: Asked) -> Detected:
    """Looks at all of a run, and writes what it found beside it."""
    header = read_header(asked.run)
    if asked.reference is not None:
        read_header(asked.reference)  # a run too: an empty folder is no reference
    if asked.top < 0:
        raise ConfigError(f"--top is {asked.top}; it must be at least 0")
    known = baselines(asked.baselines)
    eyes = Eyes(vocabulary(asked.tokenizer or header.model), _baseline(known, header))
    scale = _scale(known, header) if asked.witness else None
    right = None if asked.reference is None else Reference.of(list(read_results(asked.reference)))
    results = [one for one in read_results(asked.run) if one.said or one.tokens]
    looked = results if asked.quiet else _shown(results)
    findings = tuple(look(one, eyes, right, scale) for one in looked)
    told = Detected(
        reference="" if asked.reference is None else str(asked.reference),
        by="witness" if asked.witness else "equality",
        findings=findings,
    )
    (asked.run / FOUND).write_bytes(msgspec.json.encode(told) + b"\n")
    (asked.run / TO_READ).write_text(_page(told, results, right, asked.top))
    return told


def look(one: Result, eyes: Eyes, right: Reference | None, scale: Scale | None) -> Finding:
    found = find(one, eyes)
    wanted = None if right is None else right.of_question(one)
    if right is None or wanted is None:
        return found
    truth, onset = compare(one, wanted, scale)
    if truth == "differs" and scale is None and right.is_unstable(one):
        truth = "unknown"  # alone it had several answers: another one says nothing
    return msgspec.structs.replace(found, truth=truth, onset=onset)


def vocabulary(path: str) -> Vocabulary:
    return byte_vocabulary() if path == "hashed" else load_vocabulary(model_folder(path))


def baselines(path: Path | None) -> Baselines:
    """The file's, or those that come with the gateway."""
    place = path or Path(__file__).parent.parent / "gateway" / "monitor" / "baselines.json"
    try:
        return read(place.read_bytes(), str(place))
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {error}") from None


def _baseline(known: Baselines, header: RunHeader) -> Baseline | None:
    found = [one for one in known.baselines if one.model == header.model]
    if len(found) > 1:
        said = f"{len(found)} baselines of {header.model}; keep the one of its revision"
        raise ConfigError(f"the file of baselines has {said}")
    return found[0] if found else None


def _scale(known: Baselines, header: RunHeader) -> Scale:
    for one in known.clean:
        if one.model == header.model:
            return Scale(one.drift, one.threshold, one.runs)
    return Scale()


def _shown(results: Sequence[Result]) -> Iterator[Result]:
    yield from track(results, description="detect", auto_refresh=True)


def summary(told: Detected) -> str:
    findings = told.findings
    parts = [truth_words(findings), table(findings), agreement(findings)]
    return "\n\n".join(parts)


def _page(told: Detected, results: Sequence[Result], right: Reference | None, top: int) -> str:
    by_key = {one.key: one for one in results}
    parts = ["# What the detectors found", summary(told), "## The most suspect answers"]
    for one in suspects(told.findings, top):
        said = by_key[one.request, one.copy]
        wanted = None if right is None else right.of_question(said)
        parts.append(side_by_side(one, said, wanted))
    return "\n\n".join(parts) + "\n"


def read_found(run: Path) -> Detected | None:
    """What `detect` found in this run; None where nobody looked. Raise ConfigError."""
    path = run / FOUND
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Detected)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None
