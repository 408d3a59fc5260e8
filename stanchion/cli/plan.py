"""What a worker process, and what a verification, is told at its start. No torch here: whoever
starts workers has none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
from msgspec import Struct

from stanchion.core.config import Config
from stanchion.core.errors import ConfigError
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


def armed(config: Config, worker: str) -> Config:
    """With those failpoints that are meant for this worker: NAME, or NAME@WORKER."""
    named = (one.partition("@") for one in config.lab.failpoints.split(","))
    kept = ",".join(name for name, _, whose in named if whose in ("", worker))
    return replace(config, lab=replace(config.lab, failpoints=kept))


@dataclass(frozen=True)
class Asked:
    """What `stanchion verify` runs. `requests` or `minutes` ends it, whichever comes first."""

    seed: int = 1
    requests: int | None = None
    minutes: float | None = None
    context: int = 2048
    variety: int = 2000
    concurrency: int = 48
    abort_one_in: int = 8
    kills: int = 0
    stops: int = 0

    def check(self) -> None:
        """Raise ConfigError for what would test nothing, or never end."""
        least = {"context": 64, "variety": 1, "concurrency": 1, "seed": 0}
        for name in ("context", "variety", "concurrency", "seed", "abort_one_in", "kills", "stops"):
            if getattr(self, name) < least.get(name, 0):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least {least.get(name, 0)}")
        if self.requests is not None and self.requests < 1:
            raise ConfigError("--requests must be at least 1")
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise ConfigError("--minutes must be above 0")


encode = msgspec.json.encode
decode = msgspec.json.Decoder(WorkerPlan).decode
