"""Burn-in: a server that is right passes, however noisy; one that is wrong under load does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stanchion.cli.burnin import confirmed, lost_drafts, parted, says_nothing, suspects, told
from stanchion.cli.main import main
from stanchion.core.errors import ConfigError
from stanchion.gateway.monitor.witness import Confirmed
from stanchion.lab.burnin import FILLER, Storm, requests
from stanchion.lab.burnin_run import BurnIn, Found

from .rig import DONE, Pieces, Scripted, chunk, run

TEXT = Path(__file__).read_text() + "".join(chr(97 + at * 7 % 26) for at in range(20_000))
SMALL = Storm(
    requests=200,
    prefixes=5,
    output_tokens=12,
    concurrency=8,
    prefix_characters=120,
    turn_characters=20,
    filler_characters=300,
)
SPEC = {"spec_accept_rate": 0.5, "spec_verify_steps": 4, "spec_accept_length": 2.5}


def drawn(*parts: object) -> float:
    digest = blake2b(repr(parts).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


@dataclass
class Server(Scripted):
    """Its tokens are bytes; what comes next is a function of all before. `wrong`: is this answer to
    be computed on somebody else's prompt? It is asked with how many are in flight."""

    script: Callable[[str, dict[str, Any]], Pieces] = field(init=False)
    sigma: float = 0.0
    wrong: Callable[[int], bool] = lambda open_: False
    ids: bool = True
    salts: bool = True
    drafts: Callable[[int], float] = lambda open_: 1.5
    rng: Random = field(default_factory=lambda: Random(3))

    def __post_init__(self) -> None:
        self.script = self._answer

    async def get(self, path: str) -> Any:
        assert path == "/v1/models"
        return {"data": [{"id": "m", "max_model_len": 8192}]}

    def _answer(self, path: str, body: dict[str, Any]) -> Pieces:
        prompt = body["prompt"]
        known = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if path == "/tokenize":
            return [(0.0, json.dumps({"tokens": known}).encode())]
        if not self.salts and "cache_salt" in body:
            self.status = 400
            return [(0.0, b'{"error": {"message": "no such field: cache_salt"}}')]
        self.status = 200
        if "prompt_logprobs" in body:
            return [(0.001, json.dumps({"choices": [self._scored(known)]}).encode())]
        return self._stream(known, body)

    def _scored(self, known: list[int]) -> dict[str, Any]:
        scores: list[Any] = [None]
        for at in range(1, len(known)):
            scores.append({str(known[at]): {"logprob": self._score(known[:at], known[at])}})
        return {"prompt_logprobs": scores}

    def _stream(self, known: list[int], body: dict[str, Any]) -> Pieces:
        said, seen = [], list(known)
        wrong = self.wrong(self.open)
        for at in range(body["max_tokens"]):
            context = [0, *seen[1:]] if wrong and at >= 4 else seen
            token = 97 + int(26 * drawn(context[-8:], context[0], body["temperature"] and "hot"))
            choice: dict[str, Any] = {"index": 0, "text": chr(token)}
            if self.ids:
                score = self._score(context, token)
                choice |= {"token_ids": [token], "logprobs": {"token_logprobs": [score]}}
            drafts = SPEC | {"spec_accept_prefix": self.drafts(self.open)}
            said.append((0.01, chunk(choices=[choice], **drafts)))
            seen.append(token)
        end = {"index": 0, "text": "", "finish_reason": "length"}
        return [*said, (0.0, chunk(choices=[end]) + DONE)]

    def _score(self, context: list[int], token: int) -> float:
        exact = -3 * drawn(context[-8:], context[0], token)
        return exact + self.rng.gauss(0, self.sigma)


def burn(server: Server, storm: Storm = SMALL) -> Found:
    return run(BurnIn(server, storm, TEXT, lambda name, done, total: None).run(20))


# ---- the storm ------------------------------------------------------------------------------


def test_the_storm_is_a_function_of_its_seed_and_has_what_it_is_to_have() -> None:
    made = requests(SMALL, TEXT, 1.0)
    assert made == requests(SMALL, TEXT, 1.0) != requests(changed(SMALL, seed=8), TEXT, 1.0)
    asked = [one.content.body["prompt"] for one in made if one.content is not None]
    assert sum(one.session == FILLER for one in made) == len(made) // SMALL.filler_every
    shared = {text[: SMALL.prefix_characters] for text, one in zip(asked, made)
              if one.session != FILLER}  # fmt: skip
    assert len(shared) == SMALL.prefixes
    assert len(set(asked)) < len(asked), "some prompts come again"
    left = [one.aborted for one in made if one.aborted is not None]
    assert 0.15 < len(left) / len(made) < 0.35
    waits = sorted(one.at_s for one in left if not one.after_tokens)
    assert waits[0] < 0.2 and waits[-1] > 1.8, "over every moment of a request"
    counts = {one.after_tokens for one in left if one.after_tokens}
    assert len(counts) > SMALL.output_tokens // 2


def test_prompts_fit_into_the_servers_context() -> None:
    fitted = SMALL.fitted(140)
    longest = max(len(one.content.body["prompt"]) for one in requests(fitted, TEXT, 1.0)
                  if one.content is not None)  # fmt: skip
    assert longest <= 2 * 140 < SMALL.filler_characters
    assert SMALL.fitted(None) == SMALL
    with pytest.raises(ConfigError, match="too short"):
        SMALL.fitted(60)


@pytest.mark.parametrize("field_", ["requests", "concurrency", "turns", "output_tokens"])
def test_a_storm_of_nothing_is_refused_by_name(field_: str) -> None:
    with pytest.raises(ConfigError, match=field_):
        changed(SMALL, **{field_: 0})


# ---- what it says of a server ---------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 0.03])
def test_a_server_that_is_right_passes_with_its_noise(sigma: float) -> None:
    found = burn(Server(sigma=sigma))
    assert found.means.scores and found.means.salted
    assert found.asked == SMALL.requests
    assert found.completed + found.left + found.fillers == found.asked and not found.failed
    assert found.left > 20 and confirmed(found).trials == found.completed
    assert not suspects(found) and lost_drafts(found) is None
    assert parted(found)[0].trials > 5


@pytest.mark.parametrize("sigma", [0.0, 0.03])
def test_answers_on_anothers_prompt_are_found_with_their_onset(sigma: float) -> None:
    """Only when the server is full: alone, each of them is right."""
    rng = Random(5)
    found = burn(Server(sigma=sigma, wrong=lambda open_: open_ > 6 and rng.random() < 0.1))
    rate = confirmed(found)
    assert rate.events > 5
    onsets = [one.verdict.onset for one in found.every if isinstance(one.verdict, Confirmed)]
    assert min(onsets) >= 4 - (sigma > 0) * 4 and sorted(onsets)[len(onsets) // 2] in (4, 5)
    assert told(found)["worst"] and told(found)["confirmed"]["events"] == rate.events


def test_a_server_without_scores_is_judged_by_its_texts_alone() -> None:
    rng = Random(5)
    found = burn(Server(ids=False, wrong=lambda open_: open_ > 6 and rng.random() < 0.2))
    assert not found.means.scores and confirmed(found).trials == 0
    rate, _ = parted(found)
    assert rate.events > 3 and len(suspects(found)) == rate.events


def test_a_server_that_knows_no_salt_is_asked_without() -> None:
    found = burn(Server(salts=False))
    assert found.means.scores and not found.means.salted and not suspects(found)


def test_drafts_that_are_lost_under_load_are_a_finding_though_the_text_is_right() -> None:
    found = burn(Server(drafts=lambda open_: 1.0 if open_ > 2 else 1.5))
    assert not suspects(found)
    said = lost_drafts(found)
    assert said is not None and "33 % fewer" in said
    assert lost_drafts(burn(Server())) is None


def test_a_server_whose_cold_scores_differ_from_each_other_confirms_nothing() -> None:
    """Its noise grows after the quiet run: no gap says anything then."""
    server = Server()
    calm = server.most_open

    def later(open_: int) -> bool:
        server.sigma = 1.0 if server.most_open > calm + 2 else 0.0
        return False

    server.wrong = later
    found = burn(server)
    assert found.unstable > 10 and confirmed(found).events <= found.unstable // 10


def test_a_server_that_refuses_everything_cannot_be_burnt_in() -> None:
    server = Server()

    def refuse(path: str, body: dict[str, Any]) -> Pieces:
        server.status = 503
        return [(0.0, b'{"error": {"message": "busy"}}')]

    server.script = refuse
    with pytest.raises(ConfigError, match="busy"):
        burn(server)


def test_no_requests_are_not_all_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--url", "http://127.0.0.1:1", "--requests", "0"]) == 2
    assert "requests is 0; it must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", "--context", "long"])
    assert "'long' is no number of tokens; such as 70000 or 70k" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_the_storm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", "--url", "http://127.0.0.1:1", "--json", str(tmp_path / "none" / "x")]
    assert main(words) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_nothing_is_left_over() -> None:
    server = Server()

    async def whole() -> set[asyncio.Task[Any]]:
        await BurnIn(server, SMALL, TEXT, lambda name, done, total: None).run(5)
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert not run(whole()) and server.open == 0


def test_finding_nothing_means_nothing_where_most_requests_failed() -> None:
    """A server that answers when it is alone, and refuses whoever comes in a crowd."""
    server = Server()

    def crowded(path: str, body: dict[str, Any]) -> Pieces:
        if server.open <= 2:
            return server._answer(path, body)
        server.status = 503
        return [(0.5, b'{"error": {"message": "busy"}}')]

    server.script = crowded
    found = burn(server)
    said = says_nothing(found)
    assert said is not None and "busy" in said and not suspects(found)
    assert says_nothing(burn(Server())) is None


def test_finding_nothing_means_nothing_where_nobody_could_look() -> None:
    found = burn(Server())
    assert says_nothing(changed(found, every=found.every[: len(found.every) // 3])) is not None
