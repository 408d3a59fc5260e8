"""Servers of a benchmark, each in a process of its own, and how much of the CPU they used."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from stanchion.core.errors import ConfigError

READY_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Running:
    """A server, and the process whose CPU time is counted."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def opened() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=READY_S)
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[Running]:
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            asyncio.run(_until_models(url, process))
            yield Running(url, process.pid)
        finally:
            process.terminate()


async def _until_models(url: str, process: subprocess.Popen[bytes]) -> None:
    """Raise ConfigError where it ended, or does not answer in time."""
    deadline = time.monotonic() + READY_S
    async with opened() as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                said = process.stderr.read().decode() if process.stderr is not None else ""
                raise ConfigError(f"{process.args!r} ended: {said[-500:]}")
            try:
                async with session.get(f"{url}/v1/models") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise ConfigError(f"{url} did not answer within {READY_S:g} s")


@contextmanager
def stub(
    log: Path, requests: int, chunks: int, first_ms: float, gap_ms: float
) -> Iterator[Running]:
    """The server of `streams`: `log` gets a row a request of when each of its chunks was sent."""
    port = free_port()
    command = [sys.executable, "-m", "stanchion.cli.bench.streams", "--log", str(log)]
    command += ["--requests", f"{requests}", "--chunks", f"{chunks}", "--port", f"{port}"]
    command += ["--first-ms", f"{first_ms}", "--gap-ms", f"{gap_ms}"]
    with running(command, port) as one:
        yield one


@contextmanager
def gateway(upstream: str, tokenizer: Path, *words: str) -> Iterator[Running]:
    """`stanchion gateway` in front of a server that speaks as vLLM does."""
    port = free_port()
    command = [sys.executable, "-m", "stanchion.cli.main", "gateway", "--port", f"{port}"]
    command += ["--upstream", f"vllm:{upstream}", "--tokenizer", str(tokenizer), *words]
    with running(command, port) as one:
        yield one
