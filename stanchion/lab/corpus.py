"""Text to make prompts of: sources of Python's standard library, as the machine has them (PSF
licence). Nothing of it is kept here. Reads files, and decides nothing."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from stanchion.gateway.tokens import Vocabulary, load_vocabulary

SOURCES = ("argparse.py", "asyncio/base_events.py", "tarfile.py", "typing.py", "inspect.py",
           "subprocess.py", "zipfile.py", "turtle.py", "doctest.py", "decimal.py",
           "_pydecimal.py", "pickletools.py", "statistics.py", "ast.py", "mailbox.py")  # fmt: skip


def texts() -> list[str]:
    """The sources that are there, in this order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text() for name in SOURCES if (library / name).is_file()]


def corpus(folder: Path) -> list[int]:
    """Token ids of all of them, by the vocabulary of the model in this folder."""
    return tokens(load_vocabulary(folder))


def tokens(vocabulary: Vocabulary) -> list[int]:
    return [token for text in texts() for token in vocabulary.encode(text, special=False)]
