"""What a prompt is made of, by the markers that chat templates write as special tokens. Pure.

What no marker says is `other`. The lengths of all segments add up to the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stanchion.core.recording import Kind, Segment

MARKERS: Mapping[bytes, Kind] = {
    b"<|system|>": "system",
    b"<|user|>": "user",
    b"<|assistant|>": "assistant",
    b"<|observation|>": "tool_result",
    b"<|tool|>": "tool_result",
    b"<|im_system|>": "system",
    b"<|im_user|>": "user",
    b"<|im_assistant|>": "assistant",
    b"<think>": "reasoning",
    b"</think>": "assistant",
}
ANSWER = b"<|assistant|>", b"<|im_assistant|>"


@dataclass(frozen=True)
class Marks:
    """A vocabulary's markers: by token, the kind of segment that begins there. `known` is True for
    those tokens, and its last entry stands for all ids that the vocabulary does not have."""

    kinds: Mapping[int, Kind]
    answers: frozenset[int]
    known: NDArray[np.bool_] = field(repr=False, compare=False)

    @classmethod
    def of(cls, pieces: Sequence[bytes], special: frozenset[int]) -> Marks:
        kinds = {one: MARKERS[pieces[one]] for one in special if pieces[one] in MARKERS}
        known = np.zeros(len(pieces) + 1, np.bool_)
        known[list(kinds)] = True
        return cls(kinds, frozenset(one for one in kinds if pieces[one] in ANSWER), known)


@dataclass(frozen=True)
class Marked:
    """The markers in a prompt: (place, token), in order. `tokens`: how many it has."""

    places: tuple[tuple[int, int], ...]
    tokens: int

    @classmethod
    def of(cls, prompt: bytes, marks: Marks) -> Marked:
        """`prompt`: int32, as `blocks.raw_tokens` gives them."""
        ids = np.frombuffer(prompt, dtype=np.int32)
        found = np.flatnonzero(marks.known.take(ids, mode="clip")).tolist()
        return cls(tuple((at, int(ids[at])) for at in found), len(ids))


def segments(prompt: Marked, marks: Marks, tools: bool) -> tuple[Segment, ...]:
    """`tools`: the first system segment declares them, as the templates of this family do."""
    cuts: list[tuple[int, Kind]] = [(0, "other")]
    for at, token in prompt.places:
        kind = marks.kinds[token]
        if kind == "system" and tools:
            kind, tools = "tools", False
        cuts.append((at, kind))
    ends = [at for at, _ in cuts[1:]] + [prompt.tokens]
    return tuple(
        Segment(kind, end - at) for (at, kind), end in zip(cuts, ends, strict=True) if end > at
    )


def stem(prompt: Marked, marks: Marks) -> int:
    """How many tokens there are before the words that ask for the answer."""
    for at, token in reversed(prompt.places):
        if token in marks.answers:
            return at
        if marks.kinds[token] not in ("assistant", "reasoning"):
            break
    return prompt.tokens
