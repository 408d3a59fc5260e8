"""Which workers may join a cluster. Pure.

Promises: all workers that are in agree, field by field, on the identity of the first one; what a
worker says of itself makes sense as far as the gateway relies on it; a life that another one took
the place of does not come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Hello, Join, differences
from stanchion.core.peerkey import check_address
from stanchion.gateway.router import Life

MEMBERS_MAX = 4096
LIVES_REMEMBERED = 4096
ADDRESS_CHARACTERS_MAX = 512


class Admission:
    def __init__(self, peer_key: str) -> None:
        self._peer_key = peer_key
        self._identity: dict[str, str] = {}
        self._over: deque[Life] = deque(maxlen=LIVES_REMEMBERED)

    def refusals(self, join: Join, others: Sequence[Hello]) -> list[str]:
        """Why not: each begins with the name of a field. If there are none, it is in.

        `others` are the members of other names; without any, the newcomer says who we are.
        """
        return self._unfit(join.hello, others, self._senseless(join))

    def unfit(self, hello: Hello, others: Sequence[Hello]) -> list[str]:
        """The same of one that has no address to join from."""
        return self._unfit(hello, others, _sizes(hello))

    def _unfit(self, hello: Hello, others: Sequence[Hello], wrong: list[str]) -> list[str]:
        if (hello.name, hello.incarnation) in self._over:
            wrong.append(f"incarnation: another process has taken the name {hello.name} since")
        if len(others) >= MEMBERS_MAX:
            wrong.append(f"name: {MEMBERS_MAX} workers have joined already")
        if others:
            wrong += differences(self._identity, hello.identity, "in the cluster", "in this worker")
        elif not wrong:
            self._identity = hello.identity
        return wrong

    def over(self, life: Life) -> None:
        self._over.append(life)

    def _senseless(self, join: Join) -> list[str]:
        hello, wrong = join.hello, _sizes(join.hello)
        places = {"address": join.address}
        if hello.role == "prefill":
            places["peer_address"] = hello.peer_address
        for name, address in places.items():
            if len(address) > ADDRESS_CHARACTERS_MAX:
                wrong.append(f"{name}: longer than {ADDRESS_CHARACTERS_MAX} characters")
                continue
            try:
                check_address(name, address, self._peer_key)
            except ConfigError as error:
                wrong.append(f"{name}: {error}")
        return wrong


def _sizes(hello: Hello) -> list[str]:
    return [
        f"{name}: {getattr(hello, name)} here, at least 1 there"
        for name in ("page_tokens", "pages", "context_max", "vocabulary")
        if getattr(hello, name) < 1
    ]
