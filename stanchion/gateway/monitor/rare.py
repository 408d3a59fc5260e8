"""Rare tokens: does an answer use ranks of the vocabulary that healthy ones hardly do? Pure.

Byte-level BPE numbers its tokens by when they were merged, so high ids are rare ones. The baseline
counts healthy tokens by sixteenth of the vocabulary; the alternative is that half of the tokens are
drawn evenly from all of it, as garbage is. The test is a CUSUM of the log-likelihood ratio with
the bound of `calibrated`: h = ln(tokens / false alarm). A token that stands in the prompt says
nothing, for or against.
"""

from __future__ import annotations

from math import log

from stanchion.gateway.monitor.baseline import RANKS, Baseline, rank
from stanchion.gateway.monitor.text import Prompt
from stanchion.gateway.monitor.words import Suspicion

FALSE_ALARM = 1e-4
TOKENS_MAX = 1 << 16
SMOOTHING = 0.5
SHARE = 0.5  # of garbage, in the alternative


class Rare:
    def __init__(self, prompt: Prompt, baseline: Baseline) -> None:
        self._prompt = prompt
        self._vocabulary = baseline.vocabulary
        total = sum(baseline.ranks) + SMOOTHING * RANKS
        usual = [(count + SMOOTHING) / total for count in baseline.ranks]
        self._ratios = [log(((1 - SHARE) * one + SHARE / RANKS) / one) for one in usual]
        self._threshold = log(TOKENS_MAX / FALSE_ALARM)
        self._sum = 0.0

    def push(self, token: int, at: int) -> Suspicion | None:
        ratio = self._ratios[rank(token, self._vocabulary)]
        if (ratio <= 0.0 and self._sum == 0.0) or token in self._prompt.known:
            return None
        self._sum = max(0.0, self._sum + ratio)
        if self._sum < self._threshold:
            return None
        said, self._sum = f"log-likelihood ratio {self._sum:.1f} against the baseline's ranks", 0.0
        return Suspicion("rare", said, at)
