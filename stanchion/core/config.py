"""Settings: frozen dataclasses are the only list of them.

One declaration gives the TOML key, the `--set` name, the default, the type and the help line.
Settings are read once, in `cli`, and never change; what is worked out from them and from the
hardware (how many pages fit) is a plan, a different object.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from stanchion.core.errors import ConfigError

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Model:
    path: Annotated[str, "'tiny' (embedded), 'hashed' (the instrument), or a folder"] = "tiny"
    dtype: Annotated[str, "compute type: float32 or bfloat16"] = "float32"
    index_dtype: Annotated[str, "index keys in the cache: same (as dtype) or float8"] = "same"
    hashed_top_k: Annotated[int, "hashed only: rows attended; 0 means all"] = 0


@dataclass(frozen=True)
class Kv:
    memory_gib: Annotated[float, "memory for the KV cache"] = 1.0
    page_tokens: Annotated[int, "tokens in a page"] = 16
    check: Annotated[str, "digests of KV pages: off, sampled (1 in 16) or full"] = "off"
    poison: Annotated[bool, "overwrite pages when they are freed; for tests, it costs time"] = False
    host_cache_gib: Annotated[float, "host memory for KV that leaves the device; 0: none"] = 0.0
    disk_cache: Annotated[
        str, "PATH:GIB for KV that leaves host memory, kept over restarts; empty means none"
    ] = ""
    write_policy: Annotated[
        str,
        "when KV goes to the host: through (at once), selective (once hit), back (evicted)",
    ] = "through"
    prefetch: Annotated[
        str, "for KV that only the disk has: wait, best_effort (do not), timeout (2 s + 0.1 s/Ki)"
    ] = "timeout"


@dataclass(frozen=True)
class Engine:
    draft_tokens: Annotated[int, "drafts a verify step (0 to 5); 0 turns speculation off"] = 3
    context_max: Annotated[int, "tokens of prompt and answer; 0 means the model's own"] = 0
    chunk_tokens: Annotated[int, "prefill tokens a flight, at most"] = 512
    running_max: Annotated[int, "requests computed at once"] = 64
    waiting_max: Annotated[int, "requests that may wait; more are refused with 429"] = 1024
    deterministic: Annotated[
        bool, "demand outputs that no batch changes; on CPUs they always are so"
    ] = False
    threads: Annotated[int, "OpenMP threads of the engine process"] = 1


@dataclass(frozen=True)
class Gateway:
    host: Annotated[str, "address to bind; beyond loopback an API key is required"] = "127.0.0.1"
    port: Annotated[int, "port to bind; 0 takes a free one"] = 8000
    served_model_name: Annotated[str, "name in the API; empty means the model's own"] = ""
    tool_call_parser: Annotated[
        str, "tool calls: auto (by the chat template), glm (GLM-4.5 to GLM-5) or none"
    ] = "auto"
    reasoning_parser: Annotated[
        str, "reasoning: auto (by the chat template), glm (<think>...</think>) or none"
    ] = "auto"
    requests_per_minute: Annotated[int, "of each tenant; 0 means no bound"] = 0
    tokens_per_minute: Annotated[int, "prompts and answers of each tenant; 0: no bound"] = 0
    quotas: Annotated[
        str, "NAME=REQUESTS:TOKENS a minute, ... for tenants with quotas of their own"
    ] = ""
    in_flight_max: Annotated[int, "requests accepted at once; more wait, or get 429"] = 256
    waiting_max: Annotated[int, "requests that wait for room, most urgent first; 0: none"] = 0
    waiting_s: Annotated[float, "longest time that one waits for room"] = 30.0
    drain_s: Annotated[float, "how long SIGTERM waits for what was accepted"] = 300.0
    integrity: Annotated[
        str, "what is done about wrong output: off, report, balanced, guarded or strict"
    ] = "balanced"
    hold_tokens: Annotated[int, "guarded: tokens that wait until the monitor cleared them"] = 128
    witness_tokens_max: Annotated[int, "prefill tokens a minute for witnesses"] = 2_000_000
    witness_share: Annotated[
        float, "share of answers that are witnessed though nothing is suspected, 0 to 1"
    ] = 0.0
    retries_share: Annotated[float, "retries a minute, as a share of requests"] = 0.1
    retries_spare: Annotated[int, "retries a minute besides, for little traffic"] = 10
    breaker_faults: Annotated[int, "faults of a worker in 30 s, half of all, that shut it out"] = 5
    breaker_rest_s: Annotated[float, "how long it is shut out then"] = 5.0
    breaker_probes: Annotated[int, "requests that then try whether it is well"] = 1
    confirmed_max: Annotated[
        int, "confirmed answers within a window that take a worker out of rotation; 0: never"
    ] = 3
    confirmed_window_s: Annotated[float, "how long that window is"] = 600.0
    prefix_blocks_max: Annotated[int, "hashes of prompts kept to route by, of all workers"] = (
        1_000_000
    )
    priority_best: Annotated[int, "the most urgent priority that tenants may ask for"] = 0
    priorities: Annotated[
        str, "NAME=USUAL:BEST, ... for tenants with priorities of their own; lower is earlier"
    ] = ""
    baselines: Annotated[str, "file of what healthy answers look like; empty: the one here"] = ""
    record: Annotated[str, "folder to record requests to, without content; empty: none are"] = ""
    record_content: Annotated[bool, "record what is asked and answered, too"] = False
    record_max_gib: Annotated[float, "bound of that folder; its oldest part is dropped"] = 4.0


@dataclass(frozen=True)
class Upstream:
    urls: Annotated[
        str, "servers behind `stanchion gateway`, comma separated; vllm:, sglang: or openai: before"
    ] = ""
    prefill: Annotated[str, "those that compute prompts for others (pairs), comma separated"] = ""
    decode: Annotated[str, "those that answer with the KV of others, comma separated"] = ""
    tokenizer: Annotated[
        str, "folder of the model's tokenizer.json and chat template; empty: text is handed through"
    ] = ""
    model: Annotated[str, "which of the servers' models; empty: their first"] = ""
    connect_s: Annotated[float, "longest time to connect to one"] = 5.0
    read_s: Annotated[float, "longest silence of one amid an answer, waiting included"] = 300.0
    poll_s: Annotated[float, "from one look at a server to the next"] = 0.5


@dataclass(frozen=True)
class Cluster:
    prefill: Annotated[int, "prefill workers"] = 0
    decode: Annotated[int, "decode workers"] = 0
    both: Annotated[int, "workers that do both; 1 if there are no others"] = 0
    join: Annotated[str, "where workers may join (tcp://HOST:PORT); empty: a private socket"] = ""
    transport: Annotated[str, "how KV moves from prefill to decode: shm or nixl"] = "shm"
    prefill_deadline_s: Annotated[
        float, "from a request's arrival to the last of its KV on decode; 0 means none"
    ] = 0.0
    silence_s: Annotated[float, "a peer that is silent for so long is suspected, and killed"] = 10.0
    suspect_s: Annotated[
        float, "a worker that is silent for so long gets nothing new, where others could take it"
    ] = 1.5
    drain_s: Annotated[float, "a cancelled handoff may take so long before its peer is"] = 60.0
    restarts_max: Annotated[int, "restarts of one worker within a minute before giving up"] = 5


@dataclass(frozen=True)
class Parallel:
    cp: Annotated[int, "ranks (processes) that share the prefill of one worker"] = 1
    layer_split: Annotated[
        bool, "each rank keeps its own layers of the KV cache, instead of all of them"
    ] = False
    split: Annotated[str, "who computes which tokens: zigzag, interleaved or contiguous"] = "zigzag"
    collectives: Annotated[str, "how ranks share what they computed: shm or gloo"] = "shm"


@dataclass(frozen=True)
class Lab:
    failpoints: Annotated[
        str, "historic faults to bring back, comma separated, NAME@WORKER in one; never in use"
    ] = ""
    foreign_share: Annotated[float, "of the requests, that the failpoint foreign_write harms"] = 1.0
    slow_transfer_ms: Annotated[float, "hold every KV write back so long; harmless"] = 0.0
    slow_broadcast_ms: Annotated[float, "hold every broadcast of KV back so long; harmless"] = 0.0
    rows_to_queries: Annotated[
        bool, "with layer_split decode steps have rows sent to them, as prefill has; to compare"
    ] = False
    slow_load: Annotated[
        str, "LAYER/DOOR:MS, ... holds such loads from the host back; * for all; harmless"
    ] = ""
    removed_door: Annotated[str, "LAYER/DOOR that the failpoint door_removed opens too early"] = ""
    record_drafts: Annotated[bool, "say every draft and accept count when a request ends"] = False


@dataclass(frozen=True)
class Config:
    model: Annotated[Model, "what is served"] = field(default_factory=Model)
    kv: Annotated[Kv, "KV cache"] = field(default_factory=Kv)
    engine: Annotated[Engine, "scheduling and speculation"] = field(default_factory=Engine)
    gateway: Annotated[Gateway, "the HTTP side"] = field(default_factory=Gateway)
    cluster: Annotated[Cluster, "how many workers, and how they work together"] = field(
        default_factory=Cluster
    )
    upstream: Annotated[Upstream, "foreign servers, for `stanchion gateway`"] = field(
        default_factory=Upstream
    )
    parallel: Annotated[Parallel, "several ranks for one worker"] = field(default_factory=Parallel)
    lab: Annotated[Lab, "switches for tests and experiments"] = field(default_factory=Lab)


def load(defaults: Tree, text: str, sets: list[str]) -> Tree:
    """Lay the TOML `text` over `defaults`, and each "a.b=value" of `sets` over that.

    Raise ConfigError naming the setting that does not exist or does not fit.
    """
    try:
        config = _overlay(defaults, tomllib.loads(text), "")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings are not TOML: {error}") from None
    for item in sets:
        path, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set wants name=value, not {item!r}")
        config = _overlay(config, _nested(path.split("."), value), "")
    return config


def describe(defaults: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (name, default, help) for every setting: the docs page and `--help` are this."""
    hints = get_type_hints(type(defaults), include_extras=True)
    for one in fields(defaults):
        value = getattr(defaults, one.name)
        if is_dataclass(value):
            yield from describe(value, f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, value, get_args(hints[one.name])[1]


def check(config: Config) -> None:
    """Raise ConfigError for the first setting out of its bounds."""
    engine, kv, gateway, cluster = config.engine, config.kv, config.gateway, config.cluster
    _within("engine.draft_tokens", engine.draft_tokens, 0, 5)
    _within("engine.context_max", engine.context_max, 0, 2**22)
    _within("engine.chunk_tokens", engine.chunk_tokens, 1, 2**16)
    _within("engine.running_max", engine.running_max, 1, 4096)
    _within("engine.waiting_max", engine.waiting_max, 1, 2**20)
    _within("engine.threads", engine.threads, 1, 1024)
    _within("kv.page_tokens", kv.page_tokens, 1, 1024)
    _within("kv.memory_gib", kv.memory_gib, 0.001, 16384.0)
    _within("model.hashed_top_k", config.model.hashed_top_k, 0, 2**20)
    _within("gateway.port", gateway.port, 0, 65535)
    for name in ("tool_call_parser", "reasoning_parser"):
        _one_of(f"gateway.{name}", getattr(gateway, name), ("auto", "glm", "none"))
    for name in ("requests_per_minute", "tokens_per_minute"):
        _within(f"gateway.{name}", getattr(gateway, name), 0, 2**40)
    _within("gateway.in_flight_max", gateway.in_flight_max, 1, 2**20)
    _within("gateway.drain_s", gateway.drain_s, 0.0, 86400.0)
    for name in ("prefill", "decode", "both"):
        _within(f"cluster.{name}", getattr(cluster, name), 0, 1024)
    if bool(cluster.prefill) != bool(cluster.decode):
        raise ConfigError("cluster.prefill and cluster.decode: a pair needs at least one of each")
    _within("cluster.prefill_deadline_s", cluster.prefill_deadline_s, 0.0, 86400.0)
    _within("cluster.silence_s", cluster.silence_s, 0.5, 3600.0)
    _within("cluster.suspect_s", cluster.suspect_s, 0.3, 3600.0)
    _within("cluster.drain_s", cluster.drain_s, 0.5, 86400.0)
    _within("cluster.restarts_max", cluster.restarts_max, 0, 1000)
    _within("upstream.connect_s", config.upstream.connect_s, 0.01, 3600.0)
    _within("upstream.read_s", config.upstream.read_s, 0.1, 86400.0)
    _within("upstream.poll_s", config.upstream.poll_s, 0.05, 60.0)
    _within("lab.slow_transfer_ms", config.lab.slow_transfer_ms, 0.0, 60_000.0)
    _one_of("kv.check", kv.check, ("off", "sampled", "full"))
    _within("kv.host_cache_gib", kv.host_cache_gib, 0.0, 16384.0)
    _one_of("kv.write_policy", kv.write_policy, ("through", "selective", "back"))
    _one_of("kv.prefetch", kv.prefetch, ("wait", "best_effort", "timeout"))
    if kv.disk_cache and not kv.host_cache_gib:
        raise ConfigError("kv.disk_cache wants kv.host_cache_gib too: the disk is behind the host")
    disk_cache(kv.disk_cache)
    _check_parallel(config)
    _within("lab.foreign_share", config.lab.foreign_share, 0.0, 1.0)
    slow_load(config.lab.slow_load)
    removed_door(config.lab.removed_door)
    _one_of("cluster.transport", cluster.transport, ("shm", "nixl"))
    _one_of("model.dtype", config.model.dtype, ("float32", "bfloat16", "float16"))
    _one_of("model.index_dtype", config.model.index_dtype, ("same", "float8"))


def _check_parallel(config: Config) -> None:
    parallel = config.parallel
    _within("parallel.cp", parallel.cp, 1, 64)
    _one_of("parallel.split", parallel.split, ("zigzag", "interleaved", "contiguous"))
    _one_of("parallel.collectives", parallel.collectives, ("shm", "gloo"))
    _within("lab.slow_broadcast_ms", config.lab.slow_broadcast_ms, 0.0, 60_000.0)
    if parallel.layer_split and parallel.cp == 1:
        raise ConfigError("parallel.layer_split wants parallel.cp of at least 2")
    if parallel.cp > 1 and config.kv.disk_cache:
        raise ConfigError("kv.disk_cache with parallel.cp above 1: ranks have no disks yet")


def disk_cache(said: str) -> tuple[str, int] | None:
    """(folder, bytes) of "PATH:GIB". Raise ConfigError."""
    if not said:
        return None
    folder, _, size = said.rpartition(":")
    try:
        gib = float(size)
    except ValueError:
        gib = 0.0
    if not folder or not 0.001 <= gib <= 2**20:
        raise ConfigError(
            f"kv.disk_cache is {said!r}; it must be PATH:GIB, such as /data/kv:100 (at least 0.001)"
        )
    return folder, int(gib * 2**30)


def removed_door(said: str) -> tuple[int, str] | None:
    """(layer, door) of "LAYER/DOOR". Raise ConfigError."""
    if not said:
        return None
    layer, _, door = said.partition("/")
    if not (layer.isdecimal() and door in ("index", "attend")):
        raise ConfigError(f"{said!r} must be LAYER/DOOR, such as 3/index")
    return int(layer), door


def slow_load(said: str) -> dict[tuple[int, str] | None, float]:
    """Milliseconds by (layer, door); None stands for all others. Raise ConfigError."""
    delays: dict[tuple[int, str] | None, float] = {}
    for item in filter(None, (one.strip() for one in said.split(","))):
        place, _, words = item.rpartition(":")
        try:
            ms = float(words)
        except ValueError:
            ms = -1.0
        if not 0 <= ms <= 60_000 or not place:
            raise ConfigError(f"lab.slow_load has {item!r}; it must be LAYER/DOOR:MS or *:MS")
        delays[None if place == "*" else removed_door(place)] = ms
    return delays


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}; it must be from {least} to {most}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def _overlay(config: Tree, values: dict[str, Any], where: str) -> Tree:
    known = {one.name for one in fields(config)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"no setting {where}{unknown[0]}; there are: {', '.join(sorted(known))}")
    fitted = {name: _fit(getattr(config, name), new, where + name) for name, new in values.items()}
    return replace(config, **fitted)  # type: ignore[type-var]


def _fit(old: Any, new: Any, name: str) -> Any:
    if is_dataclass(old):
        if not isinstance(new, dict):
            raise ConfigError(f"{name} is a table of settings, not {new!r}")
        return _overlay(old, new, f"{name}.")
    try:
        if isinstance(old, bool):
            return {"true": True, "false": False}[str(new).lower()]
        if isinstance(new, bool | dict | list):
            raise ValueError
        return type(old)(new)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} wants a {type(old).__name__}, not {new!r}") from None


def _nested(path: list[str], value: str) -> dict[str, Any]:
    head, *rest = path
    return {head: _nested(rest, value) if rest else value}
