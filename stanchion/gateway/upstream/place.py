"""Where a server is, and of what kind it is if that was said: `vllm:http://10.0.0.1:8000`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args
from urllib.parse import urlsplit

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Role
from stanchion.core.request import NAME_CHARACTERS_MAX
from stanchion.gateway.upstream.wire import Kind

_HOST = re.compile(r"[A-Za-z0-9._:-]+")
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Place:
    """`url` has no slash at its end. `kind` is None where it is to be found out."""

    url: str
    role: Role
    kind: Kind | None = None

    @property
    def name(self) -> str:
        """By which the server is known in metrics and logs."""
        return self.url.partition("://")[2][-NAME_CHARACTERS_MAX:]

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


def place(said: str, role: Role) -> Place:
    """Raise ConfigError if it is none."""
    words = said.strip()
    kind = next((one for one in KINDS if words.startswith(f"{one}:")), None)
    url = words.removeprefix(f"{kind}:") if kind else words
    try:
        parts = urlsplit(url)
        named = _HOST.fullmatch(parts.hostname or "")
        usable = parts.scheme in ("http", "https") and named and parts.port != 0
        extra = parts.query or parts.fragment or parts.username or parts.password
    except ValueError:
        usable, extra = False, ""
    if not usable or extra:
        raise ConfigError(
            f"upstream {said!r} is no server's address; it must be http://HOST:PORT or "
            f"https://HOST:PORT, behind {', '.join(f'{one}:' for one in KINDS)} or nothing"
        )
    return Place(url.rstrip("/").removesuffix("/v1"), role, kind)


def places(both: str, prefill: str, decode: str) -> list[Place]:
    """Of comma separated addresses. Raise ConfigError if they make no cluster."""
    named: dict[Role, str] = {"both": both, "prefill": prefill, "decode": decode}
    found = [
        place(one, role) for role, said in named.items() for one in said.split(",") if one.strip()
    ]
    if not found:
        raise ConfigError("no upstream is named: give --upstream URL")
    if bool(prefill.strip()) != bool(decode.strip()):
        raise ConfigError(
            "--upstream-prefill and --upstream-decode: a pair needs at least one of each"
        )
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"upstream {twice[0]} is named twice")
    return found
