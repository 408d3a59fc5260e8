"""What the chaos run takes for wrong."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from chaos import Found, leaves
from streams import Reply

RIGHT = "a whole text"
USAGE = {"completion_tokens": 12}


def reply(**changed: object) -> Reply:
    made = Reply(0, RIGHT, ["[DONE]"], 1, [USAGE])
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def wrong(**changed: object) -> list[str]:
    found = Found()
    found.add(reply(**changed), RIGHT, 12)
    return found.wrong


def test_what_is_right_is_not_wrong() -> None:
    assert not wrong()
    assert not wrong(text="a wh", endings=["worker_lost"], finishes=0, usages=[])
    assert not wrong(text="a wh", endings=[], left=True, finishes=0, usages=[])


def test_each_thing_that_must_hold_is_looked_at() -> None:
    for changed in (
        {"text": "a while text"},
        {"text": "a whole a whole text"},
        {"text": "a wh"},
        {"text": "b", "endings": [], "left": True},
        {"endings": []},
        {"endings": ["[DONE]", "[DONE]"]},
        {"endings": ["worker_lost", "[DONE]"]},
        {"finishes": 2},
        {"usages": []},
        {"usages": [USAGE, USAGE]},
        {"usages": [{"completion_tokens": 11}]},
    ):
        assert len(wrong(**changed)) >= 1, changed


def test_clients_leave_within_their_text() -> None:
    chance = random.Random(1)
    stays = [leaves(chance, 100) for _ in range(400)]
    gone = [not stay(reply(text="x" * 100)) for stay in stays]
    assert 25 <= sum(gone) <= 80
    assert all(stay(reply(text="")) for stay in stays)
