"""`stanchion serve` as a user runs it: real processes, a real socket, the public client."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import openai
import pytest

from stanchion.cli.plan import WorkerPlan, encode
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


def test_an_answer_follows_its_schema_and_a_forced_call_its_parameters(tiny: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string", "maxLength": 9}, "line": {"enum": [1, 20]}},
        "required": ["path", "line"],
        "additionalProperties": False,
    }
    function = {"name": "read", "strict": True, "parameters": schema}
    messages = [{"role": "user", "content": "def main("}]
    with client(tiny) as speaker:
        for seed in range(3):
            asked = {"model": "tiny", "messages": messages, "max_tokens": 99, "seed": seed}
            said = speaker.chat.completions.create(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "place", "schema": schema, "strict": True},
                },
                **asked,
            )  # type: ignore[call-overload]
            jsonschema.validate(json.loads(said.choices[0].message.content), schema)
            said = speaker.chat.completions.create(
                tools=[{"type": "function", "function": function}],
                tool_choice="required",
                parallel_tool_calls=False,
                **asked,
            )  # type: ignore[call-overload]
            assert said.choices[0].finish_reason == "tool_calls"
            (call,) = said.choices[0].message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), schema)


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


def test_a_worker_whose_parent_is_gone_ends(tmp_path: Path) -> None:
    plan = WorkerPlan(
        name="both-0",
        role="both",
        join=f"ipc://{tmp_path}/join",
        listen=f"ipc://{tmp_path}",
        parent=1,
        config=load(Config(), "", ["model.path=hashed"]),
    )
    command = [sys.executable, "-m", "stanchion.cli.worker", encode(plan).decode()]
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


def test_a_dead_worker_ends_its_requests_as_errors_and_another_takes_its_place() -> None:
    with serving("hashed") as server:
        (engine,) = children(server)
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
            until_replaced(server, engine)
            said = speaker.completions.create(model="hashed", prompt="x", max_tokens=5)
            assert said.usage is not None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_hung_worker_is_killed_and_another_takes_its_place() -> None:
    with serving("hashed", "--set", "cluster.silence_s=1") as server:
        (engine,) = children(server)
        os.kill(engine, signal.SIGSTOP)
        descriptor = os.pidfd_open(engine)
        try:
            assert select.select([descriptor], [], [], 30)[0], "it was not killed"
        finally:
            os.close(descriptor)
        until_replaced(server, engine)


def test_a_worker_that_cannot_stay_alive_stops_the_server() -> None:
    with serving("hashed", "--set", "cluster.restarts_max=0") as server:
        os.kill(children(server)[0], signal.SIGKILL)
        assert server.process.wait(60) == 1


def children(server: Server) -> list[int]:
    pid = server.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(word) for word in listed.read().split()]


def until_replaced(server: Server, process: int) -> None:
    """Until that process is gone, another one is there, and requests can be served."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        gone = process not in children(server)  # asked first: until then it may be called ready
        said = ready(server)
        if said["ready"] and gone:
            return
        assert said["ready"] or "-0" in str(said["why_not"]), said
    raise AssertionError("never ready again")


def ready(server: Server) -> dict[str, object]:
    try:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=60) as reply:
            said: dict[str, object] = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        assert error.code == 503
        said = json.loads(error.read())
    return said


def test_a_pair_serves_and_a_new_prefill_worker_takes_the_place_of_a_hung_one() -> None:
    flags = (
        "--prefill",
        "1",
        "--decode",
        "1",
        "--kv-check",
        "full",
        "--set",
        "cluster.silence_s=1",
    )
    with serving("hashed", *flags) as server, serving("hashed") as alone:
        body = {"model": "hashed", "prompt": "def main(" * 9, "max_tokens": 20, "temperature": 0}
        expected = alone.post("/v1/completions", body)["choices"]
        assert server.post("/v1/completions", body)["choices"] == expected
        (prefill,) = [pid for pid in children(server) if '"prefill-0"' in command_line(pid)]
        os.kill(prefill, signal.SIGSTOP)
        until_replaced(server, prefill)
        body |= {"prompt": "def other(" * 9, "guided_regex": "([a-z]{3}){2,5}"}
        expected = alone.post("/v1/completions", body)["choices"]
        assert server.post("/v1/completions", body)["choices"] == expected
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_worker_that_does_not_fit_is_told_each_field_in_which_it_differs(tmp_path: Path) -> None:
    join = f"ipc://{tmp_path}/join"
    with serving("hashed", "--both", "1", "--join", join):
        command = [sys.executable, "-m", "stanchion.cli.main", "worker", "hashed", "--role", "both"]
        command += ["--join", join, "--page-size", "32", "--draft-tokens", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        for field in (
            "page_tokens: 16 in the cluster, 32 in",
            "draft_tokens: 3 in the cluster, 1 in",
        ):
            assert field in done.stderr


def test_a_worker_that_nobody_could_reach_is_refused_at_start() -> None:
    for arguments, message in (
        (["--join", "tcp://10.0.0.1:5"], "--peer-key"),
        (["--join", "tcp://10.0.0.1:5", "--peer-key", "x"], "give --listen"),
        (["--join", "nowhere"], "--join"),
        (["--join", "ipc:///tmp/x", "--kv-check", "some"], "kv.check"),
    ):
        command = [sys.executable, "-m", "stanchion.cli.main", "worker", "--role", "both"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert message in done.stderr


def test_settings_that_make_no_sense_are_refused_at_start() -> None:
    for arguments, message in (
        (["--draft-tokens", "9"], "engine.draft_tokens"),
        (["--host", "0.0.0.0"], "API key"),
        (["/nowhere"], "model.path"),
        (["--set", "kv.pages=3"], "no setting kv.pages"),
        (["--prefill", "1"], "a pair needs at least one of each"),
        (["--join", "tcp://0.0.0.0:0"], "--peer-key"),
        (["--join", "elsewhere"], "cluster.join"),
        (["--cp", "0"], "parallel.cp"),
        (["--layer-split"], "parallel.cp of at least 2"),
        (["--cp", "2", "--host-cache", "1", "--disk-cache", "/tmp:1"], "kv.disk_cache with"),
    ):
        command = [sys.executable, "-m", "stanchion.cli.main", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert message in done.stderr
