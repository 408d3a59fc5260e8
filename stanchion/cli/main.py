"""The `stanchion` command. The only reader of argv, of the environment and of settings files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from stanchion.cli.settings import read_config
from stanchion.core.config import Config, describe
from stanchion.core.errors import ServeError

SERVE = """\
Serve a model over an OpenAI-compatible API.

  stanchion serve                      the embedded model, on http://127.0.0.1:8000
  stanchion serve hashed               the hash model: text without sense, an exact instrument
  stanchion serve /models/GLM-5-small  config.json, *.safetensors, tokenizer.json

Every setting can be given as --set name=value or in a TOML file (--config); the flags below are
short names for the common ones. `stanchion settings` lists all of them with their defaults.
"""
FLAGS = {  # flag -> setting
    "host": "gateway.host",
    "port": "gateway.port",
    "served-model-name": "gateway.served_model_name",
    "kv-memory": "kv.memory_gib",
    "page-size": "kv.page_tokens",
    "draft-tokens": "engine.draft_tokens",
    "max-context": "engine.context_max",
    "dtype": "model.dtype",
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
    _chat(commands.add_parser("chat", help="talk to a server in the terminal"))
    _bench(commands.add_parser("bench", help="measure, side by side with what it replaces"))
    settings = commands.add_parser("settings", help="list every setting, its default and meaning")
    settings.set_defaults(run=_run_settings)
    return top


def _serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", help="tiny (default), hashed, or a folder")
    helps = {name: (default, text) for name, default, text in describe(Config())}
    for flag, name in FLAGS.items():
        default, text = helps[name]
        command.add_argument(f"--{flag}", metavar="X", help=f"{text} (default: {default!r})")
    command.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[NAME:]SECRET",
        help="require this key; may be repeated (also STANCHION_API_KEY)",
    )
    command.add_argument("--config", metavar="FILE", help="settings as TOML")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting"
    )
    command.set_defaults(run=_run_serve)


def _run_serve(arguments: argparse.Namespace) -> int:
    from stanchion.cli.serve import serve

    sets = []
    if arguments.model is not None:
        sets.append(f"model.path={arguments.model}")
    for flag, name in FLAGS.items():
        value = getattr(arguments, flag.replace("-", "_"))
        if value is not None:
            sets.append(f"{name}={value}")
    keys = arguments.api_key or list(filter(None, [os.environ.get("STANCHION_API_KEY")]))
    return serve(read_config(arguments.config, sets + arguments.set), tuple(keys))


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
    command.add_argument("name", choices=["engine"], help="which benchmark")
    command.add_argument("--quick", action="store_true", help="smaller and shorter: minutes")
    command.add_argument("--json", metavar="FILE", help="write machine, versions and raw runs")
    command.add_argument("--only", metavar="MEASURE", help="just this measure")
    command.set_defaults(run=_run_bench)


def _run_bench(arguments: argparse.Namespace) -> int:
    from stanchion.cli.bench.command import run

    return run(arguments.quick, arguments.json, arguments.only)


def _run_settings(arguments: argparse.Namespace) -> int:
    for name, default, text in describe(Config()):
        print(f"{name} = {default!r}\n    {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
