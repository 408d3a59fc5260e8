"""`stanchion top` against a real gateway with a scripted worker."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import httpx
import pytest

from stanchion.cli.main import main
from stanchion.cli.top import draw, fetch, run
from stanchion.core.errors import ConfigError

from ..gateway.conftest import cluster
from ..gateway.liar import Attempt
from ..gateway.test_metrics import until

KEYS = {"admin_keys": ("the-admin",)}


def shown(url: str) -> str:
    output = io.StringIO()
    assert run(url, "the-admin", 1.0, True, output) == 0
    return output.getvalue()


def test_it_shows_workers_requests_and_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gate = threading.Event()
    with cluster(tmp_path, "both-0", "both-1", **KEYS) as (gateway, workers):
        for worker in workers.values():
            worker.plan = Attempt(gates={60: gate})
        body = {"prompt": "q", "max_tokens": 2000}
        ask = threading.Thread(
            target=lambda: httpx.post(f"{gateway.url}/v1/completions", json=body, trust_env=False)
        )
        ask.start()
        said = until(lambda: shown(gateway.url), lambda text: "2.9" in text or "3.00" in text)
        lines = {line.split()[1]: line for line in said.splitlines() if "both-" in line[:12]}
        assert "well" in lines["both-0"] and "well" in lines["both-1"]
        assert "10/1024" in said and "balanced" in said and "turn" in said
        gateway.client.post(
            "/admin/quarantine",
            json={"worker": "both-1"},
            headers={"authorization": "Bearer the-admin"},
        )
        assert "out" in shown(gateway.url)
        gate.set()
        ask.join()
        until(lambda: shown(gateway.url), lambda text: "requests: 0" in text)


def test_what_is_no_server_or_refuses_is_said(tmp_path: Path) -> None:
    with cluster(tmp_path, "both-0", **KEYS) as (gateway, _):
        with pytest.raises(ConfigError, match="admin-key"):
            fetch(gateway.url, "wrong")
        with pytest.raises(ConfigError, match="admin-key is missing"):
            fetch(gateway.url, "")
        with pytest.raises(ConfigError, match="--once"):
            run(gateway.url, "the-admin", 1.0, False, io.StringIO())
        with pytest.raises(ConfigError, match="no stanchion server"):
            fetch(f"{gateway.url}/elsewhere", "the-admin")
    with pytest.raises(ConfigError, match="no answer"):
        fetch("http://127.0.0.1:1", "")
    with pytest.raises(ConfigError, match="no URL"):
        fetch("http://", "")
    with pytest.raises(ConfigError, match="seconds"):
        run("x", "", 0.0, True)
    assert main(["top", "--once", "--url", "http://127.0.0.1:1"]) == 2


def test_a_worker_of_which_little_is_known_is_shown_too() -> None:
    state = {
        "workers": [{"name": "a", "role": "both", "up": False, "lost": 1}],
        "requests": [],
        "integrity": "off",
        "verdicts": {"clean": 3},
        "anomalies": {},
        "quality_retries": {},
        "retries": {},
        "routed": {},
        "faults": {},
        "draft_faults": 1,
        "retries_over_budget": 0,
    }
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120)
    console.print(draw(state))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "lost" in said and "verdicts: 3 clean" in said and "draft faults: 1" in said
