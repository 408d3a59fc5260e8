"""What runs show, as sections: rates by arm, acceptance over time, latency, pressure. Pure.

A report has numbers and names, and no word of any prompt or answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stanchion.core.acceptance import accept_length, accept_rate
from stanchion.core.messages import Spec
from stanchion.gateway.monitor.report import LENGTH_MIN, NOTHING, RATE_MAX, gained
from stanchion.lab.ablate import Ablated
from stanchion.lab.detect import Finding
from stanchion.lab.detect_table import detectors, sessions, worth
from stanchion.lab.replay_timing import Timing, timing
from stanchion.lab.report_page import Section, Table
from stanchion.lab.report_svg import COLOURS, GREY, XY, Plot
from stanchion.lab.results import Result, RunHeader
from stanchion.lab.stats import PER, PERCENTILE_METHOD, Rate, Summary
from stanchion.lab.stats_sessions import bootstrap

HEALTHY_LINES, SICK_LINES = 40, 40
BINS = 30
PRESSURES = 4
RUNS_MAX = len(COLOURS)


@dataclass(frozen=True)
class Run:
    """`findings` is empty where nobody looked."""

    name: str
    header: RunHeader
    results: tuple[Result, ...]
    findings: tuple[Finding, ...] = ()


def sections(runs: Sequence[Run], ablated: Ablated | None = None) -> list[Section]:
    found = [one for one in runs if one.findings]
    times = {one.name: timing(one.results) for one in runs}
    made = [_runs(runs, times), *_invalid(runs)]
    if ablated is not None:
        made.append(_ablation(ablated))
    elif found:
        made.append(_rates(found))
    if found:
        made.append(_detectors(found))
    made += [section for section in (_acceptance(runs), _latency(runs, times)) if section]
    made.append(_throughput(runs))
    if found:
        made.append(_pressure(found))
    return made


# ---- runs -----------------------------------------------------------------------------------


def _runs(runs: Sequence[Run], times: dict[str, Timing]) -> Section:
    head = ("run", "arm", "loop", "speed", "copies", "requests", "completed", "failed", "aborted",
            "empty", "valid")  # fmt: skip
    rows = []
    for one in runs:
        header, told = one.header, times[one.name]
        ends = tuple(f"{count:,}" for count in told.endings.values())
        said = {True: "yes", False: "no", None: "not finished"}[header.valid]
        rows.append(
            (one.name, header.arm, header.loop, header.speed, str(header.copies),
             f"{header.requests:,}", *ends, said)
        )  # fmt: skip
    armed = sorted({name for one in runs for name in one.header.failpoints})
    words = [f"Failpoints were armed: {', '.join(armed)}."] if armed else []
    return Section("Runs", tuple(words), (Table(head, tuple(rows)),))


def _invalid(runs: Sequence[Run]) -> list[Section]:
    words = tuple(f"{one.name}: {one.header.why}" for one in runs if one.header.valid is False)
    return [Section("Not valid", words, bad=True)] if words else []


# ---- rates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bar:
    name: str
    rate: Rate
    drawn: str  # the interval with sessions drawn, in words


def _rates(found: Sequence[Run]) -> Section:
    event = _event(found)
    by_arm: dict[str, list[Finding]] = {}
    for one in found:
        by_arm.setdefault(one.header.arm or one.name, []).extend(one.findings)
    bars = []
    for name, findings in by_arm.items():
        told = sessions(findings, event)
        drawn = bootstrap(told)
        spread = "no draw differs" if drawn is None else f"{_per(drawn.low)} to {_per(drawn.high)}"
        bars.append(_Bar(name, told.total, spread))
    what = "another answer than the reference's" if event == "truth" else f"found by {event}"
    return Section(
        f"Anomalies per {PER:,}",
        (f"An anomaly is {what}. Intervals are exact ones of 95 % (Clopper and Pearson).",),
        (_rate_table(bars),),
        ((f"Anomalies per {PER:,} answers, by arm", _rate_plot(bars)),),
    )


def _event(found: Sequence[Run]) -> str:
    """The reference's word where every run has one, else the monitor's."""
    known = all(sessions(one.findings, "truth").total.trials for one in found)
    return "truth" if known else "monitor"


def _ablation(told: Ablated) -> Section:
    bars = [
        _Bar(
            one.arm,
            one.rate,
            "no draw differs"
            if one.sessions_interval is None
            else f"{_per(one.sessions_interval[0])} to {_per(one.sessions_interval[1])}",
        )
        for one in told.arms
    ]
    head = ("arm", "p, sessions swapped (Holm)", "p, Fisher (Holm)")
    rows = tuple(
        (one.arm, f"{one.permutation_holm:.4g}", f"{one.fisher_holm:.4g}")
        for one in told.comparisons
    )
    words = (f"Against {told.baseline}; an anomaly is: {told.event}. {told.size}.",)
    return Section(
        "Ablation", words, (_rate_table(bars), Table(head, rows)),
        ((f"Anomalies per {PER:,} answers, by arm", _rate_plot(bars)),),
    )  # fmt: skip


def _rate_table(bars: Sequence[_Bar]) -> Table:
    head = ("", "anomalies", f"per {PER:,} (exact 95 %)", "sessions drawn")
    rows = [
        (one.name, f"{one.rate.events:,} of {one.rate.trials:,}", _interval(one.rate), one.drawn)
        for one in bars
    ]
    return Table(head, tuple(rows))


def _rate_plot(bars: Sequence[_Bar]) -> str:
    known = [one for one in bars if one.rate.trials]
    most = max((PER * one.rate.interval().high for one in known), default=1.0)
    plot = Plot(
        (-0.5, max(len(bars), 1) - 0.5), (0.0, most), ("", f"per {PER:,}"),
        [one.name for one in bars],
    )  # fmt: skip
    for at, one in enumerate(bars):
        if one.rate.value is not None:
            bounds = one.rate.interval()
            plot.whisker(at, PER * bounds.low, PER * bounds.high, COLOURS[0])
            plot.dot((at, PER * one.rate.value), COLOURS[0], one.rate.words())
    return plot.svg()


def _detectors(found: Sequence[Run]) -> Section:
    head = ("detector", "found", "recall", "false alarms", "precision")
    every = [finding for one in found for finding in one.findings]
    rows = []
    for name in detectors(every):
        told = worth(name, every)
        cells = [f"{told.found.events:,} of {told.found.trials:,}"]
        cells += [_percent(rate) for rate in (told.recall, told.alarms, told.precision)]
        rows.append((name, *cells))
    words = "Recall and false alarms are against the reference, over all runs; empty without one."
    return Section("Detectors", (words,), (Table(head, tuple(rows)),))


# ---- acceptance -----------------------------------------------------------------------------


def _acceptance(runs: Sequence[Run]) -> Section | None:
    """As in the report's Figure 1: what running acceptance shows of healthy and sick answers."""
    sick = {
        (run.name, one.request, one.copy)
        for run in runs
        for one in run.findings
        if one.truth == "differs"
    }
    lines: dict[bool, list[tuple[str, Result]]] = {True: [], False: []}
    for run in runs:
        for one in run.results:
            if len(one.points) > 1:
                lines[(run.name, one.request, one.copy) in sick].append((run.name, one))
    if not lines[True] and not lines[False]:
        return None
    most = {True: SICK_LINES, False: HEALTHY_LINES}
    shown = {bad: _spread(every, most[bad]) for bad, every in lines.items()}
    plots = (
        ("Accept length over time since the first token", _accept_plot(shown, accept_length,
         "tokens a verify step", LENGTH_MIN)),
        ("Accept rate over time since the first token", _accept_plot(shown, accept_rate,
         "share of drafts accepted", RATE_MAX)),
    )  # fmt: skip
    known = "without a reference all count as healthy" if not sick else "by the reference"
    words = (
        f"{len(lines[False]):,} healthy and {len(lines[True]):,} sick answers have counters "
        f"({known}); {len(shown[False])} and {len(shown[True])} of them are drawn, between the "
        f"readings that the replay kept. Lines across are the bounds of Z.ai's report: length "
        f"{LENGTH_MIN}, rate {RATE_MAX}."
    )
    return Section("Acceptance", (words,), plots=plots)


def _spread(every: Sequence[tuple[str, Result]], most: int) -> list[tuple[str, Result]]:
    step = max(1, len(every) // most)
    return list(every[::step][:most])


def _accept_plot(
    shown: dict[bool, list[tuple[str, Result]]],
    of: Callable[[Spec], float | None],
    label: str,
    bound: float,
) -> str:
    curves = {bad: [_curve(one, of) for _, one in some] for bad, some in shown.items()}
    every = [point for some in curves.values() for curve in some for point in curve]
    highest = max((y for _, y in every), default=1.0)
    plot = Plot(
        (0.0, max((x for x, _ in every), default=1.0)), (0.0, max(highest, bound) * 1.05),
        ("seconds since the first token", label),
    )  # fmt: skip
    for bad, colour, name in ((False, GREY, "healthy"), (True, COLOURS[1], "sick")):
        for curve in curves[bad]:
            plot.line(curve, colour, 1.8 if bad else 0.8, name)
        if curves[bad]:
            plot.legend(name, colour)
    plot.level(bound, str(bound))
    return plot.svg()


def _curve(one: Result, of: Callable[[Spec], float | None]) -> list[XY]:
    begun = one.first_token if one.first_token is not None else one.points[0].at
    points = []
    before = NOTHING
    for point in one.points:
        between = gained(before, point.spec)
        before = point.spec
        value = None if between is None else of(between)
        if value is not None:
            points.append((point.at - begun, value))
    return points


# ---- time -----------------------------------------------------------------------------------


def _latency(runs: Sequence[Run], times: dict[str, Timing]) -> Section | None:
    head = ("run", "", "completed", "mean", "p50", "p90", "p99", "max")
    rows = []
    for one in runs:
        told = times[one.name]
        for name, said in (
            ("lateness", told.lateness),
            ("first token, from schedule", told.ttft_due),
            ("first token, from send", told.ttft_sent),
            ("answer, from schedule", told.latency_due),
            ("answer, from send", told.latency_sent),
            ("each further token", told.itl),
        ):
            rows.append((one.name, name, *_cells(said)))
    words = (
        "Milliseconds, of completed requests alone (lateness: of all that were sent). "
        f"Percentiles: {PERCENTILE_METHOD}."
    )
    plot = _ecdf(runs)
    plots = (("Time to the first token, from the schedule", plot),) if plot else ()
    return Section("Latency", (words,), (Table(head, tuple(rows)),), plots)


def _ecdf(runs: Sequence[Run]) -> str:
    curves = []
    for one in runs[:RUNS_MAX]:
        times = sorted(
            result.first_token - result.due
            for result in one.results
            if result.measured and result.first_token is not None
        )
        if times:
            curves.append((one.name, [(t, (at + 1) / len(times)) for at, t in enumerate(times)]))
    if not curves:
        return ""
    most = max(points[-1][0] for _, points in curves)
    plot = Plot((0.0, most), (0.0, 1.0), ("seconds", "share of requests"))
    for (name, points), colour in zip(curves, COLOURS):
        plot.line(points, colour, name=name)
        plot.legend(name, colour)
    return plot.svg()


def _throughput(runs: Sequence[Run]) -> Section:
    """Tokens that ended in each stretch of time: an answer counts where it ended."""
    curves = []
    rows = []
    for one in runs[:RUNS_MAX]:
        ended = [(r.end, r.output_tokens) for r in one.results if r.output_tokens is not None]
        last = max((end for end, _ in ended), default=0.0)
        if last <= 0.0:
            continue
        width = last / BINS
        sums = [0] * BINS
        for end, tokens in ended:
            sums[min(int(end / width), BINS - 1)] += tokens
        curves.append((one.name, [((at + 0.5) * width, s / width) for at, s in enumerate(sums)]))
        total = sum(tokens for _, tokens in ended)
        rows.append((one.name, f"{total:,}", f"{last:,.1f}", f"{total / last:,.1f}"))
    head = ("run", "output tokens", "seconds", "tokens/s")
    plots: tuple[tuple[str, str], ...] = ()
    if curves:
        most = max(y for _, points in curves for _, y in points)
        plot = Plot(
            (0.0, max(points[-1][0] for _, points in curves)), (0.0, max(most, 1e-9)),
            ("seconds", "tokens/s"),
        )  # fmt: skip
        for (name, points), colour in zip(curves, COLOURS):
            plot.line(points, colour, name=name)
            plot.legend(name, colour)
        plots = (("Output tokens a second, by when answers ended", plot.svg()),)
    return Section("Throughput", (), (Table(head, tuple(rows)),), plots)


# ---- pressure -------------------------------------------------------------------------------


def _pressure(found: Sequence[Run]) -> Section:
    """Does the rate follow the load? By how many others were in flight when a request was sent."""
    event = _event(found)
    told = [
        (finding.in_flight, _is_event(finding, event))
        for one in found
        for finding in one.findings
        if event != "truth" or finding.truth != "unknown"
    ]
    groups = quantiles(told, PRESSURES)
    bars = [
        _Bar(f"{low} to {high}", Rate(sum(bad for _, bad in group), len(group)), "")
        for low, high, group in groups
    ]
    tables = [_pressure_table("others in flight", bars)]
    plots = [(f"Anomalies per {PER:,} by requests in flight", _rate_plot(bars))]
    speeds = _by_speed(found, event)
    if len(speeds) > 1:
        tables.append(_pressure_table("speed of the trace's time", speeds))
        plots.append((f"Anomalies per {PER:,} by speed", _rate_plot(speeds)))
    words = ("Answers in groups of like size, by how many others were in flight at their send.",)
    return Section("Pressure", words, tuple(tables), tuple(plots))


def _by_speed(found: Sequence[Run], event: str) -> list[_Bar]:
    """Where a load went up in stages, or runs had other speeds: dose and response."""
    told: dict[float, list[bool]] = {}
    for one in found:
        for finding in one.findings:
            if event != "truth" or finding.truth != "unknown":
                told.setdefault(finding.speed, []).append(_is_event(finding, event))
    return [_Bar(f"{speed:g}", Rate(sum(bad), len(bad)), "") for speed, bad in sorted(told.items())]


def _pressure_table(what: str, bars: Sequence[_Bar]) -> Table:
    rows = [
        (one.name, f"{one.rate.events} of {one.rate.trials}", _interval(one.rate)) for one in bars
    ]
    return Table((what, "anomalies", f"per {PER:,} (exact 95 %)"), tuple(rows))


Group = tuple[int, int, list[tuple[int, bool]]]


def quantiles(told: Sequence[tuple[int, bool]], groups: int) -> list[Group]:
    """Groups of about equal size by the number, with the least and the most of each. Equal numbers
    stay together."""
    ordered = sorted(told)
    edges = (
        sorted({ordered[len(ordered) * at // groups][0] for at in range(groups)}) if told else []
    )
    cut: list[Group] = []
    for low, high in pairwise([*edges, None]):
        assert low is not None
        group = [one for one in ordered if one[0] >= low and (high is None or one[0] < high)]
        cut.append((group[0][0], group[-1][0], group))
    return cut


def _is_event(finding: Finding, event: str) -> bool:
    return finding.truth == "differs" if event == "truth" else bool(finding.by.get(event))


# ---- cells ----------------------------------------------------------------------------------


def _per(rate: float) -> str:
    return f"{PER * rate:.1f}"


def _interval(rate: Rate) -> str:
    if rate.value is None:
        return "no answers"
    bounds = rate.interval()
    return f"{_per(rate.value)} ({_per(bounds.low)} to {_per(bounds.high)})"


def _percent(rate: Rate | None) -> str:
    if rate is None or rate.value is None:
        return ""
    bounds = rate.interval()
    return f"{100 * rate.value:.1f} % ({100 * bounds.low:.1f} to {100 * bounds.high:.1f})"


def _cells(said: Summary) -> tuple[str, ...]:
    values = (said.mean, said.p50, said.p90, said.p99, said.most)
    shown = ("" if value is None else f"{1000 * value:,.1f}" for value in values)
    return (f"{said.count:,}", *shown)
