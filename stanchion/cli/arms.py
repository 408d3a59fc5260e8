"""Servers of ours for the lab: `stanchion serve` as its users run it, with what an arm asks for."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stanchion.cli.replay import replay, report
from stanchion.cli.replay_asked import Asked
from stanchion.core.errors import ConfigError

LOG = "server.log"


@contextmanager
def serving(flags: Sequence[str], log: Path) -> Iterator[str]:
    """The URL of a server with these flags, on a free port; it is drained on leaving. What it says
    on stderr goes to `log`. Raise ConfigError where it does not come up."""
    command = [sys.executable, "-m", "stanchion.cli.main", "serve", *flags, "--port", "0"]
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            url = _url(process.stdout)
            if url is None:
                raise ConfigError(f"`stanchion serve {shlex.join(flags)}` ended; see {log}")
            yield url
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.stdout.read()


def _url(lines: Iterable[str]) -> str | None:
    for line in lines:
        found = [word for word in line.split() if word.startswith("http://")]
        if " serves " in line and found:
            return found[0]
    return None


def ratios(said: str) -> list[tuple[int, int]]:
    """Of "1:1,2:1": numbers of prefill and decode workers. Raise ConfigError."""
    found = []
    for part in said.split(","):
        prefill, _, decode = part.strip().partition(":")
        if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
            raise ConfigError(f"--pd-sweep has {part!r}; it must be PREFILL:DECODE, such as 2:1")
        found.append((int(prefill), int(decode)))
    return found


def sweep(asked: Asked, said: str, flags: str) -> int:
    """The same replay against a cluster of each ratio, in RUN/pd-P-D. 0 if all are valid."""
    valid = True
    for prefill, decode in ratios(said):
        name = f"{prefill}:{decode}"
        folder = Path(asked.out) / f"pd-{prefill}-{decode}"
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = folder.parent / f"pd-{prefill}-{decode}-{LOG}"
        workers = ["--prefill", str(prefill), "--decode", str(decode)]
        with serving([*shlex.split(flags), *workers], log) as url:
            here = msgspec.structs.replace(asked, url=url, out=str(folder), arm=asked.arm or name)
            header = replay(here)
        print(f"\nprefill:decode {name}\n{report(header, folder)}", flush=True)
        valid = valid and bool(header.valid)
    return 0 if valid else 1
