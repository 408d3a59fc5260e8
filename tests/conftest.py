"""One thread a process, as workers run by default."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=7, help="seed of the one storm to replay")
