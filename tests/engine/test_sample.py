"""Speculation must not change what is sampled. Joint sequences over two verify windows are held
against the target's own law by a chi-square test; samplers with classic mistakes must fail it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from stanchion.core.request import Sampling
from stanchion.device.kernels import choose
from stanchion.engine import sample
from stanchion.engine.ask import Chosen
from stanchion.engine.sample import Ask, Window, distribution, draft, uniforms, verify

VOCABULARY = 4
LENGTH = 4  # tokens whose joint law is tested: with k drafts they span at least two windows
FIRST = 3  # position of the first output token
PROMPT = np.array([0, 1, 1], np.int32)
FAILS = 1e-6  # a right sampler fails this test once in a million seeds

PLAIN = Sampling(max_tokens=LENGTH, temperature=0.8)
FILTERED = Sampling(max_tokens=LENGTH, temperature=1.1, top_p=0.85, min_p=0.08)
PENALISED = Sampling(
    max_tokens=LENGTH, temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4,
    repetition_penalty=1.3, top_p=0.95, top_k=3, logit_bias=((2, 0.5),),
)  # fmt: skip


RESTRICTED = Sampling(max_tokens=LENGTH, temperature=0.8, top_p=0.95)
MAY_FOLLOW = (0b0110, 0b1001, 0b1111, 0b0001)  # after each token, as bits of those that may come


def toy_grammar(output: tuple[int, ...]) -> bytes:
    return bytes([MAY_FOLLOW[output[-1]] if output else 0b1110])


@dataclass(frozen=True)
class Toy:
    """Logits that depend on the last token and its place; the draft's are others."""

    table: Tensor  # (LENGTH + 8, vocabulary, vocabulary)

    @staticmethod
    def seeded(seed: int) -> Toy:
        generator = torch.Generator().manual_seed(seed)
        shape = (LENGTH + 8, VOCABULARY, VOCABULARY)
        return Toy(torch.randn(shape, generator=generator) * 1.5)

    def logits(self, histories: list[tuple[int, ...]]) -> Tensor:
        places = [len(one) for one in histories]
        last = [one[-1] if one else 0 for one in histories]
        return self.table[places, last]


def ask(sampling: Sampling, seed: int, output: tuple[int, ...]) -> Ask:
    place = FIRST + len(output)
    allowed = toy_grammar(output) if sampling is RESTRICTED else None
    return Ask(sampling, seed, place, len(output), (), PROMPT, output, allowed)


def law(target: Toy, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of LENGTH tokens, sampled one token at a time."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        histories = list(chances)
        rows = distribution_of(target.logits(histories), [ask(sampling, 0, h) for h in histories])
        chances = {
            (*history, token): chances[history] * float(rows[at, token])
            for at, history in enumerate(histories)
            for token in range(VOCABULARY)
            if float(rows[at, token]) > 0.0
        }
    return chances


def distribution_of(logits: Tensor, asks: list[Ask]) -> Tensor:
    return distribution(sample._shape(logits, asks), asks)


def speculate(
    target: Toy, drafter: Toy, sampling: Sampling, drafts: int, seeds: range
) -> list[tuple[int, ...]]:
    """Generate at least LENGTH tokens a seed, in verify windows of `drafts` drafts, batched."""
    outputs: list[tuple[int, ...]] = [() for _ in seeds]
    while min(map(len, outputs)) < LENGTH:
        lanes = [at for at, output in enumerate(outputs) if len(output) < LENGTH]
        proposed: list[tuple[int, ...]] = [() for _ in lanes]
        sources: list[list[Tensor]] = [[] for _ in lanes]
        for _ in range(drafts):
            histories = [outputs[at] + own for at, own in zip(lanes, proposed)]
            asks = [ask(sampling, seeds[at], h) for at, h in zip(lanes, histories)]
            tokens, drawn = draft(drafter.logits(histories), asks)
            proposed = [(*own, token) for own, token in zip(proposed, tokens)]
            for own, source in zip(sources, drawn):
                assert source is not None
                own.append(source)
        windows, rows = [], []
        for at, own, source in zip(lanes, proposed, sources):
            histories = [outputs[at] + own[:count] for count in range(drafts + 1)]
            rows += histories
            asks = [ask(sampling, seeds[at], h) for h in histories]
            windows.append(Window(tuple(asks), own, torch.stack(source)))
        for at, chosen in zip(lanes, verify(target.logits(rows), windows)):
            outputs[at] += tuple(chosen.tokens)
    return [output[:LENGTH] for output in outputs]


def p_value(drafts: int, sampling: Sampling, draws: int, seed: int = 7) -> float:
    """How likely counts as far from the target's law as these are, if the sampler is right."""
    target, drafter = Toy.seeded(seed), Toy.seeded(seed + 1)
    expected = law(target, sampling)
    counts = dict.fromkeys(itertools.product(range(VOCABULARY), repeat=LENGTH), 0)
    for low in range(0, draws, 5000):
        seeds = range(low, min(low + 5000, draws))
        for output in speculate(target, drafter, sampling, drafts, seeds):
            counts[output] += 1
    if any(count and output not in expected for output, count in counts.items()):
        return 0.0  # a sequence that the filters exclude
    pooled = sorted((chance * draws, counts[output]) for output, chance in expected.items())
    rare = [pair for pair in pooled if pair[0] < 5.0]
    cells = [pair for pair in pooled if pair[0] >= 5.0]
    if rare:
        cells.append((sum(wanted for wanted, _ in rare), sum(seen for _, seen in rare)))
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


SLOW = pytest.mark.soak  # 100,000 draws with everything on take a minute


@pytest.mark.parametrize(
    ("drafts", "sampling"),
    [
        *(pytest.param(drafts, PLAIN, id=f"{drafts}-plain") for drafts in (1, 2, 3, 4)),
        *(pytest.param(drafts, FILTERED, id=f"{drafts}-filters") for drafts in (1, 2, 3, 4)),
        *(pytest.param(drafts, RESTRICTED, id=f"{drafts}-grammar") for drafts in (1, 3, 4)),
        pytest.param(3, PENALISED, id="3-all"),
        *(pytest.param(drafts, PENALISED, id=f"{drafts}-all", marks=SLOW) for drafts in (1, 2, 4)),
    ],
)
def test_speculation_keeps_the_joint_law(drafts: int, sampling: Sampling) -> None:
    draws = 100_000 if sampling is PENALISED else 10_000
    chance = p_value(drafts, sampling, draws)
    print(f"k = {drafts}, {draws} draws: p = {chance:.3g}")
    assert chance > FAILS


def reused_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance reads the number that drew the draft."""
    right = uniforms
    monkeypatch.setattr(
        sample,
        "uniforms",
        lambda s, stream, p: right(s, "draft" if stream == "accept" else stream, p),
    )


def recovery_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal the token comes from p instead of the residual."""
    right = choose.judge

    def judge(target, drawn, drafts, counts, accept, recover):  # type: ignore[no-untyped-def]
        accepted, _ = right(target, drawn, drafts, counts, accept, recover)
        rows = np.cumsum(counts + 1) - counts - 1 + accepted
        return accepted, choose.draw(target[rows], recover[rows])

    monkeypatch.setattr(choose, "judge", judge)


def bonus_from_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """After k accepted drafts the bonus token comes from the draft's last distribution."""
    right = choose.judge

    def judge(target, drawn, drafts, counts, accept, recover):  # type: ignore[no-untyped-def]
        target = target.copy()
        target[np.cumsum(counts + 1) - 1] = drawn[np.cumsum(counts) - 1]
        return right(target, drawn, drafts, counts, accept, recover)

    monkeypatch.setattr(choose, "judge", judge)


@pytest.mark.parametrize("mistake", [reused_uniform, recovery_from_p, bonus_from_q])
@pytest.mark.parametrize("drafts", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_the_same_test_rejects_a_sampler_with(
    mistake: Callable[[pytest.MonkeyPatch], None], drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    chance = p_value(drafts, PENALISED, 20_000)
    print(f"{mistake.__name__}, k = {drafts}: p = {chance:.3g}")
    assert chance < FAILS


def test_the_same_test_rejects_a_sampler_that_restricts_drafts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = sample.verify

    def verify(logits: Tensor, windows: list[Window]) -> list[Chosen]:
        free = [
            replace(one, asks=tuple(replace(ask, allowed=None) for ask in one.asks))
            for one in windows
        ]
        return right(logits, free)

    monkeypatch.setitem(globals(), "verify", verify)
    assert p_value(3, RESTRICTED, 2_000) < FAILS


def test_only_rows_with_a_grammar_are_restricted_and_scores_stay_raw() -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    kept = logits.clone()
    greedy = Sampling(max_tokens=9, temperature=0.0)
    best = int(logits[1].argmax())
    asks = [ask(greedy, 1, ()), Ask(greedy, 1, FIRST, allowed=bytes([0b1111 ^ 1 << best]))]
    free, bound = verify(logits, [Window((one,)) for one in asks])
    assert free.tokens == [int(logits[0].argmax())]
    assert bound.tokens == [int(logits[1].topk(2).indices[1])]
    raw = torch.log_softmax(kept, 1)
    assert bound.logprobs[0] == pytest.approx(float(raw[1, bound.tokens[0]]), abs=1e-6)
    assert torch.equal(logits, kept)


def test_greedy_accepts_exactly_what_the_target_would_say() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    greedy = Sampling(max_tokens=9, temperature=0.0)
    asks = tuple(ask(greedy, 1, (0,) * count) for count in range(3))
    (all_right,) = verify(logits, [Window(asks, (1, 0))])
    assert (all_right.tokens, all_right.accepted) == ([1, 0, 3], 2)
    (one_right,) = verify(logits, [Window(asks, (1, 2))])
    assert (one_right.tokens, one_right.accepted) == ([1, 0], 1)


@pytest.mark.parametrize("temperature", [1e-40, 5e-324, 9e-6])
def test_nearly_zero_means_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.0]])
    cold = Sampling(max_tokens=9, temperature=temperature)
    (chosen,) = verify(logits, [Window((ask(cold, 1, ()),))])
    assert chosen.tokens == [1]


def test_logprobs_are_raw() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    hot = Sampling(max_tokens=9, temperature=0.3, top_k=1, presence_penalty=2.0, logprobs=2, seed=3)
    (chosen,) = verify(logits, [Window((ask(hot, 3, (1,)),))])
    raw = torch.log_softmax(logits[0], 0)
    assert chosen.logprobs[0] == pytest.approx(float(raw[chosen.tokens[0]]), abs=1e-6)
    best = raw.topk(2)
    assert [one.token for one in chosen.top[0]] == best.indices.tolist()


def test_an_end_token_is_banned_below_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0, 1.0]])
    sampling = Sampling(max_tokens=9, min_tokens=2, temperature=0.0)
    for generated, token in ((0, 3), (1, 3), (2, 1)):
        one = Ask(sampling, 0, FIRST + generated, generated, ends=(1,))
        (chosen,) = verify(logits, [Window((one,))])
        assert chosen.tokens == [token]


def test_uniforms_differ_by_stream_and_place() -> None:
    points = {
        float(uniforms([seed], stream, [place])[0])
        for seed in (0, 1, -1)
        for stream in ("draft", "accept", "recover")
        for place in range(50)
    }
    assert len(points) == 3 * 3 * 50
    assert all(0.0 <= point < 1.0 for point in points)
