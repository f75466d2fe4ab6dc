"""The solver finds what is there to be found, and says so when it cannot."""

import json

import pytest
import torch
from helpers.problems import Function, dense, problem_of
from helpers.tiny import TASK, finding

from sewa_cli.errors import TaskError
from sewa_cli.report.findings import History, Mask
from sewa_cli.solvers.gumbel import Gumbel, _Rest
from sewa_cli.solvers.mask import Adam

P = 40


def planted(k, good, seed):
    """k points, of which the good ones scatter around a target and the others lie off to a side."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(P, generator=generator)
    side = torch.randn(P, generator=generator)
    rows = []
    for i in range(k):
        noise = 0.3 * torch.randn(P, generator=generator)
        rows.append(target + noise + (0 if i in good else side))
    return dense(torch.stack(rows)), target


def solve(trajectory, target, K, **settings):
    def gradient(flat):
        difference = flat - target
        return difference @ difference / P, 2 * difference / P

    problem = problem_of(Function(gradient), trajectory, settings.pop("seed", 0))
    return Gumbel(Gumbel.Settings(**settings)).choose(problem, K)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0},
        {"lr": 0.1, "iterations": 200},
        {"samples": 1},
        {"samples": 5, "iterations": 60},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_setting_finds_the_planted_checkpoints(settings, seed):
    good = {2, 5, 11, 17}
    trajectory, target = planted(20, good, seed)
    solution = solve(trajectory, target, 4, seed=seed, **settings)
    assert set(solution.selected) == good


@pytest.mark.parametrize("seed", [0, 1])
def test_the_papers_normalisation_chooses_better_than_all_together(seed):
    trajectory, target = planted(20, {2, 5, 11, 17}, seed)
    solution = solve(trajectory, target, 4, normalize="paper")

    def loss(indices):
        return float(((trajectory.W[indices].mean(0) - target) ** 2).mean())

    assert loss(solution.selected) < 0.5 * loss(list(range(20)))


@pytest.mark.parametrize("seed", range(4))
def test_it_stops_when_nothing_changes_any_more_with_the_choice_of_the_full_run(seed):
    trajectory, target = planted(20, {2, 5, 11, 17}, seed)
    full = solve(trajectory, target, 4, seed=seed, iterations=400, patience=400)
    short = solve(trajectory, target, 4, seed=seed, iterations=400)
    whole, part = full.find(History), short.find(History)
    assert len(whole.values) == 400
    assert 50 < len(part.values) < 200
    assert part.at_most == 400
    assert part.values == whole.values[: len(part.values)]  # the same run, but shorter
    assert short.selected == full.selected


@pytest.mark.usefixtures("run_dir")
def test_the_summary_says_when_it_stopped_and_the_report_how_many_iterations_it_took(sewa):
    flags = ["select", "--K", 1, "--solver", "gumbel", "--set", "gumbel.iterations=900"]
    ended = sewa(*flags, "--set", "gumbel.patience=10", "--json", "-v")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    took = len(finding(report, "history")["values"])
    assert took < 900
    assert f"learning stopped after {took} of 900 iterations" in ended.err
    assert "patience: " in sewa(*flags, "--set", "gumbel.patience=3").error


def test_a_loss_that_still_falls_or_a_set_that_still_changes_is_no_rest():
    torch.manual_seed(0)
    noise = 0.1 * torch.randn(200)
    flat = [x + 1.0 for x in noise]
    falling = [x - 0.02 * i for i, x in enumerate(noise)]
    for history, ends in ((flat, True), (falling, False)):
        rest = _Rest(50)
        found = [rest.has_come([1, 2], history[:n]) for n in range(10, 200, 10)]
        assert any(found) == ends
        assert not any(found[:5])  # not before so many have passed
    rest = _Rest(50)
    assert not any(rest.has_come([1, 2 + n // 40], flat[:n]) for n in range(10, 200, 10))


def test_another_seed_gives_other_probabilities():
    trajectory, target = planted(20, {1, 2, 3, 4}, 0)
    first, again, other = (solve(trajectory, target, 3, seed=seed) for seed in (5, 5, 6))
    assert first.find(Mask) == again.find(Mask) != other.find(Mask)


def test_a_nan_gradient_ends_in_an_error_not_in_a_selection():
    trajectory, _ = planted(6, {1}, 0)

    def broken(flat):
        return flat.sum() * float("nan"), flat * float("nan")

    settings = Gumbel.Settings(iterations=3)
    with pytest.raises(TaskError, match="NaN"):
        Gumbel(settings).choose(problem_of(Function(broken), trajectory), 2)


def test_our_adam_takes_the_steps_of_torchs():
    torch.manual_seed(0)
    ours = torch.randn(7, dtype=torch.float64)
    theirs = ours.clone().requires_grad_(True)
    adam, reference = Adam(ours, 0.3), torch.optim.Adam([theirs], lr=0.3)
    for _ in range(20):
        gradient = torch.randn(7, dtype=torch.float64)
        theirs.grad = gradient.clone()
        reference.step()
        adam.step(gradient)
        torch.testing.assert_close(ours, theirs.detach())


def test_baselines_take_no_more_passes_than_learning(run_dir, sewa):
    """They are run on the first 32 of 150 batches, and the three that are shown on all."""
    task = TASK.replace("x.split(128), y.split(128)", "x.split(2), y.split(2)")
    (run_dir / "task.py").write_text(task)
    ended = sewa("select", "--json", "--set", "gumbel.iterations=30")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    baselines = 32 * len(report["simple"])
    learning, scored = 2 * 30, (1 + 3) * 2 * 150  # the choice and three baselines, two data sets
    assert report["cost"]["forward_passes"] <= baselines + learning + scored
    plan = json.loads(sewa("select", "--dry-run", "--json", "--set", "gumbel.iterations=30").out)
    assert report["cost"]["forward_passes"] <= plan["forward_passes"]
