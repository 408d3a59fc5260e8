"""Speculative-decoding acceptance, as SGLang defines it, from a request's running counters.

* `spec_accept_length` = tokens generated in verify steps / verify steps: 1 to k + 1 with the bonus.
* `spec_accept_rate`   = accepted drafts / proposed drafts: 0 to 1.
* `spec_accept_prefix` = accepted drafts / verify steps: 0 to k.

A value that nothing was measured for is absent (None), never 0.
"""

from __future__ import annotations

from stanchion.core.messages import Spec


def accept_length(spec: Spec) -> float | None:
    return spec.tokens / spec.verify_steps if spec.verify_steps else None


def accept_rate(spec: Spec) -> float | None:
    return spec.accepted / spec.proposed if spec.proposed else None


def accept_prefix(spec: Spec) -> float | None:
    return spec.accepted / spec.verify_steps if spec.verify_steps and spec.proposed else None
