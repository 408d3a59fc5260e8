"""Write docs/PROTOCOLS.md from the machines: `python runs/draw_protocols.py`."""

from __future__ import annotations

from pathlib import Path

from stanchion.disagg import handoff as h
from stanchion.sim.draw import table

HEAD = """# Protocols

Drawn from the machines by walking every state that their events reach
(`python runs/draw_protocols.py`); an event that is not listed for a phase is a Bug there. A test
holds this page against the machines.

## Handoff: one request's KV from a prefill worker to a decode worker

The promise: a page is unpinned, at either end, only when no write of this handoff is in flight or
can still begin. Evidence is the writer's word (Written, Drained) or a fence that the transport
vouches for (PeerFenced). Time passing is not evidence: Overdue asks for a fence. Decode asks again
on every Tick until it is answered; prefill answers from where it stands.

`tests/disagg/test_handoff.py` visits every order of two handoffs of two writes each over the same
pages, with a lost or repeated message, a client that leaves, a prefill that dies or is stopped with
its writes still on the way. It shows that the old machines break the promise: unpin on abort, unpin
on a timeout, source freed early, acknowledged when received, Cancel forgotten before its Offer,
Cancel ignored.
"""


def page() -> str:
    writes = [event for write in (0, 1) for event in (h.Computed(write), h.WriteEnded(write))]
    cut = [h.WriteEnded(write, False, stray) for write in (0, 1) for stray in (False, True)]
    told = [h.Offer(), h.Cancel(), h.Abort(), h.Sealed()]
    prefill = table(h.Prefill(), [*told, *writes, *cut], h.prefill)
    asked = [h.Written(), h.Drained(), h.Lost(), h.Abort(), h.Tick(), h.Overdue(), h.PeerFenced()]
    decode = table(h.Decode(), asked, h.decode)
    return f"{HEAD}\n### Prefill's end\n\n{prefill}\n\n### Decode's end\n\n{decode}\n"


if __name__ == "__main__":
    Path(__file__).parent.parent.joinpath("docs", "PROTOCOLS.md").write_text(page())
