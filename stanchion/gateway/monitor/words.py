"""What the monitor says. A suspicion is no verdict: healthy copying has an acceptance of 98 to
100 %, and a lost draft state a low one with right text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "low_acceptance",  # drafts are rejected: target and draft see different KV
    "high_acceptance",  # drafts are all taken: a confident loop, or honest copying
    "loop",  # the same tokens again and again
    "scripts",  # letters of several scripts that the prompt does not have
    "odd_characters",  # U+FFFD, control characters, code points that nobody assigned
    "reserved",  # reserved tokens, as tokens or spelled out
    "rare",  # tokens of ranks that healthy answers hardly use
    "nan",  # a log-probability that is no number
    "engine",  # the engine itself ended the answer as not trustworthy
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ACCEPTANCE: tuple[Kind, ...] = ("low_acceptance", "high_acceptance")
BROKEN: tuple[Kind, ...] = ("nan", "engine")  # the attempt cannot go on, whoever witnesses


@dataclass(frozen=True)
class Suspicion:
    """`evidence` is numbers and names, never a word of the answer. `at`: so many tokens of the
    answer were there when it rose."""

    kind: Kind
    evidence: str
    at: int
