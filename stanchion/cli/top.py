"""`stanchion top`: a running server in the terminal, from its `/admin/state`.

Workers with their pools, requests in flight with their running acceptance, verdicts and what was
done about them. Numbers and names alone: there is no content in what it reads.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stanchion.core.errors import ConfigError

State = Mapping[str, Any]
WAIT_S = 10.0
REQUESTS_SHOWN = 20
BAR_CHARACTERS = 16


def run(url: str, key: str, seconds: float, once: bool, output: TextIO | None = None) -> int:
    """Until it is interrupted. Raise ConfigError if there is no such server, or it refuses."""
    if not 0.1 <= seconds <= 3600:
        raise ConfigError("--seconds must be from 0.1 to 3600")
    console = Console(file=output or sys.stdout)
    first = draw(fetch(url, key))
    if once:
        console.print(first)
        return 0
    if not console.is_terminal:
        raise ConfigError("this is no terminal: give --once for one look")
    with Live(first, console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(seconds)
            live.update(draw(fetch(url, key)), refresh=True)


def fetch(url: str, key: str) -> State:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if not parts.hostname:
        raise ConfigError(f"--url {url!r} is no URL")
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=WAIT_S)
    try:
        path = parts.path.rstrip("/") + "/admin/state"
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        raw = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"no answer from {url}: {error}") from None
    finally:
        connection.close()
    if answer.status == 401:
        why = "is not one of this server's" if key else "is missing: /admin is shut without it"
        raise ConfigError(f"--admin-key {why}")
    try:
        said: Any = json.loads(raw)
    except ValueError:
        said = None
    if answer.status != 200 or not isinstance(said, dict) or "workers" not in said:
        raise ConfigError(f"{url} is no stanchion server: HTTP {answer.status}")
    return said


# ---- what it looks like ---------------------------------------------------------------------


def draw(state: State) -> RenderableType:
    return Group(_workers(state), _requests(state), *_sums(state))


def _workers(state: State) -> Table:
    table = Table(title="workers", title_justify="left", expand=True)
    for name in ("worker", "role", "state", "in flight", "waiting", "pace", "pool", "host"):
        table.add_column(name)
    table.add_column("bad pages", justify="right")
    for one in state["workers"]:
        table.add_row(
            one["name"],
            one["role"],
            _state(one),
            _number(one, "requests"),
            _number(one, "waiting"),
            f"x{one['pace']:.1f}" if "pace" in one else "",
            _pool(one.get("pages", 0), one.get("pages_free", 0), one.get("pages_cached", 0)),
            _pool(one.get("host_pages", 0), one.get("host_pages_free", 0), 0),
            _number(one, "pages_quarantined"),
        )
    return table


def _state(one: State) -> Text:
    if not one["up"]:
        return Text("lost", style="red")
    said = [word for word in ("draining", "out", "suspicious") if one.get(word)]
    if one.get("breaker", "closed") != "closed":
        said.append(f"breaker {one['breaker'].replace('_', ' ')}")
    return Text(", ".join(said), style="yellow") if said else Text("well", style="green")


def _number(one: State, name: str) -> str:
    return str(one[name]) if name in one else ""


def _pool(pages: int, free: int, cached: int) -> str:
    """What is in use, what is kept for reuse alone, and what is free."""
    if not pages:
        return ""
    used = max(0, pages - free - cached)
    marks = [round(BAR_CHARACTERS * part / pages) for part in (used, used + cached)]
    bar = "#" * marks[0] + "+" * (marks[1] - marks[0])
    return f"{bar.ljust(BAR_CHARACTERS, '.')} {used}+{cached}/{pages}"


def _requests(state: State) -> Table:
    requests = sorted(state["requests"], key=lambda one: -one["seconds"])
    title = f"requests: {len(requests)}, the oldest {min(len(requests), REQUESTS_SHOWN)}"
    table = Table(title=title, title_justify="left", expand=True)
    for name in ("id", "tenant", "workers", "why"):
        table.add_column(name)
    for name in ("prompt", "tokens", "seconds", "accept length", "rate"):
        table.add_column(name, justify="right")
    for one in requests[:REQUESTS_SHOWN]:
        table.add_row(
            one["id"][:12],
            one["tenant"],
            ",".join(one["workers"]),
            one["routed"],
            str(one["prompt_tokens"]),
            str(one["tokens"]),
            f"{one['seconds']:.1f}",
            _measured(one["accept_length"]),
            _measured(one["accept_rate"]),
        )
    return table


def _measured(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _sums(state: State) -> list[Text]:
    """One line for each kind of count that has one."""
    lines = [Text(f"integrity: {state['integrity']}")]
    for name in ("verdicts", "anomalies", "quality_retries", "retries", "routed", "faults"):
        counts = {what: count for what, count in state[name].items() if count}
        if counts:
            said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            lines.append(Text(f"{name.replace('_', ' ')}: {said}"))
    for name in ("draft_faults", "retries_over_budget"):
        if state[name]:
            lines.append(Text(f"{name.replace('_', ' ')}: {state[name]}", style="yellow"))
    return lines
