"""What comes over the sockets is not trusted: garbage is dropped, and nobody else notices."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import zmq

from stanchion.core.messages import (
    Drain,
    Ended,
    Greet,
    Hello,
    Start,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from stanchion.core.outcome import Completed, Overloaded
from stanchion.disagg import words
from stanchion.disagg.link import DecodeLink, PrefillLink
from stanchion.disagg.worker import UnifiedSide, Worker
from tests.disagg.rig import GREEDY, Cluster, Settings, start
from tests.engine.rig import hashed_engine

Parse = Callable[[bytes], object]
WORKERS = "stanchion.disagg.worker.decode_to_worker"  # where what came is parsed
PREFILLS = "stanchion.disagg.link.decode_from_decode"


class Gadget:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def garbage(folder: Path) -> list[bytes]:
    good = words.encode(words.Beat(session=1, settled=0, asked=[]))
    offer = words.Offer(
        session=1, settled=0, number=1, tokens=[1] * 50, tenant="", salt="", prompt_logprobs=None,
        first_page=0, pages=[1, 2, 3, 4],
    )  # fmt: skip
    whole = words.encode(offer)
    return [
        b"",
        b"\x00" * 100,
        pickle.dumps(Gadget(folder / "owned")),
        b"\xdd\xff\xff\xff\xff" + b"\x01",  # an array that claims 4 G entries
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        *(whole[:cut] for cut in range(0, len(whole), 7)),
        good + b"more",
        b"\x81\xa4type\xa7unknown",
        words.encode({"type": "offer", "session": 1, "pages": [-1]}),
        b"\x91" * 5000,  # nested beyond measure
    ]


HELLO = Hello(
    name="w", role="both", incarnation=1, pid=1, peer_address="", identity={}, model="hashed",
    revision="1", schema="s", page_tokens=16, pages=100, context_max=1000, vocabulary=272,
    draft_tokens=3, eos_ids=(256,), failpoints=(),
)  # fmt: skip


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def garbage_to_a_worker(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    """A request is under way, garbage comes: the request completes, and no gadget runs."""
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(f"ipc://{tmp_path}/w")
    dealer.connect(f"ipc://{tmp_path}/w")
    worker = Worker(UnifiedSide(hashed_engine()), HELLO, router, None, None, parent=0)
    one = Start(request="r", tokens=[40] * 20, sampling=GREEDY)
    dealer.send(encode(Greet()))
    dealer.send(encode(one))
    for frame in garbage(tmp_path):
        dealer.send(frame)
    dealer.send_multipart([b"two", b"parts"])
    worker.stopping = False
    dealer.send(encode(Drain()))
    ended: list[Ended] = []
    while not (ended and worker.draining):  # the last frame was heard, and so were all before it
        for message in worker.side.step(worker._hear(), 0.0):
            worker._say(message)
        while dealer.poll(0):
            said = decode_from_worker(dealer.recv())
            ended += [said] if isinstance(said, Ended) else []
    assert ended[0].outcome == Completed("length")
    assert not (tmp_path / "owned").exists(), "the gadget ran"


def test_garbage_on_a_workers_socket_harms_no_request(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    garbage_to_a_worker(context, tmp_path)


def garbage_to_prefill(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    """A handoff is under way, garbage comes: it completes, no gadget runs, nobody answers."""
    cluster = Cluster.of(Settings())
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    router, stranger = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(f"ipc://{tmp_path}/p")
    stranger.connect(f"ipc://{tmp_path}/p")
    link = PrefillLink(prefill, router, [0])
    other = DecodeLink(decode, context, lambda socket: None)
    one = start(cluster, "a", 200)
    partner = one.prefill
    assert partner is not None
    one = Start(
        request="a", tokens=one.tokens, sampling=one.sampling,
        prefill=type(partner)(partner.name, f"ipc://{tmp_path}/p", partner.incarnation),
    )  # fmt: skip
    said = decode.step([one], 0.0)
    for frame in garbage(tmp_path):
        stranger.send(frame)
    stranger.send_multipart([b"a", b"b", b"c"])
    stranger.send(words.encode(words.Beat(session=1, settled=0, asked=[])))  # this is answered
    now = 0.0
    ended: list[Ended] = []
    while not (ended and stranger.poll(1)):
        now += 0.01
        assert now < 100, "it does not end"
        other.say()
        link.hear(now)
        prefill.step([], now)
        link.say()
        other.hear(now)
        said += decode.step([], now)
        ended = [message for message in said if isinstance(message, Ended)]
    assert [end.outcome for end in ended] == [Completed("length")]
    assert not (tmp_path / "owned").exists(), "the gadget ran"
    answer = words.decode_from_prefill(stranger.recv())
    assert answer == words.Stranger(1, prefill.incarnation), "nobody answers garbage"
    assert not stranger.poll(0)
    other.close()


def test_garbage_between_decode_and_prefill_harms_no_handoff(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    garbage_to_prefill(context, tmp_path)


def unpickled(decode: Parse) -> Parse:
    """The wrong variant: what is no message of ours may be anybody's pickled object."""

    def parse(frame: bytes) -> object:
        try:
            return decode(frame)
        except msgspec.DecodeError:
            if frame.startswith(pickle.dumps(None)[:2]):
                pickle.loads(frame).close()
            raise

    return parse


def looked_up(union: object) -> Parse:
    """The wrong variant: a frame says what it is, and is believed before it is parsed."""
    kinds = {one.__struct_config__.tag: one for one in get_args(union)}

    def parse(frame: bytes) -> object:
        said = msgspec.msgpack.decode(frame)
        return msgspec.convert(said, kinds[said["type"]])

    return parse


def test_unpickling_what_comes_is_caught(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WORKERS, unpickled(decode_to_worker))
    with pytest.raises(AssertionError, match="the gadget ran"):
        garbage_to_a_worker(context, tmp_path)
    (tmp_path / "owned").unlink()
    monkeypatch.setattr(PREFILLS, unpickled(words.decode_from_decode))
    with pytest.raises(AssertionError, match="the gadget ran"):
        garbage_to_prefill(context, tmp_path)


def test_a_frame_that_is_believed_before_it_is_parsed_ends_the_loop_and_is_caught(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WORKERS, looked_up(ToWorker))
    with pytest.raises(KeyError, match="unknown"):
        garbage_to_a_worker(context, tmp_path)
    monkeypatch.setattr(PREFILLS, looked_up(words.FromDecode))
    with pytest.raises(KeyError, match="unknown"):
        garbage_to_prefill(context, tmp_path)


def flip_bytes(decode: Parse, seed: int) -> None:
    """Whatever a frame becomes, it parses to a word within its bounds, or not at all."""
    rng = np.random.default_rng(seed)
    frame = words.encode(
        words.Offer(
            session=5, settled=0, number=1, tokens=list(range(40)), tenant="t", salt="",
            prompt_logprobs=3, first_page=0, pages=[1, 2, 3],
        )
    )  # fmt: skip
    parsed = 0
    for _ in range(6000):
        changed = bytearray(frame)
        for _ in range(1 + int(rng.integers(3))):
            changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
        try:
            word = decode(bytes(changed))
        except (msgspec.MsgspecError, RecursionError):
            continue
        parsed += 1
        if isinstance(word, words.Offer):
            assert all(page >= 1 for page in word.pages), "a page is out of bounds"
    assert parsed > 0


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_are_refused_or_mean_another_word(seed: int) -> None:
    flip_bytes(words.decode_from_decode, seed)


class Unbounded(words.Offer, frozen=True, kw_only=True, tag="offer"):
    """The wrong variant: typed, and as large or small as the peer likes."""

    number: int
    first_page: int
    pages: list[int]  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(3))
def test_a_word_without_bounds_is_caught(seed: int) -> None:
    wrong = msgspec.msgpack.Decoder(words.Meet | Unbounded | words.Cancel | words.Beat).decode
    with pytest.raises(AssertionError, match="a page is out of bounds"):
        flip_bytes(wrong, seed)


def test_another_gateway_ends_the_drain_of_the_one_before(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/w")
    worker = Worker(UnifiedSide(hashed_engine()), HELLO, router, None, None, parent=0)

    def says(*words_: object) -> list[object]:
        """A gateway of its own says so; what is heard of it, and all that it hears back."""
        gateway = context.socket(zmq.DEALER)
        gateway.connect(f"ipc://{tmp_path}/w")
        for word in words_:
            gateway.send(encode(word))
        heard: list[object] = []
        while not heard or worker.side.engine.busy or gateway.poll(50):
            for message in worker.side.step(worker._hear(), 0.0):
                worker._say(message)
            while gateway.poll(0):
                heard.append(decode_from_worker(gateway.recv()))
        gateway.close(0)
        return heard

    one = Start(request="r", tokens=[40] * 20, sampling=GREEDY)
    first = says(Greet(), Drain(), one)
    assert [message.outcome for message in first if isinstance(message, Ended)] == [
        Overloaded("this worker is draining", 1.0)
    ]
    assert worker.progress().draining
    second = says(Greet(), one)
    assert any(isinstance(message, Ended) for message in second) and not worker.progress().draining
    router.close(0)


def test_a_prefill_worker_that_is_told_to_stop_takes_no_more(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    side = Cluster.of(Settings()).prefills[0]
    router = context.socket(zmq.ROUTER)
    worker = Worker(side, HELLO, router, None, None, parent=0)
    assert not side.draining and not worker.progress().draining
    worker.stop()
    assert side.draining and worker.progress().draining
    router.close(0)
