"""The `stanchion` command. The only reader of argv, of the environment and of settings files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from stanchion.cli import lab, look, run
from stanchion.cli.plan import Asked
from stanchion.cli.settings import read_config
from stanchion.core.config import Config, check, describe
from stanchion.core.errors import ConfigError, ServeError
from stanchion.core.messages import ROLES
from stanchion.core.peerkey import beyond_loopback, check_address
from stanchion.core.request import NAME_CHARACTERS_MAX

SERVE = """\
Serve a model over the OpenAI and the Anthropic API.

  stanchion serve                      the embedded model, on http://127.0.0.1:8000
  stanchion serve hashed               the hash model: text without sense, an exact instrument
  stanchion serve /models/GLM-5-small  config.json, *.safetensors, tokenizer.json
  stanchion serve --prefill 1 --decode 2   prompts and answers computed by workers of their own
  stanchion serve --cp 2 --layer-split     a worker of two ranks, each with half the layers' KV

Every setting can be given as --set name=value or in a TOML file (--config); the flags below are
short names for the common ones. `stanchion settings` lists all of them with their defaults.
"""
WORKER = """\
Run one worker for a gateway that was started elsewhere, with `stanchion serve --join ADDRESS`.

  stanchion worker --role decode --join tcp://10.0.0.1:7000 --listen tcp://10.0.0.2 MODEL

All workers of a cluster must agree on the model and on how its KV is laid out; one that does not
is refused, and told what differs. `--listen` is this machine's address, as the others reach it.
"""
GATEWAY = """\
Put the gateway, its monitor and its witnesses in front of servers that run already.

  stanchion gateway --upstream http://10.0.0.1:8000 --upstream http://10.0.0.2:8000 \\
      --tokenizer /models/GLM-5        vLLM or SGLang, found out by asking; ids go both ways
  stanchion gateway --upstream-prefill http://10.0.0.1:8000 \\
      --upstream-decode http://10.0.0.2:8000 --tokenizer /models/GLM-5
  stanchion gateway --upstream https://api.example.com      any server with OpenAI's API: text

vllm:, sglang: or openai: before an address says what it is. What a server does not give the
monitor is in /metrics (stanchion:monitor_signals) and in docs/UPSTREAMS.md.
"""
VERIFY = """\
Run the hash model over the topology that you would serve with, under a storm of requests, aborts
and deadlines, and compare every answer with the same request alone. Memtest for the KV path.

  stanchion verify --prefill 2 --decode 1 --minutes 5
  stanchion verify --prefill 1 --decode 1 --transport nixl --requests 10000 --kills 20 --stops 20
  stanchion verify --cp 2 --layer-split --context 16384
  stanchion verify --host-cache 0.01 --kv-memory 0.005 --disk-cache /tmp/kv:0.1 --kv-check full
  stanchion verify --prefill 2 --decode 1 --prefill-deadline 0.3 --failpoint release_before_drained

Exit code 0: all was right; 1: a wrong answer, or a page left over; 2: it could not be run.
"""
Flags = dict[str, str]  # flag -> setting
WORKER_FLAGS: Flags = {
    "kv-memory": "kv.memory_gib",
    "kv-check": "kv.check",
    "kv-poison": "kv.poison",
    "host-cache": "kv.host_cache_gib",
    "disk-cache": "kv.disk_cache",
    "write-policy": "kv.write_policy",
    "prefetch-policy": "kv.prefetch",
    "page-size": "kv.page_tokens",
    "draft-tokens": "engine.draft_tokens",
    "max-context": "engine.context_max",
    "cp": "parallel.cp",
    "layer-split": "parallel.layer_split",
    "dtype": "model.dtype",
    "transport": "cluster.transport",
    "prefill-deadline": "cluster.prefill_deadline_s",
}
VERIFY_FLAGS: Flags = {
    "prefill": "cluster.prefill",
    "decode": "cluster.decode",
    "both": "cluster.both",
    **WORKER_FLAGS,
}
UPSTREAM_FLAGS = {  # may be repeated: setting, and what it is
    "upstream": ("upstream.urls", "a server that does both; may be repeated"),
    "upstream-prefill": ("upstream.prefill", "one that computes prompts for pairs"),
    "upstream-decode": ("upstream.decode", "one that answers, in pairs"),
}
GATEWAY_FLAGS: Flags = {
    "host": "gateway.host",
    "port": "gateway.port",
    "served-model-name": "gateway.served_model_name",
    "tool-call-parser": "gateway.tool_call_parser",
    "reasoning-parser": "gateway.reasoning_parser",
    "integrity": "gateway.integrity",
    "tokenizer": "upstream.tokenizer",
    "upstream-model": "upstream.model",
}
SERVE_FLAGS: Flags = {
    "host": "gateway.host",
    "port": "gateway.port",
    "served-model-name": "gateway.served_model_name",
    "tool-call-parser": "gateway.tool_call_parser",
    "reasoning-parser": "gateway.reasoning_parser",
    "join": "cluster.join",
    "integrity": "gateway.integrity",
    "record": "gateway.record",
    "record-content": "gateway.record_content",
    "record-max-gib": "gateway.record_max_gib",
    **VERIFY_FLAGS,
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ServeError as error:
        print(f"stanchion: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="stanchion",
        description="Serves GLM-5-family models and keeps their output right under load.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _serve(serve)
    gateway = commands.add_parser(
        "gateway",
        help="the gateway alone, in front of vLLM, SGLang or others",
        description=GATEWAY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _gateway(gateway)
    worker = commands.add_parser(
        "worker",
        help="run one worker for a gateway elsewhere",
        description=WORKER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _worker(worker)
    verify = commands.add_parser(
        "verify",
        help="is every answer right under load, here?",
        description=VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _verify(verify)
    _chat(commands.add_parser("chat", help="talk to a server in the terminal"))
    shown = commands.add_parser("top", help="workers, requests and verdicts of a running server")
    look.options(shown, os.environ.get("STANCHION_ADMIN_KEY", ""))
    _bench(commands.add_parser("bench", help="measure, side by side with what it replaces"))
    lab.add(commands)
    run.add(commands)
    settings = commands.add_parser("settings", help="list every setting, its default and meaning")
    settings.set_defaults(run=_run_settings)
    return top


def _serve(command: argparse.ArgumentParser) -> None:
    _model(command, SERVE_FLAGS)
    _keys(command)
    command.set_defaults(run=_run_serve)


def _keys(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[NAME:]SECRET",
        help="require this key; may be repeated (also STANCHION_API_KEY)",
    )
    command.add_argument(
        "--admin-key",
        action="append",
        default=[],
        metavar="SECRET",
        help="opens /admin, which nothing does otherwise; may be repeated (also "
        "STANCHION_ADMIN_KEY)",
    )


def _model(
    command: argparse.ArgumentParser,
    flags: Flags,
    model: str = "tiny (default), hashed, or a folder",
) -> None:
    """What gateway and workers are told alike."""
    command.add_argument("model", nargs="?", help=model)
    _flags(command, flags)
    command.add_argument(
        "--peer-key",
        metavar="SECRET",
        help="what the cluster's processes share; better: STANCHION_PEER_KEY",
    )


def _flags(command: argparse.ArgumentParser, flags: Flags) -> None:
    settings = {name: (default, text) for name, default, text in describe(Config())}
    for flag, name in flags.items():
        default, text = settings[name]
        words = f"{text} (default: {default!r})"
        if isinstance(default, bool):
            command.add_argument(f"--{flag}", action="store_const", const="true", help=words)
        else:
            command.add_argument(f"--{flag}", metavar="X", help=words)
    command.add_argument("--config", metavar="FILE", help="settings as TOML")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting"
    )


def _config(arguments: argparse.Namespace, flags: Flags) -> Config:
    sets = []
    if getattr(arguments, "model", None) is not None:
        sets.append(f"model.path={arguments.model}")
    for flag, name in flags.items():
        value = getattr(arguments, flag.replace("-", "_"))
        if value is not None:
            sets.append(f"{name}={value}")
    return read_config(arguments.config, sets + arguments.set)


def _peer_key(arguments: argparse.Namespace) -> str:
    return arguments.peer_key or os.environ.get("STANCHION_PEER_KEY", "")


def _run_serve(arguments: argparse.Namespace) -> int:
    from stanchion.cli.serve import serve

    keys, admin = _given_keys(arguments)
    config = _config(arguments, SERVE_FLAGS)
    return serve(config, keys, _peer_key(arguments), admin)


def _given_keys(arguments: argparse.Namespace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of clients, and of who may use /admin."""
    keys = arguments.api_key or list(filter(None, [os.environ.get("STANCHION_API_KEY")]))
    admin = arguments.admin_key or list(filter(None, [os.environ.get("STANCHION_ADMIN_KEY")]))
    return tuple(keys), tuple(admin)


def _gateway(command: argparse.ArgumentParser) -> None:
    for flag, (_, words) in UPSTREAM_FLAGS.items():
        command.add_argument(f"--{flag}", action="append", metavar="URL", help=words)
    _flags(command, GATEWAY_FLAGS)
    _keys(command)
    command.add_argument(
        "--upstream-api-key",
        metavar="SECRET",
        help="sent to the servers as a bearer token; better: STANCHION_UPSTREAM_API_KEY",
    )
    command.set_defaults(run=_run_gateway)


def _run_gateway(arguments: argparse.Namespace) -> int:
    from stanchion.cli.front import front

    for flag, (setting, _) in UPSTREAM_FLAGS.items():
        if urls := getattr(arguments, flag.replace("-", "_")):
            arguments.set.append(f"{setting}={','.join(urls)}")
    keys, admin = _given_keys(arguments)
    key = arguments.upstream_api_key or os.environ.get("STANCHION_UPSTREAM_API_KEY", "")
    return front(_config(arguments, GATEWAY_FLAGS), keys, key, admin)


def _worker(command: argparse.ArgumentParser) -> None:
    _model(command, WORKER_FLAGS)
    command.add_argument("--role", choices=ROLES, required=True)
    command.add_argument("--join", metavar="ADDRESS", required=True, help="where the gateway is")
    command.add_argument("--name", help="its name in the cluster; a new one takes its place")
    command.add_argument(
        "--listen", metavar="tcp://HOST", default="tcp://127.0.0.1", help="where it can be reached"
    )
    command.set_defaults(run=_run_worker)


def _run_worker(arguments: argparse.Namespace) -> int:
    from stanchion.cli.plan import WorkerPlan, armed

    key, config = _peer_key(arguments), _config(arguments, WORKER_FLAGS)
    check(config)
    check_address("--join", arguments.join, key)
    check_address("--listen", arguments.listen, key)
    if beyond_loopback(arguments.join) and not beyond_loopback(arguments.listen):
        raise ConfigError(
            f"--listen {arguments.listen}: a gateway at {arguments.join} may be on another "
            "machine and could not reach this worker; give --listen tcp://HOST of this machine"
        )
    if arguments.name is not None and not 0 < len(arguments.name) <= NAME_CHARACTERS_MAX:
        raise ConfigError(f"--name must have 1 to {NAME_CHARACTERS_MAX} characters")
    if config.kv.disk_cache and arguments.name is None:
        raise ConfigError("--disk-cache wants --name: its next life finds its folder by it")
    name = arguments.name or f"{arguments.role}-{os.uname().nodename[:64]}-{os.getpid()}"
    plan = WorkerPlan(
        name=name,
        role=arguments.role,
        join=arguments.join,
        listen=arguments.listen,
        parent=0,
        config=armed(config, name),
    )
    from stanchion.cli.worker import run  # needs torch, which the gateway does without

    return run(plan, key)


def _verify(command: argparse.ArgumentParser) -> None:
    _model(command, VERIFY_FLAGS, "the hash model: it may be left out")
    plain = Asked()
    command.add_argument("--requests", type=int, help="stop after so many (default: 2000)")
    command.add_argument("--minutes", type=float, help="stop after so long")
    command.add_argument("--seed", type=int, default=plain.seed, help="of traffic and troubles")
    command.add_argument(
        "--context", type=_tokens, default=plain.context, help="tokens, at most; 70k is 70,000"
    )
    command.add_argument("--concurrency", type=int, default=plain.concurrency)
    command.add_argument("--variety", type=int, default=plain.variety, help="different requests")
    command.add_argument(
        "--abort-one-in", type=int, default=plain.abort_one_in, help="clients that leave; 0: none"
    )
    command.add_argument("--kills", type=int, default=0, help="SIGKILLs at random")
    command.add_argument("--stops", type=int, default=0, help="SIGSTOPs at random")
    command.add_argument(
        "--failpoint", action="append", default=[], metavar="NAME", help="bring a fault back"
    )
    command.add_argument("--json", metavar="FILE", help="write all counts, and wrong answers whole")
    command.add_argument(
        "--url",
        help="burn in a server that runs already, of whichever engine: only what HTTP shows counts",
    )
    command.add_argument("--api-key", default="", help="of that server")
    command.set_defaults(run=_run_verify)


def _tokens(said: str) -> int:
    number = said.removesuffix("k")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{said!r} is no number of tokens; such as 70000 or 70k")
    return int(number) * (1000 if said.endswith("k") else 1)


def _run_burn_in(arguments: argparse.Namespace) -> int:
    from stanchion.cli.burnin import QUIET_REQUESTS, burn_in
    from stanchion.lab.burnin import Storm

    plain = Storm()
    storm = replace(
        plain,
        requests=plain.requests if arguments.requests is None else arguments.requests,
        seed=arguments.seed,
        concurrency=arguments.concurrency,
    )
    key = arguments.api_key or os.environ.get("STANCHION_API_KEY", "")
    return burn_in(arguments.url, key, storm, QUIET_REQUESTS, arguments.json)


def _run_verify(arguments: argparse.Namespace) -> int:
    if arguments.url is not None:
        return _run_burn_in(arguments)
    config = _config(arguments, VERIFY_FLAGS)
    names = ",".join(filter(None, [config.lab.failpoints, *arguments.failpoint]))
    config = replace(config, lab=replace(config.lab, failpoints=names))
    check(config)
    from stanchion.cli.verify import verify  # needs torch

    shared = {one.name: getattr(arguments, one.name) for one in fields(Asked)}
    return verify(config, Asked(**shared), arguments.json)


def _chat(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    command.add_argument("--model", help="the model's name (default: the first one served)")
    command.add_argument("--api-key", default=None, help="also STANCHION_API_KEY")
    command.add_argument("--system", help="a system message")
    command.add_argument("--temperature", type=float, default=0.7)
    command.add_argument("--max-tokens", type=int, default=512)
    command.set_defaults(run=_run_chat)


def _run_chat(arguments: argparse.Namespace) -> int:
    from stanchion.cli import chat

    return chat.run(
        url=arguments.url,
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("STANCHION_API_KEY"),
        system=arguments.system,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
    )


def _bench(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name",
        choices=[
            *("engine", "handoff", "tiers", "layersplit", "gateway", "monitor"),
            *("recording", "replay"),
        ],
        help="which benchmark",
    )
    command.add_argument("--quick", action="store_true", help="smaller and shorter: minutes")
    command.add_argument("--json", metavar="FILE", help="write machine, versions and raw runs")
    command.add_argument("--only", metavar="MEASURE", help="just this measure")
    command.add_argument(
        "--peers", metavar="FOLDER", help="gateway: what runs/gateway_peers.sh installed"
    )
    command.add_argument(
        "--set", metavar="FOLDER", help="monitor: where its labelled set is, or is to be made"
    )
    command.set_defaults(run=_run_bench)


def _run_bench(arguments: argparse.Namespace) -> int:
    from stanchion.cli.bench.command import Folders, run

    said = (arguments.set, arguments.peers)
    folders = Folders(*(Path(one) if one is not None else None for one in said))
    return run(arguments.name, arguments.quick, arguments.json, arguments.only, folders)


def _run_settings(arguments: argparse.Namespace) -> int:
    for name, default, text in describe(Config()):
        print(f"{name} = {default!r}\n    {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
