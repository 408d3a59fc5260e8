"""What is kept is given up on a gateway's word: a prefix that a wrong answer read, or everything.

May be done at any moment, with a flight out too: a flight has pins of its own, and whoever holds a
page that is condemned begins again at the next landing, without it.
"""

from __future__ import annotations

import numpy as np

from stanchion.core.messages import Quarantine
from stanchion.engine.bounds import root_of
from stanchion.engine.loop import Engine

QUARANTINE_SHARE = 0.125  # of the pool, at most, for evidence and rest; beyond it pages are reused


def condemn(engine: Engine, order: Quarantine) -> int:
    """Nothing that an answer of these tokens read is found again: its pages leave the prefix tree
    with all that hangs on them, and so does all of its tenant and salt on other tiers, which do
    not know what hangs on what. Return how many pages are shared no more.

    The pages go into quarantine, as far as a share of the pool allows.
    """
    root = root_of(order.tenant, order.salt, engine.served)
    tokens = np.array(order.tokens, np.int32)
    pages = engine.tree.match(engine.tree.keys(root, tokens, []), tokens)
    engine.counters.quarantines += 1
    if engine.tiered is not None:
        engine.tiered.tiers.forget_root(root)
    if not len(pages):
        return 0
    room = int(QUARANTINE_SHARE * engine.pool.size) - engine.pool.quarantined
    if room > 0:
        engine.pool.quarantine(pages[:room], "a wrong answer read them")
    engine.condemned.append(pages)
    dropped = engine.tree.forget(pages)
    engine.counters.pages_dropped += dropped
    return dropped


def flush(engine: Engine) -> int:
    """Give back what is kept for reuse alone, on every tier. Return how many device pages."""
    if engine.tiered is not None:
        engine.tiered.tiers.flush()
    return engine.tree.flush()
