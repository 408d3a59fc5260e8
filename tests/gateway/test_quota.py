"""Quotas of tenants: buckets by the clock that is passed in, and refusals that name the bound."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stanchion.cli.serve import gateway_settings
from stanchion.core.config import Config, check, load
from stanchion.core.errors import ConfigError, QuotaExceeded
from stanchion.gateway.quota import Quota, Quotas, own_quotas
from stanchion.gateway.settings import GatewaySettings

from .conftest import running
from .test_metrics import until
from .worker import FakeWorker, answer


def test_requests_beyond_the_bound_wait_as_long_as_they_are_told():
    quotas = Quotas(Quota(requests_per_minute=3), {})
    for _ in range(3):
        quotas.admit("a", 100.0)
    with pytest.raises(
        QuotaExceeded, match=r"requests_per_minute: tenant a has used its 3"
    ) as said:
        quotas.admit("a", 100.0)
    assert said.value.retry_after_s == pytest.approx(20.0)
    with pytest.raises(QuotaExceeded):
        quotas.admit("a", 119.9)
    quotas.admit("a", 120.0)


def test_tokens_are_taken_when_they_are_known_and_debts_are_waited_for():
    quotas = Quotas(Quota(tokens_per_minute=600), {})
    quotas.admit("a", 0.0)
    quotas.admit("a", 0.0)  # nothing is known yet of what the first one uses
    quotas.used("a", 1200, 0.0)
    with pytest.raises(QuotaExceeded, match="tokens_per_minute") as said:
        quotas.admit("a", 0.0)
    assert said.value.retry_after_s == pytest.approx(60.1)
    quotas.admit("a", 60.1)


def test_one_tenants_use_is_not_anothers_and_some_have_quotas_of_their_own():
    quotas = Quotas(Quota(requests_per_minute=1), own_quotas(["b=2:0", "c=0:0"]))
    quotas.admit("a", 0.0)
    with pytest.raises(QuotaExceeded):
        quotas.admit("a", 0.0)
    for _ in range(2):
        quotas.admit("b", 0.0)
    with pytest.raises(QuotaExceeded):
        quotas.admit("b", 0.0)
    for _ in range(100):
        quotas.admit("c", 0.0)


@given(st.integers(1, 50), st.lists(st.floats(0.0, 30.0), max_size=80))
def test_over_any_time_no_more_are_admitted_than_the_rate_and_one_bucket(
    bound: int, gaps: list[float]
):
    quotas, now, admitted = Quotas(Quota(requests_per_minute=bound), {}), 0.0, 0
    for gap in gaps:
        now += gap
        try:
            quotas.admit("a", now)
            admitted += 1
        except QuotaExceeded as refused:
            assert 0 < refused.retry_after_s <= 60.0 / bound + 1e-6
    assert admitted <= bound + bound * now / 60.0 + 1e-6


@pytest.mark.parametrize("said", ["a", "a=1", "a=1:x", "=1:1", "a=-1:1", "a=1:1:1"])
def test_quotas_that_make_no_sense_are_refused_at_start(said: str):
    with pytest.raises(ConfigError, match="quota"):
        GatewaySettings(quotas=(said,)).check()


def test_a_tenant_beyond_its_quota_gets_429_with_the_bound_and_a_time(alone: FakeWorker):
    alone.plan = answer("x" * 50)
    keys = {"api_keys": ("alice:one", "bob:two"), "quotas": ("alice=2:0", "bob=0:100")}
    asked = {"model": "hashed", "max_tokens": 60, "messages": [{"role": "user", "content": "x"}]}
    with running(alone, **keys) as gateway:

        def post(key: str, path: str) -> httpx.Response:
            return gateway.client.post(path, json=asked, headers={"x-api-key": key})

        paths = ("/v1/chat/completions", "/v1/messages")
        assert [post("one", path).status_code for path in paths] == [200, 200]
        refused = post("one", "/v1/chat/completions")
        assert "requests_per_minute" in refused.json()["error"]["message"]
        # What an answer used is taken right after its last byte.
        spent = until(lambda: post("two", "/v1/messages"), lambda reply: not reply.is_success)
        assert "tokens_per_minute" in spent.json()["error"]["message"]
        assert len(alone.starts) >= 4
        for reply in (refused, spent):
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        counted = gateway.client.post(
            "/v1/messages/count_tokens", json=asked, headers={"x-api-key": "two"}
        )
        assert counted.is_success  # it generates nothing


def test_the_command_hands_the_gateway_what_it_was_told():
    said = ["gateway.quotas=alice=600:0, bob=10:50000", "gateway.requests_per_minute=60"]
    said += ["gateway.tool_call_parser=glm", "gateway.reasoning_parser=none"]
    settings = gateway_settings(load(Config(), "", said), (), "")
    assert settings.quotas == ("alice=600:0", "bob=10:50000")
    assert (settings.requests_per_minute, settings.tokens_per_minute) == (60, 0)
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("glm", "none")
    settings.check()


@pytest.mark.parametrize("said", ["tool_call_parser=hermes", "tokens_per_minute=-1"])
def test_settings_out_of_bounds_are_refused(said: str):
    with pytest.raises(ConfigError, match=f"gateway.{said.partition('=')[0]}"):
        check(load(Config(), "", [f"gateway.{said}"]))
    name, _, value = said.partition("=")
    with pytest.raises(ConfigError, match=name):
        GatewaySettings(**{name: int(value) if value == "-1" else value}).check()
