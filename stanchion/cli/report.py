"""`stanchion report`: runs into one HTML file, and its Markdown twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stanchion.cli.ablate import ABLATED, REFERENCE
from stanchion.cli.detect import read_found
from stanchion.cli.settings import output_folder
from stanchion.core.errors import ConfigError
from stanchion.lab.ablate import Ablated
from stanchion.lab.report import Run, sections
from stanchion.lab.report_page import html, markdown
from stanchion.lab.results import RUN, read_header, read_results

NAME = "report"


def report(folders: Sequence[Path], out: Path) -> tuple[Path, Path]:
    """The two files that were written. A folder is a run, or one of several (a sweep, an ablation).
    Raise ConfigError where one is neither."""
    told: list[Ablated] = []
    runs = []
    for folder in folders:
        if (folder / ABLATED).exists():
            told.append(_ablated(folder / ABLATED))
        found = list(_runs(folder))
        if not found:
            raise ConfigError(f"{folder} has no run of replay")
        runs += found
    if len(told) > 1:
        raise ConfigError("a report is of one ablation; give one of these folders")
    title = "Report of " + ", ".join(str(one) for one in folders)
    made = sections(runs, told[0] if told else None)
    output_folder(out)
    pages = out / f"{NAME}.html", out / f"{NAME}.md"
    pages[0].write_text(html(title, made))
    pages[1].write_text(markdown(title, made))
    return pages


def _runs(folder: Path) -> Iterator[Run]:
    """The run itself, or those right below it; not what an ablation compares with."""
    below = sorted(path.parent for path in folder.glob(f"*/{RUN}"))
    places = [folder] if (folder / RUN).exists() else [p for p in below if p.name != REFERENCE]
    for place in places:
        found = read_found(place)
        yield Run(
            name=place.name,
            header=read_header(place),
            results=tuple(read_results(place)),
            findings=() if found is None else found.findings,
        )


def _ablated(path: Path) -> Ablated:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ablated)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None
