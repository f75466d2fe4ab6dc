"""The default: prior, path and folds, and what it does with odd data."""

import json

import pytest
import torch
from helpers.linear_problems import NOISE, problem_of, random_problem
from helpers.tiny import TASK, finding, report_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sewa_cli.methods.fixed import baselines, moving_averages
from sewa_cli.report.findings import Blend, Expected, Predicted
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Ground, aggregate
from sewa_cli.solvers.aggregate import (
    NEGLIGIBLE,
    Aggregate,
    drop_negligible,
    estimate,
    path,
    path_shares,
    prior_shares,
    strengths_for,
)
from sewa_cli.stats import assign_folds, behind_in_errors
from sewa_cli.text import with_K

STRENGTHS = (1.0, 0.3, 0.1, 0.03, 0.01)


def choose(problem):
    return Aggregate().choose(problem, AUTO)


def quadratic(seed, p=3, k=7):
    """p losses ½‖A c − b‖², as values and gradients."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(p, 10, k, generator=generator, dtype=torch.float64)
    b = torch.randn(p, 10, generator=generator, dtype=torch.float64)

    def value(C):
        return 0.5 * ((torch.einsum("pik,pk->pi", A, C) - b) ** 2).sum(1)

    def gradient(C):
        return torch.einsum("pik,pi->pk", A, torch.einsum("pik,pk->pi", A, C) - b)

    return value, gradient


def solve_slowly(value, prior, strength, steps=2000):
    """Minimise over a softmax by plain gradient descent and autograd."""
    theta = prior.log().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([theta], lr=0.03)
    scale = float(value(prior[None])[0].detach())
    for _ in range(steps):
        c = theta.softmax(0)
        loss = value(c[None])[0] + strength * scale * (c * (c.log() - prior.log())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return theta.softmax(0).detach()


@pytest.mark.parametrize(
    "strength", [0.1, *(pytest.param(s, marks=pytest.mark.breadth) for s in STRENGTHS if s != 0.1)]
)
def test_the_path_ends_where_slow_descent_does(strength):
    value, gradient = quadratic(5, p=1)
    prior = torch.full((1, 7), 1 / 7, dtype=torch.float64)
    c = path(gradient, prior, value(prior), STRENGTHS)[STRENGTHS.index(strength), 0]
    slow = solve_slowly(value, prior[0], strength)
    assert float((value(c[None]) - value(slow[None])) / value(prior)) < 5e-3


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_path_stays_on_the_simplex_and_each_strength_lowers_its_own_objective(seed):
    value, gradient = quadratic(seed)
    priors = torch.full((3, 7), 1 / 7, dtype=torch.float64)
    scale = value(priors)
    found, before = path(gradient, priors, scale, STRENGTHS), priors
    assert bool((found >= 0).all())
    torch.testing.assert_close(found.sum(2), torch.ones(len(STRENGTHS), 3, dtype=torch.float64))
    for strength, c in zip(STRENGTHS, found, strict=True):

        def penalised(C, strength=strength):
            apart = (C * (C / priors).clamp_min(1e-300).log()).sum(1)
            return value(C) + strength * scale * apart

        assert bool((penalised(c) <= penalised(before) + 1e-9).all())
        before = c


def test_what_is_as_good_as_the_best_has_its_share_and_what_is_behind_has_less():
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(200, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    losses = torch.stack([one, one, one + 0.02 + noise, one + 1 + noise, one * torch.nan])
    weights = torch.ones(200, dtype=torch.float64)
    z = behind_in_errors(losses, weights)
    assert z[0] == z[1] == 0
    assert 0 < z[2] < z[3] < z[4] == torch.inf
    for shares in (path_shares(losses, weights), prior_shares(losses, weights)):
        assert float(shares.sum()) == pytest.approx(1)
        assert shares[0] == shares[1] > shares[2] > shares[3] >= shares[4] == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda x: sum(x) > 1e-6))
def test_negligible_coefficients_make_up_next_to_nothing(raw):
    c = torch.tensor(raw, dtype=torch.float64)
    c = c / c.sum()
    kept = drop_negligible(c)
    assert float(kept.sum()) == pytest.approx(1)
    assert float(c[kept == 0].sum()) <= NEGLIGIBLE + 1e-12


def test_validated_losses_do_not_depend_on_the_examples_own_labels():
    """Losses under two labels give the output; it must be the same in each fold."""
    plain = random_problem()
    y = torch.cat([batch[1] for batch in plain.objective.selection])
    fold = assign_folds(60, 5, 0)
    moved = y.clone()
    moved[fold == 0] += 1.0
    found = []
    for labels in (y, moved):
        seen = Aggregate().survey(random_problem(labels=labels))
        averages = torch.stack([seen.averages[name] for name in seen.moving])
        losses = torch.stack([seen.losses[name] for name in seen.moving])
        found.append(estimate(seen.predictions, averages, losses, fold).validated[:, fold == 0])
    # (o − y)² and (o − y − 1)² differ by 1 − 2(o − y)
    residual = (1 - (found[1] - found[0])) / 2
    torch.testing.assert_close(residual**2, found[0], rtol=1e-3, atol=1e-3)


def test_the_expected_loss_is_that_of_new_data():
    """Few examples and many checkpoints: what is learned looks better than it is."""
    expected, seen, truth = torch.zeros(3, 20)
    for seed in range(20):
        problem = random_problem(20, 15, seed)
        found = choose(problem)
        expects = found.find(Expected)
        generator = torch.Generator().manual_seed(seed)  # as in random_problem
        torch.randn(20, 5, generator=generator)
        best = torch.cat([torch.randn(5, generator=generator), torch.zeros(1)])
        flat = problem.trajectory.mix_few(found.coefficients)
        expected[seed], seen[seed] = expects.loss, problem.objective.value(flat)
        truth[seed] = float(((flat - best) ** 2).sum()) + NOISE**2  # inputs are normal
    too_low = float((truth - seen).mean())
    assert too_low > 0.05 * float(truth.mean())
    assert abs(float((truth - expected).mean())) < too_low


def test_the_examples_of_a_group_are_in_one_fold():
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    problem = random_problem(examples=40)
    y = torch.cat([batch[1] for batch in problem.objective.selection])
    W = problem.trajectory.mix(torch.eye(9)).clone()
    twice = torch.arange(40).repeat_interleave(2)
    problem = problem_of(W, x[twice], y[twice], label_groups=lambda b: b[1][:, 0].tolist())
    predicted = choose(problem).find(Predicted)
    assert predicted.units == 40


def test_it_is_no_worse_than_the_baselines_and_costs_little():
    problem = random_problem(examples=400, k=30, batch=400)
    found = choose(problem)
    ground = found.find(Ground)
    assert set(ground.losses) == set(baselines(30))
    assert problem.objective.passes.forward <= 2.3 * 30 + 20 - 10  # ten are left for scores
    assert problem.trajectory.bytes_moved <= 3 * 4 * 30 * 6
    loss = problem.objective.value(problem.trajectory.mix_few(found.coefficients))
    assert loss <= min(ground.losses.values())
    assert sum(found.coefficients) == pytest.approx(1)


@pytest.mark.usefixtures("plain_run")
def test_the_report_has_prior_path_and_expected_loss(sewa):
    assert sewa("select").code == 0
    report = report_of()
    blend = finding(report, "blend")
    assert sum(one["share"] for one in blend["prior"]) == pytest.approx(1)
    assert sum(one["share"] for one in blend["path"]) == pytest.approx(1)
    assert [one["strength"] for one in blend["path"]] == [None, *strengths_for(300)]
    assert sum(c["weight"] for c in report["candidates"]) == pytest.approx(1)
    expected = finding(report, "expected")
    interval = expected["interval"]
    assert interval["low"] < expected["by"] < interval["high"]


def test_a_broken_checkpoint_is_left_out_as_if_it_were_not_there(plain_run, sewa):
    path = plain_run / "ckpts/step-50.safetensors"
    path.rename(plain_run / "step-50.safetensors")
    assert sewa("select", "-o", "without.safetensors").code == 0
    broken = load_file(plain_run / "step-50.safetensors")
    next(iter(broken.values())).fill_(torch.nan)
    save_file(broken, path)
    ended = sewa("select", "-o", "with.safetensors")
    assert ended.code == 0, ended.err
    assert report_of("with.report.json")["left_out"][0]["step"] == 50
    assert (plain_run / "with.safetensors").read_bytes() == (
        plain_run / "without.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("rows", [9, 10])
def test_few_examples_take_the_best_moving_average(rows):
    problem = random_problem(rows, seed=86)
    chosen = choose(problem)
    ground = chosen.find(Ground)
    losses = ground.losses
    best = min((n for n in moving_averages(9) if n in losses), key=losses.__getitem__)
    if rows < 10:
        assert chosen.method == with_K(*best)
        assert "cross-validation needs 10 examples" in problem.events.warnings[0]
    else:
        assert chosen.find(Blend) is not None


def test_one_batch_of_a_loss_that_does_not_split_takes_the_best_moving_average(plain_run, sewa):
    whole = TASK.replace("return data(1)", "return data(1, 128)").replace(
        "return F.cross_entropy(outputs, batch[1])",
        "return F.cross_entropy(outputs, batch[1], reduction='sum').sqrt()",
    )
    (plain_run / "task.py").write_text(whole)
    ended = sewa("select")
    assert ended.code == 0, ended.err
    assert "loss() does not split into examples" in ended.err
    assert report_of()["written"] != "learned"


@pytest.mark.usefixtures("plain_run")
def test_two_checkpoints_are_enough(sewa):
    ended = sewa("select", "--last", 2)
    assert ended.code == 0, ended.err
    report = report_of()
    own = report["average"]["selection_loss"]
    ends = [report["references"][name]["selection_loss"] for name in ("last", "uniform")]
    assert own <= max(ends) + 1e-6


def test_labels_of_other_examples_are_warned_of_and_change_nothing():
    problem = random_problem(examples=200)
    assert choose(problem).find(Blend) is not None
    assert problem.events.warnings == []
    y = torch.cat([batch[1] for batch in problem.objective.selection])
    shuffled = random_problem(
        examples=200, labels=y[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    )
    assert choose(shuffled).find(Blend) is not None
    assert "no better with the examples mixed up" in shuffled.events.warnings[0]


def test_a_loss_that_ignores_its_batch_is_warned_of():
    problem = random_problem(loss=lambda outputs, _: (outputs**2).mean())
    choose(problem)
    assert "return its outputs from predict()" in problem.events.warnings[0]


@pytest.mark.usefixtures("plain_run")
def test_what_does_not_come_true_is_not_written(sewa, monkeypatch):
    """The learned average is run with other weights, as if its prediction had been false."""
    true = aggregate.Survey.true_losses
    monkeypatch.setattr(aggregate.Survey, "true_losses", lambda self, flats: true(self, -3 * flats))
    ended = sewa("select")
    assert ended.code == 0, ended.err
    assert "no better than the" in ended.err
    report = report_of()
    losses = {with_K(s["name"], s["K"]): s["selection_loss"] for s in report["simple"]}
    names = [with_K(*name) for name in moving_averages(12)]
    assert report["written"] == min((n for n in names if n in losses), key=losses.__getitem__)


def test_a_loss_that_changes_its_batch_is_reported_in_one_line(plain_run, sewa):
    changing = TASK.replace(
        "    return F.cross_entropy(outputs, batch[1])",
        "    batch[1][batch[0][:, 0] > 9] = -100\n    return F.cross_entropy(outputs, batch[1])",
    )
    (plain_run / "task.py").write_text(changing)
    ended = sewa("select")
    assert ended.code == 4
    assert "changes the batch in place" in ended.error


@pytest.mark.usefixtures("plain_run")
def test_with_little_memory_all_selection_losses_are_of_the_same_examples(sewa):
    assert sewa("select", "-o", "wide.safetensors").code == 0
    ended = sewa("select", "--memory", "40KB", "-o", "tight.safetensors")
    assert ended.code == 0, ended.err
    wide, tight = (report_of(f"{name}.report.json") for name in ("wide", "tight"))
    assert tight["selection_rows"] == finding(tight, "predicted")["rows"] < wide["selection_rows"]
    assert f"{tight['selection_rows']} of the {wide['selection_rows']} selection" in ended.err
    losses = {with_K(s["name"], s["K"]): s["selection_loss"] for s in tight["simple"]}
    for name, scores in tight["references"].items():
        assert scores["selection_loss"] == pytest.approx(losses[name], rel=1e-5)


@pytest.mark.usefixtures("plain_run")
def test_compare_has_the_default_as_a_row_and_select_agrees(sewa):
    found = json.loads(sewa("compare", "--methods", "aggregate,uniform", "--json").out)
    assert sewa("select").code == 0
    row = found["rows"][0]
    assert (row["method"], row["K"]) == ("aggregate", None)
    assert row["heldout_loss"] == pytest.approx(report_of()["average"]["heldout_loss"], rel=1e-4)
    fast = json.loads(sewa("compare", "--fast", "--methods", "aggregate,uniform", "--json").out)
    assert sum(fast["rows"][0]["coefficients"][0]) == pytest.approx(1)


def test_an_expected_loss_that_is_no_number_is_not_reported():
    def infinite_above(outputs, batch):
        losses = (outputs - batch[1]) ** 2
        return torch.where(losses > 2.5, torch.inf, losses).mean()

    found = choose(random_problem(examples=60, k=12, loss=infinite_above, seed=1))
    assert found.find(Blend) is not None
    assert found.find(Expected) is None
