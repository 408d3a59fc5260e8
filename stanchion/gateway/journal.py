"""The gateway's log: one line of JSON a call, from a fixed list of typed fields. Never content.

A field that is not in `Line` cannot be logged. Prompts, answers, keys and headers are not in it;
`request` is our own id and `tenant` the name of a key.
"""

from __future__ import annotations

import logging

import msgspec
from msgspec import Struct


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True):
    event: str
    request: str = ""
    tenant: str = ""
    route: str = ""
    status: int = 0
    outcome: str = ""
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    milliseconds: float = 0.0
    error: str = ""  # the class of an error, never its words
    kind: str = ""  # of a suspicion
    action: str = ""  # what was done about it
    verdict: str = ""  # of a witness
    token: int = 0  # number of the answer's token that it is about
    worker: str = ""
    routed: str = ""  # why that worker


def write(line: Line, level: int = logging.INFO) -> None:
    logger = logging.getLogger("stanchion.gateway")
    if logger.isEnabledFor(level):
        logger.log(level, "%s", msgspec.json.encode(line).decode())
