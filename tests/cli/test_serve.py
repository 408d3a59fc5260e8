"""`stanchion serve` as a user runs it: real processes, a real socket, the public client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import openai
import pytest

from stanchion.core.config import Config, load

START_S = 60


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]

    def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            said: dict[str, object] = json.loads(reply.read())
            return said


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "stanchion.cli.main", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            line = next(line for line in process.stdout if "http://" in line)
            watchdog.cancel()
            url = next(word for word in line.split() if word.startswith("http://"))
            yield Server(url, process)
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.stdout.read()


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with serving("tiny") as server:
        yield server


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_conversation_streamed_and_not(tiny: Server) -> None:
    with client(tiny) as speaker:
        model = speaker.models.list().data[0].id
        assert model == "tiny"
        messages = [{"role": "user", "content": "def main("}]
        for turn in range(3):
            whole = speaker.chat.completions.create(
                model=model, messages=messages, max_tokens=40, temperature=0.7, seed=turn
            )  # type: ignore[call-overload]
            pieces = speaker.chat.completions.create(
                model=model, messages=messages, max_tokens=40, temperature=0.7, seed=turn,
                stream=True, stream_options={"include_usage": True, "include_spec": True},
            )  # type: ignore[call-overload]  # fmt: skip
            chunks = list(pieces)
            text = "".join(
                chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
            )
            assert text == whole.choices[0].message.content
            assert chunks[-1].usage == whole.usage or (
                chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
            )
            last = chunks[-1].model_dump()
            assert 1.0 <= last["spec_accept_length"] <= 4.0
            assert 0.0 <= last["spec_accept_rate"] <= 1.0
            messages += [
                {"role": "assistant", "content": text or " "},
                {"role": "user", "content": "return"},
            ]
        assert whole.usage.prompt_tokens_details.cached_tokens > 0


def test_a_wrong_field_is_named(tiny: Server) -> None:
    with client(tiny) as speaker, pytest.raises(openai.BadRequestError) as caught:
        speaker.completions.create(model="tiny", prompt="x", temperature=9.0)
    assert "temperature" in str(caught.value) and "2" in str(caught.value)


def test_a_long_prompt_is_scored_whole(tiny: Server) -> None:
    """Scores come from the engine a chunk at a time; each must stand beside its own token."""
    ids = [20 + (at * at) % 900 for at in range(1300)]
    body: dict[str, object] = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": 1,
        "prompt_logprobs": 0,
    }
    scores = tiny.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]  # type: ignore[index]
    assert len(scores) == len(ids) and scores[0] is None
    assert all(str(token) in score for token, score in zip(ids[1:], scores[1:]))
    short = tiny.post("/v1/completions", body | {"prompt": ids[:300]})
    assert short["choices"][0]["prompt_logprobs"] == scores[:300]  # type: ignore[index]
    one = tiny.post("/v1/completions", body | {"prompt": ids[:1]})
    assert one["choices"][0]["prompt_logprobs"] == [None]  # type: ignore[index]


def test_an_engine_whose_parent_is_gone_ends(tmp_path: Path) -> None:
    settings = msgspec.json.encode(load(Config(), "", ["model.path=hashed"])).decode()
    command = [sys.executable, "-m", "stanchion.cli.worker", f"ipc://{tmp_path}/w", settings, "1"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_an_idle_server_ends_at_once(sent: signal.Signals) -> None:
    with serving("hashed") as server:
        server.process.send_signal(sent)
        assert server.process.wait(30) == 0


def test_sigterm_during_load_loses_nothing_that_was_accepted() -> None:
    with serving("hashed", "--set", "engine.chunk_tokens=64") as server:
        done: list[int] = []
        begun = threading.Semaphore(0)

        def stream(seed: int) -> None:
            with client(server) as speaker:
                chunks = speaker.completions.create(
                    model="hashed", prompt="x" * 200, max_tokens=400, seed=seed, stream=True,
                    extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
                )  # fmt: skip
                first = True
                for chunk in chunks:
                    if first:
                        begun.release()
                        first = False
                    if chunk.usage is not None:
                        done.append(chunk.usage.completion_tokens)

        threads = [threading.Thread(target=stream, args=(at,)) for at in range(12)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=60)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert done == [400] * 12
        assert server.process.wait(60) == 0


def test_a_dead_engine_ends_its_requests_as_errors_and_the_server_with_them() -> None:
    with serving("hashed") as server:
        children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
        with open(children) as listed:
            (engine,) = map(int, listed.read().split())
        with client(server) as speaker:
            chunks = speaker.completions.create(
                model="hashed", prompt="x", max_tokens=100_000, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            seen = iter(chunks)
            next(seen)
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(openai.APIError):
                for _ in seen:
                    pass
        assert server.process.wait(60) == 1


def test_settings_that_make_no_sense_are_refused_at_start() -> None:
    for arguments, message in (
        (["--draft-tokens", "9"], "engine.draft_tokens"),
        (["--host", "0.0.0.0"], "API key"),
        (["/nowhere"], "model.path"),
        (["--set", "kv.pages=3"], "no setting kv.pages"),
    ):
        command = [sys.executable, "-m", "stanchion.cli.main", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert message in done.stderr
