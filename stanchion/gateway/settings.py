"""What a gateway may be told, and every bound that it holds its clients to."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Annotated, get_args

from stanchion.core.errors import ConfigError
from stanchion.core.request import PRIORITY_MAX
from stanchion.gateway.monitor.guard import Mode
from stanchion.gateway.priority import ranges
from stanchion.gateway.quota import own_quotas

PARSERS = ("auto", "glm", "none")
_SECONDS = (
    "body_s", "worker_silence_s", "suspect_s", "stall_s", "drain_s", "retry_after_s",
    "breaker_rest_s", "waiting_s", "confirmed_window_s",
)  # fmt: skip
_ONE_OR_MORE = (
    "in_flight_max", "body_bytes_max", "bodies_bytes_max", "chat_tokens", "breaker_faults",
    "breaker_probes",
)  # fmt: skip
_NONE_OR_MORE = (
    "hold_tokens", "witness_tokens_max", "retries_share", "retries_spare", "confirmed_max",
    "prefix_blocks_max", "waiting_max",
)  # fmt: skip


@dataclass(frozen=True)
class GatewaySettings:
    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 takes a free one"] = 8000
    api_keys: Annotated[tuple[str, ...], "secret, or name:secret; the name is the tenant"] = field(
        default=(), repr=False
    )
    peer_key: Annotated[str, "secret of the cluster's sockets; empty: none"] = field(
        default="", repr=False
    )
    served_model_name: Annotated[str, "the model's name in the API; the worker's if empty"] = ""
    admin_keys: Annotated[tuple[str, ...], "secrets for /admin; none: nobody may"] = field(
        default=(), repr=False
    )
    tool_call_parser: Annotated[str, "auto (by the chat template), glm or none"] = "auto"
    reasoning_parser: Annotated[str, "auto (by the chat template), glm or none"] = "auto"
    requests_per_minute: Annotated[int, "of each tenant; 0 means no bound"] = 0
    tokens_per_minute: Annotated[int, "prompts and answers of each tenant; 0: no bound"] = 0
    quotas: Annotated[tuple[str, ...], "NAME=REQUESTS:TOKENS a minute, for that tenant"] = ()
    priority_best: Annotated[int, "the most urgent priority that tenants may ask for"] = 0
    priorities: Annotated[tuple[str, ...], "NAME=USUAL:BEST priority, for that tenant"] = ()
    waiting_max: Annotated[int, "requests that wait for room; beyond is 429"] = 0
    waiting_s: Annotated[float, "longest time that one waits for room"] = 30.0
    in_flight_max: Annotated[int, "sequences accepted at once; beyond is 429"] = 256
    body_bytes_max: Annotated[int, "largest request body"] = 32 * 2**20
    bodies_bytes_max: Annotated[int, "all request bodies that are being read"] = 512 * 2**20
    body_s: Annotated[float, "longest time a body may take to arrive"] = 60.0
    chat_tokens: Annotated[int, "max_tokens of a chat that does not say"] = 4096
    generated_tokens_max: Annotated[int, "bound of choices * max_tokens"] = 4 * 2**20
    worker_silence_s: Annotated[float, "a worker silent for so long is lost"] = 10.0
    suspect_s: Annotated[float, "a worker silent for so long is given nothing new"] = 1.5
    stall_s: Annotated[float, "running without progress for so long is not ready"] = 30.0
    drain_s: Annotated[float, "longest time that SIGTERM waits for what was accepted"] = 300.0
    retry_after_s: Annotated[float, "what a refused client is told to wait"] = 1.0
    integrity: Annotated[str, "off, report, balanced, guarded or strict"] = "balanced"
    hold_tokens: Annotated[int, "guarded: tokens that wait for the monitor"] = 128
    witness_tokens_max: Annotated[int, "prefill tokens a minute for witnesses"] = 2_000_000
    witness_share: Annotated[float, "answers witnessed though nothing is suspected, 0 to 1"] = 0.0
    retries_share: Annotated[float, "retries a minute, of its requests, whatever for"] = 0.1
    retries_spare: Annotated[int, "retries a minute besides, for little traffic"] = 10
    breaker_faults: Annotated[int, "faults of a worker in 30 s, half of all, that shut it out"] = 5
    breaker_rest_s: Annotated[float, "how long it is shut out then"] = 5.0
    breaker_probes: Annotated[int, "requests that then try whether it is well"] = 1
    confirmed_max: Annotated[int, "confirmed answers that take a worker out; 0: never"] = 3
    confirmed_window_s: Annotated[float, "within so long"] = 600.0
    prefix_blocks_max: Annotated[int, "hashes of prompts kept, of all workers"] = 1_000_000
    baselines: Annotated[str, "file of healthy answers' baselines; empty: ours"] = ""
    record: Annotated[str, "folder to record requests to; empty: none are"] = ""
    record_content: Annotated[bool, "record what is asked and answered too"] = False
    record_max_gib: Annotated[float, "bound of the folder; the oldest is dropped"] = 4.0

    def check(self) -> None:
        if not self.api_keys and not _loopback(self.host):
            raise ConfigError(
                f"host {self.host} is beyond loopback: that needs at least one API key (api_keys)"
            )
        for name in _ONE_OR_MORE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        for name in _SECONDS:
            if not 0 < getattr(self, name) < 10**6:
                raise ConfigError(f"{name} must be a number of seconds above 0")
        for name in ("tool_call_parser", "reasoning_parser"):
            if getattr(self, name) not in PARSERS:
                raise ConfigError(f"{name} must be one of {', '.join(PARSERS)}")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0")
        own_quotas(self.quotas)
        ranges(self.priorities)
        if not -PRIORITY_MAX <= self.priority_best <= 0:
            raise ConfigError(f"priority_best must be from -{PRIORITY_MAX} to 0")
        if {*self.admin_keys} & {key.rpartition(":")[2] for key in self.api_keys}:
            raise ConfigError("admin_keys: a key of a tenant cannot be one of these too")
        if self.integrity not in get_args(Mode):
            raise ConfigError(f"integrity must be one of {', '.join(get_args(Mode))}")
        for name in _NONE_OR_MORE:
            if not 0 <= getattr(self, name) < 10**12:
                raise ConfigError(f"{name} must be 0 or more")
        if not 0 <= self.witness_share <= 1:
            raise ConfigError("witness_share must be from 0 to 1")
        if self.record_content and not self.record:
            raise ConfigError("record_content wants record: the folder to record to")
        if not 0.001 <= self.record_max_gib <= 2**20:
            raise ConfigError(f"record_max_gib must be from 0.001 to {2**20}")
        if not 0 <= self.port <= 65535:
            raise ConfigError("port must be from 0 to 65535")


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
