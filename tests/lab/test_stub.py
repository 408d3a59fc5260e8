"""What load generators are held against: the stub, and the judgement of their lateness."""

from __future__ import annotations

import pytest

from stanchion.cli.bench import stub
from stanchion.cli.bench.replay import lateness_p99
from stanchion.core.errors import ConfigError


def test_lateness_is_against_the_most_punctual_request() -> None:
    wanted = [0.0, 0.1, 0.2, 0.3]
    assert lateness_p99([7.0, 7.1, 7.2, 7.3], wanted) == pytest.approx(0.0)
    assert lateness_p99([7.1, 7.0, 7.2, 7.4], wanted) == pytest.approx(0.097)
    with pytest.raises(ConfigError, match="3 requests came of 4"):
        lateness_p99([7.0, 7.1, 7.2], wanted)


def test_traces_are_even_and_share_first_blocks() -> None:
    made = stub.trace(50, 2.0)
    assert len(made) == 100
    assert [one["timestamp"] for one in made[:3]] == [0, 20, 40]
    assert len({one["hash_ids"][0] for one in made}) == 10
    assert len({one["hash_ids"][1] for one in made}) == 100
    assert all(len(one["hash_ids"]) == stub.INPUT // stub.BLOCK for one in made)
