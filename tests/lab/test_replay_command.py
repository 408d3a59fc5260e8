"""`stanchion replay` with real sockets and processes, against a server that computes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stanchion.cli import arms
from stanchion.cli.bench import stub
from stanchion.cli.bench.replay import serving
from stanchion.cli.detect import Asked as Look
from stanchion.cli.detect import detect
from stanchion.cli.main import main
from stanchion.cli.replay import finish, replay, report
from stanchion.cli.replay_asked import Asked
from stanchion.core.errors import ConfigError
from stanchion.lab.results import RESULTS, Writer, read_header, read_results


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """40 requests within one second."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, stub.trace(40, 1.0))) + "\n")
    return path


def asked(trace: Path, url: str, **more: object) -> Asked:
    given = {"out": str(trace.parent / "run"), "lateness_max_s": 30.0} | more
    return Asked(trace=str(trace), url=url, **given)  # type: ignore[arg-type]


def test_a_trace_is_sent_and_all_of_it_is_written_down(trace: Path, url: str) -> None:
    header = replay(asked(trace, url), quiet=True)
    assert header.valid and header.model == stub.MODEL and header.requests == 40
    results = list(read_results(trace.parent / "run"))
    assert [one.ending for one in results] == ["completed"] * 40
    for one in results:
        assert one.send is not None and one.first_token is not None and one.last_token is not None
        assert one.send <= one.first_token <= one.last_token <= one.end
        assert one.first_token - one.send >= stub.FIRST_S
        assert one.last_token - one.send >= stub.FIRST_S + (stub.TOKENS - 1) * stub.NEXT_S
        assert one.output_tokens == stub.TOKENS and one.finish == "length"
        body = msgspec.json.decode(one.body)
        assert body["max_tokens"] == stub.TOKENS and "ignore_eos" not in body
        assert "cache_salt" not in body and "return_token_ids" not in body  # nobody asked for it
    assert "40 completed, 0 failed" in report(header, trace.parent / "run")


def test_a_run_that_was_cut_goes_on(trace: Path, url: str) -> None:
    folder = trace.parent / "run"
    replay(asked(trace, url), quiet=True)
    (file,) = folder.glob("results-*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:25]) + lines[25][:40])
    header = replay(asked(trace, url, processes=2), quiet=True)
    assert header.valid and header.sittings == 2 and header.processes == 2
    results = list(read_results(folder))
    assert len(results) == 40 and len({one.key for one in results}) == 40
    assert len(list(folder.glob("results-002-*.jsonl"))) == 2
    late = max(one.end for one in results[:25])
    assert min(one.due for one in results[25:]) >= late  # its clock went on
    with pytest.raises(ConfigError, match="speed '1', not '2'"):
        replay(asked(trace, url, speed="2"), quiet=True)


def test_one_of_a_run_is_asked_again_alone(trace: Path, url: str) -> None:
    replay(asked(trace, url, first=3), quiet=True)
    folder = trace.parent / "run"
    names = [one.request for one in read_results(folder)]
    again = asked(folder, url, out=str(trace.parent / "alone"), solo=(names[1],), times=4)
    assert replay(again, quiet=True).solo
    results = list(read_results(trace.parent / "alone"))
    assert [one.copy for one in results] == [0, 1, 2, 3]
    assert {one.request for one in results} == {f"{names[1]}#0"}
    was = msgspec.json.decode(next(read_results(folder)).body)["prompt"]
    is_ = {msgspec.json.decode(one.body)["prompt"] for one in results}
    assert len(is_) == 1 and was not in is_
    with pytest.raises(ConfigError, match="no request nobody"):
        replay(asked(folder, url, solo=("nobody",)), quiet=True)


def test_a_generator_that_is_late_says_so_in_its_exit_code(
    trace: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(trace.parent / "run")
    command = [
        "replay",
        str(trace),
        "--url",
        url,
        "--out",
        out,
        "--concurrency",
        "1",
        "--first",
        "12",
    ]
    assert main([*command, "--speed", "40", "--lateness-max", "0.05"]) == 1
    said = capsys.readouterr().out
    assert "NOT VALID" in said and "at most 1 were let through" in said
    assert read_header(Path(out)).valid is False


def test_what_cannot_be_run_is_told(
    trace: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, said in (
        (["--url", "nowhere"], "must begin with http"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--url", url, "--processes", "0"], "--processes is 0"),
        (["--url", url, "--block-tokens", "513"], "from 1 to 512"),
        (["--url", url, "--pd-sweep", "1:1"], "leave --url out"),
        (["--url", url, "--tokenizer", str(tmp_path / "none")], "none"),
        ([], "--url is missing"),
    ):
        assert main(["replay", str(trace), "--out", str(tmp_path / "x"), *more]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "x").exists(), "nothing is left of what was not run"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    assert main(["replay", str(trace), "--url", url, "--out", str(tmp_path / "full")]) == 2
    assert "not empty" in capsys.readouterr().err
    (tmp_path / "letter").write_text("dear")
    for command in ("replay", "report"):
        more = ["--url", url] if command == "replay" else []
        source = trace if command == "replay" else run_of(trace, url, tmp_path)
        out = str(tmp_path / "letter")
        assert main([command, str(source), "--out", out, *more]) == 2
        assert f"--out {out} cannot be a folder: File exists" in capsys.readouterr().err


def run_of(trace: Path, url: str, folder: Path) -> Path:
    replay(asked(trace, url, out=str(folder / "run"), first=1), quiet=True)
    return folder / "run"


def test_a_run_of_failures_is_not_valid_and_says_why(trace: Path, url: str) -> None:
    header = replay(asked(trace, url, first=3), quiet=True)
    folder = trace.parent / "run"
    results = list(read_results(folder))
    for path in folder.glob(RESULTS):
        path.unlink()
    with closing(Writer(folder, 1, 0)) as writer:
        for one in results:
            writer.add(msgspec.structs.replace(one, ending="failed", error="404 no such model"))
    header = finish(folder, header)
    assert header.valid is False and header.why == "every request failed"
    assert "  3 times: 404 no such model" in report(header, folder).splitlines()


def test_a_missing_extra_is_named(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stanchion.cli.run.find_spec", lambda name: None)
    assert main(["replay", str(trace), "--out", "x", "--url", "http://127.0.0.1:1"]) == 2
    assert "stanchion[lab]" in capsys.readouterr().err


def test_ratios_are_read() -> None:
    assert arms.ratios("1:1, 2:1,1:2") == [(1, 1), (2, 1), (1, 2)]
    for wrong in ("", "1", "0:1", "1:x", "-1:1"):
        with pytest.raises(ConfigError, match="PREFILL:DECODE"):
            arms.ratios(wrong)


@pytest.mark.soak
def test_a_cluster_is_started_for_each_ratio(trace: Path) -> None:
    given = asked(trace, "", first=8, block_tokens=16, max_tokens=8, tokenizer="hashed")
    assert arms.sweep(given, "1:1,2:1", "hashed --integrity off") == 0
    for name in ("pd-1-1", "pd-2-1"):
        folder = trace.parent / "run" / name
        assert read_header(folder).arm == name.removeprefix("pd-").replace("-", ":")
        assert all(one.ending == "completed" for one in read_results(folder))


@pytest.mark.soak
def test_a_recording_is_replayed_and_answered_alike(trace: Path) -> None:
    """Record, replay, detect: what was recorded with its content has the same answers again, also
    to copies that share no cache."""
    kept, first, again = (trace.parent / name for name in ("kept", "first", "again"))
    flags = ["hashed", "--integrity", "off"]
    with arms.serving(
        [*flags, "--record", str(kept), "--record-content"], trace.parent / "log"
    ) as url:
        made = {"block_tokens": 16, "max_tokens": 8, "tokenizer": "hashed", "first": 20}
        assert replay(asked(trace, url, out=str(first), **made), quiet=True).requests == 20
    with arms.serving(flags, trace.parent / "log") as url:
        header = replay(asked(kept, url, out=str(again), loop="session", copies=2), quiet=True)
    assert header.requests == 40
    results = list(read_results(again))
    assert [one.ending for one in results] == ["completed"] * 40
    assert len({msgspec.json.decode(one.body).get("cache_salt") for one in results}) == 2
    told = detect(Look(again, first, tokenizer="hashed", quiet=True))
    assert [one.truth for one in told.findings] == ["same"] * 40
