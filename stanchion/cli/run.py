"""The commands of the lab that make runs and read them: replay, detect, ablate, report."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stanchion.core.errors import ConfigError

if TYPE_CHECKING:
    from stanchion.cli.replay_asked import Asked

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

REPLAY = """\
Send a trace to any server of OpenAI's API, at its recorded times, and write down all that came.

  stanchion replay recording/ --url http://127.0.0.1:8000 --out runs/one
  stanchion replay mooncake.jsonl --url U --out runs/two --speed 1x60,2x60,4 --copies 3
  stanchion replay sessions.jsonl --url U --out runs/three --loop session --block-tokens 4
  stanchion replay recording/ --out runs/sweep --pd-sweep 1:1,2:1,1:2 --serve "tiny --kv-memory 1"
  stanchion replay runs/one --solo REQUEST --times 500 --url U --out runs/alone

A run that was cut off goes on when the same command is given again. Exit code 0: a valid run;
1: not valid (the generator was late, or requests are missing); 2: it could not be run.
"""
DETECT = """\
Look at every answer of a run: the gateway's own folds (loops, scripts, rare tokens, acceptance),
and simple judges beside them. With a reference, say what each is worth: recall and precision.

  stanchion detect runs/one
  stanchion detect runs/one --reference runs/alone

A reference is a run whose answers are right: the same questions alone, or under no load. Writes
RUN/detect.json, and RUN/detect.md with the most suspect answers beside the reference's.
"""
ABLATE = """\
Run a plan of arms: the same trace against servers that differ in one thing, in blocks that take
turns. Sizes are fixed beforehand, and it is judged once, when all is in.

  trace = "sessions.jsonl"
  requests = 2000               # of each arm
  block = 200
  baseline = "both faults"
  expect = [0.01, 0.0]          # rates to tell apart: it says how many requests that needs
  replay = {speed = "20", block_tokens = 4, max_tokens = 64}
  reference = {serve = "tiny"}  # asked one at a time: these answers are right
  [arms."both faults"]
  serve = "tiny --prefill 2 --decode 1 --set lab.failpoints=release_before_drained"
  [arms.fixed]
  serve = "tiny --prefill 2 --decode 1"

The command goes on where it was when it is given again.
"""


def add(commands: Commands) -> None:
    """All parsers of this file."""
    replay = commands.add_parser(
        "replay",
        help="send a trace to a server, as it was recorded",
        description=REPLAY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _replay(replay)
    detect = commands.add_parser(
        "detect",
        help="look at all answers of a run, beside a reference",
        description=DETECT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _detect(detect)
    ablate = commands.add_parser(
        "ablate",
        help="which difference between servers makes wrong answers?",
        description=ABLATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _ablate(ablate)
    report = commands.add_parser("report", help="runs into one HTML file, and a Markdown twin")
    _report(report)


def _replay(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", help="a recording, or a file of Mooncake, Weka, Azure, ...")
    command.add_argument("--url", help="the server, such as http://127.0.0.1:8000")
    command.add_argument("--out", metavar="RUN", required=True, help="folder for the results")
    command.add_argument("--api-key", help="also STANCHION_API_KEY")
    command.add_argument("--model", default="", help="default: the first that the server lists")
    command.add_argument("--arm", default="", help="a name for this run, in reports")
    when = command.add_argument_group("when")
    when.add_argument(
        "--loop", choices=["open", "session"], default="open",
        help="open: at recorded times; session: after the answer before, and the client's pause",
    )  # fmt: skip
    when.add_argument("--speed", default="1", help="of the trace's time: 4, or stages 1x60,2x60,4")
    when.add_argument("--gap-max", type=float, metavar="S", help="cut idle gaps (trace's seconds)")
    when.add_argument(
        "--spread", type=float, default=0.0, metavar="S",
        help="sessions begin over so many seconds more (trace's), where all would begin at once",
    )  # fmt: skip
    when.add_argument("--copies", type=int, default=1, help="of all sessions, apart in the cache")
    when.add_argument("--seed", type=int, default=0, help="of the copies' salts")
    when.add_argument("--first", type=int, metavar="N", help="only so many requests of the trace")
    when.add_argument("--no-aborts", action="store_true", help="clients that left stay")
    when.add_argument("--concurrency", type=int, metavar="N", help="at most so many at once")
    when.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request")
    when.add_argument("--processes", type=int, default=1, help="that share the sessions")
    when.add_argument(
        "--lateness-max", type=float, metavar="S",
        help="a run is valid if 99 %% of requests are sent within so much of their time",
    )  # fmt: skip
    what = command.add_argument_group("what")
    what.add_argument("--api", choices=["chat", "completions"], help="for prompts without content")
    what.add_argument("--temperature", type=float, help="instead of the recorded one")
    what.add_argument("--max-tokens", type=int, metavar="N", help="no answer may be longer")
    what.add_argument(
        "--answer-tokens", type=int, metavar="N",
        help="so many for each answer to a made prompt, where --block-tokens would shrink it",
    )  # fmt: skip
    what.add_argument(
        "--block-tokens", type=int, metavar="N",
        help="what a block of the trace becomes; prompts and answers shrink alike",
    )  # fmt: skip
    what.add_argument("--unit", choices=["ms", "s"], help="of the trace's times, if it is not said")
    what.add_argument("--tokenizer", default="tiny", help="folder; for prompts without content")
    what.add_argument("--as-ids", action="store_true", help="send such prompts as token ids")
    what.add_argument(
        "--salt", choices=["auto", "on", "off"], default="auto",
        help="say cache_salt in copies; auto: to servers that are known to take it",
    )  # fmt: skip
    again = command.add_argument_group("one at a time, and over several servers")
    again.add_argument(
        "--solo", action="append", default=[], metavar="REQUEST[#COPY]",
        help="TRACE is a run: ask this one of it again, alone; may be repeated",
    )  # fmt: skip
    again.add_argument("--times", type=int, default=1, help="how often each, with --solo")
    again.add_argument("--pd-sweep", metavar="P:D,...", help="start a cluster for each ratio")
    again.add_argument("--serve", default="", metavar="FLAGS", help="of `stanchion serve`, there")
    command.set_defaults(run=_run_replay)


def _asked(said: argparse.Namespace) -> Asked:
    from stanchion.cli.replay_asked import Asked
    from stanchion.lab.replay_timing import LATENESS_MAX_S

    bound = LATENESS_MAX_S if said.lateness_max is None else said.lateness_max
    return Asked(
        trace=said.trace, url=said.url or "", out=said.out, model=said.model, arm=said.arm,
        api_key=said.api_key or os.environ.get("STANCHION_API_KEY", ""), loop=said.loop,
        speed=said.speed, gap_max_s=said.gap_max, spread_s=said.spread,
        copies=said.copies, seed=said.seed,
        first=said.first, aborts=not said.no_aborts, concurrency=said.concurrency,
        timeout_s=said.timeout, processes=said.processes, lateness_max_s=bound, api=said.api,
        temperature=said.temperature, max_tokens=said.max_tokens,
        answer_tokens=said.answer_tokens,
        block_tokens=said.block_tokens, unit=said.unit, tokenizer=said.tokenizer,
        as_ids=said.as_ids, salt=said.salt, solo=tuple(said.solo), times=said.times,
    )  # fmt: skip


def _wants_client() -> None:
    if find_spec("aiohttp") is None:
        raise ConfigError("this command wants the extra `lab`: pip install 'stanchion[lab]'")


def _run_replay(said: argparse.Namespace) -> int:
    _wants_client()
    from stanchion.cli import replay
    from stanchion.cli.arms import sweep

    asked = _asked(said)
    if said.pd_sweep is not None:
        if said.url:
            raise ConfigError("--pd-sweep starts its own servers; leave --url out")
        return sweep(asked, said.pd_sweep, said.serve)
    if not said.url:
        raise ConfigError("--url is missing: which server?")
    header = replay.replay(asked)
    print(replay.report(header, Path(asked.out)))
    return 0 if header.valid else 1


def _detect(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="RUN", type=Path, help="of stanchion replay")
    command.add_argument("--reference", metavar="RUN", type=Path, help="a run that is right")
    command.add_argument(
        "--witness",
        action="store_true",
        help="compare log-probabilities, not tokens: for servers whose runs differ by rounding",
    )
    command.add_argument("--tokenizer", default="", help="folder; default: the model's name")
    command.add_argument("--baselines", metavar="FILE", type=Path, help="what healthy looks like")
    command.add_argument("--top", type=int, default=20, help="suspect answers to write down")
    command.set_defaults(run=_run_detect)


def _run_detect(said: argparse.Namespace) -> int:
    from stanchion.cli.detect import TO_READ, Asked, detect, summary

    asked = Asked(
        said.folder, said.reference, said.witness, said.tokenizer, said.baselines, said.top
    )
    told = detect(asked)
    print(summary(told))
    print(f"\nto read: {said.folder / TO_READ}")
    return 0


def _ablate(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", metavar="PLAN.toml", type=Path)
    command.add_argument("--out", metavar="FOLDER", type=Path, required=True)
    command.add_argument("--dry", action="store_true", help="say how many requests it needs, only")
    command.set_defaults(run=_run_ablate)


def _run_ablate(said: argparse.Namespace) -> int:
    _wants_client()
    from stanchion.cli.ablate import ablate, dry
    from stanchion.lab.ablate import words

    if said.dry:
        print(dry(said.plan))
        return 0
    print(words(ablate(said.plan, said.out)))
    return 0


def _report(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folders", metavar="RUN", type=Path, nargs="+", help="runs, or a folder of several"
    )
    command.add_argument("--out", metavar="FOLDER", type=Path, help="default: the first RUN")
    command.set_defaults(run=_run_report)


def _run_report(said: argparse.Namespace) -> int:
    from stanchion.cli.report import report

    page, twin = report(said.folders, said.out or said.folders[0])
    print(f"{page}\n{twin}")
    return 0
