"""Detokenisation and stop strings are folds: every split of the tokens gives the same (D17, D18).

Each law is also held against the wrong way of doing it, which must break it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stanchion.core.outcome import Cancelled, Completed, Outcome, OutputSuspect, PeerLost
from stanchion.gateway.choice import ChoiceFold, End, Style
from stanchion.gateway.detok import TextFold, decode
from stanchion.gateway.stops import StopFold, StopSet
from stanchion.gateway.tokens import byte_vocabulary

LENGTH = Completed("length")
BYTES = tuple(bytes([byte]) for byte in range(256))
SAMPLES = [
    "汉字和假名",
    "안녕하세요 세계",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301a\u0308\u0323",
    "plain",
    "\x00é\u07ff\uffff\U0010ffff",
]
RAW = st.one_of(
    st.text(max_size=40).map(str.encode),
    st.lists(st.sampled_from(SAMPLES), max_size=4).map(lambda parts: "".join(parts).encode()),
    st.binary(max_size=40),
    st.lists(st.one_of(st.sampled_from([part.encode() for part in SAMPLES]), st.binary(max_size=3)),
             max_size=6).map(b"".join),
)  # fmt: skip


@st.composite
def tokens_of(draw: st.DrawFn) -> tuple[tuple[bytes, ...], list[int]]:
    """Bytes cut into tokens anywhere, so that a token may hold parts of characters."""
    raw = draw(RAW)
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)), max_size=len(raw) + 1)))
    edges = [0, *cuts, len(raw)]
    pieces = tuple(raw[a:b] for a, b in pairwise(edges))
    return pieces, list(range(len(pieces)))


def batches(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for at in range(0, len(tokens), size):
        yield tokens[at : at + size]


# ---- characters -----------------------------------------------------------------------------


@given(tokens_of())
def test_text_of_any_cut_is_the_one_shot_decode(cut: tuple[tuple[bytes, ...], list[int]]):
    pieces, tokens = cut
    fold = TextFold(pieces)
    deltas = [fold.push(token) for token in tokens]
    deltas.append(fold.finish())
    assert "".join(deltas) == b"".join(pieces).decode("utf-8", "replace") == decode(pieces, tokens)


@given(RAW)
@example(b"\xe4\xbd\xff")
@example(b"\xed\xa0\x80\xf4\x90\x80\x80")
def test_a_byte_at_a_time_is_the_same(raw: bytes):
    fold = TextFold(BYTES)
    assert "".join(map(fold.push, raw)) + fold.finish() == raw.decode("utf-8", "replace")


def test_decoding_token_by_token_breaks_the_law():
    raw = "안녕".encode()
    naive = "".join(BYTES[byte].decode("utf-8", "replace") for byte in raw)
    assert naive != "안녕" and "\ufffd" in naive


def test_slicing_a_re_decoded_window_breaks_the_law():
    """The cause of D17: the text decoded so far is cut at a length that changes later."""
    raw, shown = "녕a".encode(), ""
    for upto in range(1, len(raw) + 1):
        text = raw[:upto].decode("utf-8", "replace")
        shown += text[len(shown) :]
    assert shown != "녕a"


def test_special_tokens_are_skipped_unless_shown():
    vocabulary = byte_vocabulary()
    tokens = [259, *b"hi", 256]
    assert decode(vocabulary.pieces, tokens, vocabulary.special) == "hi"
    assert decode(vocabulary.pieces, tokens) == "<|user|>hi<|endoftext|>"
    assert decode(vocabulary.pieces, [5000]) == ""


# ---- stop strings ---------------------------------------------------------------------------

STOPS = ["DEFGHIJ", "Pari", "\nUser:", "👩‍👧", "Paris is", "ab", "abab", "b"]


def one_shot(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The law itself, slowly: the first place where a stop is complete; there, the longest."""
    for at in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:at].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: at if include else at - len(longest)], longest
    return text, None


def folded(text: str, sizes: Sequence[int], stops: Sequence[str], include: bool):
    fold = StopFold(StopSet(stops), include)
    parts, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        parts.append(fold.push(text[at : at + size]))
        at, turn = at + size, turn + 1
    parts.append(fold.finish() if fold.matched is None else "")
    return "".join(parts), fold.matched


def texts(alphabet: str) -> st.SearchStrategy[str]:
    return st.one_of(
        st.text(alphabet, max_size=30),
        st.lists(st.one_of(st.sampled_from(STOPS), st.text(alphabet, max_size=4))).map("".join),
    )


@given(
    texts("abDEFGHIJParis \nUser:👩‍👧x"),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.booleans(),
)
def test_stops_are_matched_on_the_text_for_every_split(text, stops, sizes, include):
    assert folded(text, sizes, stops, include) == one_shot(text, stops, include)


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_stops_that_overlap_themselves_and_each_other(text, stops, sizes):
    assert folded(text, sizes, stops, False) == one_shot(text, stops, False)


def test_no_character_of_a_stop_is_out_before_the_alarm_is_over():
    fold = StopFold(StopSet(["DEFGHIJ"]))
    assert [fold.push(part) for part in ("abcD", "EF", "GHI", "K")] == ["abc", "", "", "DEFGHIK"]


def test_matching_in_each_chunk_misses_a_stop_across_chunks():
    chunks = ["abcDEF", "GHIJrest"]
    assert not any("DEFGHIJ" in chunk for chunk in chunks)
    fold = StopFold(StopSet(["DEFGHIJ"]))
    assert "".join(map(fold.push, chunks)) == "abc" and fold.matched == "DEFGHIJ"


# ---- a whole choice -------------------------------------------------------------------------


def run(style: Style, tokens: Sequence[int], size: int, outcome: Outcome = LENGTH):
    fold = ChoiceFold(style)
    text, scored = "", []
    for part in batches(tokens, size):
        piece = fold.push(part, [-1.0] * len(part), [[] for _ in part])
        text += piece.text
        scored.extend(piece.scored)
    text += fold.finish(outcome).text
    return text, fold.tokens, fold.end, fold.failed, scored


@settings(max_examples=60)
@given(texts("abPar 汉é👩‍👧\n"), st.lists(st.sampled_from(STOPS), max_size=3), st.integers(0, 6))
def test_a_choice_is_the_same_for_every_batch_size(text, stops, min_tokens):
    style = Style(BYTES, stops=StopSet(stops), min_tokens=min_tokens)
    tokens = list(text.encode())
    alone = run(style, tokens, 1)
    for size in range(2, 8):
        assert run(style, tokens, size) == alone
    assert run(style, tokens, max(1, len(tokens))) == alone


@given(texts("abPar 汉é"), st.sampled_from(STOPS))
def test_usage_counts_to_the_token_that_completes_the_stop(text, stop):
    tokens = list(text.encode())
    shown, counted, end, _, scored = run(Style(BYTES, stops=StopSet([stop])), tokens, 7)
    assert counted == len(scored)
    if stop in text:
        assert end == End("stop", stop)
        assert counted == len(text[: text.index(stop) + len(stop)].encode())
        assert shown == text[: text.index(stop)]
    else:
        assert (shown, counted, end) == (text, len(tokens), End("length"))


def test_the_end_token_is_no_text_but_counts_and_only_when_it_is_the_last():
    style = Style(BYTES, end_ids=frozenset({ord("!")}))
    assert run(style, b"hi!", 1, Completed("stop"))[:3] == ("hi", 3, End("stop", ord("!")))
    plain = Style(BYTES, end_ids=frozenset({ord("!")}), eos_ids=frozenset({ord("!")}))
    assert run(plain, b"hi!", 1, Completed("stop"))[:3] == ("hi", 3, End("stop")), "as in vLLM"
    assert run(style, b"hi!yo!", 7, Completed("stop"))[0] == "hi!yo"
    assert run(style, b"hi!", 1, Completed("length"))[:3] == ("hi!", 3, End("length"))
    shown = Style(BYTES, end_ids=frozenset({ord("!")}), include_stop=True)
    assert run(shown, b"hi!", 2, Completed("stop"))[0] == "hi!"


def test_an_ordinary_end_token_may_complete_a_stop_string():
    style = Style(BYTES, end_ids=frozenset({ord("!")}), stops=StopSet(["i!"]))
    for size in range(1, 5):
        shown, counted, end, _, scored = run(style, b"hi!x", size)
        assert (shown, counted, end) == ("h", 3, End("stop", "i!"))
        assert len(scored) == 3


def test_a_stop_is_not_looked_for_in_the_text_of_the_first_min_tokens():
    style = Style(BYTES, stops=StopSet(["ab"]), min_tokens=3)
    for size in range(1, 8):
        assert run(style, b"ababab", size)[:3] == ("abab", 6, End("stop", "ab"))
        assert run(style, b"abaxx", size)[:3] == ("abaxx", 5, End("length"))


@pytest.mark.parametrize("outcome", [PeerLost("x"), Cancelled("monitor"), OutputSuspect("nan")])
def test_only_a_completed_outcome_ends_a_choice_well(outcome):
    *_, end, failed, _ = run(Style(BYTES), b"hello", 2, outcome)
    assert (end, failed) == (None, outcome)


def test_a_score_that_is_no_number_ends_the_choice_as_suspect():
    fold = ChoiceFold(Style(BYTES))
    piece = fold.push(b"abc", [-1.0, float("nan"), -1.0], [[], [], []])
    assert piece.text == "a" and isinstance(fold.failed, OutputSuspect)
    fold.finish(Completed("stop"))
    assert fold.end is None


def test_what_comes_after_the_end_changes_nothing():
    fold = ChoiceFold(Style(BYTES, stops=StopSet(["b"])))
    assert fold.push(b"abc", [0.0] * 3, []).text == "a"
    assert fold.push(b"more", [0.0] * 4, []).text == ""
    fold.finish(PeerLost("late"))
    assert (fold.tokens, fold.end, fold.failed) == (2, End("stop", "b"), None)
