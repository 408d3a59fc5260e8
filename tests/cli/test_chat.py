"""`stanchion chat` against a real gateway with a scripted worker."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stanchion.cli.chat import run
from stanchion.core.messages import Start
from stanchion.core.outcome import PeerLost
from stanchion.gateway.tokens import byte_vocabulary

from ..gateway.conftest import Gateway, running
from ..gateway.glm import glm_vocabulary
from ..gateway.worker import SPEC, FakeWorker, Plan, answer, end, say


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[FakeWorker, Gateway]]:
    with (
        FakeWorker(f"ipc://{tmp_path}/worker") as worker,
        running(worker, api_keys=("secret",)) as gateway,
    ):
        yield worker, gateway


def say_to(gateway: Gateway, turns: str, **settings) -> tuple[int, str]:
    output = io.StringIO()
    given = {"api_key": "secret"} | settings
    code = run(url=gateway.url, turns=io.StringIO(turns), output=output, **given)
    return code, output.getvalue()


def asked(start: Start) -> str:
    vocabulary = byte_vocabulary()
    return b"".join(vocabulary.pieces[token] for token in start.tokens).decode()


def test_a_scripted_conversation_keeps_its_history_until_reset(served):
    worker, gateway = served
    worker.plan = answer("hello ✓", batch=2, cached_tokens=3, spec=SPEC)
    code, shown = say_to(gateway, "one\n\ntwo\n/reset\nthree\n/quit\nfour\n", system="Be brief.")
    assert code == 0
    assert [asked(start) for start in worker.starts] == [
        "<|system|>Be brief.<|user|>one<|assistant|>",
        "<|system|>Be brief.<|user|>one<|assistant|>hello ✓<|user|>two<|assistant|>",
        "<|system|>Be brief.<|user|>three<|assistant|>",
    ]
    assert shown.count("hello ✓") == 3
    assert "10 tokens" in shown and "first after" in shown
    assert "acceptance 2.50 tokens a step" in shown and "50% of drafts" in shown
    assert "3 of " in shown


def test_reasoning_is_shown_and_not_kept(tmp_path: Path):
    with FakeWorker(f"ipc://{tmp_path}/worker") as worker:
        worker.plan = answer("hm\n</think>\nyes")
        with running(worker, glm_vocabulary(), api_keys=("secret",)) as gateway:
            code, shown = say_to(gateway, "one\ntwo\n")
        assert code == 0 and shown.count("hm\n\nyes") == 2 and "first after" in shown
        assert asked(worker.starts[-1]) == (
            "<|user|>one<|assistant|>yes<|user|>two<|assistant|><think>"
        )


def test_settings_travel_and_what_was_not_measured_is_not_said(served):
    worker, gateway = served
    code, shown = say_to(gateway, "hi\n", temperature=0.0, max_tokens=20)
    sampling = worker.starts[0].sampling
    assert (code, sampling.temperature, sampling.max_tokens) == (0, 0.0, 20)
    assert "acceptance" not in shown and "cached" not in shown


def test_a_reply_that_fails_is_told_and_not_kept(served):
    worker, gateway = served
    gate = threading.Event()

    def plan(start: Start) -> Plan:
        if len(worker.starts) == 1:
            return [say(start, "half an ans"), gate, end(start, PeerLost("the worker died"))]
        return answer("whole")(start)

    worker.plan = plan
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    code, shown = say_to(gateway, "one\ntwo\n")
    timer.join()
    assert code == 1
    assert "half an ans" in shown and "the worker died" in shown and "whole" in shown
    assert asked(worker.starts[1]) == "<|user|>two<|assistant|>"


def test_a_refusal_names_what_was_wrong(served):
    code, shown = say_to(served[1], "hi\n", temperature=9.0)
    assert code == 1 and "temperature" in shown and "at most 2.0" in shown


def test_a_wrong_key_or_no_server_is_said_at_once(served):
    code, shown = say_to(served[1], "hi\n", api_key="wrong")
    assert code == 1 and "API key" in shown
    output = io.StringIO()
    assert run(url="http://127.0.0.1:1", turns=io.StringIO("hi\n"), output=output) == 1
    assert "no answer" in output.getvalue()


def test_a_model_cannot_steer_the_terminal(served):
    worker, gateway = served
    worker.plan = answer("\x1b[2Jgone\x07[red]not markup[/red]")
    _, shown = say_to(gateway, "hi\n")
    assert "\x1b" not in shown and "\x07" not in shown
    assert "␛[2Jgone␇[red]not markup[/red]" in shown
