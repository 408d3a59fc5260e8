import numpy as np
import pytest
import torch

from stanchion.device.kernels.choose import (
    draw,
    draw_plain,
    finite,
    finite_plain,
    judge,
    judge_plain,
    log_norms,
    log_norms_plain,
    soften,
    soften_plain,
    uniforms,
    uniforms_plain,
)


def logits(rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 6


@pytest.mark.parametrize("width", [1, 5, 16, 31, 272, 2048])
def test_they_equal_their_references(width: int) -> None:
    said = logits(7, width)
    heat = torch.linspace(0.3, 2.0, 7)
    chances = soften(said.numpy(), heat.numpy())
    torch.testing.assert_close(torch.from_numpy(chances), soften_plain(said, heat))
    torch.testing.assert_close(torch.from_numpy(log_norms(said.numpy())), log_norms_plain(said))
    points = np.random.default_rng(2).random(7)
    expected = draw_plain(torch.from_numpy(chances), torch.from_numpy(points))
    assert draw(chances, points).tolist() == expected.tolist()


def test_a_row_does_not_depend_on_the_others() -> None:
    said = logits(9, 2048)
    heat = np.full(9, 0.7, np.float32)
    together = soften(said.numpy(), heat)
    norms = log_norms(said.numpy())
    for row in range(9):
        alone = said[row : row + 1].numpy()
        assert (soften(alone, heat[:1]) == together[row]).all()
        assert (log_norms(alone) == norms[row]).all()


def test_what_is_banned_has_no_chance_at_all() -> None:
    said = np.array([[0.0, -np.inf, 1.0, -np.inf]], np.float32)
    chances = soften(said, np.ones(1, np.float32))
    assert chances[0, 1] == chances[0, 3] == 0.0
    assert draw(chances, np.array([np.nextafter(1.0, 0.0)])).tolist() == [2]
    assert draw(chances, np.array([0.0])).tolist() == [0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_every_place_of_a_row_is_looked_at(bad: float) -> None:
    for at in range(40):
        rows = np.zeros((3, 40), np.float32)
        rows[1, at] = bad
        assert finite(rows).tolist() == finite_plain(torch.from_numpy(rows)).tolist()
        assert finite(rows).tolist() == [True, False, True]


def test_uniforms_equal_their_reference() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 2**63], np.uint64)
    places = np.array([0, 1, 2, 2**40], np.uint64)
    for stream in (1, 2, 3):
        assert uniforms(seeds, stream, places).tolist() == uniforms_plain(seeds, stream, places)


def test_windows_are_judged_as_the_reference_does() -> None:
    generator = np.random.default_rng(4)
    counts = np.array([0, 1, 3, 5, 2] * 12)
    rows = int(counts.sum()) + len(counts)
    heat = np.ones(rows, np.float32)
    target = soften(logits(rows, 33, 5).numpy(), heat)
    drawn = soften(logits(int(counts.sum()), 33, 6).numpy() / 2, heat[: counts.sum()])
    drawn[::7] = target[: len(drawn[::7])]  # where p and q are equal nothing is left of p - q
    drafts = np.array([generator.choice(33, p=one / one.sum()) for one in drawn.astype(float)])
    accept, recover = generator.random(len(drafts)), generator.random(rows)
    accepted, tokens = judge(target, drawn, drafts, counts, accept, recover)
    said = judge_plain(
        torch.from_numpy(target), torch.from_numpy(drawn), drafts, counts, accept, recover
    )
    assert list(zip(accepted.tolist(), tokens.tolist())) == said


def test_a_nan_never_passes() -> None:
    target = np.full((2, 4), np.nan, np.float32)
    drawn = np.full((1, 4), 0.25, np.float32)
    one, zero = np.array([1]), np.zeros(2)
    accepted, _ = judge(target, drawn, one, one, zero[:1], zero)
    assert accepted.tolist() == [0]
