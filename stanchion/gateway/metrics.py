"""Counters and gauges in Prometheus's form, named as near to vLLM's as meaning allows.

What the gateway sees itself is counted here; what only a worker knows is read from its last
`Progress` at the time of the scrape, and labelled with its name and role. A registry of its own:
two gateways in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stanchion.core.messages import Hello, Progress, Spec, TierProgress
from stanchion.core.outcome import FaultOwner, Outcome
from stanchion.gateway.connection import SIGNALS
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.integrity import Integrity
from stanchion.gateway.members import Member, View
from stanchion.gateway.record.recorder import LOST, Recorder
from stanchion.gateway.router import WHYS
from stanchion.gateway.waiting import Line

BREAKER_STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "stanchion:"
_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_E2E_S = (0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920)


class Metrics:
    def __init__(self, fleet: Fleet, line: Line, recorder: Recorder | None = None) -> None:
        self.registry = CollectorRegistry()
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self._generated = self._counter("generation_tokens", "Tokens generated for clients")
        self._billed = self._counter("billed_tokens", "Tokens a tenant pays for", "tenant", "kind")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache")
        self._ended = self._counter("requests_ended", "Answers ended, any outcome", "outcome")
        self._success = self._counter("request_success", "Answers completed", "finished_reason")
        self._calls = self._counter("tool_calls", "Tool calls of answers", "state")
        self._replies = self._counter("http_replies", "HTTP replies", "route", "status")
        self._first = self._histogram("time_to_first_token_seconds", "To the first token", _TTFT_S)
        self._next = self._histogram("inter_token_latency_seconds", "Between tokens", _ITL_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "To the end", _E2E_S)
        self.registry.register(_Workers(fleet))
        words = "Requests that wait for room, most urgent first"
        waiting = Gauge(_PREFIX + "requests_waiting_for_room", words, registry=self.registry)
        waiting.set_function(lambda: len(line))
        if recorder is not None:
            self.registry.register(_Recorded(recorder))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def reply(self, route: str, status: int) -> None:
        self._replies.labels(route, str(status)).inc()

    def called(self, whole: int, cut: int) -> None:
        """One answer's tool calls: closed by the model, or cut short."""
        for state, calls in (("whole", whole), ("cut", cut)):
            if calls:
                self._calls.labels(state).inc(calls)

    def accepted(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)

    def billed(self, tenant: str, prompt: int, generated: int) -> None:
        """One request, once, however many attempts there were."""
        for kind, tokens in (("prompt", prompt), ("generated", generated)):
            self._billed.labels(tenant, kind).inc(tokens)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`seconds` since the message before; a batch counts as one wait, as clients see it."""
        self._next.observe(seconds / tokens)

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def ended(
        self, outcome: Outcome, reason: str | None, prompt: int, cached: int, seconds: float
    ) -> None:
        """One answer. `reason` where it ended well, else its outcome."""
        self._ended.labels("completed" if reason else tag(outcome)).inc()
        if reason:
            self._success.labels(reason).inc()
            self._whole.observe(seconds)
            self._queries.inc(prompt)
            self._hits.inc(cached)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, words, labels, registry=self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, words, buckets=buckets, registry=self.registry)


def tag(outcome: Outcome) -> str:
    return str(outcome.__struct_config__.tag)


Value = tuple[str, str, float]  # name, help, value
_COUNTERS = frozenset(
    {
        "unknown_messages", "miscounted_attempts", "worker_lost", "attempt_tokens",
        "breaker_opened", "quarantines", "kv_pages_dropped",
        "engine_steps", "prefill_tokens",
        "engine_busy_seconds", "num_preemptions", "corrupted_requests", "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "kv_bytes_sent",
        "deadlines", "kv_pages_lifted", "kv_pages_spilled", "kv_pages_not_spilled",
        "kv_pages_fetched", "kv_fetch_timeouts", "kv_pages_bad_host", "disk_cache_stored",
        "disk_cache_misses", "disk_cache_dropped", "disk_cache_errors",
    }
)  # fmt: skip


class _Workers(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for view in self._fleet.views():
            for name, words, value in _values(view, self._fleet):
                if name not in families:
                    kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                    families[name] = kind(_PREFIX + name, words, labels=("worker", "role"))
                families[name].add_metric((view.name, view.role), value)
        yield from families.values()
        yield self._info()
        yield self._signals()
        retries = CounterMetricFamily(
            _PREFIX + "request_retries", "Attempts made again elsewhere", labels=("reason",)
        )
        for reason, count in self._fleet.attempts.retries.items():
            retries.add_metric((reason,), count)
        yield retries
        yield from _routing(self._fleet)
        suspicions, garbage = self._fleet.suspicions, self._fleet.garbage
        yield CounterMetricFamily(_PREFIX + "suspicions", "Workers suspected", suspicions)
        yield CounterMetricFamily(_PREFIX + "join_garbage", "Joins that were none", garbage)
        yield from _integrity(self._fleet.integrity)

    def _signals(self) -> Metric:
        words = "1 if it gives this to the monitor, which works with what there is"
        found = GaugeMetricFamily(
            _PREFIX + "monitor_signals", words, labels=("worker", "role", "signal")
        )
        for view in self._fleet.views():
            given = view.member.link.signals if view.member is not None else ()
            for signal in SIGNALS:
                found.add_metric((view.name, view.role, signal), float(signal in given))
        return found

    def _info(self) -> Metric:
        labels = ("worker", "role", "model", "revision", "draft_tokens", "vocabulary")
        info = GaugeMetricFamily(_PREFIX + "worker_info", "What it serves; always 1", labels=labels)
        for view in self._fleet.views():
            if view.member is not None:
                one = view.member.hello
                drafts, vocabulary = str(one.draft_tokens), str(one.vocabulary)
                said = (view.name, view.role, one.model, one.revision, drafts, vocabulary)
                info.add_metric(said, 1.0)
        return info


class _Recorded(Collector):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        told = self._recorder
        yield CounterMetricFamily(_PREFIX + "recorded", "Requests recorded", told.written)
        yield CounterMetricFamily(_PREFIX + "recorded_bytes", "Of records", told.written_bytes)
        lost = CounterMetricFamily(
            _PREFIX + "record_lost", "Records not made, and old segments dropped", labels=("why",)
        )
        for why in LOST:
            lost.add_metric((why,), told.lost[why])
        yield lost


def _integrity(told: Integrity) -> Iterator[Metric]:
    anomalies = CounterMetricFamily(
        _PREFIX + "output_anomalies", "Suspicions, and what was done", labels=("kind", "action")
    )
    for (kind, action), count in told.anomalies.items():
        anomalies.add_metric((kind, action), count)
    verdicts = CounterMetricFamily(
        _PREFIX + "witness_verdicts", "What second witnesses said", labels=("verdict",)
    )
    for verdict in ("clean", "confirmed", "unwitnessed"):
        verdicts.add_metric((verdict,), told.verdicts[verdict])
    retries = CounterMetricFamily(
        _PREFIX + "quality_retries", "Answers made again for their quality", labels=("outcome",)
    )
    for outcome in ("completed", "failed", "over_budget", "no_worker"):
        retries.add_metric((outcome,), told.outcomes[outcome])
    monitored = CounterMetricFamily(
        _PREFIX + "monitored_answers",
        "Answers looked at, by the rule for acceptance; none: without counters",
        labels=("acceptance",),
    )
    for rule in ("calibrated", "report", "none"):
        monitored.add_metric((rule,), told.monitored[rule])
    yield from (monitored, anomalies, verdicts, retries)
    words = "Prefill tokens computed for witnesses"
    yield CounterMetricFamily(_PREFIX + "witness_tokens", words, told.witness_tokens)
    words = "Witnesses that another one and the answer's own worker contradicted"
    yield CounterMetricFamily(_PREFIX + "witnesses_overruled", words, told.overruled_witnesses)
    words = "Workers whose drafts are at fault: speculation is off there"
    yield CounterMetricFamily(_PREFIX + "draft_faults", words, told.draft_faults_found)


def _routing(fleet: Fleet) -> Iterator[Metric]:
    routed = CounterMetricFamily(
        _PREFIX + "routed", "Attempts, by why they went where they did", labels=("reason",)
    )
    for why in WHYS:
        routed.add_metric((why,), fleet.attempts.routed[why])
    faults = CounterMetricFamily(
        _PREFIX + "attempt_faults", "Attempts that failed, by whose fault it was", labels=("owner",)
    )
    for owner in get_args(FaultOwner):
        faults.add_metric((owner,), fleet.rotation.owners[owner])
    yield from (routed, faults)
    words = "Attempts not made again, since the budget of retries was spent"
    yield CounterMetricFamily(_PREFIX + "retries_over_budget", words, fleet.attempts.over_budget)
    words = "Prefixes that workers were told to drop"
    yield CounterMetricFamily(_PREFIX + "quarantines_ordered", words, fleet.quarantines)
    words = "Workers taken out of rotation for confirmed answers: look at them"
    yield CounterMetricFamily(_PREFIX + "workers_taken_out", words, fleet.taken_out)
    words = "Hashes of prompts that workers are believed to hold"
    yield GaugeMetricFamily(_PREFIX + "prefix_blocks", words, len(fleet.rotation.prefixes))


def _rotation(member: Member, fleet: Fleet) -> Iterator[Value]:
    told = fleet.told(member)
    yield "breaker_state", "0 closed, 1 half open, 2 open", BREAKER_STATES[told.breaker]
    yield "breaker_opened", "Times it was shut out", told.opened
    yield "worker_pace", "Times as long for a token as the others; 1 if not slow", told.pace
    yield "worker_out_of_rotation", "1 if given work only where no other is", float(told.out)


def _values(view: View, fleet: Fleet) -> Iterator[Value]:
    permits = fleet.permits(view.member) if view.member else 0
    ledger = view.member.link.ledger if view.member else None
    up = ledger is not None and ledger.hello is not None
    yield "worker_up", "1 if it has joined and was not lost", float(up)
    yield "requests_in_flight", "Sequences accepted and not ended", permits
    yield "unknown_messages", "Messages for no known request", view.unknown
    yield "miscounted_attempts", "Attempts whose worker counts other tokens", view.miscounted
    yield "worker_lost", "Times the worker was lost", view.lost
    yield "attempt_tokens", "Tokens that it said, of all attempts", view.computed.total()
    leaving = 0 if ledger is None else ledger.leaving
    yield "requests_leaving", "Sequences it was told to end, and has not said it did", leaving
    if view.member is not None:
        yield from _rotation(view.member, fleet)
    if ledger is not None and (said := ledger.progress) is not None:
        yield from _load(said, ledger.hello)
        yield from _speculation(said)
        yield from _handoffs(said)
        if said.tiers is not None:
            yield from _tiers(said.tiers)


def _load(said: Progress, hello: Hello | None) -> Iterator[Value]:
    used = said.pages - said.pages_free
    yield "num_requests_running", "Sequences being computed", said.running
    yield "num_requests_waiting", "Sequences waiting", said.waiting
    if said.pages:
        yield "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", used / said.pages
    yield "kv_pages_free", "KV pages free", said.pages_free
    yield "kv_pages_cached", "KV pages kept only for reuse", said.pages_cached
    yield "engine_steps", "Steps of the engine", said.steps
    yield "prefill_tokens", "Prompt tokens computed", said.prefill_tokens
    yield "engine_busy_seconds", "Time in steps", said.busy_s
    yield "num_preemptions", "Sequences set back for want of pages", said.preempted
    yield "corrupted_requests", "Answers stopped as not trustworthy", said.suspect
    if hello is not None:
        yield "context_tokens_max", "Longest sequence", hello.context_max


def _speculation(said: Progress) -> Iterator[Value]:
    spec = Spec(said.verify_steps, said.verify_steps + said.accepted, said.proposed, said.accepted)
    yield "spec_decode_num_drafts", "Verify steps", spec.verify_steps
    yield "spec_decode_num_draft_tokens", "Draft tokens proposed", spec.proposed
    yield "spec_decode_num_accepted_tokens", "Draft tokens accepted", spec.accepted
    if spec.proposed and spec.verify_steps:  # nothing measured: no value, never 0
        yield "spec_accept_rate", "Accepted / proposed", spec.accepted / spec.proposed
        yield "spec_accept_length", "Tokens a verify step", spec.tokens / spec.verify_steps


def _tiers(said: TierProgress) -> Iterator[Value]:
    yield "host_cache_pages", "KV pages of host memory", said.host_pages
    yield "host_cache_pages_kept", "KV pages kept in host memory", said.host_kept
    yield (
        "host_cache_pages_quarantined",
        "Pages of host memory not used again",
        (said.host_quarantined),
    )
    yield "tier_copies", "Copies between KV tiers under way", said.copies
    yield "kv_pages_lifted", "KV pages loaded from host memory", said.lifted
    yield "kv_pages_spilled", "KV pages copied to host memory", said.spilled
    yield "kv_pages_not_spilled", "KV pages that host memory had no room for", said.not_spilled
    yield "kv_pages_fetched", "KV pages read from disk", said.fetched
    yield "kv_fetch_timeouts", "Requests that did not wait for the disk to the end", said.timeouts
    yield (
        "kv_pages_bad_host",
        "KV pages from host memory that differed",
        said.bad_host,
    )
    yield "disk_cache_pages", "KV pages on disk", said.disk_pages
    yield "disk_cache_bytes", "Bytes of KV on disk", said.disk_bytes
    yield "disk_cache_stored", "KV pages written to disk", said.disk_stored
    yield "disk_cache_misses", "KV pages on disk that were short, torn or gone", said.disk_misses
    yield (
        "disk_cache_dropped",
        "KV pages not written, since the disk was slow or off",
        (said.disk_dropped),
    )
    yield "disk_cache_errors", "Reads and writes that failed", said.disk_errors
    yield "disk_cache_writing", "1 if KV is written to disk", float(said.disk_writing)


def _handoffs(said: Progress) -> Iterator[Value]:
    yield "handoffs", "Handoffs whose pages wait for evidence", said.handoffs
    yield "pages_handoff", "KV pages held for such evidence alone", said.pages_handoff
    yield "pages_quarantined", "KV pages not used again", said.pages_quarantined
    yield "kv_bytes_sent", "Bytes of KV handed to other workers", said.kv_bytes_sent
    yield "quarantines", "Orders to drop a prefix that were carried out", said.quarantines
    yield "kv_pages_dropped", "KV pages shared no more for these", said.pages_dropped
    yield "deadlines", "Requests cut off by the prefill deadline", said.deadlines
