"""An answer that goes on behind its own clean tokens, from cold KV, says what the solo run says.

Positions count over prompt and output, and each draw is a function of (seed, stream, position): so
it holds for greedy answers with speculation and without, and for sampled ones without it (with it
they have the right distribution, but verify windows begin elsewhere).
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.gateway.splice import resumed, seeded
from tests.engine.rig import solo

PROMPT = [40 + at % 50 for at in range(37)]
TOKENS = 48
CUTS = (1, 2, 15, 16, 17, 31, 47)
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.3},
    "greedy, ends": {"temperature": 0.0, "ignore_eos": False, "min_tokens": 20},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "draft_tokens": 0},
    "sampled, output penalties": {
        "temperature": 2.0,
        "frequency_penalty": 2.0,
        "presence_penalty": 2.0,
        "draft_tokens": 0,
    },
    "sampled, biased": {"temperature": 1.0, "logit_bias": ((50, 3.0),), "draft_tokens": 0},
}


def start(**more: Any) -> Start:
    sampling = Sampling(**{"max_tokens": TOKENS, "ignore_eos": True} | more)
    return seeded(Start(request="answer", tokens=PROMPT, sampling=sampling))


@pytest.mark.parametrize("asked", ASKED)
def test_the_rest_is_the_solo_runs(asked: str) -> None:
    whole = solo(start(**ASKED[asked]), 3)
    for cut in CUTS:
        if cut < len(whole.tokens):
            rest = solo(resumed(start(**ASKED[asked]), whole.tokens[:cut], f"r{cut}", "salt"), 3)
            assert rest.tokens == whole.tokens[cut:], cut
            assert rest.logprobs == whole.logprobs[cut:], cut
            assert rest.ends[0].outcome == whole.ends[0].outcome


def test_an_attempt_that_draws_by_its_own_name_is_caught() -> None:
    """The wrong variant: without a seed of the answer's, a sampled text goes on as another one."""
    one = Start(
        request="answer",
        tokens=PROMPT,
        sampling=Sampling(max_tokens=TOKENS, temperature=0.8, ignore_eos=True, draft_tokens=0),
    )
    whole = solo(one, 3)
    rest = solo(resumed(one, whole.tokens[:15], "another", "salt"), 3)
    assert rest.tokens != whole.tokens[15:]


def test_a_penalty_of_output_tokens_needs_to_know_them() -> None:
    """The wrong variant: not told that they are the answer's, the engine takes kept tokens for the
    prompt's."""
    asked = start(**ASKED["sampled, output penalties"])
    whole = solo(asked, 3)
    resumes = [resumed(asked, whole.tokens[:cut], f"r{cut}", "") for cut in CUTS]
    rests = [solo(replace(one, said=0), 3).tokens for one in resumes]
    assert any(rest != whole.tokens[cut:] for cut, rest in zip(CUTS, rests))
