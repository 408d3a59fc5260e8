"""Reports: two forms of one list of sections, with numbers and without a word of content."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from stanchion.cli.report import report
from stanchion.core.errors import ConfigError
from stanchion.lab.ablate import analyse, read
from stanchion.lab.detect import Finding
from stanchion.lab.report import Run, quantiles, sections
from stanchion.lab.report_page import Section, Table, html, markdown
from stanchion.lab.report_svg import Plot, number, ticks
from stanchion.lab.results import Result

from .test_ablate import ARMS, PLAN
from .test_detect import a_run, finding, points, result

CANARY = "the-quick-canary"


def runs() -> list[Run]:
    return [_run("healthy", sick=0), _run("sick", sick=6)]


def _run(name: str, sick: int) -> Run:
    results, findings = [], []
    for at in range(60):
        results.append(
            result(
                CANARY, prompt=CANARY, request=f"r{at}", session=f"s{at % 12}", due=at * 1.0,
                send=at * 1.0, first_token=at + 0.5, last_token=at + 2.0, end=at + 2.0,
                output_tokens=20, points=points(*(2,) * 40), in_flight=at // 10,
            )
        )  # fmt: skip
        bad = at >= 60 - sick
        one = finding("differs" if bad else "same", session=f"s{at % 12}", monitor=bad, regex=False)
        findings.append(msgspec.structs.replace(one, request=f"r{at}", in_flight=at // 10))
    header = msgspec.structs.replace(_header(), arm=name)
    return Run(name, header, tuple(results), tuple(findings))


def _header() -> Any:
    from stanchion.lab.replay_timing import lateness
    from stanchion.lab.results import RunHeader

    return RunHeader(
        trace="t", url="u", model="hashed", loop="open", speed="1", copies=1, seed=0, requests=60,
        started_unix_s=0.0, valid=True, lateness=lateness([0.0], 0.1), failpoints=("fault",),
    )  # fmt: skip


def test_a_report_says_its_numbers_in_both_forms() -> None:
    made = sections(runs())
    page, twin = html("t", made), markdown("t", made)
    for said in ("6 of 60", "1000.0 (375.9 to 2050.6)", "0 of 60", "Failpoints were armed: fault"):
        assert said in page and said in twin, said
    titles = ["Runs", "Anomalies per 10,000", "Detectors", "Acceptance", "Latency", "Throughput",
              "Pressure"]  # fmt: skip
    assert re.findall(r"^## (.*)$", twin, re.M) == titles
    assert re.findall(r"<h2>(.*?)</h2>", page) == titles


def test_a_page_needs_nothing_from_elsewhere_and_tells_no_content() -> None:
    made = sections(runs())
    page, twin = html("t", made), markdown("t", made)
    assert CANARY not in page and CANARY not in twin
    assert not re.search(r"<script|<link|<img|src=|url\(|@import", page)
    assert re.findall(r"https?://[^\"']+", page) == ["http://www.w3.org/2000/svg"] * 6


def test_pictures_are_whole_xml() -> None:
    pictures = re.findall(r"<svg.*?</svg>", html("t", sections(runs())))
    assert len(pictures) == 6
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        for one in root.iter("{http://www.w3.org/2000/svg}polyline"):
            for pair in one.attrib["points"].split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= 640 and 0 <= y <= 300


def test_sick_and_healthy_are_drawn_apart() -> None:
    (section,) = [one for one in sections(runs()) if one.title == "Acceptance"]
    assert "114 healthy and 6 sick" in section.words[0]
    for _, picture in section.plots:
        assert "<title>sick</title>" in picture and "<title>healthy</title>" in picture
    assert "1.4" in section.plots[0][1] and "0.96" in section.plots[1][1]


def test_pressure_has_groups_of_like_size() -> None:
    told = [(at // 10, at >= 54) for at in range(60)]
    groups = quantiles(told, 4)
    assert [(low, high, len(some)) for low, high, some in groups] == [
        (0, 0, 10), (1, 2, 20), (3, 3, 10), (4, 5, 20)
    ]  # fmt: skip
    assert sum(bad for _, _, some in groups for _, bad in some) == 6
    assert quantiles([], 4) == []
    assert [len(some) for _, _, some in quantiles([(3, True)] * 9, 4)] == [9]


def test_stages_of_speed_are_dose_and_response() -> None:
    one = runs()[1]
    faster = tuple(
        msgspec.structs.replace(finding, speed=1.0 if at < 40 else 4.0)
        for at, finding in enumerate(one.findings)
    )
    (section,) = [
        section
        for section in sections([Run(one.name, one.header, one.results, faster)])
        if section.title == "Pressure"
    ]
    assert [row[:2] for row in section.tables[1].rows] == [("1", "0 of 40"), ("4", "6 of 20")]
    assert len(section.plots) == 2


def test_a_run_that_is_not_valid_says_so_first() -> None:
    (one, _) = runs()
    late = Run(one.name, msgspec.structs.replace(one.header, valid=False, why="late"), one.results)
    made = sections([late])
    assert made[1].title == "Not valid" and made[1].bad
    assert '<p class="bad">healthy: late</p>' in html("t", made)
    assert "**healthy: late**" in markdown("t", made)
    assert "Detectors" not in [section.title for section in made]  # nobody looked


def test_an_ablation_is_told_as_it_was_judged() -> None:
    told = analyse(read(PLAN, "p"), ARMS, done=12)
    twin = markdown("t", sections(runs(), told))
    assert "| both | 100 of 2,000 | 500.0 (408.6 to 604.8) |" in twin
    assert "Against both" in twin and "## Anomalies per" not in twin


def test_text_cannot_break_out() -> None:
    section = Section("<b>", ("<script>",), (Table(("a|b",), (("c\nd|",),)),))
    page = html("<t>", [section])
    assert "<script>" not in page and "<b>" not in page
    parser = HTMLParser()
    parser.feed(page)
    assert "| a\\|b |" in markdown("t", [section]) and "| c d\\| |" in markdown("t", [section])


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0, 0.9) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert ticks(3, 3) == [3] and ticks(0, float("inf")) == [0]
    assert number(1234567.0) == "1,234,567" and number(0.05) == "0.05"


def test_points_outside_are_drawn_at_the_edge() -> None:
    plot = Plot((0, 1), (0, 1), ("x", "y"))
    plot.line([(-5, 0.5), (9, 9)], "#000")
    assert 'points="64.0,135.0 624.0,16.0"' in plot.svg()


# ---- the command ----------------------------------------------------------------------------


def results(count: int) -> list[Result]:
    return [result("x", request=f"r{at}", send=0.0, first_token=0.5) for at in range(count)]


def test_folders_of_runs_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    a_run(tmp_path / "sweep" / "pd-1-1", results(3))
    a_run(tmp_path / "sweep" / "pd-2-1", results(4))
    page, twin = report([tmp_path / "sweep"], tmp_path / "out")
    assert page.read_text().startswith("<!doctype html>")
    assert "| pd-1-1 |" in twin.read_text() and "| pd-2-1 |" in twin.read_text()
    with pytest.raises(ConfigError, match="has no run"):
        report([tmp_path / "out"], tmp_path / "out")


def test_findings_are_taken_along(tmp_path: Path) -> None:
    from stanchion.cli.detect import FOUND, Detected

    folder = a_run(tmp_path / "run", results(2))
    found: list[Finding] = [finding("same", monitor=True)]
    told = Detected(reference="", by="equality", findings=tuple(found))
    (folder / FOUND).write_bytes(msgspec.json.encode(told))
    _, twin = report([folder], folder)
    assert "| monitor | 1 of 1 |" in twin.read_text()
    (folder / FOUND).write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"detect\.json"):
        report([folder], folder)
