"""What an engine has done since it began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    suspect: int = 0
    verify_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    quarantines: int = 0
    pages_dropped: int = 0
