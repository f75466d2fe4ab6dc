"""E-values: noise reaches 1/α in no more than a share α of all sequences, however one looks."""

from math import isfinite

import pytest
import torch
from helpers.contests import noise

from sewa_cli.stats import RATES, SURE, evidence, is_shown, parts_needed

SEQUENCES, PARTS = 2000, 150


def running(differences):
    """E after each part, for many sequences [R, n] at once, by the formula."""
    squares = (differences**2).cumsum(1) / torch.arange(1, differences.shape[1] + 1)
    u = torch.where(differences == 0, 0.0, differences / squares.sqrt())
    logs = [(torch.log1p(torch.tanh((rate * u).clamp(-18, 18)))).cumsum(1) for rate in RATES]
    return torch.stack(logs).exp().mean(0)


@pytest.mark.parametrize("kind", ["normal", "cauchy", "signs", "lognormal"])
def test_noise_is_rarely_taken_for_more(kind):
    generator = torch.Generator().manual_seed(1)
    shape = SEQUENCES, PARTS
    one, two = (noise(SEQUENCES * PARTS, generator, kind).view(shape) for _ in range(2))
    differences = one - two if kind == "lognormal" else one  # exchangeable pairs, or symmetric
    found = running(differences)
    for row in (0, 1, 2):
        for n in (1, 7, PARTS):
            assert evidence(differences[row, :n]) == pytest.approx(float(found[row, n - 1]))
    highest = found.max(dim=1).values
    for level in (5, 20, 100):
        share = float((highest >= level).double().mean())
        assert share <= 1 / level + 2 * (1 / level / SEQUENCES) ** 0.5, (level, share)


def test_what_says_nothing_and_what_is_huge():
    assert evidence(torch.zeros(0)) == evidence(torch.zeros(100_000)) == 1.0
    assert evidence(torch.ones(10)) > 100  # as many as 25 parts leave for a duel
    for size in (5e-324, 1.0, 1.7e308):
        every = torch.full((100_000,), size, dtype=torch.float64)
        assert isfinite(evidence(every))
        assert evidence(every) > 1e100
        assert 0 <= evidence(-every) < 1e-6
    mixed = torch.tensor([float("inf"), -1.0, 1e300, -1e-300], dtype=torch.float64)
    assert isfinite(evidence(mixed))


def test_parts_that_would_tell():
    assert parts_needed(torch.tensor([1.1, -0.9]).double().repeat(5000)) == 784  # (2.8 / 0.1)²
    for nothing in ([], [1.0], [0.0, 0.0], [1.0, 1.0], [1.0, -1.0]):
        assert parts_needed(torch.tensor(nothing, dtype=torch.float64)) is None


def test_who_wins_often_and_rarely_loses_by_much_is_not_shown_to_be_better():
    generator = torch.Generator().manual_seed(0)
    wins = torch.rand(300, 75, generator=generator) < 0.9
    level = torch.where(wins, 1.0, -9.0).double()  # of mean 0
    fooled = sum(evidence(one) >= SURE for one in level)
    assert sum(map(is_shown, level)) <= 0.02 * len(level) < fooled


def test_a_clear_lead_is_shown_whatever_its_shape():
    generator = torch.Generator().manual_seed(0)
    assert is_shown(torch.full((12,), 4.5))
    assert is_shown(0.5 + 0.01 * noise(12, generator))
    assert is_shown(noise(150, generator) + 0.7)
    assert is_shown(noise(150, generator, "lognormal") - 0.4)
    assert not is_shown(-torch.full((50,), 4.5))
    assert not is_shown(torch.zeros(50))
    assert not is_shown(torch.ones(1))
