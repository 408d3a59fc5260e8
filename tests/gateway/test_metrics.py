"""What `/metrics` tells, and that a log line cannot hold content."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stanchion.gateway.journal import Line

from .worker import WAIT_S, FakeWorker, answer


def values(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


DONE = "stanchion:request_success_total|stop"
Seen = TypeVar("Seen")


def until(look: Callable[[], Seen], met: Callable[[Seen], bool]) -> Seen:
    """What was served is counted and logged once its last byte is written, so after the reply."""
    deadline = time.monotonic() + WAIT_S
    while not met(seen := look()):
        assert time.monotonic() < deadline
    return seen


def test_counters_move_by_what_was_served(client: httpx.Client, worker: FakeWorker):
    worker.plan = answer("hello", cached_tokens=2)
    before = values(client)
    assert client.post("/v1/completions", json={"prompt": "abcd"}).is_success
    after = until(
        lambda: values(client),
        lambda now: now.get(DONE, 0.0) > before.get(DONE, 0.0),
    )

    def moved(name: str) -> float:
        return after[f"stanchion:{name}"] - before.get(f"stanchion:{name}", 0.0)

    assert moved("prompt_tokens_total") == 4
    assert moved("generation_tokens_total") == 6
    assert moved("prefix_cache_hits_total") == 2
    assert moved("request_success_total|stop") == 1
    assert moved("requests_ended_total|completed") == 1
    assert moved("time_to_first_token_seconds_count") == 1
    assert moved("e2e_request_latency_seconds_count") == 1
    assert after["stanchion:num_requests_running|both|both-0"] == 0
    assert after["stanchion:kv_cache_usage_perc|both|both-0"] == pytest.approx(24 / 1024)
    assert after["stanchion:spec_decode_num_draft_tokens_total|both|both-0"] == 30
    assert after["stanchion:spec_decode_num_accepted_tokens_total|both|both-0"] == 20
    assert after["stanchion:spec_accept_length|both|both-0"] == 3.0
    assert after["stanchion:num_preemptions_total|both|both-0"] == 2
    assert after["stanchion:worker_up|both|both-0"] == 1
    assert after["stanchion:handoffs|both|both-0"] == 3
    assert after["stanchion:pages_handoff|both|both-0"] == 4
    assert after["stanchion:pages_quarantined|both|both-0"] == 5
    assert after["stanchion:kv_bytes_sent_total|both|both-0"] == 6
    assert after["stanchion:deadlines_total|both|both-0"] == 7
    assert after["stanchion:corrupted_requests_total|both|both-0"] == 1
    info = [name for name in after if name.startswith("stanchion:worker_info")]
    assert info == ["stanchion:worker_info|3|hashed|1|both|272|both-0"]


def test_a_log_line_says_nothing_of_what_was_said(
    client: httpx.Client, worker: FakeWorker, caplog: pytest.LogCaptureFixture
):
    worker.plan = answer("the answer")
    with caplog.at_level(logging.INFO, "stanchion.gateway"):
        client.post("/v1/completions", json={"prompt": "the question", "stop": ["secret"]})
        (record,) = until(lambda: list(caplog.records), bool)
    line = json.loads(record.message)
    assert set(line) <= set(Line.__struct_fields__)
    assert not re.search("question|answer|secret", caplog.text)
    assert (line["prompt_tokens"], line["outcome"]) == (12, "completed")
