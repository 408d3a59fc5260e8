"""Step 1: a corpus from the sources of the Python standard library, and its tokenizer.

Promises: no two files with the same or nearly the same content; files held out are held out whole,
by a seed; every string round-trips through the tokenizer. Writes into the working directory
`tokenizer.json`, `library.bin`, `tests.bin`, `held_out.bin` (16-bit token ids) and `corpus.json`.
"""

import argparse
import json
import platform
import random
import re
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from progress import report
from shape import END, SPECIAL_TOKENS, Shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SKETCH_SIZE = 64
ALIKE = 0.5
TABLE_LINE = re.compile(r"""\s*(?:[ubr]?['"]|[\d\[({\\]|0x|-\d)""")


@dataclass(frozen=True)
class Source:
    path: str  # below the root of the library
    text: str

    @property
    def is_test(self) -> bool:
        return "test" in self.path.split("/")[0] or "/test" in self.path


def sources(root: Path) -> Iterator[Source]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "__pycache__" in name:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few test files are in other encodings on purpose
        if len(text) >= 200:
            yield Source(name, text)


def table_like(text: str) -> bool:
    """Codec maps, help texts as one dictionary, generated tables: nothing to learn but digits."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(bool(TABLE_LINE.match(line)) for line in lines) > 0.5 * len(lines)


def sketch(text: str) -> frozenset[int]:
    """The smallest hashes of all runs of three lines: alike files have alike sketches."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    runs = {zlib.crc32("\n".join(lines[i : i + 3]).encode()) for i in range(max(1, len(lines) - 2))}
    return frozenset(sorted(runs)[:SKETCH_SIZE])


def distinct(files: list[Source]) -> tuple[list[Source], int, int]:
    """The files without copies, and how many copies and near copies were dropped."""
    kept: list[Source] = []
    sketches: list[frozenset[int]] = []
    seen: set[str] = set()
    holders: dict[int, list[int]] = defaultdict(list)
    copies = near = 0
    for file in files:
        if file.text in seen:
            copies += 1
            continue
        seen.add(file.text)
        own = sketch(file.text)
        shared = Counter(index for value in own for index in holders[value])
        if any(n > ALIKE * min(len(own), len(sketches[i])) for i, n in shared.items()):
            near += 1
            continue
        for value in sorted(own):
            holders[value].append(len(kept))
        kept.append(file)
        sketches.append(own)
    return kept, copies, near


def train_tokenizer(files: list[Source], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    assert tokenizer.get_vocab_size() == vocab_size
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(16))
    every_character = "".join(chr(code) for code in range(0x2FFF)) + "\U0001f40d  \n\t\r\n end "
    for text in (every_character, "def f(x):\n    return x\n", "<|user|>\nprint<|assistant|>\n"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def encode(tokenizer: Tokenizer, files: list[Source]) -> np.ndarray:
    """All files in a row, each after an end token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([file.text for file in files]):
        ids.append(END)
        ids.extend(encoding.ids)
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".tiny"))
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--held-out-share", type=float, default=0.025)
    options = parser.parse_args()
    work: Path = options.work
    if (work / "corpus.json").exists():
        report("corpus: already there")
        return
    work.mkdir(parents=True, exist_ok=True)
    found = list(sources(Path(sysconfig.get_paths()["stdlib"])))
    files, copies, near = distinct([file for file in found if not table_like(file.text)])
    random.Random(options.seed).shuffle(files)
    held_out_count = max(1, round(options.held_out_share * len(files)))
    held_out, rest = files[:held_out_count], files[held_out_count:]
    parts = {
        "library": [file for file in rest if not file.is_test],
        "tests": [file for file in rest if file.is_test],
        "held_out": held_out,
    }
    tokenizer = train_tokenizer(parts["library"], Shape().vocab_size)
    check_tokenizer(tokenizer, Shape().vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "seed": options.seed,
        "files_found": len(found),
        "copies_dropped": copies,
        "near_copies_dropped": near,
        "tables_dropped": sum(table_like(file.text) for file in found),
    }
    for name, part in parts.items():
        ids = encode(tokenizer, part)
        ids.tofile(work / f"{name}.bin")
        size = sum(len(file.text.encode()) for file in part)
        facts[name] = {"files": len(part), "bytes": size, "tokens": len(ids)}
        report(f"corpus: {name} {len(part)} files, {len(ids)} tokens, {size / len(ids):.2f} B each")
    facts["held_out_files"] = sorted(file.path for file in held_out)
    (work / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    report(f"corpus: {len(found)} files found, {copies} copies and {near} near copies dropped")


if __name__ == "__main__":
    main()
