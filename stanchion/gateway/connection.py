"""What the gateway needs of the connection to one server, whoever made the server.

`Link` is that of our own workers; `upstream/link` that of vLLM, SGLang and others. Whoever chooses,
retries, watches and counts knows no difference. What a connection brings of each answer besides its
text is said in `signals`: the monitor works with what there is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol, get_args

from stanchion.core.messages import Order, Start
from stanchion.core.outcome import Leaver
from stanchion.gateway.ledger import Ledger, Ticket

Signal = Literal["token_ids", "logprobs", "witness", "running_acceptance", "final_acceptance"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)


class Connection(Protocol):
    @property
    def ledger(self) -> Ledger: ...

    @property
    def signals(self) -> Collection[Signal]: ...

    def close(self) -> None: ...

    def start(self, start: Start, ticket: Ticket) -> bool:
        """False if it cannot be taken now; then nothing has changed."""

    def leave(self, ticket: Ticket, by: Leaver) -> None:
        """Its reader wants no more."""

    def leave_all(self, by: Leaver) -> None: ...

    def abort(self, requests: Sequence[str], by: Leaver) -> None:
        """What is still computed of these is for nobody."""

    def drain(self) -> None:
        """It is given nothing new."""

    def tell(self, order: Order) -> None:
        """About what it keeps for reuse; one that cannot be told goes on as it is."""

    def lose(self, why: str) -> None:
        """Everything in flight ends, or is begun again elsewhere."""

    def hear(self) -> None:
        """Everything that has come by now is heard."""

    def tick(self) -> None:
        """To be called a few times a second."""
