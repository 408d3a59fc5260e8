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
Cancel ignored, a failed write taken for one that has ended. `sim/hunt` runs whole clusters of the
real parts, with real sessions.

### Evidence

* **The writer's word**, over any transport: Written or Drained.
* **shm**: the end of all the writer's processes (one a rank; `Met` names them), each seen on a
  pidfd. Unmapping at the target revokes nothing.
* **nixl over TCP**: the target's agent for that peer deleted. Neither the writer's end nor a
  released handle, a deregistered region or a removed remote agent is: [measured](nixl-fence.md).
* **nixl over anything else**: nothing more, until a fence is shown to work there. Pages of a lost
  peer stay held until this process ends.

A write that fails at its source is `stray`: its bytes may still arrive. Prefill then says Lost, not
Drained, and decode fences: over TCP by itself, in shared memory by asking for the peer's end.

### Sessions

Decode opens a session with `Meet` (who it is, where its pool lies, the number of the attempt), and
prefill answers `Met` with that number. Every other word names its session; one of any other session
is answered `Stranger` and has no effect.

* Prefill ends a session when its decode was silent or came back as a new process, and only once all
  its handoffs are closed. So the answer to a later attempt is evidence for the earlier session.
* An answer to an earlier attempt says nothing: it is dropped. (Taking it for a new session was a
  fault of ours, which the hunt found: handoffs in flight were taken for drained.)
* A `Meet` with another invitation says that decode has fenced the earlier one. A session with a
  lost handoff ends in no other way: until then its `Meet` is answered by the same session.
* `settled`, on every word of decode's, says below which number it will ask nothing more: prefill
  remembers closed handoffs until then, and a late Offer below it is not even answered.
* A pid means nothing on another machine or in another space of process ids: `Met` names its host,
  and over shared memory a pair that does not share one is not used.
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
