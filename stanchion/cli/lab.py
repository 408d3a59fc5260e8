"""`stanchion anonymise` and `stanchion convert`: recordings made fit to leave, or for others."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any

import msgspec

from stanchion.core.errors import ConfigError

ANONYMISE = """\
Make a recording, or a public trace, fit to be given away: desensitised, yet replayable.

  stanchion anonymise RECORDING OUT                    hashes and pseudonyms; no content at all
  stanchion anonymise RECORDING OUT --level surrogate  other words in the places of all words
  stanchion anonymise RECORDING OUT --level secrets    content, with known kinds of secrets masked

Structure is kept exactly: lengths, times, sessions, and who shares how much of which prefix. Names
and hashes are made with a key that is drawn for this export, never written, and gone at the end.
What was tried against the export is printed, and written to OUT/privacy.json.

Exit code 0: no attack came through and the structure was kept; 1: one did, or it was not.
"""
CONVERT = """\
Read any trace, say what is in it, and write it for other tools.

  stanchion convert RECORDING                                      say what is in it
  stanchion convert RECORDING out.jsonl --to mooncake --block-tokens 512
  stanchion convert RECORDING out.jsonl --to weka                  blocks of 64 tokens
"""


def add(commands: Any) -> None:
    """The parsers of both commands."""
    plain = argparse.RawDescriptionHelpFormatter
    _anonymise(
        commands.add_parser(
            "anonymise",
            help="make a recording fit to be given away",
            description=ANONYMISE,
            formatter_class=plain,
        )
    )
    _convert(
        commands.add_parser(
            "convert",
            help="what is in a trace; and traces for other tools",
            description=CONVERT,
            formatter_class=plain,
        )
    )


def _source(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", metavar="IN", help="a recording's folder, or a trace's file")
    command.add_argument("--unit", choices=["ms", "s"], help="of a Mooncake file's timestamps")
    command.add_argument("--in-block-tokens", type=int, help="of a Mooncake file (default: 512)")


def _anonymise(command: argparse.ArgumentParser) -> None:
    _source(command)
    command.add_argument("out", metavar="OUT", help="a folder that is empty or not there")
    command.add_argument(
        "--level", choices=["hashes", "surrogate", "secrets"], default="hashes", help="see above"
    )
    command.add_argument(
        "--model",
        default="tiny",
        help="surrogate: whose tokenizer and template it was recorded for",
    )
    command.add_argument(
        "--time-step", type=float, default=0.0, metavar="S", help="round times down to it (0: keep)"
    )
    command.add_argument(
        "--guesses", type=int, default=1_000_000, help="of the dictionary attack (default: 1000000)"
    )
    command.set_defaults(run=_run_anonymise)


def _run_anonymise(arguments: argparse.Namespace) -> int:
    from stanchion.cli.settings import model_folder
    from stanchion.gateway.tokens import byte_vocabulary, load_vocabulary
    from stanchion.lab.anonymise.export import Settings, anonymise
    from stanchion.lab.anonymise.key import KEY_BYTES, Key
    from stanchion.lab.anonymise.report import PRIVACY

    settings = Settings(arguments.level, arguments.time_step, arguments.guesses)
    vocabulary = None
    if arguments.level == "surrogate":
        hashed = arguments.model == "hashed"
        vocabulary = byte_vocabulary() if hashed else load_vocabulary(model_folder(arguments.model))
    key, other = Key(secrets.token_bytes(KEY_BYTES)), Key(secrets.token_bytes(KEY_BYTES))
    out = Path(arguments.out)
    report = anonymise(_trace(arguments), out, settings, key, other, vocabulary)
    (out / PRIVACY).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print(report.text())
    return 0 if report.clean and (report.kept.exactly or report.level == "secrets") else 1


def _trace(arguments: argparse.Namespace) -> Any:
    from stanchion.lab.formats.options import Options
    from stanchion.lab.formats.sniff import read

    return read(Path(arguments.trace), Options(arguments.in_block_tokens, arguments.unit))


def _convert(command: argparse.ArgumentParser) -> None:
    _source(command)
    command.add_argument("out", metavar="OUT", nargs="?", help="the file to write")
    command.add_argument("--to", choices=["mooncake", "weka"], help="for whom")
    command.add_argument(
        "--block-tokens", type=int, help="what a hash covers (mooncake: 512, weka: 64)"
    )
    command.set_defaults(run=_run_convert)


def _run_convert(arguments: argparse.Namespace) -> int:
    from stanchion.lab.formats import mooncake, weka
    from stanchion.lab.structure import structure

    if (arguments.out is None) != (arguments.to is None):
        raise ConfigError("OUT and --to go together")
    if arguments.block_tokens is not None and arguments.block_tokens < 1:
        raise ConfigError(f"--block-tokens is {arguments.block_tokens}; it must be at least 1")
    trace = _trace(arguments)
    found = structure(trace)
    header, blocks = trace.header, sum(len(one.blocks) for one in trace)
    print(f"{header.source}, level {header.level}: {found.requests} requests, {trace.torn} torn")
    span = found.arrivals[-1] - found.arrivals[0] if found.arrivals else 0.0
    print(f"{len({one for one, _ in found.order})} sessions in {span:.0f} s")
    if header.block_tokens is not None and blocks:
        share = found.page_hits / blocks
        print(f"blocks of {header.block_tokens} tokens: {blocks}, {share:.1%} were there before")
    if arguments.to is None:
        return 0
    writer = mooncake if arguments.to == "mooncake" else weka
    size = arguments.block_tokens or writer.BLOCK_TOKENS
    written = writer.write(Path(arguments.out), trace, header, size)
    print(f"wrote {arguments.out} with blocks of {size} tokens: what is shared within one is lost")
    if written.unshared:
        print(f"{written.unshared} partial last blocks have unknown hashes: shared with nobody")
    return 0
