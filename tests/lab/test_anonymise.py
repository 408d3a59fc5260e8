"""Anonymised recordings: nothing of what was said is left, and all of its structure (D32, D33)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
from msgspec import Struct

from stanchion.cli.main import main
from stanchion.core.errors import Bug, ConfigError
from stanchion.core.recording import Content, Header, Level, Recorded, Times
from stanchion.gateway.body import ChatBody
from stanchion.lab.anonymise.body import replaced, typed
from stanchion.lab.anonymise.canary import leaked, planting, secrets
from stanchion.lab.anonymise.export import Settings, anonymise
from stanchion.lab.anonymise.fields import Shield
from stanchion.lab.anonymise.key import Key
from stanchion.lab.anonymise.masks import DetectSecrets, Masks, Patterns
from stanchion.lab.anonymise.pool import library, names, pool
from stanchion.lab.anonymise.privacy import anonymity, dictionary, likely, linked, shown
from stanchion.lab.anonymise.report import PRIVACY
from stanchion.lab.anonymise.surrogate import Surrogates, _Marks
from stanchion.lab.anonymise.tokenised import Tokenised
from stanchion.lab.anonymise.words import Words
from stanchion.lab.formats.sniff import read
from stanchion.lab.formats.trace import Trace
from stanchion.lab.replay_body import Bodies
from stanchion.lab.replay_plan import pace, plan
from stanchion.lab.structure import page_hits, sharing, structure

from .traffic import PAGE, SOURCE, recording, replayed, vocabulary

KEY, OTHER = Key(b"k" * 32), Key(b"o" * 32)
GUESSES = 2000
TEXT = 200_000  # characters to make surrogates of: enough for tests


def settings(level: Any, **more: Any) -> Settings:
    return Settings(level, guesses=GUESSES, pool_characters=TEXT, **more)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace, int]:
    folder = tmp_path_factory.mktemp("recorded")
    trace, plant = recording(folder)
    planted = int(plant().removeprefix("canary")[:4])
    return folder / "recording", trace, planted


def everything(folder: Path) -> Iterator[bytes]:
    return (path.read_bytes() for path in folder.rglob("*") if path.is_file())


# ---- nothing is left (D32) ------------------------------------------------------------------


def test_a_recording_without_content_has_none(tmp_path: Path) -> None:
    trace, _ = recording(tmp_path, content=False)
    assert len(list(trace)) > 20 and trace.header.level == "none"
    assert set(leaked(everything(tmp_path / "recording"))) == set()


@pytest.mark.parametrize("level", ["hashes", "surrogate"])
def test_no_canary_comes_out_and_the_structure_is_kept(
    recorded: tuple[Path, Trace, int], tmp_path: Path, level: Any
) -> None:
    folder, trace, planted = recorded
    assert planted >= 200 and len(set(leaked(everything(folder)))) >= 200
    out = tmp_path / "out"
    report = anonymise(trace, out, settings(level), KEY, OTHER, vocabulary())
    assert set(leaked(everything(out))) == set()
    raw = b"".join(everything(out)).lower()
    assert KEY.secret not in raw and KEY.secret.hex().encode() not in raw
    found = read(out)
    assert structure(found) == structure(trace)
    assert structure(found).page_hits == structure(trace).page_hits > 500
    assert report.clean and report.kept.exactly, report.text()
    assert report.kept.without_words == {} and report.canaries.leaked == 0
    assert found.header.origin_unix_s is None and found.header.level == level
    for one in found:
        assert (one.content is not None) is (level == "surrogate")
        assert one.sampling is None or (one.sampling.logit_bias, one.sampling.stop_ids) == ((), ())


def test_an_export_replays_with_the_same_page_hits(
    recorded: tuple[Path, Trace, int], tmp_path: Path
) -> None:
    """Of its bodies alone, rendered and encoded by another gateway (D33, 5)."""
    trace = recorded[1]
    anonymise(trace, tmp_path / "out", settings("surrogate"), KEY, OTHER, vocabulary())
    again = replayed(tmp_path, read(tmp_path / "out"))
    told = sorted(trace, key=lambda one: one.times.end or 0.0)
    assert [one.input_tokens for one in again] == [one.input_tokens for one in told]
    before, after = [one.blocks for one in told], [one.blocks for one in again]
    assert page_hits(after) == page_hits(before) and sum(page_hits(after)) > 500
    assert sharing(after) == sharing(before)


def test_what_a_surrogate_keeps(recorded: tuple[Path, Trace, int], tmp_path: Path) -> None:
    trace = recorded[1]
    anonymise(trace, tmp_path / "out", settings("surrogate"), KEY, OTHER, vocabulary())
    calls = 0
    for before, after in zip(trace, read(tmp_path / "out"), strict=True):
        assert before.content is not None and after.content is not None
        said, made = before.content.body, after.content.body
        assert isinstance(made.get("prompt"), type(said.get("prompt")))
        if before.api != "chat":
            continue
        assert [one["role"] for one in made["messages"]] == [
            one["role"] for one in said["messages"]
        ]
        for one, other in zip(said["messages"], made["messages"], strict=True):
            for call, its in zip(
                one.get("tool_calls", ()), other.get("tool_calls", ()), strict=True
            ):
                calls += 1
                shape = json.loads(call["function"]["arguments"])
                kept = json.loads(its["function"]["arguments"])
                assert [*map(type, kept.values())] == [*map(type, shape.values())]
        assert len(made.get("tools", ())) == len(said.get("tools", ()))
        for other in made.get("tools", ()):
            schema = other["function"]["parameters"]
            assert schema["type"] == "object"
            (name,) = schema["properties"]
            assert schema["properties"][name]["type"] == "string"
            assert len(schema["properties"][name]["enum"]) == 2
    assert calls > 20


def test_every_surrogate_is_sent_by_a_replay(
    recorded: tuple[Path, Trace, int], tmp_path: Path
) -> None:
    """Also of Anthropic's API: what comes out of it is a chat, and is called one."""
    trace = recorded[1]
    anonymise(trace, tmp_path / "out", settings("surrogate"), KEY, OTHER, vocabulary())
    assert {one.api for one in trace} == {"chat", "completions", "messages"}
    for one in read(tmp_path / "out"):
        path, body = Bodies("m").of(plan([one], "open", pace("1")).steps[0])
        wanted = "messages" if path == "/v1/chat/completions" else "prompt"
        assert one.content is not None and body[wanted] == one.content.body[wanted]


@pytest.mark.parametrize("choice", ["none", "auto", "required", "weather"])
def test_a_call_that_was_forced_still_is(words: Words, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    body = typed(
        "chat",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [{"type": "function", "function": {"name": "weather"}}],
            "tool_choice": named if choice == "weather" else choice,
        },
    )
    assert isinstance(body, ChatBody)
    made = replaced(body, _Marks(words, "t", True))
    other = words.name("t", "weather")
    if choice == "weather":
        assert made.tool_choice == named | {"function": {"name": other}} and other != choice
    else:
        assert made.tool_choice == choice
    assert [one.function.name for one in made.tools or ()] == [other]


class Leaky(Shield):
    """The old way: a list of what is taken out (D32). What is new comes through."""

    def record(self, one: Recorded) -> Recorded:
        return msgspec.structs.replace(one, content=None)


def test_a_list_of_what_to_take_out_would_leak(recorded: tuple[Path, Trace, int]) -> None:
    plant = planting()
    one = Recorded(
        request="r", session=plant(), agent=plant(), times=Times(arrival=0.0), input_tokens=1,
        outcome=plant(), content=Content(body={"x": plant()}),
    )  # fmt: skip
    for shield, left in ((Leaky(KEY), 3), (Shield(KEY), 0)):
        made = [msgspec.json.encode(shield.record(one))]
        assert len(set(leaked(made))) == left


def test_a_field_without_a_class_is_a_bug() -> None:
    class Known(Struct, frozen=True):
        kept: Annotated[int, "shape"] = 1
        preview: str = "secret"

    with pytest.raises(Bug, match=r"Known\.preview has no privacy class"):
        Shield(KEY)._shielded(Known(), Shield(KEY)._rules(""))


# ---- five attacks, each with the wrong variant that they must catch (D33) ------------------


def some(count: int, session: int = 7, **more: Any) -> list[Recorded]:
    """Requests of which each goes on where the one before ended."""
    given: dict[str, Any] = {
        "tenant": "100000000042",
        "sampling": None,
    }
    return [
        Recorded(
            request=f"{number:012}",
            session=str(session + number // 4),
            turn=number % 4,
            think_s=0.5 if number % 4 else None,
            times=Times(arrival=number * 0.75),
            input_tokens=PAGE * (number + 1) + 3,
            blocks=tuple(f"{at:016x}" for at in range(number + 1)),
            tail_tokens=3,
            tail=f"{number:016x}",
            **given | more,
        )
        for number in range(count)
    ]


def trace_of(requests: list[Recorded], level: Level = "none") -> Trace:
    header = Header(source="stanchion", model="tiny", block_tokens=PAGE, level=level)
    return Trace(header, lambda left_out: iter(requests))


class Unkeyed(Key):
    """Plain hashes."""

    def name(self, said: str) -> str:
        return sha256(said.encode()).hexdigest()[:16]


@pytest.mark.parametrize("guesses", [50_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_plain_hashes_are_found_by_a_dictionary_and_ours_are_not(guesses: int) -> None:
    told = some(40)
    found = dictionary(shown(map(Shield(Unkeyed(KEY.secret)).record, told)), likely(guesses))
    assert found.guesses == guesses and found.schemes == ("sha256",)
    assert found.hits >= 11, "the tenant and the sessions"
    assert dictionary(shown(map(Shield(KEY).record, told)), likely(guesses)).hits == 0
    assert dictionary(shown(told), likely(1000)).schemes == ("no hash at all",)


def test_another_export_has_nothing_in_common_unless_the_key_is_used_again() -> None:
    told = some(40)
    first = [Shield(KEY).record(one) for one in told]
    assert linked(first, (Shield(OTHER).record(one) for one in told)) == 0
    assert linked(first, (Shield(KEY).record(one) for one in told)) == len(shown(first)) > 80


@dataclass(frozen=True)
class Salted(Shield):
    """A salt of its own for each record."""

    def record(self, one: Recorded) -> Recorded:
        return Shield(Key(sha256(one.request.encode()).digest())).record(one)


def test_a_salt_for_each_record_would_destroy_the_structure() -> None:
    told = some(40)
    before = structure(told)
    wrong = structure(map(Salted(KEY).record, told))
    assert before.differences(wrong) == ["order", "hits", "sharing"]
    assert structure(map(Shield(KEY).record, told)) == before
    assert before.page_hits == sum(range(40))


def test_times_are_rounded_where_that_was_asked_for(tmp_path: Path) -> None:
    told = trace_of(some(8))
    report = anonymise(told, tmp_path / "o", settings("hashes", time_step_s=2.0), KEY, OTHER, None)
    assert [one.times.arrival for one in read(tmp_path / "o")] == [0, 0, 0, 2, 2, 2, 4, 4]
    assert report.kept.exactly and "rounded down to 2 s" in report.text()


def test_who_is_alone_with_length_and_time_is_counted() -> None:
    told = [*some(4), *some(4)]  # each twice
    assert anonymity(told, 1, 1.0).alone == 0 and anonymity(told, 1, 1.0).smallest == 2
    told.append(msgspec.structs.replace(told[0], input_tokens=10**6))
    found = anonymity(told, 64, 60.0)
    assert (found.alone, found.smallest, found.requests) == (1, 1, 9)


def test_hashes_of_another_tenant_are_others() -> None:
    first, second = some(3), some(3, tenant="another")
    made = [Shield(KEY).record(one).blocks[0] for one in (first[0], second[0])]
    assert made[0] != made[1]


def test_the_key_is_never_shown() -> None:
    assert "kkkk" not in repr(Shield(KEY)) + repr(KEY)
    with pytest.raises(ConfigError, match="has 32 bytes, not 3"):
        Key(b"abc")


# ---- words ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenised() -> Tokenised:
    return Tokenised(vocabulary())


@pytest.fixture(scope="module")
def words(tokenised: Tokenised) -> Words:
    text = library(TEXT)
    parts = pool(tokenised, text, True), pool(tokenised, text, False)
    return Words(KEY, tokenised, *parts, names(tokenised, text))


def test_text_is_encoded_in_stretches_as_it_is_whole(tokenised: Tokenised) -> None:
    text = f"<|user|>\n{SOURCE[:3000]}<|assistant|>\nüöä<think></think>x<|user|>"
    assert list(tokenised.ids(text)) == vocabulary().encode(text, False)
    assert tokenised.text(tokenised.ids(text)) == text.encode()


def test_surrogates_of_any_lengths_can_be_put_together(tokenised: Tokenised, words: Words) -> None:
    ids = tokenised.ids(SOURCE)
    lucky = np.random.default_rng(3)
    for lines in (False, True):
        at, parts, lengths = 0, [], []
        while at < 3000:
            size = int(lucky.integers(1, 40))
            parts.append(
                words.text("t", ids[at : at + size], size, "amid" if at else "bare", lines)
            )
            lengths.append(size)
            at += size
        whole = tokenised.ids(b"".join(parts).decode())
        assert len(whole) == sum(lengths)
        ends = np.cumsum(tokenised.sizes(whole))
        cuts = np.cumsum([len(part) for part in parts])
        assert set(cuts.tolist()) <= set(ends.tolist()), "no token lies over a join"
        assert [int(np.searchsorted(ends, cut)) + 1 for cut in cuts] == np.cumsum(lengths).tolist()


def test_the_same_text_has_the_same_surrogate_and_others_have_others(
    tokenised: Tokenised, words: Words
) -> None:
    ids = tokenised.ids(SOURCE)
    blocks = {ids[at : at + 16].tobytes(): ids[at : at + 16] for at in range(0, 3200, 16)}
    made = {words.text("t", one, 16, "amid", True) for one in blocks.values()}
    assert len(made) == len(blocks)
    assert {words.text("t", one, 16, "amid", True) for one in blocks.values()} == made
    assert not {words.text("u", one, 16, "amid", True) for one in blocks.values()} & made
    for size in (2, 3, 5):  # of which there are few
        short = {ids[at : at + size].tobytes(): ids[at : at + size] for at in range(0, 600, size)}
        made = {words.text("t", one, size, "amid", True) for one in short.values()}
        assert len(made) == len(short)


def test_names_and_numbers_are_a_tenants_own(words: Words) -> None:
    said = [f"name_{number}" for number in range(50)]
    first, second = ([words.name(tenant, one) for one in said] for tenant in "ab")
    assert len({*first}) == len({*second}) == 50 and first != second
    assert [words.name("a", one) for one in said] == first and not {*first} & {*said}
    assert KEY.digits("a", "-120.5e10") != KEY.digits("b", "-120.5e10")
    assert len(KEY.digits("a", "100000000042")) == 12 and KEY.digits("a", "x") == "x"


def test_prompts_share_pages_as_before(words: Words, tokenised: Tokenised) -> None:
    """Cut anywhere, also amid a page: what differs there shares no more than it did."""
    maker = Surrogates(vocabulary(), tokenised, words, PAGE)
    prompts = [SOURCE[:at] + more for at in range(300, 900, 37) for more in ("", " x", "\n\ny = 2")]
    before, after = [], []
    for prompt in prompts:
        ids = tokenised.ids(prompt)
        one = Recorded(
            request="r", session="s", api="completions", times=Times(arrival=0.0),
            input_tokens=len(ids), content=Content(body={"prompt": prompt}),
        )  # fmt: skip
        made = maker.content(one)
        assert made is not None, maker.why
        for kept, tokens in ((before, ids), (after, made[1])):
            whole = len(tokens) // PAGE
            kept.append([tokens[: (at + 1) * PAGE].tobytes() for at in range(whole)])
    assert page_hits(after) == page_hits(before) and sharing(after) == sharing(before)


def test_a_prompt_of_another_model_is_left_without_words(
    words: Words, tokenised: Tokenised
) -> None:
    maker = Surrogates(vocabulary(), tokenised, words, PAGE)
    one = Recorded(
        request="r", session="s", api="chat", times=Times(arrival=0.0), input_tokens=5,
        content=Content(body={"messages": [{"role": "user", "content": "hello"}]}),
    )  # fmt: skip
    assert maker.content(one) is None
    assert maker.why == {"other tokens than recorded": 1}


# ---- what cannot be had ---------------------------------------------------------------------


def test_levels_that_want_content_say_so(tmp_path: Path) -> None:
    for level in ("surrogate", "secrets"):
        with pytest.raises(ConfigError, match=r"wants content, .*--record-content"):
            told = trace_of(some(2))
            anonymise(told, tmp_path / "o", settings(level), KEY, OTHER, vocabulary())
    with pytest.raises(ConfigError, match="wants --model"):
        anonymise(
            trace_of(some(2), "content"), tmp_path / "o", settings("surrogate"), KEY, OTHER, None
        )
    header = Header(source="stanchion", model="m", block_tokens=16, level="content", tokenizer="x")
    with pytest.raises(ConfigError, match="its tokenizer is not the one"):
        told = Trace(header, lambda left_out: iter(some(2)))
        anonymise(told, tmp_path / "o", settings("surrogate"), KEY, OTHER, vocabulary())


# ---- secrets --------------------------------------------------------------------------------


def test_known_kinds_of_secrets_are_masked_and_code_stays(
    recorded: tuple[Path, Trace, int], tmp_path: Path
) -> None:
    trace = recorded[1]
    report = anonymise(trace, tmp_path / "out", settings("secrets"), KEY, OTHER, None)
    assert report.canaries.planted == 200 and report.canaries.recall >= 0.9, report.text()
    assert "CONTENT IS IN IT" in report.text()
    bodies = [one.content.body for one in read(tmp_path / "out") if one.content]
    prompts = [body["prompt"] for body in bodies if isinstance(body.get("prompt"), str)]
    assert SOURCE[:900] in prompts, "no secret is in it"


def test_the_same_secret_has_the_same_mask_everywhere() -> None:
    masks = Masks(KEY, (Patterns(), DetectSecrets()))
    (key, *_), mail = secrets(KEY, 1), "jane.doe@corp.example.com"
    body = {"a": [f"use {key} or ask {mail}"], "b": {"c": f"{mail}: {key}"}, "user": "jane"}
    made = masks.value(body)
    first, second = made["a"][0], made["b"]["c"]
    assert key not in str(made) and mail not in str(made) and "jane" not in str(made)
    assert first.split()[1] == second.split()[1] and first.split()[4] == second.split(":")[0]
    assert len(first) == len(body["a"][0]) and first.startswith("use ")
    assert masks.value(body) == made and Masks(OTHER, masks.detectors).value(body) != made


def test_an_answer_that_was_masked_has_no_ids() -> None:
    masks, shield = Masks(KEY, (Patterns(),)), Shield(KEY)
    for text, kept in (("call +49 301 2345 6789 now", ()), ("nothing here", (1, 2))):
        one = some(1, content=Content(body={}, text=text, tokens=(1, 2), logprobs=(-1.0, -2.0)))[0]
        made = masks.record(one, shield)
        assert made.content is not None and made.content.tokens == kept
        assert bool(made.content.logprobs) is bool(kept)


def test_local_addresses_and_versions_stay() -> None:
    masks = Masks(KEY, (Patterns(),))
    for text in ("127.0.0.1:8000", "10.0.0.1", "version 1.2.3", "2026-11-30", "12:30:15", "a::b"):
        assert masks.text(text) == text
    assert masks.text("at 8.8.4.4 now") != "at 8.8.4.4 now"


# ---- the commands ---------------------------------------------------------------------------


def test_the_commands(
    recorded: tuple[Path, Trace, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = str(recorded[0]), tmp_path / "out"
    assert main(["anonymise", folder, str(out), "--level", "surrogate", "--guesses", "100"]) == 0
    said = capsys.readouterr().out
    assert "structure       kept exactly" in said and "0 came out (recall 100.0%)" in said
    written = json.loads((out / PRIVACY).read_text())
    assert written["canaries"]["leaked"] == 0 and written["kept"]["differences"] == []
    assert main(["convert", str(out)]) == 0
    assert "level surrogate: 30 requests, 0 torn" in capsys.readouterr().out
    target = tmp_path / "m.jsonl"
    assert main(["convert", str(out), str(target), "--to", "mooncake", "--block-tokens", "64"]) == 0
    assert "blocks of 64 tokens: what is shared within one is lost" in capsys.readouterr().out
    assert main(["convert", str(target), "--in-block-tokens", "64"]) == 0
    assert main(["convert", str(target)]) == 2, "other blocks than the format has by default"
    assert main(["convert", str(out), str(target)]) == 2
    assert main(["anonymise", folder, str(out)]) == 2, "the folder is not empty"
    assert "is not empty" in capsys.readouterr().err
    assert main(["anonymise", folder, str(target)]) == 2, "a file is in its place"
    assert "m.jsonl: cannot be a folder: File exists" in capsys.readouterr().err
    for kind in ("mooncake", "weka"):
        nowhere = str(tmp_path / "no" / "m.jsonl")
        assert main(["convert", folder, nowhere, "--to", kind, "--block-tokens", "64"]) == 2
        assert "cannot be written: No such file" in capsys.readouterr().err
    assert main(["convert", folder, str(target), "--to", "weka", "--block-tokens", "0"]) == 2
    assert "--block-tokens is 0; it must be at least 1" in capsys.readouterr().err
    assert main(["convert", str(tmp_path)]) == 2
    assert "is no recording: header.json is not in it" in capsys.readouterr().err
