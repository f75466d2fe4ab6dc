"""K checkpoints with equal coefficients by predicted losses, and K by cross-validation."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from helpers.linear_problems import predicted, random_problem
from helpers.tiny import finding
from hypothesis import given
from hypothesis import strategies as st

from sewa_cli.report.findings import Budget, Expected
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Ground, mask
from sewa_cli.solvers.linear import Linear, relax
from sewa_cli.solvers.outputs.predictions import mean


@pytest.mark.parametrize("K", [1, 3, 6])
def test_the_best_subset_is_found(K):
    """It is as good as the best of all subsets, each tried."""
    for seed in range(3):
        problem = random_problem(seed=seed, k=8)
        found = Linear().choose(problem, K)
        losses = [
            problem.objective.value(problem.trajectory.mix_few(mean(some, 8).tolist()))
            for some in combinations(range(8), K)
        ]
        own = problem.objective.value(problem.trajectory.mix_few(found.coefficients))
        assert own == pytest.approx(min(losses), rel=1e-4)
        assert len(found.selected) == K


def test_the_relaxed_mask_is_feasible_and_no_small_change_is_better():
    found = predicted(random_problem())
    gradient = found.gradient_on(torch.ones(1, 60, dtype=torch.bool))
    [s] = relax(gradient, 4, torch.full((1, 9), 4 / 9, dtype=torch.float64), 200)
    assert float(s.sum()) == pytest.approx(4)
    assert bool(((s >= 0) & (s <= 1)).all())
    loss = found.loss(s / 4)
    for i, j in combinations(range(9), 2):
        for step in (0.01, -0.01):
            moved = s.clone()
            moved[i], moved[j] = moved[i] + step, moved[j] - step
            if bool(((moved >= 0) & (moved <= 1)).all()):
                assert found.loss(moved / 4) >= loss - 1e-6


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12), st.floats(0.05, 0.95))
def test_the_projection_is_the_nearest_feasible_point(values, share):
    v = torch.tensor(values, dtype=torch.float64)
    total = share * len(values)
    s = mask.project_to_sum(v, total)
    assert float(s.sum()) == pytest.approx(total)
    assert bool(((s >= 0) & (s <= 1)).all())
    inside = (s > 1e-9) & (s < 1 - 1e-9)
    if bool(inside.any()):  # what is cut off nowhere has moved by the same
        assert float((v - s)[inside].max() - (v - s)[inside].min()) < 1e-6


def groups_of_unequal_size(batch):
    return (2 * batch[0][:, 0]).round().tolist()


FEW_IN_GROUPS = {"examples": 12, "batch": 5, "label_groups": groups_of_unequal_size}


@pytest.mark.parametrize(
    "data",
    [{"examples": 100}, {**FEW_IN_GROUPS, "seed": 0}, {**FEW_IN_GROUPS, "seed": 8}],
    ids=["many", "a mask by groups", "a baseline by groups"],
)
def test_sparse_takes_the_lowest_of_its_table_and_expects_what_new_data_say(data):
    problem = random_problem(k=12, **data)
    found = Linear().choose(problem, AUTO)
    budget, expected = found.find(Budget), found.find(Expected)
    [taken] = [option for option in budget.options if option.chosen]
    losses = [option.loss for option in budget.options if option.loss is not None]
    assert taken.loss == min(losses)
    assert taken.behind == 0
    uniform = problem.objective.value(problem.trajectory.mix_few([1 / 12] * 12))
    assert [o.loss for o in budget.options if o.name == "uniform"] == [pytest.approx(uniform)]
    assert expected.loss >= min(losses) - 1e-9  # chosen by other folds
    if taken.name == "learned":
        assert len(found.selected) == taken.K


def infinite_from_4(outputs, batch):
    losses = (outputs - batch[1]) ** 2
    return torch.where(losses > 4, torch.inf, losses).mean()


def test_an_infinite_loss_is_reported_as_none():
    problem = random_problem(k=12, **FEW_IN_GROUPS, seed=1, loss=infinite_from_4)
    found = Linear().choose(problem, AUTO)
    losses = {(one.name, one.K): one.loss for one in found.find(Budget).options}
    assert losses["learned", 1] is None
    assert losses["last", None] is None
    assert found.find(Ground).losses["last", None] == torch.inf
    assert all(loss is None or loss <= 4 for loss in losses.values())


@pytest.mark.usefixtures("plain_run")
def test_sparse_reports_its_options(sewa):
    ended = sewa("select", "--sparse", "-v")
    assert ended.code == 0, ended.err
    assert "cross-validated loss by K" in ended.err
    report = json.loads(Path("averaged.report.json").read_text())
    assert sum(option["chosen"] for option in finding(report, "budget")["options"]) == 1
    assert finding(report, "expected")["loss"] > 0


@pytest.mark.usefixtures("run_dir")
def test_sparse_and_a_number_do_not_go_together(sewa):
    ended = sewa("select", "--sparse", "--K", 4)
    assert ended.code == 2
    assert "leave out one of them" in ended.error


@pytest.mark.usefixtures("plain_run")
def test_a_mask_of_K_reads_the_checkpoints_three_times_at_most(sewa):
    assert sewa("select", "--K", 4, "--solver", "linear").code == 0
    report = json.loads(Path("averaged.report.json").read_text())
    assert report["K"] == 4
    sizes = sum(path.stat().st_size for path in Path("ckpts").iterdir())
    assert report["cost"]["bytes_read"] <= 4 * sizes  # with those that score and write


@pytest.mark.usefixtures("plain_run")
def test_compare_makes_masks_whatever_solver_weighs(sewa):
    ended = sewa("compare", "--solver", "aggregate", "--methods", "sewa,last", "--K", 4, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["rows"][0]["size"] == 4


@pytest.mark.usefixtures("plain_run")
def test_fast_comparisons_serve_every_K_from_one_survey(sewa):
    flags = "--methods", "sewa,twa,greedy,last", "--json"
    one = json.loads(sewa("compare", "--fast", *flags, "--K", "3").out)
    more = json.loads(sewa("compare", "--fast", *flags, "--K", "3,5").out)
    masks = {row["K"]: row["coefficients"] for row in more["rows"] if row["method"] == "sewa"}
    assert masks[3] == next(r["coefficients"] for r in one["rows"] if r["method"] == "sewa")
    assert sum(c > 0 for c in masks[5][0]) == 5
