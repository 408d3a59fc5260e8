"""Loops: the same tokens again and again, with any period up to 1,024. Pure.

For every period p it is kept where the tail that repeats with it began: one comparison of a token
with the 1,024 before it, whatever the length of the answer. The shortest period with a long enough
tail is the primitive one, since its multiples have the same tail. What is long enough:

* 192 repeated tokens, and three repetitions after the first unit (llama.cpp, vLLM and others that
  stop loops ask for three or four); 256 where the unit has 8 tokens or fewer;
* 1,024 where the unit is filler: no letters but those of null, true, 0x.. or one single character.
  Rules of a table, a zeroed base64 block or a generated array are of this kind, and healthy;
* what stands in the prompt is not held against the answer: as many repetitions as there are more.

Base64, tables, JSON of like rows and lock files hardly have exact periods in tokens at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stanchion.gateway.monitor.words import Suspicion

PERIOD_MAX = 1024
TOKENS_MIN = 192
REPEATS_MIN = 3  # after the first
SHORT_PERIOD, SHORT_TOKENS = 8, 256
FILLER_TOKENS = 1024
CHECK_EVERY = 8  # tokens
_BUFFER = 8 * PERIOD_MAX
# Possessive: what has matched is not tried another way, or a long unit could take for ever.
_FILLER = re.compile(r"(?:0x[0-9a-f]*+|null|none|nil|true|false|nan|[\W\d_])*+|(\w)\1*+", re.I)
Ids = NDArray[np.int32]


class Loops:
    """Feed it the tokens of one answer, one at a time."""

    def __init__(self, prompt: Sequence[int], pieces: Sequence[bytes]) -> None:
        self._prompt = prompt
        self._pieces = pieces
        self._kept: Ids = np.full(_BUFFER, -1, np.int32)
        self._next = PERIOD_MAX  # where the next token goes
        # After how many tokens the tail of each period began, period 1024 first.
        self._since: NDArray[np.int64] = np.zeros(PERIOD_MAX, np.int64)
        self._count = 0
        self._told = 0  # tokens of the tail that was spoken of last
        self._granted = (0, 0)  # a period, and how long a tail of it is no loop

    def push(self, token: int) -> Suspicion | None:
        if self._next == _BUFFER:
            self._kept[:PERIOD_MAX] = self._kept[-PERIOD_MAX:]
            self._next = PERIOD_MAX
        before = self._kept[self._next - PERIOD_MAX : self._next]
        self._count += 1
        np.copyto(self._since, self._count, where=before != token)
        self._kept[self._next] = token
        self._next += 1
        return None if self._count % CHECK_EVERY else self._look()

    def _look(self) -> Suspicion | None:
        long = np.flatnonzero(self._since <= self._count - TOKENS_MIN)
        if not len(long):
            self._told, self._granted = 0, (0, 0)
            return None
        place = int(long[-1])
        period, run = PERIOD_MAX - place, self._count - int(self._since[place])
        # One that goes on is spoken of again when it is twice as long.
        if run < 2 * self._told or run < REPEATS_MIN * period:
            return None
        if self._granted[0] != period:
            unit = self._kept[self._next - period : self._next]
            self._granted = period, self._wanted(unit) + self._in_prompt(unit)
        if run < self._granted[1]:
            return None
        self._told = run
        said = f"period {period}, {run // period + 1} times"
        return Suspicion("loop", said, self._count)

    def _wanted(self, unit: Ids) -> int:
        if _FILLER.fullmatch(self._text(unit)):
            return max(FILLER_TOKENS, REPEATS_MIN * len(unit))
        if len(unit) <= SHORT_PERIOD:
            return SHORT_TOKENS
        return max(TOKENS_MIN, REPEATS_MIN * len(unit))

    def _text(self, unit: Ids) -> str:
        known = (self._pieces[one] for one in unit.tolist() if one < len(self._pieces))
        return b"".join(known).decode("utf-8", "replace").strip()

    def _in_prompt(self, unit: Ids) -> int:
        """Tokens of the longest stretch of the prompt that repeats this unit."""
        return most_repeats(np.asarray(self._prompt, np.int32), unit) * len(unit)


def most_repeats(text: Ids, unit: Ids) -> int:
    """How often, at most, the unit stands in the text one time after the other."""
    raw, wanted = text.astype("<i4").tobytes(), unit.astype("<i4").tobytes()
    most, at = 0, raw.find(wanted)
    while at >= 0:
        if at % 4:
            at = raw.find(wanted, at + 1)
            continue
        first = at
        while raw.startswith(wanted, at):
            at += len(wanted)
        most = max(most, (at - first) // len(wanted))
        at = raw.find(wanted, at)
    return most
