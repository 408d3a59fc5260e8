"""From a plan to tokens: one flight is drafting, one target pass, the verdict, and catching up.

    draft    the drafts after the first, one slot a pass, on hiddens of the draft layer itself
    target   verify windows and prefill chunks together, ragged
    verdict  rows that are not finite end their request; the others accept drafts and add a token
    extend   the draft layer over what is now certain, on target hiddens; it gives the next first
             draft, and it is what makes the draft rows worth sharing

The runner decides nothing about requests: it returns what it found, and the loop draws conclusions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stanchion.core.matching import Matcher
from stanchion.device.kernels.choose import finite
from stanchion.device.stream import Pages, Stream, View
from stanchion.engine.batch import Ints, Tables, Written
from stanchion.engine.flight import Arrived, Landed, Scores
from stanchion.engine.grammar import Path
from stanchion.engine.request import Ahead, Request
from stanchion.engine.sample import Window, draft, score, verify
from stanchion.engine.scheduler import Piece
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.ready import Ready
from stanchion.kv.schema import Door
from stanchion.kv.store import Found, Leased, Read, Rows, Store
from stanchion.model.text import Model

SCORED_ROWS = 64  # prompt log-probabilities are made from this many rows of logits at a time


# What hears, layer by layer, up to which row each request's prompt is in place.
OnRows = Callable[[int, Sequence[tuple[Request, int]]], None]

# By how many queries each request has: which of them go through a pass of their own.
Apart = Callable[[Ints], Sequence[Ints]]


def _all_together(counts: Ints) -> Sequence[Ints]:
    return [np.arange(len(counts))]


class Marking:
    """A flight's cache for one pass: when a layer's rows are in, its watermark rises."""

    def __init__(
        self, leased: Leased, ready: Ready, written: Written, then: Callable[[int], None] | None
    ) -> None:
        self.page_tokens = leased.page_tokens
        self._leased = leased
        self._ready = ready
        self._written = written
        self._then = then

    def ask(self, layer: int, door: Door, read: Read) -> Found:
        return self._leased.ask(layer, door, read)

    def writing(self, layer: int, door: Door) -> AbstractContextManager[View[Rows]]:
        entered = self._leased.writing(layer, door)
        if door == "index":  # a layer's index rows are written before its latents
            return entered
        return Raising(entered, partial(self._raise, layer))

    def _raise(self, layer: int) -> None:
        self._ready.raise_to(layer, self._written.pages, self._written.rows)
        if self._then is not None:
            self._then(layer)


class Raising:
    """A door after which a layer's rows are ready, unless what was inside it failed."""

    __slots__ = ("_door", "_then")

    def __init__(self, door: AbstractContextManager[View[Rows]], then: Callable[[], None]) -> None:
        self._door = door
        self._then = then

    def __enter__(self) -> View[Rows]:
        return self._door.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._door.__exit__(kind, *rest)
        if kind is None:
            self._then()


class Runner:
    def __init__(
        self, model: Model, store: Store, stream: Stream, pool: PagePool, ready: Ready
    ) -> None:
        self.model = model
        self._store = store
        self._stream = stream
        self._pool = pool
        self._ready = ready
        self.on_rows: OnRows | None = None
        self.apart: Apart = _all_together

    def launch(self, pieces: Sequence[Piece], pins: list[Pin]) -> Arrived:
        flight = _Flight(self, pieces, pins)
        flight.propose()
        hidden = flight.target()
        flight.judge(hidden)
        if self.model.schema.draft:
            flight.extend(hidden)
        return Arrived(flight.landed)


class _Flight:
    def __init__(self, runner: Runner, pieces: Sequence[Piece], pins: list[Pin]) -> None:
        self._runner = runner
        self._model = runner.model
        self._pins = pins
        self.landed = [Landed(piece) for piece in pieces]
        self._windows: dict[int, Window] = {}
        self._all = self._tables_of(self.landed)

    def propose(self) -> None:
        """Draw each decoding request's drafts, the first from what `extend` left behind."""
        lanes = [one for one in self.landed if one.piece.drafts]
        drawn: dict[int, list[Tensor | None]] = {id(one): [] for one in lanes}
        states = {id(one): _ahead(one) for one in lanes}
        paths = {id(one): Path(matcher) for one in self.landed if (matcher := _matcher(one))}
        step = 0
        while lanes:
            logits = torch.cat([states[id(one)].logits for one in lanes])
            _mark_suspects(lanes, _finite(logits), "a row of draft logits is not finite")
            asks = [one.piece.request.ask(one.drafts, _look(paths, one)) for one in lanes]
            for one, token, source in zip(lanes, *draft(logits, asks)):
                one.drafts.append(token)
                drawn[id(one)].append(source)
                if path := paths.get(id(one)):
                    path.step(token)
            step += 1
            lanes = [one for one in lanes if one.piece.drafts > step]
            if lanes:
                self._draft_further(lanes, states)
        for one in self.landed:
            allowed: Sequence[bytes | None] = ()
            if path := paths.get(id(one)):
                path.look()
                path.back()
                allowed, one.fault = path.allowed, path.fault
            self._windows[id(one)] = _window(one, drawn.get(id(one), []), allowed)

    def _draft_further(self, lanes: list[Landed], states: dict[int, Ahead]) -> None:
        tables = self._tables(lanes)
        tokens = np.array([one.drafts[-1] for one in lanes], np.int64)
        firsts = np.array([one.piece.first + len(one.drafts) for one in lanes], np.int64)
        ones = np.ones(len(lanes), np.int64)
        hidden = torch.cat([states[id(one)].hidden for one in lanes])
        batch = tables.ragged(tokens, firsts, ones)
        cache = self._lease(tables, (batch.rows // tables.page_tokens).astype(np.int32))
        hidden = self._model.draft(batch, hidden, cache)
        logits = self._model.draft_logits(hidden)
        for at, one in enumerate(lanes):
            states[id(one)] = Ahead(hidden[at : at + 1], logits[at : at + 1])

    def target(self) -> Tensor:
        counts = np.array([one.piece.count for one in self.landed], np.int64)
        return self._passes(counts, lambda group: self._target([self.landed[at] for at in group]))

    def _target(self, lanes: Sequence[Landed]) -> Tensor:
        tables = self._tables(lanes)
        tokens = np.concatenate([_input(one) for one in lanes])
        firsts = np.array([one.piece.first for one in lanes], np.int64)
        counts = np.array([one.piece.count for one in lanes], np.int64)
        redone = np.array([one.piece.redone for one in lanes], np.int64)
        batch = tables.ragged(tokens, firsts, counts, redone)
        ends = [(one.piece.request, one.piece.first + one.piece.count) for one in lanes]
        cache = self._mark(tables, firsts + redone, counts - redone, ends)
        return self._model.forward(batch, cache)

    def _passes(self, counts: Ints, run: Callable[[Ints], Tensor]) -> Tensor:
        """The hidden states of all queries in order, of one pass or of several."""
        groups = self._runner.apart(counts)
        if len(groups) == 1:
            return run(groups[0])
        hidden = self._model.no_hidden(int(counts.sum()))
        owner = np.repeat(np.arange(len(counts)), counts)
        for group in groups:
            hidden[torch.from_numpy(np.isin(owner, group))] = run(group)
        return hidden

    def judge(self, hidden: Tensor) -> None:
        """Check that rows are finite, score prompts, and let each window choose its tokens."""
        sound = _finite(hidden)
        first, lanes, rows = 0, [], []
        for one in self.landed:
            past = first + one.piece.count
            if not sound[first:past].all():
                one.suspect = "the hidden state of a row is not finite"
            elif one.suspect is None:
                if one.piece.request.wants_scores:
                    one.scores = self._score_prompt(one.piece, hidden[first:past])
                if one.piece.samples and one.fault is None:
                    lanes.append(one)
                    rows.append((first, past) if one.piece.decodes else (past - 1, past))
            first = past
        if lanes:
            self._choose(lanes, torch.cat([hidden[low:high] for low, high in rows]))

    def _choose(self, lanes: list[Landed], hidden: Tensor) -> None:
        logits = self._model.logits(hidden)
        sound = _finite(logits)
        sizes = [len(self._windows[id(one)].asks) for one in lanes]
        starts = np.cumsum(sizes) - sizes
        fit = [bool(sound[low : low + size].all()) for low, size in zip(starts, sizes)]
        if not all(fit):
            kept = [
                torch.arange(low, low + size) for low, size, ok in zip(starts, sizes, fit) if ok
            ]
            for one, ok in zip(lanes, fit):
                if not ok:
                    one.suspect = "a row of logits is not finite"
            lanes = [one for one, ok in zip(lanes, fit) if ok]
            if not lanes:
                return
            logits = logits[torch.cat(kept)]
        for one in lanes:
            self._prove(one.piece)
        chosen = verify(logits, [self._windows[id(one)] for one in lanes])
        for one, choice in zip(lanes, chosen):
            one.chosen = choice

    def _prove(self, piece: Piece) -> None:
        """Nobody samples without proof that every row it read is in place, and its own."""
        request = piece.request
        end = piece.first + piece.count
        drafted = piece.first if self._model.schema.draft else end
        self._runner._ready.prove(
            request.name, piece.pages, end, drafted, request.generations,
            self._runner._pool.generations,
        )  # fmt: skip

    def _score_prompt(self, piece: Piece, hidden: Tensor) -> Scores:
        """Raw log-probabilities of the prompt tokens that follow this piece's positions."""
        request = piece.request
        first = max(piece.first, request.scored)  # it may have been preempted amid its prompt
        past = min(piece.first + piece.count + 1, request.prompt_length)
        tokens = request.tokens[first + 1 : past].tolist()
        scores = Scores([], [])
        for low in range(0, len(tokens), SCORED_ROWS):
            some = tokens[low : low + SCORED_ROWS]
            begin = first - piece.first + low
            logits = self._model.logits(hidden[begin : begin + len(some)])
            logprobs, top = score(logits, some, [request.sampling.prompt_logprobs] * len(some))
            scores.logprobs.extend(logprobs)
            scores.top.extend(top)
        return scores

    def extend(self, hidden: Tensor) -> None:
        """Draft slot p takes token p and the target hidden of p - 1, for all that is certain."""
        lanes, tokens, firsts, counts, before = [], [], [], [], []
        first = 0
        for one in self.landed:
            piece, begin = one.piece, first
            first += piece.count
            certain = _certain(one)
            if one.suspect is not None or one.fault is not None or certain is None:
                continue
            if piece.first == 0 and not piece.redone:  # slot 0 has no hidden before it
                before.append(self._model.no_hidden(1))
                certain, start = np.concatenate([one.piece.request.tokens[:1], certain]), 0
            else:
                start = piece.first + 1
            before.append(hidden[begin : begin + len(certain) - (start == 0)])
            lanes.append(one)
            tokens.append(certain)
            firsts.append(start)
            counts.append(len(certain))
        if lanes:
            self._extend(lanes, np.concatenate(tokens), firsts, counts, torch.cat(before))

    def _extend(
        self,
        lanes: list[Landed],
        tokens: NDArray[np.int32],
        firsts: list[int],
        counts: list[int],
        before: Tensor,
    ) -> None:
        begins, sizes = np.array(firsts, np.int64), np.array(counts, np.int64)
        owner = np.repeat(np.arange(len(lanes)), sizes)

        def run(group: Ints) -> Tensor:
            some = [lanes[at] for at in group]
            mine, tables = np.isin(owner, group), self._tables(some)
            first, count = begins[group], sizes[group]
            batch = tables.ragged(tokens[mine].astype(np.int64), first, count)
            upto = [(one.piece.request, int(end)) for one, end in zip(some, first + count)]
            cache = self._mark(tables, first, count, upto)
            return self._model.draft(batch, before[torch.from_numpy(mine)], cache)

        hidden = self._passes(sizes, run)
        sound = _finite(hidden)
        ends = np.cumsum(sizes) - 1
        fit = np.array([sound[end + 1 - size : end + 1].all() for end, size in zip(ends, sizes)])
        _mark_suspects(lanes, fit, "the draft layer's hidden of a row is not finite")
        goes_on = [at for at, one in enumerate(lanes) if _goes_on(one)]
        if not goes_on:
            return
        last = hidden[torch.from_numpy(ends[goes_on])]
        logits = self._model.draft_logits(last)
        for row, at in enumerate(goes_on):
            lanes[at].ahead = Ahead(last[row : row + 1], logits[row : row + 1])

    def _tables(self, lanes: Sequence[Landed]) -> Tables:
        if len(lanes) == len(self.landed):
            return self._all
        return self._tables_of(lanes)

    def _tables_of(self, lanes: Sequence[Landed]) -> Tables:
        page_tokens = self._model.schema.page_tokens
        return Tables.of([one.piece.pages for one in lanes], page_tokens)

    def _lease(self, tables: Tables, written: Pages) -> Leased:
        return Leased(self._runner._store, self._runner._stream, self._pins, tables.pages, written)

    def _mark(
        self, tables: Tables, firsts: Ints, counts: Ints, ends: list[tuple[Request, int]]
    ) -> Marking:
        written = tables.written(firsts, counts)
        leased, hears = self._lease(tables, written.pages), self._runner.on_rows
        then = None if hears is None else (lambda layer: hears(layer, ends))
        return Marking(leased, self._runner._ready, written, then)


def _matcher(one: Landed) -> Matcher | None:
    return one.piece.request.matcher if one.piece.samples else None


def _look(paths: Mapping[int, Path], one: Landed) -> bytes | None:
    path = paths.get(id(one))
    return path.look() if path is not None else None


def _window(
    one: Landed, sources: Sequence[Tensor | None], allowed: Sequence[bytes | None]
) -> Window:
    request, drafts = one.piece.request, one.drafts
    masks = allowed or [None] * (len(drafts) + 1)
    asked = [request.ask(drafts[:at], mask) for at, mask in enumerate(masks)]
    kept = [source for source in sources if source is not None]
    return Window(tuple(asked), tuple(drafts), torch.stack(kept) if kept else None)


def _ahead(one: Landed) -> Ahead:
    assert one.piece.ahead is not None
    return one.piece.ahead


def _input(one: Landed) -> Ints:
    piece = one.piece
    known = piece.request.tokens[piece.first : piece.first + piece.count - piece.drafts]
    return np.concatenate([known.astype(np.int64), np.array(one.drafts, np.int64)])


def _certain(one: Landed) -> NDArray[np.int32] | None:
    """The tokens of slots first + 1, ...: those that follow the piece's certain positions."""
    piece, request = one.piece, one.piece.request
    if one.chosen is not None:
        known = request.tokens[piece.first + 1 : request.length]
        return np.concatenate([known, np.array(one.chosen.tokens, np.int32)])
    known = request.tokens[piece.first + 1 : min(piece.first + piece.count + 1, request.length)]
    return known if len(known) or (piece.first == 0 and not piece.redone) else None


def _goes_on(one: Landed) -> bool:
    """Will its next flight be a verify step?"""
    piece = one.piece
    return one.chosen is not None or (
        piece.request.generated > 0 and piece.first + piece.count == piece.request.prefill_end
    )


def _mark_suspects(lanes: Sequence[Landed], sound: NDArray[np.bool_], evidence: str) -> None:
    for one, good in zip(lanes, sound):
        if not good:
            one.suspect = evidence


def _finite(rows: Tensor) -> NDArray[np.bool_]:
    if not rows.is_floating_point():
        return np.ones(len(rows), np.bool_)
    return finite(rows.float().numpy())
