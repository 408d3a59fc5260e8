"""One thread a process, as workers run by default."""

import gc
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def walks_stay_short() -> Iterator[None]:
    """What is left of a module is not walked by the collector again, as in a serving process: one
    process runs all tests, and a walk over all that they leave would hold up those with clocks."""
    yield
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=7, help="seed of the one storm to replay")
