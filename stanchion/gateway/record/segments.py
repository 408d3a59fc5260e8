"""What a prompt is made of, by the markers that chat templates write as special tokens. Pure.

What no marker says is `other`. The lengths of all segments add up to the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """A vocabulary's markers: by token, the kind of segment that begins there."""

    kinds: Mapping[int, Kind]
    answers: frozenset[int]

    @classmethod
    def of(cls, pieces: Sequence[bytes], special: frozenset[int]) -> Marks:
        kinds = {one: MARKERS[pieces[one]] for one in special if pieces[one] in MARKERS}
        return cls(kinds, frozenset(one for one in kinds if pieces[one] in ANSWER))


def segments(tokens: Sequence[int], marks: Marks, tools: bool) -> tuple[Segment, ...]:
    """`tools`: the first system segment declares them, as the templates of this family do."""
    cuts: list[tuple[int, Kind]] = [(0, "other")]
    for at, token in enumerate(tokens):
        kind = marks.kinds.get(token)
        if kind is not None:
            if kind == "system" and tools:
                kind, tools = "tools", False
            cuts.append((at, kind))
    ends = [at for at, _ in cuts[1:]] + [len(tokens)]
    return tuple(
        Segment(kind, end - at) for (at, kind), end in zip(cuts, ends, strict=True) if end > at
    )


def stem(tokens: Sequence[int], marks: Marks) -> int:
    """How many tokens there are before the words that ask for the answer."""
    for at in range(len(tokens) - 1, -1, -1):
        if tokens[at] in marks.answers:
            return at
        if marks.kinds.get(tokens[at], "assistant") not in ("assistant", "reasoning"):
            break
    return len(tokens)
