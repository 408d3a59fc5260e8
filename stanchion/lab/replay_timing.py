"""What a run measured: endings counted apart, times from the schedule and from the send. Pure.

Only completed requests are in sets of latencies. From the schedule is what a client of the recorded
load would have felt; from the send is what the server took once asked. Where the two part, the
generator (or its cap) was late, and beyond a stated bound the run is not valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stanchion.lab.results import Lateness, Result, RunHeader
from stanchion.lab.stats import PERCENTILE_METHOD, Summary, percentile, summary

LATENESS_MAX_S = 0.1  # 99 % of requests must be sent within so much of their time
FAILURES_SHOWN = 3
ENDINGS = ("completed", "failed", "aborted", "empty")


@dataclass(frozen=True)
class Timing:
    """Of one run or of one arm. `failures`: what was said of them, and how often. `itl`: seconds a
    token after the first, of answers whose number of tokens is known. `tokens_s`: of all completed
    answers, over the time from first send to last end."""

    endings: dict[str, int]
    failures: dict[str, int]
    lateness: Summary
    ttft_due: Summary
    ttft_sent: Summary
    latency_due: Summary
    latency_sent: Summary
    itl: Summary
    tokens: int | None
    seconds: float | None

    @property
    def requests(self) -> int:
        return sum(self.endings.values())

    @property
    def tokens_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens is not None and self.seconds else None

    @property
    def requests_s(self) -> float | None:
        return self.requests / self.seconds if self.seconds else None


def timing(results: Iterable[Result]) -> Timing:
    every = list(results)
    counts = Counter(one.ending for one in every)
    whole = [one for one in every if one.measured]
    sends = [one.send for one in every if one.send is not None]
    known = [one.output_tokens for one in whole if one.output_tokens is not None]
    return Timing(
        endings={name: counts.get(name, 0) for name in ENDINGS},  # type: ignore[call-overload]
        failures=dict(Counter(one.error for one in every if one.error).most_common()),
        lateness=summary(_each(every, lambda one: one.lateness_s)),
        ttft_due=summary(_each(whole, lambda one: _less(one.first_token, one.due))),
        ttft_sent=summary(_each(whole, lambda one: _less(one.first_token, one.send))),
        latency_due=summary(_each(whole, lambda one: one.end - one.due)),
        latency_sent=summary(_each(whole, lambda one: _less(one.end, one.send))),
        itl=summary(_each(whole, itl_s)),
        tokens=sum(known) if known else None,
        seconds=max(one.end for one in every) - min(sends) if sends else None,
    )


def itl_s(one: Result) -> float | None:
    """Mean time of a token after the first. The first piece may have had several: they have no
    times of their own, so the whole stretch is divided by all tokens but one."""
    first, last, tokens = one.first_token, one.last_token, one.output_tokens
    if first is None or last is None or tokens is None or tokens < 2:
        return None
    return (last - first) / (tokens - 1)


def _each(results: Iterable[Result], of: Callable[[Result], float | None]) -> list[float]:
    return [value for one in results if (value := of(one)) is not None]


def _less(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


# ---- is the run valid? ----------------------------------------------------------------------


def lateness(values: Sequence[float], bound_s: float) -> Lateness:
    return Lateness(
        p50_s=percentile(values, 0.5),
        p99_s=percentile(values, 0.99),
        max_s=max(values, default=None),
        bound_s=bound_s,
    )


def verdict(
    said: Lateness, concurrency: int | None, missing: int, every_failed: bool = False
) -> tuple[bool, str]:
    """Is it valid, and if not, why not?"""
    if missing:
        return False, f"{missing} requests have no result"
    if every_failed:
        return False, "every request failed"
    if said.p99_s is None:
        return False, "nothing was sent"
    if said.p99_s > said.bound_s:
        cap = "" if concurrency is None else f"; at most {concurrency} were let through at once"
        return False, (
            f"99 % of the requests must be sent within {said.bound_s:g} s of their time; the "
            f"99th percentile of lateness is {said.p99_s:.3f} s{cap}"
        )
    return True, ""


# ---- words ----------------------------------------------------------------------------------


def words(header: RunHeader, told: Timing) -> str:
    valid = {True: "valid", False: f"NOT VALID: {header.why}", None: "not finished"}[header.valid]
    counts = ", ".join(f"{count:,} {name}" for name, count in told.endings.items())
    lines = [
        f"{header.loop} loop, speed {header.speed}, {header.copies} copies: {valid}",
        f"{told.requests:,} requests: {counts}",
        *(f"  {count:,} times: {why}" for why, count in [*told.failures.items()][:FAILURES_SHOWN]),
        _line("lateness", told.lateness),
        _line("first token, from schedule", told.ttft_due),
        _line("first token, from send", told.ttft_sent),
        _line("whole answer, from schedule", told.latency_due),
        _line("whole answer, from send", told.latency_sent),
        _line("each further token", told.itl),
    ]
    if told.tokens_s is not None and told.requests_s is not None:
        lines.append(f"{told.tokens_s:,.1f} tokens/s, {told.requests_s:,.2f} requests/s")
    lines.append(f"percentiles: {PERCENTILE_METHOD}; of completed requests alone")
    return "\n".join(lines)


def _line(name: str, said: Summary) -> str:
    if said.mean is None or said.p50 is None or said.p99 is None or said.most is None:
        return f"{name}: not measured"
    values = f"mean {_ms(said.mean)}, p50 {_ms(said.p50)}, p99 {_ms(said.p99)}"
    return f"{name}: {values}, max {_ms(said.most)} ms ({said.count:,})"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
