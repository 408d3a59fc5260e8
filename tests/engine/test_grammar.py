"""Answers under a grammar: each is its solo run's, follows its grammar, and is nobody's trouble."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from stanchion.core.grammar import COPIES_MAX, HEAD
from stanchion.core.matching import GrammarFault, Grammars
from stanchion.core.messages import Ended, Start
from stanchion.core.outcome import Completed, Rejected
from stanchion.core.request import Sampling
from stanchion.engine.scheduler import Limits
from stanchion.gateway.tokens import byte_vocabulary
from stanchion.model.hashed import END_TOKEN
from stanchion.sim.choices import Choices, seeded
from tests.engine.rig import finish, hashed_engine, late, random_start, solo, storm, wrong

Json = dict[str, Any]
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
WORDS = ("red", "green", 'a "quoted" é', "</arg_value>", "")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    words = byte_vocabulary()
    return Grammars(words.pieces, words.special, words.eos_ids, words.size)


def of_schema(schema: Json) -> str:
    body = {"name": "body", "json_schema": schema | COMPACT}
    return json.dumps({"grammars": [{"lark_grammar": f"{HEAD}start: @body"}, body]})


def of_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": HEAD + lark}]})


def of_regex(regex: str) -> str:
    return of_lark(f"start: /{regex}/")


def schema(choices: Choices, depth: int = 0) -> Json:
    kinds = 6 if depth > 2 else 9
    match choices.pick(kinds):
        case 0:
            return {"enum": [*WORDS[: 1 + choices.pick(len(WORDS))], choices.pick(100)]}
        case 1:
            return {"type": "string", "maxLength": choices.pick(8)}
        case 2:
            return {"type": "integer", "minimum": -choices.pick(50), "maximum": choices.pick(2000)}
        case 3:
            return {"type": ("boolean", "null")[choices.pick(2)]}
        case 4:
            return {"type": "string", "pattern": ("^[a-f]{2,4}$", "^x+$")[choices.pick(2)]}
        case 5:
            return {"const": WORDS[choices.pick(len(WORDS))]}
        case 6:
            return {"type": "array", "items": schema(choices, depth + 1), "maxItems": 2}
        case 7:
            return {"anyOf": [schema(choices, depth + 1) for _ in range(2)]}
        case _:
            names = [f"k{place}" for place in range(1 + choices.pick(3))]
            return {
                "type": "object",
                "properties": {name: schema(choices, depth + 1) for name in names},
                "required": names[choices.pick(2) :],
                "additionalProperties": False,
            }


def prompt(number: int) -> list[int]:
    return [32 + (7 * number + place) % 95 for place in range(1 + number % 40)]


def start(
    name: str, grammar: str | None, tokens: list[int] | None = None, **sampling: Any
) -> Start:
    given = {"max_tokens": 120, "temperature": 0.9, "seed": len(name)} | sampling
    return Start(
        request=name, tokens=tokens or prompt(3), sampling=Sampling(**given), grammar=grammar
    )


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != END_TOKEN).decode()


def bound_start(
    choices: Choices, name: str, prefixes: list[list[int]], turns: list[Start]
) -> Start:
    """Three of four have a grammar; the others go with them in the same batches."""
    drawn = random_start(choices, name, prefixes, turns)
    if choices.pick(4) == 0:
        return replace(drawn, grammar=None, said=0)
    most = 20 + choices.pick(100)
    sampling = replace(drawn.sampling, min_tokens=0, ignore_eos=False, max_tokens=most)
    return replace(drawn, grammar=of_schema(schema(choices)), sampling=sampling, said=0)


def valid(start: Start, tokens: list[int], outcome: object) -> bool:
    """Is it whole, and what it has to be? What is cut may begin well and no more."""
    if start.grammar is None or outcome != Completed("stop") or tokens[-1] != END_TOKEN:
        return False
    _, part = json.loads(start.grammar)["grammars"]
    jsonschema.validate(json.loads(text_of(tokens)), part["json_schema"])
    return True


@pytest.mark.parametrize("drafts", range(6))
def test_under_load_each_answer_is_its_solo_runs(drafts: int, grammars: Grammars) -> None:
    preempted = whole = 0
    for seed in (200 + drafts, 300 + drafts):
        choices = seeded(seed)
        limits = Limits((3, 17, 64)[choices.pick(3)], 8 + choices.pick(20), draft_tokens=drafts)
        engine = hashed_engine(limits, 350 + choices.pick(50), 1, grammars=grammars)
        if seed % 2:
            late(engine)
        result = storm(engine, choices, 60, draw=bound_start)
        assert wrong(result, drafts, grammars=grammars) == [], f"replay with seed {seed}"
        assert engine.audit() == []
        preempted += engine.counters.preempted
        whole += sum(
            valid(one, result.heard[name].tokens, result.heard[name].ends[0].outcome)
            for name, one in result.starts.items()
        )
    print(f"{preempted} preempted, {whole} whole")
    assert preempted and whole


def test_every_completed_answer_is_valid_by_its_schema(grammars: Grammars) -> None:
    """200 random schemas, together in one engine."""
    starts = [
        start(f"r{seed}", of_schema(schema(seeded(seed))), prompt(seed), seed=seed, max_tokens=160)
        for seed in range(200)
    ]
    engine = hashed_engine(Limits(draft_tokens=3), grammars=grammars)
    heard = finish(engine, starts)
    assert all(isinstance(one.ends[0].outcome, Completed) for one in heard.values())
    whole = sum(
        valid(one, heard[one.request].tokens, heard[one.request].ends[0].outcome) for one in starts
    )
    print(f"{whole} of 200 whole, {engine.counters.accepted} drafts accepted")
    assert whole > 190
    assert engine.counters.accepted


def test_speculation_does_not_change_what_is_greedy(grammars: Grammars) -> None:
    for seed in range(20):
        one = start("r", of_schema(schema(seeded(seed))), prompt(seed), temperature=0.0)
        texts = {tuple(solo(one, drafts, grammars=grammars).tokens) for drafts in range(6)}
        assert len(texts) == 1


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_answer_ends_where_its_grammar_may(drafts: int, grammars: Grammars) -> None:
    """The model would often end before, or never."""
    lengths = set()
    for seed in range(60):
        one = start("r", of_regex("([a-z]{3}){2,5}"), prompt(seed), seed=seed)
        heard = solo(one, drafts, grammars=grammars)
        assert heard.ends[0].outcome == Completed("stop")
        assert re.fullmatch("([a-z]{3}){2,5}", text_of(heard.tokens))
        lengths.add(len(heard.tokens) - 1)
    assert len(lengths) > 1


def test_what_is_cut_says_so(grammars: Grammars) -> None:
    one = start("r", of_regex("[a-z]{10}"))
    whole = solo(one, 3, grammars=grammars).tokens
    assert len(whole) == 11
    for most in range(1, 11):
        cut = replace(one, sampling=replace(one.sampling, max_tokens=most))
        heard = solo(cut, 3, grammars=grammars)
        assert heard.ends[0].outcome == Completed("length")
        assert text_of(heard.tokens).isalpha() and len(heard.tokens) == most


def test_scores_are_those_of_the_model_without_a_grammar(grammars: Grammars) -> None:
    one = start("r", of_regex("[a-z]{10}"))
    heard = solo(one, 3, grammars=grammars)
    scored = start("s", None, one.tokens + heard.tokens, max_tokens=0, prompt_logprobs=0)
    assert solo(scored, 0).prompt_logprobs[len(one.tokens) - 1 :] == heard.logprobs


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}])
@pytest.mark.parametrize("grammar", [None, of_schema({"type": "string", "maxLength": 30})])
def test_what_another_attempt_said_counts(
    sampling: Json, grammar: str | None, grammars: Grammars
) -> None:
    """Resumed at any place, grammar and penalties go on as if there had been one attempt."""
    one = start("r", grammar, temperature=0.0, max_tokens=40, **sampling)
    whole = solo(one, 3, grammars=grammars)
    for kept in range(1, len(whole.tokens) - 1):
        rest = replace(
            one,
            tokens=one.tokens + whole.tokens[:kept],
            sampling=replace(one.sampling, max_tokens=40 - kept),
            said=kept,
        )
        heard = solo(rest, 3, grammars=grammars)
        assert heard.tokens == whole.tokens[kept:]
        assert heard.ends[0].outcome == whole.ends[0].outcome


MANY = of_lark("start: " + " | ".join(f'"w{n}"' for n in range(3000)))  # over a bound of a step


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (MANY, "max is 2000"),
        (of_regex("("), "invalid regex"),
        (of_schema({"type": "array", "maxItems": COPIES_MAX + 1}), "maxItems"),
        (of_lark("start: a\na: b\nb: a"), "no text follows"),
        (of_schema({"not": {}}), "not"),
        ("{}", "grammars"),
        (json.dumps({"grammars": [{"json_schema": {"type": "null"}}]}), "begins with"),
    ],
)
def test_a_bad_grammar_is_its_own_requests_trouble(
    grammar: str, said: str, grammars: Grammars
) -> None:
    mates = [start(f"mate {n}", None, prompt(n), max_tokens=30) for n in range(4)]
    engine = hashed_engine(grammars=grammars)
    heard = finish(engine, [*mates[:2], start("bad", grammar), *mates[2:]])
    outcome = heard["bad"].ends[0].outcome
    assert isinstance(outcome, Rejected) and outcome.field == "grammar"
    assert said.lower() in outcome.message.lower()
    for mate in mates:
        assert heard[mate.request].answer == solo(mate, 3).answer
    assert engine.audit() == []


class Broken:
    """A matcher that fails after so many calls, in the middle of a verify window too."""

    def __init__(self, inner: Any, calls: int, method: str) -> None:
        self._inner, self._calls, self._method = inner, calls, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._calls -= 1
            if self._calls < 0:
                raise GrammarFault("broken")
        return getattr(self._inner, name)


@pytest.mark.parametrize("method", ["allowed", "say", "back"])
def test_a_matcher_may_fail_at_any_moment(method: str, grammars: Grammars) -> None:
    mate = start("mate", None, prompt(5), max_tokens=40)
    expected = solo(mate, 3).answer
    for calls in range(12):
        engine = hashed_engine(grammars=grammars)
        bad = start("bad", of_regex("[a-z]{60}"))
        said = engine.step([bad, mate])
        request = next(one for one in engine.running.values() if one.name == "bad")
        request.matcher = Broken(request.matcher, calls, method)  # type: ignore[assignment]
        heard = {"bad": [], "mate": []}  # type: ignore[var-annotated]
        while said or engine.busy:
            for message in said:
                heard[message.request].append(message)
            said = engine.step([])
        (end,) = [one for one in heard["bad"] if isinstance(one, Ended)]
        assert end.outcome == Rejected("grammar", "broken")
        tokens = [token for one in heard["mate"][:-1] for token in one.tokens]
        assert tokens == expected[0]
        assert engine.audit() == []


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_an_answer_that_may_not_end_has_no_grammar(sampling: Json, grammars: Grammars) -> None:
    heard = finish(hashed_engine(grammars=grammars), [start("r", of_regex("a"), **sampling)])
    outcome = heard["r"].ends[0].outcome
    assert isinstance(outcome, Rejected) and outcome.field == "grammar"


def test_a_worker_without_a_vocabulary_and_a_model_without_an_end_say_so() -> None:
    (end,) = finish(hashed_engine(), [start("r", of_regex("a"))])["r"].ends
    assert isinstance(end.outcome, Rejected) and "no vocabulary" in end.outcome.message
    words = byte_vocabulary()
    with pytest.raises(GrammarFault, match="no end token"):
        Grammars(words.pieces, words.special, (), words.size).matcher(of_regex("a"))
