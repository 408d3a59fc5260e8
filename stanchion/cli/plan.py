"""What a worker process is told at its start. No torch here: whoever starts workers has none."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from stanchion.core.config import Config
from stanchion.core.messages import Role


class WorkerPlan(Struct, frozen=True, kw_only=True):
    """`join`: the gateway's join socket. `listen`: where the worker's own sockets go, as
    ipc:///FOLDER or tcp://HOST; it chooses a name or a port there. `parent`: the process whose end
    is ours, 0 for none."""

    name: str
    role: Role
    join: str
    listen: str
    parent: int
    config: Config


encode = msgspec.json.encode
decode = msgspec.json.Decoder(WorkerPlan).decode
