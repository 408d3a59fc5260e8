"""The host tier's books against a model of them: who leaves, who cannot, and nothing is lost."""

from __future__ import annotations

import numpy as np

from stanchion.kv.hosttier import HostTier
from stanchion.kv.pages import Pin
from stanchion.kv.record import Prompt, Record
from stanchion.sim.choices import seeded

SLOTS = 12


def record(number: int) -> Record:
    return Record(number.to_bytes(32, "little"), b"root", number.to_bytes(4, "little"), b"")


def prompt(numbers: list[int], root: bytes = b"root") -> Prompt:
    return Prompt(root, [record(one).key for one in numbers], lambda at: record(numbers[at]).tokens)


def kept(tier: HostTier, numbers: list[int]) -> None:
    pin = tier.pool.take(len(numbers), "test")
    for number, slot in zip(numbers, pin.pages.tolist()):
        tier.keep(record(number), slot)
    pin.drop()


def test_a_hit_is_the_run_that_is_there_of_the_same_root_and_tokens() -> None:
    tier = HostTier(SLOTS)
    kept(tier, [1, 2, 3, 5])
    assert [one.key for one in tier.match(prompt([1, 2, 3, 4, 5]), 0)] == prompt([1, 2, 3]).keys
    assert len(tier.match(prompt([1, 2, 3]), 2)) == 1
    assert tier.match(prompt([1, 2], b"another's"), 0) == []
    other = Prompt(b"root", prompt([1]).keys, lambda at: b"other tokens")
    assert tier.match(other, 0) == []
    assert tier.audit() == []


def test_the_end_of_a_prefix_leaves_before_its_start() -> None:
    tier = HostTier(4)
    kept(tier, [1, 2, 3, 4])
    tier.match(prompt([1, 2, 3, 4]), 0)
    tier.make_room(2)
    assert [one for one in (1, 2, 3, 4) if record(one).key in tier] == [1, 2]
    assert tier.evicted == 2 and tier.audit() == []


def test_what_is_in_use_stays() -> None:
    """A storm of keeps, hits, holds and evictions; what somebody holds is never given away."""
    for seed in range(40):
        choices, tier = seeded(seed), HostTier(SLOTS)
        held: list[tuple[int, Pin, int]] = []
        number = 0
        for _ in range(200):
            match choices.pick(4):
                case 0:
                    tier.make_room(1 + choices.pick(4))
                    if tier.pool.available:
                        kept(tier, [number])
                        number += 1
                case 1 if number:
                    wanted = choices.pick(number)
                    found = tier.match(prompt([wanted]), 0)
                    for pin in tier.hold(found, "copy"):
                        held.append((wanted, pin, found[0].slot))
                case 2 if held:
                    held.pop(choices.pick(len(held)))[1].drop()
                case _:
                    tier.make_room(choices.pick(SLOTS))
            for wanted, _, slot in held:
                (one,) = tier.match(prompt([wanted]), 0)
                assert one.slot == slot, f"seed {seed}"
            assert tier.pool.audit() == []
        for _, pin, _ in held:
            pin.drop()
        assert tier.audit() == [], f"seed {seed}"


def test_who_was_kept_first_stays() -> None:
    tier = HostTier(SLOTS)
    kept(tier, [1])
    first = tier.match(prompt([1]), 0)[0].slot
    kept(tier, [1])
    assert tier.match(prompt([1]), 0)[0].slot == first
    assert tier.pages == 1 and tier.pool.available == SLOTS - 1 and tier.audit() == []


def test_condemned_memory_is_not_used_again() -> None:
    tier = HostTier(SLOTS)
    kept(tier, [1, 2])
    (bad,) = tier.match(prompt([1]), 0)
    tier.condemn([bad, bad])
    assert tier.match(prompt([1, 2]), 0) == [] and tier.pool.quarantined == 1
    tier.make_room(SLOTS)
    assert tier.pool.available == SLOTS - 1
    assert bad.slot not in tier.pool.take(SLOTS - 1, "test").pages
    assert np.all(tier.pool.counts(np.array([bad.slot], np.int32)) == 1)
