"""What `stanchion top` may be told."""

from __future__ import annotations

import argparse


def options(command: argparse.ArgumentParser, key: str) -> None:
    """`key`: the admin's, where none is given."""
    command.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    command.add_argument("--admin-key", help="also STANCHION_ADMIN_KEY")
    command.add_argument("--seconds", type=float, default=1.0, help="from one look to the next")
    command.add_argument("--once", action="store_true", help="one look, and no more")
    command.set_defaults(run=lambda arguments: _run(arguments, key))


def _run(arguments: argparse.Namespace, key: str) -> int:
    from stanchion.cli import top

    given = arguments.admin_key or key
    return top.run(arguments.url, given, arguments.seconds, arguments.once)
