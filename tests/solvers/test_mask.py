"""The mask's promises, as properties."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sewa_cli.solvers import mask

vectors = st.lists(st.floats(-30, 30), min_size=2, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


@given(vectors, st.floats(0.01, 0.99))
def test_shifted_logits_put_the_sum_where_it_is_asked(theta, share):
    total = share * theta.numel()
    s = torch.sigmoid(mask.shifted_logits(theta, total))
    assert float(s.sum()) == pytest.approx(total, abs=1e-6)
    assert (s[torch.argsort(theta)].diff() >= -1e-12).all()  # a shift keeps the order


@settings(max_examples=40)
@given(st.lists(st.floats(-4, 4), min_size=2, max_size=8), st.floats(0.05, 0.95))
def test_the_gradient_through_the_shift_equals_finite_differences(values, share):
    theta = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    total = share * theta.numel()
    assert torch.autograd.gradcheck(
        lambda x: torch.sigmoid(mask.shifted_logits(x, total)), (theta,), atol=1e-4
    )


def test_the_noise_is_the_difference_of_two_gumbels():
    noise = mask.logistic_noise(200, 500, torch.Generator().manual_seed(0))
    # logistic: mean 0, variance π²/3, and P(noise < x) = σ(x)
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 3, rel=0.02)
    for x in (-2.0, 0.5, 3.0):
        share = float((noise < x).double().mean())
        assert share == pytest.approx(1 / (1 + math.exp(-x)), abs=0.005)
    assert torch.isfinite(noise).all()


def test_a_cold_mask_is_a_bernoulli_draw_of_its_probabilities():
    s = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    noise = mask.logistic_noise(40_000, 3, torch.Generator().manual_seed(1))
    cold = mask.relax(torch.logit(s), noise, temperature=1e-3).exp()
    assert cold.mean(0).tolist() == pytest.approx(s.tolist(), abs=0.01)
    assert float(((cold > 0.01) & (cold < 0.99)).double().mean()) < 0.02


def test_sum_normalisation_gives_a_mean_and_the_papers_divides_by_k():
    masks = torch.tensor([[0.5, 0.25, 0.25, 1.0]], dtype=torch.float64).log()
    found = mask.coefficients(masks, 2, "sum").tolist()[0]
    assert found == pytest.approx([0.25, 0.125, 0.125, 0.5])
    found = mask.coefficients(masks, 1, "paper").tolist()[0]
    assert found == pytest.approx([0.5, 0.25, 0.25, 1.0])


def test_a_mask_too_cold_to_have_a_sum_still_has_coefficients():
    logits = torch.full((20,), -3.0, dtype=torch.float64)
    noise = mask.logistic_noise(500, 20, torch.Generator().manual_seed(0))
    a = mask.coefficients(mask.relax(logits, noise, 1e-4), 1, "sum")
    assert torch.isfinite(a).all()
    torch.testing.assert_close(a.sum(-1), torch.ones(500, dtype=torch.float64))


def test_the_largest_are_in_step_order_and_the_later_wins_a_tie():
    assert mask.largest(torch.tensor([0.9, 0.1, 0.5, 0.95]), 2) == [0, 3]
    assert mask.largest(torch.full((5,), 0.4), 2) == [3, 4]
