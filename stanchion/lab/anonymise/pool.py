"""The text that surrogates are made of: Python's standard library, found where this runs.

It is under the PSF licence, and code and English, so a model stays in what it knows. A span begins
with a space and a letter and ends behind a letter or digit, so what stands beside it changes
neither its tokens nor their number, and any spans can be put together.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import ConfigError
from stanchion.lab.anonymise.tokenised import Tokenised

# Modules that are much read and long: code of many kinds, and prose in their docstrings.
MODULES = (
    "argparse.py", "ast.py", "collections/__init__.py", "configparser.py", "dataclasses.py",
    "datetime.py", "decimal.py", "difflib.py", "doctest.py", "email/message.py", "enum.py",
    "fractions.py", "functools.py", "gzip.py", "heapq.py", "http/client.py", "http/server.py",
    "inspect.py", "ipaddress.py", "json/decoder.py", "locale.py", "logging/__init__.py",
    "logging/handlers.py", "mailbox.py", "mimetypes.py", "optparse.py", "pathlib.py", "pdb.py",
    "pprint.py", "random.py", "shutil.py", "smtplib.py", "socket.py", "ssl.py", "statistics.py",
    "string.py", "subprocess.py", "tarfile.py", "tempfile.py", "textwrap.py", "threading.py",
    "tokenize.py", "traceback.py", "turtle.py", "typing.py", "unittest/mock.py", "urllib/parse.py",
    "urllib/request.py", "uuid.py", "weakref.py", "xmlrpc/client.py", "zipfile.py",
)  # fmt: skip
OWN = "The quick brown fox jumps over the lazy dog while nobody looks at what it reads. " * 40
SPACED_WORD = re.compile(rb"^ [A-Za-z]")
ENDS_WELL = re.compile(rb"[A-Za-z0-9]$")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{1,30}")
# What a JSON text writes another way, what templates strip or read, and what is not ASCII.
ODD = re.compile(r"[^ -~\n]|[\"\\<>&'`]")
CHARACTERS = 800_000


def library(characters: int = CHARACTERS) -> str:
    """Raise ConfigError where this Python came without its library's text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for name in MODULES:
        path = folder / name
        if path.is_file():
            found.append(path.read_text(encoding="utf-8", errors="ignore"))
    if not found:
        raise ConfigError(f"no text for surrogates: {folder} has no sources of Python's library")
    return (OWN + "\n".join(found))[:characters]


@dataclass(frozen=True)
class Pool:
    """`tokens` of a text, and `cuts`: the places at which a span may begin or end. `saved[i]`:
    tokens that the word at `cuts[i]` has less without the space before it. `letters`: of one token
    each, wherever they stand; only where tokens are characters."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    raw: bytes
    cuts: NDArray[np.int64]
    is_cut: NDArray[np.bool_]
    saved: NDArray[np.int64]
    letters: tuple[bytes, ...]

    def span(self, cut: int, tokens: int, bare: bool) -> bytes | None:
        """So many tokens from that cut on, if a span may end there. `bare`: without the space."""
        first = int(self.cuts[cut])
        last = first + tokens + (int(self.saved[cut]) if bare else 0)
        if not first < last < len(self.is_cut) or not self.is_cut[last]:
            return None
        return self.raw[int(self.offsets[first]) + bare : int(self.offsets[last])]


def pool(tokenised: Tokenised, text: str, lines: bool) -> Pool:
    """`lines`: with its line breaks, for text that is shown as it is; else all on one line."""
    plain = ODD.sub("", text)
    plain = re.sub(r"[ \t]+\n", "\n", plain) if lines else " ".join(plain.split())
    tokens = tokenised.ids(plain)
    sizes = tokenised.sizes(tokens)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    raw = plain.encode()
    is_cut = np.array(
        [
            0 < at < len(tokens) - 1
            and bool(SPACED_WORD.match(raw[offsets[at] : offsets[at] + 2]))
            and bool(ENDS_WELL.search(raw[offsets[at] - 1 : offsets[at]]))
            for at in range(len(tokens))
        ],
        dtype=np.bool_,
    )
    cuts = np.flatnonzero(is_cut)
    if len(cuts) < 1000:
        raise ConfigError(f"too little text for surrogates: {len(cuts)} places to cut it")
    saved = np.array(list(_saved(tokenised, raw, [int(offsets[at]) for at in cuts])), np.int64)
    return Pool(tokens, offsets, raw, cuts, is_cut, saved, tuple(_letters(tokenised)))


def _letters(tokenised: Tokenised) -> Iterator[bytes]:
    for letter in ascii_lowercase:
        parts = [tokenised.ids(part) for part in ("ab", letter, "cd")]
        if len(parts[1]) == 1 and np.array_equal(
            tokenised.ids(f"ab{letter}cd"), np.concatenate(parts)
        ):
            yield letter.encode()


def _saved(tokenised: Tokenised, raw: bytes, places: Sequence[int]) -> Iterator[int]:
    known: dict[bytes, int] = {}
    word = re.compile(rb" [A-Za-z]+")
    for place in places:
        found = word.match(raw, place)
        assert found is not None
        said = found.group()
        if said not in known:
            text = said.decode()
            known[said] = len(tokenised.ids(text)) - len(tokenised.ids(text[1:]))
        yield known[said]


def names(tokenised: Tokenised, text: str) -> dict[int, list[str]]:
    """Identifiers of the text, by how many tokens they have."""
    found: dict[int, list[str]] = {}
    for name in sorted(set(NAME.findall(text))):
        found.setdefault(len(tokenised.ids(name)), []).append(name)
    return found
