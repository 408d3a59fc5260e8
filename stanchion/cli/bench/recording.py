"""`stanchion bench recording`: what recording costs (`recordcost`), how fast recordings are
anonymised, and whether structure is kept.

The recording is made up: agents' sessions that share tools and system prompt and grow by files of
Python's library. Every prompt is counted whole, as a replay would have to send it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stanchion.cli.bench import recordcost
from stanchion.cli.bench.measure import Measure, interleave
from stanchion.core.recording import Content, Header, Recorded, Times
from stanchion.gateway.body import ChatBody
from stanchion.gateway.openai import chat_text
from stanchion.gateway.record.blocks import chain, root
from stanchion.gateway.tokens import Vocabulary, load_vocabulary
from stanchion.lab.anonymise.body import typed
from stanchion.lab.anonymise.export import Settings, Wanted, anonymise, export
from stanchion.lab.anonymise.key import KEY_BYTES, Key
from stanchion.lab.anonymise.pool import library
from stanchion.lab.anonymise.tokenised import Tokenised
from stanchion.lab.formats.sniff import read
from stanchion.lab.formats.trace import Trace
from stanchion.lab.structure import structure

PAGE_TOKENS = 16
SYSTEM_CHARACTERS, TURN_CHARACTERS, LONG_TURN_CHARACTERS = 8_000, 2_500, 9_000
TURN_S = 10.0
GATE_TOKENS_S, AIM_TOKENS_S = 30_000.0, 100_000.0


@dataclass(frozen=True)
class Sizes:
    sessions: int
    turns: int
    repeats: int
    record: recordcost.Sizes


FULL = Sizes(sessions=12, turns=16, repeats=5, record=recordcost.FULL)
QUICK = Sizes(sessions=3, turns=6, repeats=1, record=recordcost.QUICK)


class Bench:
    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder = folder
        self.sizes = sizes
        self.measures: dict[str, Callable[[], Measure]] = {
            "anonymise_tokens_s": lambda: self.speed("surrogate"),
            "anonymise_tokens_s_secrets": lambda: self.speed("secrets"),
            "anonymise_tokens_s_hashes": lambda: self.speed("hashes"),
            "structure_kept": self.structure,
            "record_cost": lambda: recordcost.record_cost(folder, sizes.record),
        }

    def prepare(self, names: Sequence[str]) -> None:
        _ = self.trace

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(self._folder)

    @cached_property
    def trace(self) -> Trace:
        made = sorted(_sessions(self.vocabulary, self.sizes), key=lambda one: one.times.arrival)
        header = Header(source="stanchion", model="tiny", block_tokens=PAGE_TOKENS, level="content")
        return Trace(header, lambda left_out: iter(made))

    def speed(self, level: Wanted) -> Measure:
        """Records in, records out: no files, no attacks; each run begins with nothing known."""
        tokens = sum(one.input_tokens for one in self.trace)
        numbers = iter(range(self.sizes.repeats + 1))

        def rate() -> float:
            key = Key(bytes([next(numbers)]) * KEY_BYTES)
            maker = export(Settings(level), key, self.trace, self.vocabulary)
            began = time.perf_counter()
            for _ in maker.records(self.trace):
                pass
            return tokens / (time.perf_counter() - began)

        name = "anonymise_tokens_s" + ("" if level == "surrogate" else f"_{level}")
        measure = Measure(name, "tokens/s", "value", gate=GATE_TOKENS_S, aim=AIM_TOKENS_S)
        measure.note = f"{self.sizes.sessions} sessions, {tokens} prompt tokens, one core"
        return interleave(measure, rate, None, self.sizes.repeats)

    def structure(self) -> Measure:
        """1 where a whole export has the original's structure, at every level that promises it."""
        measure = Measure("structure_kept", "", "value", gate=1.0)
        kept = [self._kept(level) for level in ("hashes", "surrogate")]
        measure.ours = [float(all(kept))]
        measure.note = "prefix sharing, hits, lengths, arrivals, gaps, order; pages of surrogates"
        return measure

    def _kept(self, level: Wanted) -> bool:
        first, second = (Key(bytes([one]) * KEY_BYTES) for one in (1, 2))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "export"
            told = anonymise(
                self.trace, out, Settings(level, guesses=0), first, second, self.vocabulary
            )
            same = structure(read(out)) == structure(self.trace)
        return same and told.kept.exactly and not told.kept.without_words


def _sessions(vocabulary: Vocabulary, sizes: Sizes) -> Iterator[Recorded]:
    tokenised, text = Tokenised(vocabulary), library()
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tool = {"name": "read", "description": text[:500], "parameters": schema}
    system = {"role": "system", "content": text[1000 : 1000 + SYSTEM_CHARACTERS]}
    for session in range(sizes.sessions):
        messages: list[dict[str, Any]] = [system]
        for turn in range(sizes.turns):
            at = (session * sizes.turns + turn) * TURN_CHARACTERS % (len(text) // 2)
            size = LONG_TURN_CHARACTERS if turn % 4 == 0 else TURN_CHARACTERS
            role = "tool" if turn % 2 else "user"
            messages = [*messages, {"role": role, "content": text[at : at + size]}]
            body = {
                "messages": messages,
                "tools": [{"type": "function", "function": tool}],
                "max_tokens": 200,
            }
            yield _recorded(tokenised, vocabulary, body, session, turn)
            answer = {"role": "assistant", "content": text[at + size : at + size + 300]}
            messages = [*messages, answer]


def _recorded(
    tokenised: Tokenised, vocabulary: Vocabulary, body: dict[str, Any], session: int, turn: int
) -> Recorded:
    said = typed("chat", body)
    assert isinstance(said, ChatBody)
    ids = tokenised.ids(chat_text(said, vocabulary))
    prompt = chain(root(b"", "", ""), ids.tobytes(), PAGE_TOKENS)
    arrival = turn * TURN_S + session
    return Recorded(
        request=f"{session} {turn}",
        session=str(session),
        turn=turn,
        think_s=1.0 if turn else None,
        api="chat",
        times=Times(arrival=arrival, end=arrival + TURN_S - 1.0),
        input_tokens=len(ids),
        output_tokens=200,
        blocks=prompt.blocks,
        tail_tokens=prompt.tail_tokens,
        tail=prompt.shown_tail,
        content=Content(body=body),
    )
