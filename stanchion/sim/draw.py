"""Draw a machine as a table by walking every state that its own events can reach."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from stanchion.core.errors import Bug

Step = Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]


def table(start: Hashable, events: Sequence[object], step: Step, depth: int = 8) -> str:
    """A Markdown table: phase, event, next phase, effects. Events that are a Bug are left out."""
    rows: dict[tuple[str, str, str, str], None] = {}
    seen, front = {start: None}, [start]
    for _ in range(depth):
        after: list[Hashable] = []
        for state in front:
            for event in events:
                try:
                    state_after, effects = step(state, event)
                except Bug:
                    continue
                rows[_row(state, event, state_after, effects)] = None
                if state_after not in seen:
                    seen[state_after] = None
                    after.append(state_after)
        front = after
    head = "| phase | event | then | effects |\n|---|---|---|---|"
    return "\n".join([head, *("| " + " | ".join(row) + " |" for row in sorted(rows))])


def _row(
    state: Any, event: object, after: Any, effects: tuple[object, ...]
) -> tuple[str, str, str, str]:
    named = dict.fromkeys(map(_name, effects))  # one of each: three writes start as one does
    return state.phase, _name(event), after.phase, ", ".join(named) or "nothing"


def _name(one: Any) -> str:
    kind = type(one).__name__
    return f"{kind} {type(one.message).__name__}" if hasattr(one, "message") else kind
