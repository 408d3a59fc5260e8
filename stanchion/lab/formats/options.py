"""What a reader may be told of a file that does not say it itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["ms", "s"]


@dataclass(frozen=True)
class Options:
    """None: as the format has it."""

    block_tokens: int | None = None
    unit: Unit | None = None
