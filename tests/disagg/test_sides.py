"""One fault at a time: aborts in every state, late and lost words, deadlines, bad references.

Each test names the reports it comes from, by the number of the list of public faults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from stanchion.core.messages import Abort, Start
from stanchion.core.outcome import (
    Cancelled,
    Completed,
    Outcome,
    OutputSuspect,
    Overloaded,
    PeerLost,
    Rejected,
)
from stanchion.core.request import Sampling
from stanchion.device.stream import Pages
from stanchion.disagg import handoff as h
from stanchion.disagg import words
from stanchion.disagg.check import Mode
from stanchion.disagg.decode import DecodeSide
from stanchion.disagg.peer import Peer
from stanchion.disagg.prefill import PrefillSide, Session
from stanchion.engine.request import Request
from stanchion.engine.scheduler import Limits
from stanchion.kv.layout import Key, Layout, Spans, spans
from stanchion.kv.transfer import courier
from tests.disagg.rig import TIMES, Cluster, Held, Settings, decode, differs, held, prefill, start
from tests.engine.rig import solo

# A pool of 39 pages of 16 tokens: a request of 31 pages leaves no room for another of 20.
SMALL = Settings(pages=40, limits=Limits(chunk_tokens=64))


def answers(cluster: Cluster, *starts: Start) -> None:
    """Each has completed, and as if it had been alone."""
    for one in starts:
        heard = cluster.heard[one.request]
        assert isinstance(heard.ends[0].outcome, Completed), heard.ends
        assert differs(one, heard, cluster.settings) is None


# ---- D04: pages are not given out while a write may land in them ------------------------------

STATES = ("offered", "queued", "writing", "written", "decoding")


def abort_in(cluster: Cluster, lane: Held, first: Start, state: str) -> None:
    """Bring the request into `state`, then let its client leave."""
    decode_side, prefill_side = cluster.decodes[0], cluster.prefills[0]
    cluster.step([first])
    if state in ("queued", "writing"):
        cluster.until(lambda: bool(prefill_side.engine.running))
    if state == "writing":
        cluster.until(lambda: len(lane.writes) > 3)
    if state in ("written", "decoding"):
        cluster.until(lambda: not prefill_side.engine.busy and bool(lane.writes))
        lane.release()
    if state == "decoding":
        cluster.until(lambda: bool(cluster.heard[first.request].tokens))
    lane.holding = True
    assert decode_side.engine.busy
    cluster.step([Abort(first.request, "client")])


@pytest.mark.parametrize("state", STATES)
def test_whoever_leaves_gives_no_page_away_under_a_write(state: str) -> None:
    cluster = Cluster.of(SMALL)
    lane = held(cluster)
    first, second = start(cluster, "a", 490), start(cluster, "b", 500, salt=1)
    abort_in(cluster, lane, first, state)
    cluster.step([second])
    for _ in range(30):  # a's pages do not come back while its writes are out, however long
        cluster.step()
    if state == "writing":
        assert cluster.decodes[0].pages_held == 31
        assert not cluster.heard["b"].ends and not cluster.decodes[0].engine.running
    lane.release()
    cluster.settle()
    answers(cluster, second)
    assert cluster.outcome("a") == Cancelled("client")
    assert differs(first, cluster.heard["a"], SMALL) is None
    assert cluster.audit() == []


def test_the_old_way_is_caught() -> None:
    """Fault 1 of the report: the pages go to the next request, and the late write lands in them.
    A wrong text, or (with digests) a suspect: but not the right answer."""
    for check in ("off", "full"):
        settings = replace(SMALL, failpoints=("release_before_drained",), check=check)
        cluster = Cluster.of(settings, prefills=2)
        lane = held(cluster)
        first, second = start(cluster, "a", 490), start(cluster, "b", 500, salt=1, at=1)
        abort_in(cluster, lane, first, "writing")
        cluster.step([second])
        cluster.until(lambda one=cluster: bool(one.heard["b"].tokens))  # all of b's KV is here
        lane.release()
        while (old := cluster.prefills[0])._writes:  # they land before b goes on
            old.step([], cluster.now)
        cluster.settle()
        assert cluster.heard["b"].ends
        outcome = cluster.outcome("b")
        if check == "off":
            assert differs(second, cluster.heard["b"], settings) == "b differs"
        else:
            assert isinstance(outcome, OutputSuspect) and "KV differs at the end" in str(outcome)
            assert cluster.decodes[0].engine.pool.quarantined > 0


def test_a_deadline_ends_the_request_and_not_the_write() -> None:
    times = replace(TIMES, deadline_s=2.0, drain_s=1000.0)
    cluster = Cluster.of(replace(SMALL, times=times))
    lane = held(cluster)
    first = start(cluster, "a", 490)
    cluster.step([first])
    cluster.until(lambda: bool(cluster.heard["a"].ends))
    assert cluster.outcome("a") == Cancelled("deadline") and 2.0 <= cluster.now <= 2.3
    for _ in range(100):
        cluster.step()
    assert cluster.decodes[0].pages_held == 31 and cluster.decodes[0].deadlines == 1
    assert cluster.prefills[0].open == 1 and not cluster.prefills[0].engine.busy
    lane.release()
    cluster.settle()
    assert cluster.audit() == []


def test_prefill_stops_computing_at_the_next_chunk() -> None:
    cluster = Cluster.of(SMALL)
    cluster.step([start(cluster, "a", 490)])
    engine = cluster.prefills[0].engine
    cluster.until(lambda: engine.counters.prefill_tokens >= 64)
    before = engine.counters.prefill_tokens
    cluster.step([Abort("a", "client")])
    cluster.settle()
    assert engine.counters.prefill_tokens - before <= 3 * 64 < 490
    assert cluster.audit() == []


def test_a_flush_waits_for_the_writes() -> None:
    """The admin's flush of the cache empties the tree, and takes no pinned page."""
    cluster = Cluster.of(SMALL)
    lane = held(cluster)
    first, second = start(cluster, "a", 490), start(cluster, "b", 490)
    cluster.step([first])
    cluster.until(lambda: len(lane.writes) > 3)
    for side in (*cluster.decodes, *cluster.prefills):
        side.engine.tree.flush()
        assert side.engine.pool.audit() == []
    lane.release()
    cluster.settle()
    cluster.step([second])
    cluster.settle()
    answers(cluster, first, second)


# ---- D05, D06: nobody's clock releases the other's pages; nothing is held for ever -------------


def test_a_slow_decode_does_not_make_prefill_give_its_source_away() -> None:
    """A lease that runs out on one side only: prefill's pages are its own until its writes end."""
    cluster = Cluster.of(SMALL)
    lane = held(cluster)
    first = start(cluster, "a", 490)
    cluster.step([first])
    cluster.until(lambda: not cluster.prefills[0].engine.busy and bool(lane.writes))
    for _ in range(300):  # 30 s: any lease of the peers' engines would be over
        cluster.step()
    prefill_side = cluster.prefills[0]
    assert prefill_side.pages_held == 31
    others = [start(cluster, f"o{at}", 200, salt=at + 2) for at in range(4)]
    cluster.step(others)  # they want prefill's pages
    for _ in range(20):
        cluster.step()
    lane.release()
    cluster.settle()
    answers(cluster, first, *others)


def test_a_source_given_back_early_is_caught() -> None:
    """The wrong variant: prefill drops its source pins when the compute is over."""
    cluster = Cluster.of(replace(SMALL, check="full"))
    lane = held(cluster)
    first = start(cluster, "a", 490)
    cluster.step([first])
    side = cluster.prefills[0]
    cluster.until(lambda: not side.engine.busy and bool(lane.writes))
    (sending,) = (one for session in side.sessions.values() for one in session.handoffs.values())
    for pin in sending.pins:
        pin.drop()
    sending.pins = []
    side.engine.tree.flush()
    other = start(cluster, "b", 590, salt=3)
    side.engine.step([Start(request="b", tokens=other.tokens, sampling=Sampling(max_tokens=0))])
    while side.engine.busy:
        side.engine.step([])
    lane.release()
    cluster.settle()
    assert isinstance(cluster.outcome("a"), OutputSuspect)


def decode_dies(cluster: Cluster, when: str) -> None:
    """A new life takes its place, and a lease passes: nothing of the old one is on prefill."""
    lane = held(cluster)
    cluster.step([start(cluster, "a", 490)])
    side = cluster.prefills[0]
    if when == "before":
        cluster.wire.clear()
    if when == "mid":
        cluster.until(lambda: len(lane.writes) > 3)
    if when == "after":
        lane.release()
        cluster.until(lambda: bool(cluster.heard["a"].tokens))
    lane.release()
    cluster.decodes[0] = decode("decode-0", 201, cluster.settings)  # a new life; a is forgotten
    del cluster.heard["a"]
    for _ in range(80):
        cluster.step()
    assert (side.open, side.pages_held, side.audit()) == (0, 0, []), "prefill holds pages"


@pytest.mark.parametrize("when", ["before", "mid", "after"])
def test_a_dead_decode_leaves_nothing_on_prefill(when: str) -> None:
    cluster = Cluster.of(SMALL)
    decode_dies(cluster, when)
    side = cluster.prefills[0]
    again = start(cluster, "again", 490)
    cluster.step([again])
    cluster.settle()
    answers(cluster, again)
    assert len(side.sessions) == 1


def test_a_prefill_that_waits_for_decodes_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the source is let go when decode says that it is settled, and by nothing
    else. It gives all back while decode lives."""
    true_step, true_hear = h.prefill, PrefillSide.hear

    def step(state: h.Prefill, event: h.PrefillEvent) -> tuple[h.Prefill, tuple[h.Effect, ...]]:
        after, effects = true_step(state, event)
        return after, tuple(one for one in effects if not isinstance(one, h.Unpin))

    def hear(self: PrefillSide, word: words.FromDecode, address: bytes, now: float) -> None:
        session = None if isinstance(word, words.Meet) else self.sessions.get(word.session)
        for sending in () if session is None else session.handoffs.values():
            if sending.closed and sending.number < word.settled:
                for pin in sending.pins:
                    pin.drop()
                sending.pins = []
        true_hear(self, word, address, now)

    monkeypatch.setattr(h, "prefill", step)
    monkeypatch.setattr(PrefillSide, "hear", hear)
    alive = Cluster.of(SMALL)
    one = start(alive, "a", 490)
    alive.step([one])
    alive.settle()
    for _ in range(6):
        alive.step()  # a beat says that it is settled
    answers(alive, one)
    assert alive.audit() == []
    with pytest.raises(AssertionError, match="prefill holds pages"):
        decode_dies(Cluster.of(SMALL), "mid")


def prefill_dies(cluster: Cluster, when: str) -> None:
    """Silent, then known to have ended, then there anew: its requests end, their pages wait for
    that evidence, and come back with it."""
    lane = held(cluster)
    side, old = cluster.decodes[0], cluster.prefills[0]
    cluster.step([start(cluster, "a", 490)])
    if when != "before":
        cluster.until(lambda: len(lane.writes) > 3)
    if when == "after":
        cluster.mute = True  # its last word is lost
        lane.release()
        cluster.until(lambda: not old.engine.busy and not old._writes)
    cluster.stopped[0] = None
    for _ in range(70):
        cluster.step()
    if when != "before":
        assert side.pages_held == 31, "a silent peer is no evidence"
        assert {one.incarnation for one in cluster.suspected} == {old.incarnation}
    assert isinstance(cluster.outcome("a"), PeerLost)
    for _ in range(60):
        cluster.step()
    side.peer_ended(old.incarnation)
    cluster.mute = False
    cluster.prefills[0] = prefill("prefill-0", 77, cluster.settings)
    del cluster.stopped[0]
    cluster.wire.clear()
    cluster.settle(100)
    assert cluster.audit() == []


@pytest.mark.parametrize("when", ["before", "mid", "after"])
def test_a_dead_prefill_ends_its_requests_and_frees_their_pages(when: str) -> None:
    cluster = Cluster.of(SMALL, prefills=2)
    prefill_dies(cluster, when)
    again = start(cluster, "again", 490, at=0)
    cluster.step([again])
    cluster.settle()
    answers(cluster, again)


@pytest.mark.parametrize("when", ["mid", "after"])
def test_a_decode_that_waits_for_prefills_word_is_caught(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant: that its process ended means nothing, only Written or Drained frees."""
    monkeypatch.setattr(DecodeSide, "peer_ended", lambda self, incarnation: None)
    cluster = Cluster.of(SMALL, prefills=2)
    with pytest.raises(AssertionError, match=r"still busy: .*handoff 1 is cancelling"):
        prefill_dies(cluster, when)
    assert cluster.decodes[0].pages_held == 31


def refused(cluster: Cluster, name: str, length: int) -> Outcome:
    """Offered to a prefill worker that does not take it: over at once, with nothing held."""
    cluster.step([start(cluster, name, length)])
    cluster.settle(10)
    assert cluster.audit() == []
    return cluster.outcome(name)


def test_a_prefill_that_refuses_is_heard_at_once() -> None:
    cluster = Cluster.of(SMALL)
    cluster.prefills[0].engine = replace_context(cluster.prefills[0].engine, 100)
    outcome = refused(cluster, "a", 490)
    assert isinstance(outcome, PeerLost) and "over the 100 that fit here" in outcome.message
    cluster.prefills[0].draining = True
    assert isinstance(refused(cluster, "b", 50), Overloaded)


def test_a_refusal_that_nobody_is_told_of_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: who cannot take an offer forgets it."""
    true_offer = PrefillSide._offer

    def offer(self: PrefillSide, session: Session, word: words.Offer) -> None:
        if not self.draining:
            true_offer(self, session, word)

    monkeypatch.setattr(PrefillSide, "_offer", offer)
    cluster = Cluster.of(SMALL)
    cluster.prefills[0].draining = True
    with pytest.raises(AssertionError, match=r"still busy: .*handoff 1 is offered"):
        refused(cluster, "a", 50)


def replace_context(engine: Any, context_max: int) -> Any:
    engine.served = replace(engine.served, context_max=context_max)
    return engine


# ---- D07: an error never becomes an answer ---------------------------------------------------


def offer(cluster: Cluster, **changes: Any) -> words.Offer:
    session = next(iter(cluster.prefills[0].sessions))
    plain = words.Offer(
        session=session, settled=0, number=900, tokens=[40] * 40, tenant="", salt="",
        prompt_logprobs=None, first_page=0, pages=[5, 6, 7],
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"pages": [5, 6]}, "pages"),
        ({"pages": [5, 6, 40]}, "pages"),
        ({"pages": [5, 6, 2**30]}, "pages"),
        ({"pages": [5, 5, 7]}, "pages"),
        ({"first_page": 2**40}, "pages"),
        ({"tokens": [40] * 39 + [999]}, "prompt"),
    ],
)
def test_a_bad_reference_is_refused_and_nothing_is_written(
    changes: dict[str, Any], field: str
) -> None:
    cluster = Cluster.of(SMALL)
    good = start(cluster, "good", 50)
    cluster.step([good])
    cluster.settle()
    side = cluster.prefills[0]
    before = side.bytes_sent
    side.hear(offer(cluster, **changes), b"0", cluster.now)
    for _ in range(5):
        side.step([], cluster.now)
    refused = [word for _, word in side.out if isinstance(word, words.Drained)]
    assert isinstance(refused[0].outcome, Rejected) and refused[0].outcome.field == field
    assert side.bytes_sent == before
    side.out.clear()
    again = start(cluster, "again", 70, salt=5)
    cluster.step([again])
    cluster.settle()
    answers(cluster, good, again)


def test_a_reference_is_good_once_and_in_its_own_session() -> None:
    cluster = Cluster.of(SMALL)
    cluster.step([start(cluster, "a", 50)])
    cluster.settle()
    for _ in range(6):
        cluster.step()  # a beat says that it is settled
    side = cluster.prefills[0]
    (session,) = side.sessions.values()
    late = offer(cluster, number=1, settled=session.settled)
    before = side.bytes_sent
    side.out.clear()
    for word in (late, offer(cluster, session=12345), words.Cancel(session=1, settled=0, number=1)):
        side.hear(word, b"0", cluster.now)
        side.step([], cluster.now)
    strangers = [word for _, word in side.out if isinstance(word, words.Stranger)]
    assert len(strangers) == 2 and len(side.out) == 2, "the late offer is not even answered"
    assert side.bytes_sent == before and not side.engine.busy


@pytest.mark.parametrize("lost", ["offer", "first answer", "cancel", "drained"])
def test_a_lost_word_is_said_again(lost: str) -> None:
    cluster = Cluster.of(SMALL)
    lane = held(cluster)
    first = start(cluster, "a", 490)
    cluster.step([first])
    if lost == "offer":
        cluster.until(lambda: bool(cluster.prefills[0].sessions))
        cluster.step()
        cluster.wire = [one for one in cluster.wire if not one.to_prefill]
    cluster.until(lambda: not cluster.prefills[0].engine.busy and bool(lane.writes))
    if lost == "cancel":
        cluster.step([Abort("a", "client")])
        cluster.wire.clear()
    if lost == "drained":
        cluster.step([Abort("a", "client")])
    lane.release()
    if lost in ("first answer", "drained"):
        cluster.until(lambda: not cluster.prefills[0].open)
        cluster.wire.clear()
    cluster.settle()
    if lost in ("offer", "first answer"):
        answers(cluster, first)
    assert cluster.audit() == []


def test_one_buffer_that_fails_fails_the_handoff() -> None:
    """Failure marking covers every buffer: pages of one layer do not arrive, the rest does."""
    cluster = Cluster.of(replace(SMALL, check="full"))
    lane = held(cluster)
    first = start(cluster, "a", 490)
    cluster.step([first])
    cluster.until(lambda: not cluster.prefills[0].engine.busy and bool(lane.writes))
    lost = next(write for write in lane.writes if write.layer == 3)  # the draft layer's
    elsewhere: Pages = np.full(len(lost.destination), 0, np.int32)
    elsewhere[:] = np.arange(len(elsewhere)) + 1 if 1 not in lost.destination else lost.destination
    lane.writes[lane.writes.index(lost)] = replace(lost, destination=lost.destination[::-1].copy())
    lane.release()
    cluster.settle()
    outcome = cluster.outcome("a")
    assert isinstance(outcome, OutputSuspect) and "of layer 3" in outcome.evidence
    assert "digest" in outcome.evidence and "written by prefill-0" in outcome.evidence
    assert cluster.decodes[0].engine.pool.quarantined > 0


def test_a_write_that_fails_fails_the_request() -> None:
    cluster = Cluster.of(SMALL)
    lane = held(cluster)
    cluster.step([start(cluster, "a", 490)])
    cluster.until(lambda: len(lane.writes) > 3)
    lane.lane.cut([])
    broken = lane.writes.pop(0)
    cluster.prefills[0].lane = lane
    fails = Fails(lane, broken.number)
    cluster.prefills[0].lane = fails
    lane.release()
    cluster.settle()
    outcome: Outcome = cluster.outcome("a")
    assert outcome == PeerLost("the KV could not be written", "prefill-0")
    assert cluster.audit() == []


class Fails:
    """A lane of which some writes end without being whole."""

    def __init__(self, lane: Held, *numbers: int, stray: bool = False) -> None:
        self._lane = lane
        self._failed = list(numbers)
        self._stray = stray

    def poll(self) -> list[Any]:
        from stanchion.kv.transfer.words import WriteEnded

        failed, self._failed = self._failed, []
        return [*self._lane.poll(), *(WriteEnded(one, False, self._stray) for one in failed)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


# ---- D03: what does not fit is refused -------------------------------------------------------


def test_a_pair_that_does_not_fit_is_refused_by_name() -> None:
    cluster = Cluster.of(SMALL)
    cluster.decodes[0].identity = {**cluster.decodes[0].identity, "draft_tokens": "0"}
    cluster.step([start(cluster, "a", 50)])
    cluster.settle()
    outcome = cluster.outcome("a")
    assert isinstance(outcome, PeerLost)
    assert "draft_tokens: absent here, 0 there" in outcome.message
    assert cluster.audit() == []


def unequal(prefill_drafts: int, decode_drafts: int, check: Mode = "off") -> Outcome:
    """A pair with so many drafts on each side: it answers right, or names what does not fit."""
    there, here = (
        replace(SMALL, limits=Limits(chunk_tokens=64, draft_tokens=drafts), check=check)
        for drafts in (prefill_drafts, decode_drafts)
    )
    cluster = Cluster(here, [prefill("prefill-0", 1, there)], [decode("d", 101, here)])
    one = start(cluster, "a", 50)
    cluster.step([one])
    cluster.settle()
    outcome, heard = cluster.outcome("a"), cluster.heard["a"]
    if isinstance(outcome, Completed):
        alone = solo(msgspec.structs.replace(one, prefill=None), decode_drafts)
        assert heard.tokens == alone.tokens, "the text differs"
        assert heard.answer == alone.answer, "the drafts differ"
    else:
        assert isinstance(outcome, PeerLost) and "of layer 3" in outcome.message, outcome
        assert not heard.tokens
    assert cluster.audit() == []
    return outcome


@pytest.mark.parametrize("drafts", [(0, 3), (3, 0)])
def test_a_draft_layer_on_one_side_only_is_refused_by_its_buffers(drafts: tuple[int, int]) -> None:
    assert isinstance(unequal(*drafts), PeerLost)


def by_position(
    ours: Layout, theirs: Layout, layer: int, source: Pages, destination: Pages, last_rows: int
) -> Spans:
    """`spans`, with the peer's buffers taken from a list of its bases, all of one kind and then all
    of the next, at the places that they have in ours."""

    def listed(layout: Layout) -> list[Key]:
        return sorted(layout.buffers, key=lambda key: (key[1], key[0]))

    taken = zip(listed(ours), listed(theirs), strict=False)
    named = replace(theirs, buffers={key: theirs.buffers[other] for key, other in taken})
    return spans(ours, named, layer, source, destination, last_rows)


def test_layouts_that_nobody_compares_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the wrong variant: what both have is well, and the draft layer is empty."""
    monkeypatch.setattr(courier, "check_layouts", lambda ours, theirs: None)
    with pytest.raises(AssertionError, match="the drafts differ"):
        unequal(0, 3)


def test_buffers_taken_by_position_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: nobody compares the two layouts, and a buffer is a place in a list. It does well
    while both sides have the draft layer; if decode alone has it, bases are off."""
    monkeypatch.setattr(courier, "check_layouts", lambda ours, theirs: None)
    monkeypatch.setattr(courier, "spans", by_position)
    assert isinstance(unequal(3, 3), Completed)
    with pytest.raises(AssertionError, match="the text differs"):
        unequal(0, 3)
    with pytest.raises(AssertionError, match="OutputSuspect"):
        unequal(0, 3, check="full")


# ---- D02, D39: no shared slot, no name of a client's ------------------------------------------


def test_no_first_token_and_no_hidden_state_crosses() -> None:
    """There is no metadata slot to mix up: what decode hears of a prompt is that its KV is whole.
    The words themselves are the proof; a field added to them must be added here, with a reason."""
    fields = {one.name for one in msgspec.structs.fields(words.Written)}
    assert fields == {"session", "number", "cached_tokens", "digests", "scores"}
    fields = {one.name for one in msgspec.structs.fields(words.Drained)}
    assert fields == {"session", "number", "outcome"}


def test_64_requests_over_a_slow_wire_mix_nothing_and_none_is_cut_off() -> None:
    settings = Settings(pages=1024, slow_ms=5.0, check="full")
    cluster = Cluster.of(settings, prefills=4)
    starts = [start(cluster, f"r{at}", 40 + at, salt=at % 3, at=at % 4) for at in range(64)]
    cluster.step(starts)
    cluster.settle()
    answers(cluster, *starts)


def one_after_the_other(first_name: str, second_name: str) -> None:
    """The second comes while the handoff of the first is still draining, and is another one."""
    cluster = Cluster.of(replace(SMALL, pages=120))
    lane = held(cluster)
    cluster.step([start(cluster, first_name, 490)])
    cluster.until(lambda: len(lane.writes) > 3)
    cluster.step([Abort(first_name, "client")])
    assert cluster.outcome(first_name) == Cancelled("client")
    second = start(cluster, second_name, 400, salt=9)
    cluster.step([second])
    lane.release()
    cluster.settle()
    answers(cluster, second)
    assert cluster.audit() == []


def test_the_machine_is_used_by_requests_of_one_name_after_each_other() -> None:
    one_after_the_other("same", "same")


def test_a_handoff_known_by_its_requests_name_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the name is the key, and nothing is minted. Other names do well."""
    true_begin = DecodeSide._begin

    def begin(self: DecodeSide, request: Request, now: float) -> None:
        self._numbers = int.from_bytes(request.name[:6].encode())
        true_begin(self, request, now)

    monkeypatch.setattr(DecodeSide, "_begin", begin)
    one_after_the_other("one", "other")
    with pytest.raises(AssertionError, match="PeerLost"):
        one_after_the_other("same", "same")


# ---- sessions: a late word of an earlier one says nothing of this one --------------------------


def late_answer(cluster: Cluster) -> Held:
    """Two sessions after each other; while writes of the second are out, the answer that opened
    the first comes once more."""
    decode_side, prefill_side = cluster.decodes[0], cluster.prefills[0]
    cluster.step([start(cluster, "first", 60)])
    cluster.settle()
    (session,) = prefill_side.sessions.values()
    old = prefill_side._met(session, session.attempt)
    prefill_side._leave(session, "it was silent")
    (peer,) = decode_side.peers.values()
    cluster.until(lambda: peer.session not in (None, session.number))
    lane = held(cluster)
    cluster.step([start(cluster, "a", 490)])
    cluster.until(lambda: len(lane.writes) > 3)
    decode_side.hear(peer, old, cluster.now)
    return lane


def test_a_late_answer_to_an_earlier_meeting_changes_nothing() -> None:
    cluster = Cluster.of(SMALL)
    lane = late_answer(cluster)
    cluster.step()
    assert cluster.decodes[0].open == 1 and not cluster.heard["a"].ends
    lane.release()
    cluster.settle()
    assert isinstance(cluster.outcome("a"), Completed) and cluster.audit() == []


def test_a_decode_that_believes_a_late_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old machine of ours, found by the hunt: any Met with another number was a new session,
    and so the handoffs of this one were taken for drained, with their writes under way."""

    def met(self: DecodeSide, peer: Peer, word: words.Met) -> None:
        if peer.session != word.session:
            for receiving in list(peer.handoffs.values()):
                if receiving.session is not None:
                    self._drained(receiving, PeerLost("an earlier session"))
            peer.session = word.session
            for receiving in list(peer.handoffs.values()):
                self._offer(receiving)

    monkeypatch.setattr(DecodeSide, "_met", met)
    cluster = Cluster.of(SMALL)
    lane = late_answer(cluster)
    cluster.step()
    assert cluster.decodes[0].open == 0 and lane.writes, "pages are free under these writes"


def test_a_lost_handoff_is_fenced_though_its_session_was_silent() -> None:
    """A write strayed, the word of it was lost, and decode was away for so long that prefill gave
    the session up, with another handoff's writes still out. It is the same session that goes on."""
    cluster = Cluster.of(replace(SMALL, pages=80, times=replace(TIMES, drain_s=1000.0)))
    decode_side, prefill_side = cluster.decodes[0], cluster.prefills[0]
    lane = held(cluster)
    cluster.step([start(cluster, "a", 200), start(cluster, "b", 300, salt=1)])
    cluster.until(lambda: not prefill_side.engine.busy and len(lane.writes) > 8)
    strays = [one for one in lane.writes if prefill_side._writes[one.number][1].number == 1]
    lane.writes = [one for one in lane.writes if one not in strays]
    prefill_side.lane = Fails(lane, *(one.number for one in strays), stray=True)
    for _ in range(80):  # decode is stopped
        cluster.now += 0.1
        prefill_side.step([], cluster.now)
        prefill_side.out.clear()
    (session,) = prefill_side.sessions.values()
    assert session.gone and session.lost and lane.writes
    for _ in range(30):
        cluster.step()
    assert decode_side.open == 2, "nothing shows that its pages are not written"
    assert [one.incarnation for one in cluster.suspected] == [prefill_side.incarnation]
    assert isinstance(cluster.outcome("a"), PeerLost)
    lane.release()
    decode_side.peer_ended(prefill_side.incarnation)
    cluster.step()
    assert decode_side.open == 0 and decode_side.audit() == []


def test_a_deadline_is_for_the_prompt_and_not_for_the_answer() -> None:
    """A prompt that decode holds whole is not waited for, however long its answer takes."""
    cluster = Cluster.of(replace(SMALL, pages=120, times=replace(TIMES, deadline_s=2.0)))
    first, second = start(cluster, "first", 160), start(cluster, "second", 160)
    sampling = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
    second = msgspec.structs.replace(second, sampling=sampling)
    cluster.step([first])
    cluster.settle()
    cluster.step([second])
    cluster.settle()
    assert cluster.now > 4.0
    answers(cluster, first, second)


@pytest.mark.parametrize("settled", [5, 10**9, 2**53 - 1])
def test_a_peer_cannot_make_prefill_forget_what_is_open(settled: int) -> None:
    cluster = Cluster.of(SMALL)
    lane = held(cluster)
    first = start(cluster, "a", 490)
    cluster.step([first])
    cluster.until(lambda: len(lane.writes) > 3)
    side = cluster.prefills[0]
    (session,) = side.sessions.values()
    side.hear(words.Beat(session=session.number, settled=settled, asked=[]), b"0", cluster.now)
    assert side.open == 1 and side.engine.pool.audit() == []


def test_numbers_and_process_ids_have_bounds() -> None:
    cancel = words.Cancel(session=1, settled=0, number=2**53)
    with pytest.raises(msgspec.ValidationError):
        words.decode_from_decode(words.encode(cancel))
    for pid in (0, -1, 2**40):
        met = words.Met(attempt=1, session=1, incarnation=1, pids=[pid], host="")
        with pytest.raises(msgspec.ValidationError):
            words.decode_from_prefill(words.encode(met))
