"""The engine on the embedded model: what must hold for floats as it does for hashes."""

from __future__ import annotations

from functools import cache as once

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from stanchion.cli.settings import model_folder
from stanchion.core.errors import Bug
from stanchion.core.identity import CacheIdentity
from stanchion.core.messages import Ended, Start
from stanchion.core.outcome import Completed, OutputSuspect
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.gateway.tokens import Vocabulary, load_vocabulary
from stanchion.model.glm5 import Glm5
from stanchion.model.hashed import HashModel
from stanchion.model.load import load_glm
from stanchion.model.text import Cache, Ragged
from tests.engine.rig import Heard, finish

PROMPTS = (
    "def main(argv=None):\n    parser = argparse.ArgumentParser(",
    "class Queue:\n    '''Create a queue object with a given maximum size.'''\n\n    def __init__(",
    "import os\nimport sys\n\n\ndef walk(top, topdown=True",
    "    for name in names:\n        if name.startswith('_'):\n",
)


@once
def vocabulary() -> Vocabulary:
    return load_vocabulary(model_folder("tiny"))


def embedded(draft_tokens: int, chunk_tokens: int = 512) -> Engine:
    model, name, revision, eos = load_glm(
        model_folder("tiny"), 16, draft=draft_tokens > 0, deterministic=True
    )
    limits = Limits(draft_tokens=draft_tokens, chunk_tokens=chunk_tokens)
    return assemble(model, limits, 512, name, revision, eos, record_drafts=True).engine


def starts(temperature: float, output: int = 60) -> list[Start]:
    encode = vocabulary().encode
    return [
        Start(
            request=f"r{at}",
            tokens=encode(text * (1 + 3 * (at % 2)), special=False),
            sampling=Sampling(
                max_tokens=output, temperature=temperature, ignore_eos=True, seed=at, logprobs=1
            ),
        )
        for at, text in enumerate(PROMPTS)
    ]


def answers(heard: dict[str, Heard]) -> dict[str, tuple[object, ...]]:
    return {name: one.answer for name, one in heard.items()}


def test_greedy_text_with_speculation_equals_text_without() -> None:
    plain = finish(embedded(0), starts(0.0))
    for drafts in (1, 3, 5):
        engine = embedded(drafts)
        speculated = finish(engine, starts(0.0))
        for name, heard in plain.items():
            assert speculated[name].tokens == heard.tokens, (drafts, name)
            assert speculated[name].logprobs == heard.logprobs, (drafts, name)
        assert engine.counters.accepted > 0
        assert engine.audit() == []


def test_an_answer_does_not_depend_on_the_batch_the_chunk_or_the_cache() -> None:
    """Bitwise: alone and cold, together in small chunks, and again over a prefix hit."""
    asked = starts(0.7)
    alone = {one.request: finish(embedded(3), [one])[one.request].answer for one in asked}
    engine = embedded(3, chunk_tokens=24)
    assert answers(finish(engine, asked)) == alone
    again = [msgspec.structs.replace(one, request=f"{one.request} again") for one in asked]
    heard = finish(engine, again)
    assert engine.counters.cached_tokens > 0
    assert {name.removesuffix(" again"): one.answer for name, one in heard.items()} == alone
    assert engine.audit() == []


class Poisoned(Glm5):
    """Turns the hidden state of one token to NaN, as a broken kernel or bad memory would."""

    bad_token: int

    def forward(self, batch: Ragged, cache: Cache) -> Tensor:
        hidden = super().forward(batch, cache)
        hidden[torch.from_numpy(batch.tokens == self.bad_token)] = torch.nan
        return hidden


def test_a_nan_ends_its_own_request_only_and_is_never_shared() -> None:
    engine = embedded(3)
    asked = starts(0.0)
    clean = answers(finish(engine, asked))
    engine = embedded(3)
    model = engine.launch.__self__.model  # type: ignore[attr-defined]
    assert isinstance(model, Glm5)
    model.__class__ = Poisoned
    model.bad_token = 2047  # type: ignore[attr-defined]
    bad = msgspec.structs.replace(
        asked[0], request="bad", tokens=[*asked[0].tokens * 4, 2047, *asked[0].tokens]
    )
    heard = finish(engine, [*asked, bad])
    (end,) = heard["bad"].ends
    assert isinstance(end.outcome, OutputSuspect) and heard["bad"].tokens == []
    assert engine.counters.suspect == 1
    del heard["bad"]
    said = answers(heard)
    assert all(2047 in heard[name].tokens or said[name] == clean[name] for name in said)
    keys = engine.tree.keys(_root(engine, bad), np.array(bad.tokens, np.int32), [])
    shared = engine.tree.match(keys, np.array(bad.tokens, np.int32))
    assert len(shared) * 16 <= bad.tokens.index(2047)
    assert engine.audit() == []


class BadDrafts(HashModel):
    """Its draft logits turn to NaN from the second draft of a window on."""

    calls = 0

    def draft_logits(self, hidden: Tensor) -> Tensor:
        logits = super().draft_logits(hidden)
        self.calls += 1
        return logits * torch.nan if self.calls % 3 == 0 else logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_draft_is_never_accepted(temperature: float) -> None:
    engine = assemble(BadDrafts(), Limits(draft_tokens=3), 64).engine
    sampling = Sampling(max_tokens=40, temperature=temperature, ignore_eos=True, seed=1)
    heard = finish(engine, [Start(request="r", tokens=[40] * 9, sampling=sampling)])["r"]
    assert isinstance(heard.ends[0].outcome, OutputSuspect)
    assert all(logprob > -20.0 for logprob in heard.logprobs)


def test_rows_that_stop_being_ready_stop_their_request() -> None:
    """The proof is made for each verify window, not once: here a watermark falls in between."""
    engine = assemble(HashModel(), Limits(draft_tokens=3), 64).engine
    sampling = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine.step([Start(request="r", tokens=[40] * 40, sampling=sampling)])
    engine.step([])
    pages = engine.running["r"].pages[:1]
    engine.ready.lower_to(pages, np.array([7], np.int32), np.array([7], np.int32))
    with pytest.raises(Bug, match="which is not ready"):
        finish(engine, [])


def _root(engine: Engine, start: Start) -> bytes:
    served = engine.served
    return CacheIdentity(
        start.tenant, start.salt, served.model, served.revision, served.schema
    ).digest()


def test_prompt_scores_equal_the_log_probabilities_of_generation() -> None:
    """What was generated greedily, given back as a prompt, scores the same, bit for bit."""
    engine = embedded(3)
    (start,) = starts(0.0)[:1]
    first = finish(engine, [start])["r0"]
    scored = Start(
        request="score",
        tokens=[*start.tokens, *first.tokens],
        sampling=Sampling(max_tokens=0, prompt_logprobs=2),
    )
    heard = finish(engine, [scored])["score"]
    assert heard.ends[0].outcome == Completed("length")
    assert len(heard.prompt_logprobs) == len(scored.tokens) - 1
    assert heard.prompt_logprobs[len(start.tokens) - 1 :] == first.logprobs


def test_acceptance_stays_within_its_bounds() -> None:
    engine = embedded(3)
    for heard in finish(engine, starts(0.7, 120)).values():
        (end,) = heard.ends
        assert isinstance(end, Ended) and end.spec is not None
        spec = end.spec
        assert 0 <= spec.accepted <= spec.proposed <= 3 * spec.verify_steps
        assert spec.verify_steps <= spec.tokens <= 4 * spec.verify_steps


def test_without_drafts_there_are_no_counters() -> None:
    engine = assemble(HashModel(draft=False), Limits(draft_tokens=0), 64).engine
    start = Start(request="r", tokens=[40], sampling=Sampling(max_tokens=5))
    assert finish(engine, [start])["r"].ends[0].spec is None
