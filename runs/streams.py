"""What the runs that stream from a real server share: the server, its clients, its metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

READY_S = 120.0
READ_S = 600.0


@dataclass
class Server:
    url: str
    pid: int


@dataclass
class Reply:
    """One stream. `endings`: of each end that it told, in order: [DONE] or the code of an error."""

    prompt: int
    text: str = ""
    endings: list[str] = field(default_factory=list)
    finishes: int = 0  # finish reasons said
    usages: list[dict[str, Any]] = field(default_factory=list)
    left: bool = False  # its client did, before the end
    refused: int = 0  # the status, where there was no stream
    first_s: float | None = None
    all_s: float = 0.0

    @property
    def done(self) -> bool:
        return self.endings == ["[DONE]"]

    def take(self, line: str, began: float) -> None:
        said = line.removeprefix("data: ")
        if said == "[DONE]":
            self.endings.append(said)
        elif said.startswith("{"):
            event = json.loads(said)
            if "error" in event:
                self.endings.append(str(event["error"]["code"]))
            if event.get("usage"):
                self.usages.append(event["usage"])
            for choice in event.get("choices", ()):
                self.text += choice["text"]
                self.finishes += choice["finish_reason"] is not None
                if choice["text"] and self.first_s is None:
                    self.first_s = time.monotonic() - began


Stay = Callable[[Reply], bool]


@contextmanager
def server(*words: str, told: IO[bytes] | int = subprocess.DEVNULL) -> Iterator[Server]:
    """`stanchion serve tiny WORDS` from when it is ready until it has drained. Raise SystemExit if
    it does not become ready, or does not end well."""
    command = [sys.executable, "-m", "stanchion.cli.main", "serve", "tiny", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True) as run:
        assert run.stdout is not None
        url = next((word for line in run.stdout for word in line.split() if "://" in word), "")
        if not url:
            raise SystemExit("the server ended before it was ready")
        drain = threading.Thread(target=run.stdout.read, daemon=True)
        drain.start()
        try:
            yield Server(url, run.pid)
        finally:
            run.terminate()
            code = run.wait(READY_S)
    if code:
        raise SystemExit(f"the server ended with {code}")


def ask(
    client: httpx.Client, number: int, prompt: list[int], tokens: int, stay: Stay = lambda _: True
) -> Reply:
    """Greedy. The client leaves when `stay` says no, which is asked at each event."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    reply, began = Reply(number), time.monotonic()
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                reply.refused = answer.status_code
                reply.endings.append(str(json.loads(answer.read())["error"]["code"]))
                return reply
            for line in answer.iter_lines():
                reply.take(line, began)
                if not stay(reply):
                    reply.left = True
                    return reply
    except httpx.RemoteProtocolError:
        pass  # how a stream ends that has no success
    finally:
        reply.all_s = time.monotonic() - began
    return reply


def replies(
    url: str,
    every: Sequence[list[int]],
    order: Sequence[int],
    together: int,
    tokens: int,
    stays: Callable[[int], Stay] = lambda _: lambda _: True,
) -> list[Reply]:
    """`stays` says for the n-th of them how long its client does."""
    with (
        httpx.Client(base_url=url, timeout=READ_S, trust_env=False) as client,
        ThreadPoolExecutor(together) as threads,
    ):
        return list(
            threads.map(
                lambda at: ask(client, order[at], every[order[at]], tokens, stays(at)),
                range(len(order)),
            )
        )


def counted(url: str, names: Sequence[str]) -> dict[str, float]:
    """Of these metrics each sample, by its name and the values of its labels."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return {
        " ".join((family.name.removeprefix("stanchion:"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.removeprefix("stanchion:") in names
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
