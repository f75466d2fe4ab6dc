"""Intervals: as wide as they should be, and no winner where there is none."""

import pytest
import torch

from sewa_cli.stats import compare_rows


def test_means_are_weighted_and_the_best_is_the_lowest():
    losses = torch.rand(3, 40, dtype=torch.float64)
    weights = torch.arange(1, 41, dtype=torch.float64)
    spread = compare_rows(losses, weights)
    expected = (losses * weights).sum(1) / weights.sum()
    assert spread.means == pytest.approx(expected.tolist())
    assert spread.best == int(expected.argmin())
    assert spread.differences[spread.best] == 0
    for mean, (low, high) in zip(spread.means, spread.intervals, strict=True):
        assert low < mean < high


def test_an_interval_of_a_mean_is_that_of_the_normal_approximation():
    torch.manual_seed(0)
    losses = torch.randn(1, 2000, dtype=torch.float64) + 5
    ((low, high),) = compare_rows(losses, torch.ones(2000, dtype=torch.float64)).intervals
    half = 1.96 * float(losses.std()) / 2000**0.5
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)


def test_a_small_but_steady_difference_is_found_because_it_is_paired():
    torch.manual_seed(0)
    hard = 3 * torch.rand(300, dtype=torch.float64)  # examples differ a lot, rows hardly
    better = hard + 0.001 * torch.randn(300, dtype=torch.float64)
    spread = compare_rows(torch.stack([hard + 0.01, better]), torch.ones(300, dtype=torch.float64))
    assert spread.best == 1
    assert spread.difference_intervals[0][0] > 0
    assert spread.intervals[0][0] < spread.means[1]  # unpaired intervals overlap


def test_the_best_of_many_equals_is_crowned_no_more_often_than_promised():
    """Twenty rows that differ by noise alone: all pairs hold together in 95 % of the cases."""
    crowned = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        shared = torch.rand(200, dtype=torch.float64, generator=generator)
        rows = shared + 0.2 * torch.randn(20, 200, dtype=torch.float64, generator=generator)
        spread = compare_rows(rows, torch.ones(200, dtype=torch.float64), seed, samples=500)
        beaten = [low > 0 for low, _ in spread.difference_intervals]
        crowned += any(beaten)
    assert crowned <= 8  # 3 expected of 60


def test_few_examples_are_not_trusted_too_much():
    """Fifteen equal rows on twenty examples: the rate that is promised for many."""
    crowned = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(15, 20, dtype=torch.float64, generator=generator)
        spread = compare_rows(rows, torch.ones(20, dtype=torch.float64), seed, samples=500)
        crowned += any(low > 0 for low, _ in spread.difference_intervals)
    assert crowned <= 12  # 5 expected; without the correction 18
