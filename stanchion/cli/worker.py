"""The worker process's entry: `python -m stanchion.cli.worker PLAN_JSON`."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
import torch
import zmq

from stanchion.cli import plan as plans
from stanchion.cli.plan import WorkerPlan
from stanchion.cli.ranks import Followers
from stanchion.cli.settings import SWITCH_S, model_folder
from stanchion.cli.tiers import tier_plan
from stanchion.core.config import Config
from stanchion.core.errors import ConfigError, ServeError
from stanchion.core.matching import Grammars
from stanchion.core.messages import Abort, Hello, Join, Start
from stanchion.core.peerkey import check_address, connect_with, serve_with
from stanchion.core.request import Sampling
from stanchion.disagg.assemble import (
    Post,
    arena_for,
    decode_side,
    incarnation,
    prefill_side,
    split_failpoints,
    unified_side,
)
from stanchion.disagg.link import DecodeLink, Link, PrefillLink, Socket
from stanchion.disagg.peer import Times
from stanchion.disagg.worker import Joining, Side, Worker, serve
from stanchion.engine.assemble import Parts, assemble, pages_that_fit
from stanchion.engine.loop import Engine
from stanchion.engine.others import Others
from stanchion.engine.ranks import owners, page_bytes
from stanchion.engine.scheduler import Limits
from stanchion.gateway.tokens import byte_vocabulary, load_vocabulary
from stanchion.model.hashed import HashModel
from stanchion.model.text import Model
from stanchion.parallel.group import RankLost

FRAME_BYTES_MAX = 256 * 2**20
WARM_TOKENS = 48


def run(plan: WorkerPlan, peer_key: str = "") -> int:
    """Build the worker, join, serve. Return the process's exit code: 2 for settings that do not
    fit this machine, or the cluster."""
    torch.set_num_threads(plan.config.engine.threads)
    try:
        with torch.inference_mode():
            return _run(plan, peer_key)
    except ServeError as error:
        print(f"stanchion: {error}", file=sys.stderr)
        return 2
    except RankLost as error:
        print(f"stanchion: {plan.name}: {error}; all its ranks end", file=sys.stderr)
        return 1


def _run(plan: WorkerPlan, peer_key: str) -> int:
    for name, address in (("join", plan.join), ("listen", plan.listen)):
        check_address(name, address, peer_key)
    config = plan.config
    failpoints = split_failpoints(config.lab.failpoints)
    layer_split = config.parallel.layer_split and plan.role != "decode"
    if failpoints.ranks and not config.parallel.layer_split:
        raise ConfigError(f"the failpoint {min(failpoints.ranks)} wants parallel.layer_split")
    followers = None
    if config.parallel.cp > 1 and plan.role != "decode":
        sends = layer_split and plan.role == "prefill"
        followers = Followers(config, failpoints.ranks, sends)
    parts, hello = build(plan, failpoints.engine, followers)
    context: zmq.Context[Socket] = zmq.Context()
    socket, address = _bound(context, plan, "w", peer_key)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a gateway that is gone is to be noticed
    post = _post(plan, hello, failpoints.handoff, followers)
    side: Side = unified_side(parts)
    link: Link | None = None
    if plan.role == "prefill" or config.kv.host_cache_gib:
        sys.setswitchinterval(SWITCH_S)
    if plan.role == "prefill":
        peers, peer_address = _bound(context, plan, "p", peer_key)
        kept_by = owners(parts.runner.model.schema, config.parallel.cp) if layer_split else None
        side, bell = prefill_side(parts, post, parts.others, kept_by)
        link = PrefillLink(side, peers, [bell, *(followers.descriptors if followers else ())])
        hello = msgspec.structs.replace(hello, peer_address=peer_address)
    elif plan.role == "decode":
        side, link = _decode(parts, post, context, peer_key)
    warm(parts.engine)
    gc.collect()
    gc.freeze()  # what was loaded stays: collections need not walk it again
    joining = _joining(context, plan, Join(address, hello), peer_key)
    try:
        refused = serve(Worker(side, hello, socket, joining, link, plan.parent))
    finally:
        if link is not None:
            link.close()
        if parts.engine.tiered is not None:
            parts.engine.tiered.tiers.close()
        if followers is not None:
            followers.close()
        context.destroy(linger=1000)
    for line in refused:
        print(f"stanchion: {plan.name} does not fit its cluster: {line}", file=sys.stderr)
    return 2 if refused else 0


def _post(
    plan: WorkerPlan, hello: Hello, failpoints: frozenset[str], followers: Followers | None
) -> Post:
    config = plan.config
    return Post(
        role=plan.role,
        name=plan.name,
        incarnation=hello.incarnation,
        identity=hello.identity,
        times=Times(
            silence_s=config.cluster.silence_s,
            drain_s=config.cluster.drain_s,
            deadline_s=config.cluster.prefill_deadline_s or float("inf"),
        ),
        check=config.kv.check,  # type: ignore[arg-type]  # one of them: config.check saw to it
        transport=config.cluster.transport,
        slow_transfer_ms=config.lab.slow_transfer_ms,
        failpoints=failpoints,
        others=followers.pids if followers is not None else (),
    )


def _decode(
    parts: Parts, post: Post, context: zmq.Context[Socket], peer_key: str
) -> tuple[Side, Link]:
    def watch(incarnation: int, pids: Sequence[int]) -> None:
        link.watch(incarnation, pids)

    side = decode_side(parts, post, watch)
    link = DecodeLink(side, context, lambda socket: connect_with(socket, peer_key))
    return side, link


def _bound(
    context: zmq.Context[Socket], plan: WorkerPlan, kind: str, peer_key: str
) -> tuple[Socket, str]:
    """A ROUTER where the plan says, and its address: each life of a worker has its own."""
    socket = context.socket(zmq.ROUTER)
    # A ROUTER drops frames beyond its mark without a word. What may queue is bounded by what was
    # accepted: at most one frame a token of each request, so there is no mark.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    serve_with(socket, peer_key)
    unix = plan.listen.startswith("ipc://")
    place = f"{plan.listen}/{kind}{os.getpid()}" if unix else f"{plan.listen}:*"
    try:
        socket.bind(place)
    except zmq.ZMQError as error:
        wanted = "a folder that is there" if unix else "tcp://HOST, without a port"
        raise ConfigError(f"--listen {plan.listen}: {error}; it must be {wanted}") from None
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _joining(context: zmq.Context[Socket], plan: WorkerPlan, join: Join, peer_key: str) -> Joining:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    connect_with(socket, peer_key)
    try:
        socket.connect(plan.join)
    except zmq.ZMQError as error:
        raise ConfigError(f"--join {plan.join}: {error}; it must be like tcp://HOST:PORT") from None
    return Joining(socket, join, plan.join)


def build(
    plan: WorkerPlan,
    failpoints: frozenset[str],
    followers: Followers | None = None,
) -> tuple[Parts, Hello]:
    """Load the model and put the engine together; with `followers` it is rank 0 of several.

    Raise ConfigError, WeightsError or RankLost.
    """
    config = plan.config
    model, name, revision, eos_ids = load_model(config)
    engine_settings = config.engine
    limits = Limits(
        chunk_tokens=engine_settings.chunk_tokens,
        running_max=engine_settings.running_max,
        waiting_max=engine_settings.waiting_max,
        draft_tokens=engine_settings.draft_tokens if model.schema.draft else 0,
    )
    layer_split = config.parallel.layer_split and plan.role != "decode"
    each = page_bytes(model.schema, config.parallel.cp, layer_split)
    pages = pages_that_fit(each, config.kv.memory_gib)
    ranks = None if followers is None else followers.start(pages)
    kept = model.schema if ranks is None else ranks.schema(model.schema)
    tiers = tier_plan(config, plan.name, model.schema, each)
    parts = assemble(
        model, limits, pages, name, revision, eos_ids, failpoints, config.lab.record_drafts,
        engine_settings.context_max, arena_for(plan.role, kept, pages), config.kv.poison,
        tiers, ranks, None if followers is None else Others(followers),
        grammars(config, eos_ids, model.vocabulary) if plan.role != "prefill" else None,
        config.lab.foreign_share,
    )  # fmt: skip
    hello = Hello(
        name=plan.name,
        role=plan.role,
        incarnation=incarnation(),
        pid=os.getpid(),
        peer_address="",
        identity={
            "model": name,
            "revision": revision,
            **model.schema.described(),
            "draft_tokens": str(limits.draft_tokens),
            "kv_check": config.kv.check,
            "context_max": str(parts.engine.served.context_max),
            "transport": config.cluster.transport,
            "version": version("stanchion"),
        },
        model=name,
        revision=revision,
        schema=model.schema.digest(),
        page_tokens=model.schema.page_tokens,
        pages=pages - 1,
        context_max=parts.engine.served.context_max,
        vocabulary=model.vocabulary,
        draft_tokens=limits.draft_tokens,
        eos_ids=eos_ids,
        failpoints=tuple(filter(None, config.lab.failpoints.split(","))),
    )
    return parts, hello


def warm(engine: Engine) -> None:
    """Compile what is compiled at first use: a peer must not take that for a hang. Nothing of it
    stays; what an earlier life left on disk does."""
    tiers = None if engine.tiered is None else engine.tiered.tiers
    disk = None
    if tiers is not None:
        disk, tiers.disk = tiers.disk, None
    room = (engine.pool.size - 1) * engine.ready.page_tokens
    count = max(1, min(WARM_TOKENS, room - 4, engine.served.context_max - 4))
    tokens = [one % engine.served.vocabulary for one in range(1, count + 1)]
    sampling = Sampling(max_tokens=3, seed=0, top_p=0.9, prompt_logprobs=0, logprobs=0)
    heard: list[Start | Abort] = [Start(request="warm", tokens=tokens, sampling=sampling)]
    while heard or engine.busy:
        engine.step(heard)
        heard = []
    engine.tree.flush()
    engine.counters = type(engine.counters)()
    if tiers is not None:
        tiers.flush()
        tiers.disk, tiers.counters = disk, type(tiers.counters)()


def load_model(config: Config) -> tuple[Model, str, str, tuple[int, ...]]:
    """The model, its name, its revision, and the tokens that end an answer."""
    drafts = config.engine.draft_tokens > 0
    if config.model.path == "hashed":
        model = HashModel(config.kv.page_tokens, drafts, config.model.hashed_top_k or None)
        return model, "hashed", f"1 top_k {model.top_k}", model.eos_ids
    from stanchion.model.load import load_glm  # the hash model needs none of it

    folder = model_folder(config.model.path)
    return load_glm(
        folder,
        config.kv.page_tokens,
        dtype=config.model.dtype,
        index_dtype=config.model.index_dtype,
        draft=drafts,
        deterministic=config.engine.deterministic,
        progress=_progress,
    )


def grammars(config: Config, eos_ids: Sequence[int], size: int) -> Grammars:
    """What answers under a grammar are followed with: the vocabulary as the gateway reads it."""
    path = config.model.path
    words = byte_vocabulary() if path == "hashed" else load_vocabulary(model_folder(path))
    return Grammars(words.pieces, words.special, eos_ids, size)


def _progress(done: int, total: int) -> None:
    """One line that grows on a terminal, a line a tenth elsewhere."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rloading weights {100 * done // total:3d} %", end=end, file=sys.stderr)
    elif done == total:
        print(f"loaded {total} tensors", file=sys.stderr)


def main(argv: list[str]) -> int:
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.WARNING)
    return run(plans.decode(argv[0]), os.environ.get("STANCHION_PEER_KEY", ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
