"""What the text itself shows: too many scripts, broken characters, reserved tokens. Pure.

Nothing here depends on how the text was cut: it is read a character at a time. What the prompt has
is not held against the answer; the prompt is looked at only when there is something to compare.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import cached_property

from stanchion.gateway.detok import decode
from stanchion.gateway.monitor.words import Kind, Suspicion

LETTERS = 256  # the last so many are looked at
FOREIGN_SCRIPTS, FOREIGN_LETTERS = 3, 12
CHARACTERS = 512
ODD_CHARACTERS = 3
RESERVED = 3
NAME_CHARACTERS = 32

# Where runs of letters of one script begin (Unicode 15, Scripts.txt, merged and rounded to blocks).
# Chinese, Japanese and Korean writing mixes its scripts by nature: it counts as one.
_BLOCKS = (
    (0x0000, "latin"), (0x0370, "greek"), (0x0400, "cyrillic"), (0x0530, "armenian"),
    (0x0590, "hebrew"), (0x0600, "arabic"), (0x0700, "syriac"), (0x0750, "arabic"),
    (0x0780, "thaana"), (0x07C0, "other"), (0x08A0, "arabic"), (0x0900, "devanagari"),
    (0x0980, "bengali"), (0x0A00, "gurmukhi"), (0x0A80, "gujarati"), (0x0B00, "oriya"),
    (0x0B80, "tamil"), (0x0C00, "telugu"), (0x0C80, "kannada"), (0x0D00, "malayalam"),
    (0x0D80, "sinhala"), (0x0E00, "thai"), (0x0E80, "lao"), (0x0F00, "tibetan"),
    (0x1000, "myanmar"), (0x10A0, "georgian"), (0x1100, "cjk"), (0x1200, "ethiopic"),
    (0x13A0, "cherokee"), (0x1400, "other"), (0x1780, "khmer"), (0x1800, "mongolian"),
    (0x18B0, "other"), (0x1E00, "latin"), (0x1F00, "greek"), (0x2000, "sign"),
    (0x2C00, "other"), (0x2C60, "latin"), (0x2C80, "other"), (0x2DE0, "cyrillic"),
    (0x2E00, "sign"), (0x2E80, "cjk"), (0xA000, "yi"), (0xA4D0, "other"), (0xA720, "latin"),
    (0xA800, "other"), (0xA960, "cjk"), (0xA980, "other"), (0xAB30, "latin"), (0xAB70, "other"),
    (0xAC00, "cjk"), (0xD800, "other"), (0xF900, "cjk"), (0xFB00, "latin"), (0xFB13, "armenian"),
    (0xFB1D, "hebrew"), (0xFB50, "arabic"), (0xFE00, "sign"), (0xFE70, "arabic"),
    (0xFF00, "sign"), (0xFF21, "latin"), (0xFF66, "cjk"), (0x10000, "other"), (0x1B000, "cjk"),
    (0x1B170, "other"), (0x1D400, "sign"), (0x1D800, "other"), (0x20000, "cjk"),
    (0x32000, "other"),
)  # fmt: skip
_STARTS = [start for start, _ in _BLOCKS]
_FREE = ("latin", "sign")  # in every prompt, whatever it is written in
_ALLOWED_CONTROLS = "\t\n\r\f\v"
_PLAIN = re.compile(
    r"[\x20-\x3d\x3f-\x7e\t\n\r\f\v]*"
)  # ASCII without what ends a reserved token's name
_NAMED = re.compile(r"<\|[A-Za-z0-9_]{1,24}\|>")


def script(character: str) -> str:
    """Of a letter: its script's name. `sign`: letter-like signs, of no script."""
    return _BLOCKS[bisect_right(_STARTS, ord(character)) - 1][1]


def odd(character: str) -> bool:
    """U+FFFD, a control character, or a code point that is private or not assigned."""
    if character == "\ufffd":
        return True
    return character not in _ALLOWED_CONTROLS and unicodedata.category(character) in _ODD


_ODD = ("Cc", "Cn", "Co", "Cs")


class Prompt:
    """What an answer may have from its prompt; decoded when somebody asks."""

    def __init__(self, tokens: Sequence[int], pieces: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._pieces = pieces

    @cached_property
    def known(self) -> frozenset[int]:
        return frozenset(self.tokens)

    @cached_property
    def text(self) -> str:
        return decode(self._pieces, self.tokens)

    @cached_property
    def characters(self) -> frozenset[str]:
        return frozenset(self.text)

    @cached_property
    def scripts(self) -> frozenset[str]:
        return frozenset(script(one) for one in self.characters if one.isalpha())


class Scripts:
    """Letters of three or more scripts that the prompt does not have, among the last 256 letters.
    One foreign script is a translation; several at once are token salad."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._last: deque[str] = deque()
        self._counts: dict[str, int] = {}

    def latin(self, text: str) -> None:
        """Takes plain ASCII, most of what there is."""
        if self._counts.get("latin") != LETTERS:  # else they are all that is known, and stay it
            for _ in range(min(sum(map(str.isalpha, text)), LETTERS)):
                self._count("latin")

    def push(self, character: str) -> str | None:
        """Evidence, if there is some."""
        name = script(character)
        self._count(name)
        if name in _FREE or len(self._counts) < FOREIGN_SCRIPTS:
            return None
        foreign = {
            name: count
            for name, count in self._counts.items()
            if count > 1 and name not in _FREE and name not in self._prompt.scripts
        }
        letters = sum(foreign.values())
        if len(foreign) < FOREIGN_SCRIPTS or letters < FOREIGN_LETTERS:
            return None
        self._last.clear()
        self._counts.clear()
        return f"{letters} letters of {', '.join(sorted(foreign))}"

    def _count(self, name: str) -> None:
        if len(self._last) == LETTERS:
            gone = self._last.popleft()
            self._counts[gone] -= 1
            if not self._counts[gone]:
                del self._counts[gone]
        self._last.append(name)
        self._counts[name] = self._counts.get(name, 0) + 1


class Odd:
    """Three or more odd characters among the last 512, not counting those of the prompt."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._places: deque[int] = deque(maxlen=ODD_CHARACTERS)

    def push(self, character: str, place: int) -> str | None:
        if not odd(character) or character in self._prompt.characters:
            return None
        self._places.append(place)
        if len(self._places) < ODD_CHARACTERS or place - self._places[0] >= CHARACTERS:
            return None
        self._places.clear()
        return f"{ODD_CHARACTERS} within {CHARACTERS} characters, the last U+{ord(character):04X}"


class Texts:
    """All of the above over one answer. `special`: reserved ids; `ends`: those that end answers."""

    def __init__(self, prompt: Prompt, special: frozenset[int], ends: frozenset[int]) -> None:
        self._prompt = prompt
        self._reserved = special - ends
        self._scripts = Scripts(prompt)
        self._odd = Odd(prompt)
        self._tail = ""
        self._characters = 0
        self._named = 0

    def token(self, token: int, at: int) -> Suspicion | None:
        if token not in self._reserved or token in self._prompt.known:
            return None
        return self._name("as tokens", at)

    def push(self, text: str, at: int) -> list[Suspicion]:
        """`text` comes with token number `at` of the answer."""
        if _PLAIN.fullmatch(text):
            self._characters += len(text)
            self._scripts.latin(text)
            self._tail = (self._tail + text)[-NAME_CHARACTERS:]
            return []
        return [one for character in text for one in self._look(character, at)]

    def _look(self, character: str, at: int) -> list[Suspicion]:
        self._characters += 1
        self._tail = (self._tail + character)[-NAME_CHARACTERS:]
        found: list[Suspicion | None] = []
        if character.isalpha():
            found.append(_said("scripts", self._scripts.push(character), at))
        elif character == "\ufffd" or not character.isprintable():
            odds = self._odd.push(character, self._characters)
            found.append(_said("odd_characters", odds, at))
        elif character == ">" and self._spelled():
            found.append(self._name("spelled out", at))
        return [one for one in found if one is not None]

    def _spelled(self) -> bool:
        names = _NAMED.findall(self._tail)
        return bool(names) and self._tail.endswith(names[-1]) and names[-1] not in self._prompt.text

    def _name(self, how: str, at: int) -> Suspicion | None:
        self._named += 1
        if self._named % RESERVED:
            return None
        return Suspicion("reserved", f"{self._named} reserved tokens, the last {how}", at)


def _said(kind: Kind, evidence: str | None, at: int) -> Suspicion | None:
    return None if evidence is None else Suspicion(kind, evidence, at)
