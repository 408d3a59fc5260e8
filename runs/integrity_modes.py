"""Each integrity mode before workers that are sick. `python runs/integrity_modes.py [--json F]`

`stanchion serve` with two workers and the embedded model, a device too small for the traffic's
prefixes and a host that has them. The failpoint makes the index doors forget to wait for a load
(the report's fault 2), and each layer's index rows are held back by a declared delay. Requests are
streamed, greedy, some at once; an answer is right if its text is the one that the same server
gives without the failpoint. Both workers are armed: what is made again comes from cold KV, and
loads nothing.

For each mode: how many clients had a whole right text, a whole wrong text, or a typed error, how
many of those errors came behind a right prefix, what was witnessed and made again, and the time to
the first text and to the end. Rates have exact 95 % intervals (Clopper and Pearson).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fault1 import interval
from prometheus_client.parser import text_string_to_metric_families

from stanchion.cli.settings import model_folder
from stanchion.lab.corpus import corpus

PREFIXES, TAILS, PREFIX_TOKENS = 12, 5, 512
FAULT = "index_read_before_ready"
LAYERS = 6  # of the embedded model, its draft layer included
SIZES = ["kv.memory_gib=0.0025", "kv.host_cache_gib=0.1", "engine.running_max=4"]
COUNTED = (
    "witness_verdicts", "quality_retries", "output_anomalies", "witness_tokens", "routed",
    "quarantines", "kv_pages_dropped", "pages_quarantined", "workers_taken_out",
)  # fmt: skip
READY_S = 120.0


@dataclass
class Reply:
    prompt: int
    text: str = ""
    done: bool = False
    code: str = ""
    first_s: float | None = None
    all_s: float = 0.0


@dataclass
class Told:
    """Of one mode."""

    mode: str
    right: int = 0
    wrong: int = 0
    errors: int = 0
    errors_behind_right_text: int = 0
    first_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def replies(self) -> int:
        return self.right + self.wrong + self.errors

    def add(self, reply: Reply, expected: str) -> None:
        if not reply.done:
            self.errors += 1
            self.errors_behind_right_text += expected.startswith(reply.text)
            return
        self.right += reply.text == expected
        self.wrong += reply.text != expected
        self.all_s.append(reply.all_s)
        if reply.first_s is not None:
            self.first_s.append(reply.first_s)

    def row(self) -> str:
        low, high = interval(self.wrong, max(self.replies, 1))
        cells = [
            self.mode,
            f"{self.right}",
            f"{self.wrong} of {self.replies} ({100 * low:.1f} to {100 * high:.1f} %)",
            f"{self.errors} ({self.errors_behind_right_text})",
            f"{1000 * statistics.median(self.first_s or [0.0]):.0f}",
            f"{1000 * statistics.median(self.all_s or [0.0]):.0f}",
            ", ".join(f"{name} {value:g}" for name, value in self.metrics.items() if value),
        ]
        return "| " + " | ".join(cells) + " |"


def prompts(text: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    made = []
    for _ in range(PREFIXES):
        first = int(rng.integers(len(text) - 2 * PREFIX_TOKENS))
        for tail in range(TAILS):
            more = first + PREFIX_TOKENS + 16 * tail
            made.append([*text[first : first + PREFIX_TOKENS], *text[more : more + 8 + tail]])
    return made


@contextmanager
def server(mode: str, failpoint: str, delay_ms: float) -> Iterator[str]:
    slow = ",".join(f"{layer}/index:{delay_ms}" for layer in range(LAYERS))
    sets = [*SIZES, f"lab.failpoints={failpoint}", f"lab.slow_load={slow}"]
    command = [sys.executable, "-m", "stanchion.cli.main", "serve", "tiny", "--port", "0"]
    command += ["--both", "2", "--integrity", mode]
    command += [part for one in sets for part in ("--set", one)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        drain = threading.Thread(target=run.stderr.read, daemon=True)
        drain.start()
        try:
            yield _url(run.stdout)
        finally:
            run.terminate()
            run.wait(READY_S)


def _url(lines: Any) -> str:
    for line in lines:
        for word in line.split():
            if word.startswith("http://"):
                return str(word)
    raise SystemExit("the server ended before it was ready")


def ask(client: httpx.Client, number: int, prompt: list[int], tokens: int) -> Reply:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": True}
    reply, began = Reply(number), time.monotonic()
    try:
        with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
            for line in answer.iter_lines():
                _take(reply, line, began)
    except httpx.RemoteProtocolError:
        pass  # how a stream ends that has no success
    reply.all_s = time.monotonic() - began
    return reply


def _take(reply: Reply, line: str, began: float) -> None:
    said = line.removeprefix("data: ")
    if said == "[DONE]":
        reply.done = True
    elif said.startswith("{"):
        event = json.loads(said)
        if "error" in event:
            reply.code = event["error"]["code"]
        for choice in event.get("choices", ()):
            reply.text += choice["text"]
            if choice["text"] and reply.first_s is None:
                reply.first_s = time.monotonic() - began


def replies(
    url: str, every: Sequence[list[int]], order: Sequence[int], together: int, tokens: int
) -> list[Reply]:
    with (
        httpx.Client(base_url=url, timeout=600.0, trust_env=False) as client,
        ThreadPoolExecutor(together) as threads,
    ):
        return list(threads.map(lambda at: ask(client, at, every[at], tokens), order))


def counted(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("stanchion:")
        if name in COUNTED:
            for sample in family.samples:
                key = " ".join((name, *sample.labels.values()))
                found[key] = sample.value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="streams, in each mode")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--together", type=int, default=8, help="streams at once")
    parser.add_argument("--delay-ms", type=float, default=0.3, help="of each layer's index rows")
    parser.add_argument("--mode", action="append", help="these alone")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    every = prompts(corpus(model_folder("tiny")))
    with server("off", "", asked.delay_ms) as url:
        right = replies(url, every, range(len(every)), asked.together, asked.tokens)
    assert all(one.done for one in right)
    order = np.random.default_rng(9).integers(len(every), size=asked.requests).tolist()
    print("| mode | right | wrong | errors (behind right text) | first text, ms | all, ms | |")
    print("|---|---|---|---|---|---|---|", flush=True)
    told = []
    for mode in asked.mode or ("off", "report", "balanced", "guarded", "strict"):
        with server(mode, FAULT, asked.delay_ms) as url:
            one = Told(mode)
            for reply in replies(url, every, order, asked.together, asked.tokens):
                one.add(reply, right[reply.prompt].text)
            one.metrics = counted(url)
        told.append(one)
        print(one.row(), flush=True)
    if asked.json:
        rows = {"settings": vars(asked), "modes": [vars(one) for one in told]}
        Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
