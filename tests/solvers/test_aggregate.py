"""The default solver: shares, the pulled path, nested folds, and what it does with odd data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import TASK, Sewa, train_tiny, user_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sewa_cli import solvers
from sewa_cli.events import Events
from sewa_cli.methods.family import Name, family, ladder
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Choice, Problem
from sewa_cli.solvers.aggregate.estimate import (
    CRUMBS,
    Prior,
    behind_in_errors,
    estimate,
    path_shares,
    without_crumbs,
)
from sewa_cli.solvers.aggregate.solver import Aggregate
from sewa_cli.solvers.crossvalidate import choose_budget
from sewa_cli.solvers.equal import are_equal
from sewa_cli.solvers.linear.build import USUAL, build, count, frame
from sewa_cli.solvers.linear.pull import STRENGTHS, path
from sewa_cli.solvers.linear.rounds import Linear
from sewa_cli.solvers.linear.surrogate import Surrogate
from sewa_cli.solvers.linear.units import Units
from sewa_cli.text import with_K
from sewa_cli.trajectory.dense import Dense

CPU = torch.device("cpu")
NO_HELDOUT = TASK.split("def heldout_data")[0] + "def loss" + TASK.split("def loss")[1]


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def problem_on(
    rows: int = 60, k: int = 9, seed: int = 0, labels: Tensor | None = None, loss: Any = None
) -> Problem:
    """A linear model, whose outputs are linear in its weights, and squared error."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator)
    truth = torch.randn(5, generator=generator)
    y = (x @ truth)[:, None] + 0.5 * torch.randn(rows, 1, generator=generator)
    y = y if labels is None else labels
    W = torch.cat([truth, torch.zeros(1)]) + 0.7 * torch.randn(k, 6, generator=generator)
    return problem_of(W, x, y, loss, seed)


def problem_of(W: Tensor, x: Tensor, y: Tensor, loss: Any = None, seed: int = 0) -> Problem:
    """Weights and a bias in each row of W."""
    model = FlatModel(nn.Linear(x.shape[1], 1), CPU)
    batches = list(zip(torch.split(x, 25), torch.split(y, 25), strict=True))
    objective = Objective(
        model,
        lambda model, batch: model(batch[0]),
        loss or (lambda outputs, batch: ((outputs - batch[1]) ** 2).mean()),
        backward,
        batches,
    )
    return Problem(objective, Dense(W, model.layout), 10**9, seed, Events())


def surveyed(problem: Problem) -> Surrogate:
    k = problem.trajectory.k
    base = problem.trajectory.mix(torch.full((1, k), 1 / k))[0]
    return build(problem, base, 0.1)


def prior_of(surrogate: Surrogate, units: Units) -> tuple[Prior, Tensor]:
    """The ladder as prior, and the losses of the whole family."""
    averages = {n: torch.tensor(c, dtype=torch.float64) for n, c in family(surrogate.k).items()}
    losses = {name: units.losses(surrogate.mix(c)) for name, c in averages.items()}
    rungs = [name for name in ladder(surrogate.k) if name in averages]
    found = Prior(
        torch.stack([averages[name] for name in rungs]),
        torch.stack([losses[name] for name in rungs]),
        torch.zeros(len(rungs), dtype=torch.bool),
    )
    return found, torch.stack(list(losses.values()))


# ---- the path ----------------------------------------------------------------------------------


def quadratic(seed: int, p: int = 3, k: int = 7) -> tuple[Any, Any]:
    """p losses ½‖A c − b‖², as values and gradients."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(p, 10, k, generator=generator, dtype=torch.float64)
    b = torch.randn(p, 10, generator=generator, dtype=torch.float64)

    def value(C: Tensor) -> Tensor:
        return 0.5 * ((torch.einsum("pik,pk->pi", A, C) - b) ** 2).sum(1)

    def gradient(C: Tensor) -> Tensor:
        return torch.einsum("pik,pi->pk", A, torch.einsum("pik,pk->pi", A, C) - b)

    return value, gradient


def slowly(value: Any, prior: Tensor, strength: float, steps: int = 5000) -> Tensor:
    """The slow twin of one problem: softmax weights, plain gradient descent by autograd."""
    start = prior.log()
    theta = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([theta], lr=0.02)
    scale = float(value(prior[None])[0].detach())
    for _ in range(steps):
        c = theta.softmax(0)
        loss = value(c[None])[0] + strength * scale * (c * (c.log() - start)).sum()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
    return theta.softmax(0).detach()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_path_stays_on_the_simplex_and_each_pull_lowers_its_own_objective(seed: int) -> None:
    value, gradient = quadratic(seed)
    priors = torch.full((3, 7), 1 / 7, dtype=torch.float64)
    scale = value(priors)
    found = path(gradient, priors, scale)
    assert found.shape == (len(STRENGTHS), 3, 7)
    torch.testing.assert_close(found.sum(2), torch.ones(len(STRENGTHS), 3, dtype=torch.float64))
    assert bool((found >= 0).all())
    before = priors
    for strength, c in zip(STRENGTHS, found, strict=True):

        def penalised(C: Tensor, strength: float = strength) -> Tensor:
            apart = (C * (C / priors).clamp_min(1e-300).log()).sum(1)
            found: Tensor = value(C) + strength * scale * apart
            return found

        assert bool((penalised(c) <= penalised(before) + 1e-9).all())
        before = c


@pytest.mark.breadth
def test_the_path_ends_where_slow_descent_does() -> None:
    value, gradient = quadratic(5, p=1)
    prior = torch.full((1, 7), 1 / 7, dtype=torch.float64)
    found = path(gradient, prior, value(prior))
    for strength, c in zip(STRENGTHS, found[:, 0], strict=True):
        apart = (value(c[None]) - value(slowly(value, prior[0], strength)[None])) / value(prior)
        assert float(apart) < 5e-3, strength


def test_problems_side_by_side_are_solved_as_each_alone() -> None:
    value, gradient = quadratic(2)
    priors = torch.softmax(torch.randn(3, 7, generator=torch.Generator().manual_seed(1)), 1)
    priors = priors.double()
    together = path(gradient, priors, value(priors))
    for p in range(3):

        def alone(C: Tensor, p: int = p) -> Tensor:
            every = priors.clone()
            every[p] = C[0]
            return torch.as_tensor(gradient(every)[p : p + 1])

        scale = value(priors)[p : p + 1]
        torch.testing.assert_close(path(alone, priors[p : p + 1], scale)[:, 0], together[:, p])


# ---- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [True, False])
def test_gradients_on_samples_of_the_rows_are_those_of_calling_the_loss_on_them(
    splits: bool,
) -> None:
    root = None if splits else (lambda out, batch: ((out - batch[1]) ** 2).sum().sqrt())
    problem = problem_on(loss=root)
    surrogate = surveyed(problem)
    units = Units(surrogate.outputs, surrogate.base)
    assert units.by_row == splits
    generator = torch.Generator().manual_seed(0)
    members = torch.rand(4, len(units), generator=generator) < 0.6
    members[:, 0] = True
    C = torch.softmax(torch.randn(4, surrogate.k, generator=generator), 1).double()
    found = units.gradient_on(surrogate, members, 10**9)(C)
    for p in range(4):
        some = surrogate.on(members[p]) if splits else surrogate.on_batches(members[p])
        _, slow = some.loss_and_gradient(C[p])
        torch.testing.assert_close(found[p], slow, rtol=1e-4, atol=1e-5)


def test_the_base_of_a_centred_cache_is_predicted_exactly() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    problem = problem_on()
    model = FlatModel(net, CPU)
    W = model.flat.clone() + torch.randn(9, model.layout.size)
    objective = Objective(
        model, lambda m, b: m(b[0]), problem.objective.loss, backward, problem.objective.selection
    )
    bent = Problem(objective, Dense(W, model.layout), 10**9, 0, Events())
    surrogate = surveyed(bent)
    c = torch.full((9,), 1 / 9, dtype=torch.float64)
    assert not torch.allclose(surrogate.mix(c), surrogate.base, atol=1e-3)
    surrogate.centre(c)
    torch.testing.assert_close(surrogate.mix(c), surrogate.base)


# ---- shares ------------------------------------------------------------------------------------


def test_what_is_as_good_as_the_best_has_its_share_and_what_is_behind_has_less() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(200, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    losses = torch.stack([one, one, one + 0.02 + noise, one + 1 + noise])
    weights = torch.ones(200, dtype=torch.float64)
    z = behind_in_errors(losses, weights)
    assert z[0] == z[1] == 0
    assert 0 < z[2] < z[3]
    shares = path_shares(losses, weights)
    assert float(shares.sum()) == pytest.approx(1)
    assert shares[0] == shares[1] > shares[2] > shares[3]


def test_a_rung_with_nan_has_no_share() -> None:
    losses = torch.rand(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses[1, 7] = torch.nan
    prior = Prior(torch.eye(3, dtype=torch.float64), losses, torch.zeros(3, dtype=torch.bool))
    shares = prior.shares(torch.ones(50, dtype=torch.float64))
    assert shares[1] == 0
    assert float(shares.sum()) == pytest.approx(1)


def test_a_part_of_the_run_counts_only_if_it_leads_for_sure() -> None:
    generator = torch.Generator().manual_seed(0)
    moving = torch.rand(50, dtype=torch.float64, generator=generator)
    jitter = 0.2 * torch.randn(50, dtype=torch.float64, generator=generator)
    weights, parts = torch.ones(50, dtype=torch.float64), torch.tensor([False, True])
    rungs = torch.eye(2, dtype=torch.float64)
    hardly = Prior(rungs, torch.stack([moving, moving - 0.01 + jitter]), parts)
    assert hardly.shares(weights).tolist() == [1, 0]
    clearly = Prior(rungs, torch.stack([moving, moving - 0.5 + jitter]), parts)
    assert clearly.shares(weights)[1] > 0.99


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda x: sum(x) > 1e-6))
def test_crumbs_make_up_next_to_nothing_and_the_rest_still_sums_to_one(raw: list[float]) -> None:
    c = torch.tensor(raw, dtype=torch.float64)
    c = c / c.sum()
    kept = without_crumbs(c)
    assert float(kept.sum()) == pytest.approx(1)
    assert float(c[kept == 0].sum()) <= CRUMBS + 1e-12


# ---- folds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_is_expected_of_a_row_does_not_depend_on_its_own_label(rounds: int) -> None:
    """From losses under two labels follows the output; it must be the same, in each nested fold."""
    plain = problem_on()
    y = torch.cat([batch[1] for batch in plain.objective.selection])
    fold = torch.randperm(60, generator=torch.Generator().manual_seed(0)) % 5
    moved = y.clone()
    moved[fold == 0] += 1.0
    nested = []
    for labels in (y, moved):
        surrogate = surveyed(problem := problem_on(labels=labels))
        units = Units(surrogate.outputs, surrogate.base)
        prior, simple = prior_of(surrogate, units)
        found = estimate(surrogate, units, prior, simple, 5, problem)
        for _ in range(rounds - 1):
            found = estimate(surrogate, units, prior, simple, 5, problem, found.answers)
        nested.append(found.nested[fold == 0])
    # (o − y)² and (o − y − 1)² differ by 1 − 2(o − y)
    residual = (1 - (nested[1] - nested[0])) / 2
    torch.testing.assert_close(residual**2, nested[0], rtol=1e-3, atol=1e-4)


def test_the_expected_loss_is_not_that_of_the_rows_it_was_learned_on() -> None:
    """Labels without any meaning, few rows: what is learned looks good on them, and only there."""
    gaps = []
    for seed in range(6):
        labels = torch.randn(30, 1, generator=torch.Generator().manual_seed(100 + seed))
        surrogate = surveyed(problem := problem_on(30, 20, seed, labels))
        units = Units(surrogate.outputs, surrogate.base)
        prior, simple = prior_of(surrogate, units)
        found = estimate(surrogate, units, prior, simple, 5, problem)
        gaps.append(float(found.nested.mean()) - surrogate.loss(surrogate.mix(found.coefficients)))
    assert sum(gaps) > 0


# ---- what --sparse expects ---------------------------------------------------------------------


def test_what_sparse_expects_of_a_row_does_not_depend_on_its_own_label() -> None:
    y = torch.cat([batch[1] for batch in problem_on().objective.selection])
    fold = torch.randperm(60, generator=torch.Generator().manual_seed(0)) % 5
    moved = y.clone()
    moved[fold == 0] += 1.0
    taken = []
    for labels in (y, moved):
        surrogate = surveyed(problem := problem_on(labels=labels))
        averages = {n: torch.tensor(c, dtype=torch.float64) for n, c in family(9).items()}
        simple = {name: surrogate.mix(c) for name, c in averages.items()}
        nested = choose_budget(surrogate, simple, Linear.Settings(), problem).nested
        assert nested is not None
        taken.append(nested.taken[fold == 0])
    residual = (1 - (taken[1] - taken[0])) / 2  # as above
    torch.testing.assert_close(residual**2, taken[0], rtol=1e-3, atol=1e-4)


def test_sparse_expects_what_new_rows_say_where_the_curve_by_K_is_optimistic() -> None:
    """By few rows, the K that is taken looks better in cross-validation than it is."""
    quick = Linear.Settings(rounds=1, iterations=15, swaps=2)
    expected, curve, truth = torch.zeros(3, 20)
    for seed in range(20):
        problem = problem_on(12, 12, seed)
        found = Linear(quick).choose(problem, AUTO)
        assert found.expected is not None
        assert found.budget is not None
        (taken,) = [option for option in found.budget if option.chosen]
        assert taken.loss is not None
        generator = torch.Generator().manual_seed(seed)  # as in problem_on
        torch.randn(12, 5, generator=generator)
        best = torch.cat([torch.randn(5, generator=generator), torch.zeros(1)])
        away = problem.trajectory.mix_few(found.coefficients) - best
        expected[seed], curve[seed] = found.expected.loss, taken.loss
        truth[seed] = float((away**2).sum()) + 0.5**2  # rows are normal, with noise of 0.5
    too_low = float((truth - curve).mean())
    assert too_low > 0.1 * float(truth.mean())
    assert abs(float((truth - expected).mean())) < too_low / 3


# ---- the solver --------------------------------------------------------------------------------


def chosen(problem: Problem) -> Choice:
    return Aggregate().choose(problem, AUTO)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(2, 30), rows=st.integers(10, 80))
def test_weights_are_an_average_for_any_run(seed: int, k: int, rows: int) -> None:
    found = chosen(problem_on(rows, k, seed))
    assert len(found.coefficients) == k
    assert sum(found.coefficients) == pytest.approx(1)
    assert min(found.coefficients) >= 0


def test_where_outputs_are_linear_the_prediction_is_the_truth() -> None:
    found = chosen(problem_on())
    assert abs(found.details["surrogate_error"]) < 1e-4
    assert len(found.details["rounds"]) == 1


def test_with_many_rows_it_is_better_than_every_simple_average() -> None:
    problem = problem_on(rows=2000, k=12)
    found = chosen(problem)
    flat = problem.trajectory.mix_few(found.coefficients)
    assert found.simple is not None
    assert problem.objective.value(flat) < min(found.simple.values())


@pytest.mark.parametrize("where", [0, 5, -1])
def test_averages_with_an_infinite_loss_get_no_share_and_stop_nothing(where: int) -> None:
    """One checkpoint is far off, and so is every average that has it."""

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        squares = (outputs - batch[1]).clamp(-1e4, 1e4) ** 2
        return torch.where(outputs.abs() > 1000.0, outputs * torch.inf, squares).mean()

    plain = problem_on(k=12, loss=loss)
    W = torch.cat([plain.trajectory.row(i)[None] for i in range(12)])
    W[where] += 1e6
    problem = Problem(plain.objective, Dense(W, plain.trajectory.layout), 10**9, 0, Events())
    found = chosen(problem)
    assert found.coefficients[where] < 1e-3
    assert problem.objective.value(problem.trajectory.mix_few(found.coefficients)) < 100


def test_the_same_seed_gives_the_same_weights() -> None:
    one, two = (chosen(problem_on(seed=3)).coefficients for _ in range(2))
    assert one == two


def test_with_little_room_the_ladder_has_fewer_rungs_and_both_ends() -> None:
    wide = chosen(problem_on(k=30))
    problem = problem_on(k=30)
    narrow = Problem(problem.objective, problem.trajectory, 20_000, 0, Events())
    assert narrow.room // 4 // (4 * 6) > 30  # the ladder is not what has to give here
    tight = Problem(problem.objective, problem.trajectory, 11_000, 0, Events())
    few = chosen(tight)
    assert wide.blend is not None
    assert few.blend is not None
    names = {rung.name for rung in few.blend.prior}
    assert {"last", "uniform"} <= names
    assert sum(few.coefficients) == pytest.approx(1)


def test_another_round_follows_where_the_prediction_was_off() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    model = FlatModel(net, CPU)
    W = model.flat.clone() + 1.5 * torch.randn(20, model.layout.size)
    plain = problem_on(200)
    objective = Objective(
        model, lambda m, b: m(b[0]), plain.objective.loss, backward, plain.objective.selection
    )
    problem = Problem(objective, Dense(W, model.layout), 10**9, 0, Events())
    found = chosen(problem)
    assert len(found.details["rounds"]) == 2
    once = Aggregate(Aggregate.Settings(rounds=1)).choose(problem, AUTO)
    losses = [
        problem.objective.value(problem.trajectory.mix_few(c.coefficients)) for c in (found, once)
    ]
    assert losses[0] <= losses[1] * 1.02


# ---- through the command -----------------------------------------------------------------------


def report_of(path: str = "averaged.report.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


@pytest.fixture
def plain_run(run_dir: Path) -> Path:
    """Without a K in its sewa.yaml."""
    config = run_dir / "sewa.yaml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("K:")]
    config.write_text("\n".join(lines) + "\n")
    return run_dir


def two_basins(seed: int = 0, k: int = 16, rows: int = 80) -> Problem:
    """A network whose first checkpoints know the labels; the others are far away, and worse."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model = FlatModel(net, CPU)
    x = torch.randn(rows, 5, generator=generator)
    good = 0.8 * torch.randn(model.layout.size, generator=generator)
    model.set(good)
    with torch.no_grad():
        y = net(x) + 0.3 * torch.randn(rows, 1, generator=generator)
    W = good + 0.1 * torch.randn(k, len(good), generator=generator)
    W[k // 4 :] += 0.6 * torch.randn(len(good), generator=generator)
    objective = Objective(
        model,
        lambda model, batch: model(batch[0]),
        lambda outputs, batch: ((outputs - batch[1]) ** 2).mean(),
        backward,
        [(x, y)],
    )
    return Problem(objective, Dense(W, model.layout), 10**9, seed, Events())


@pytest.mark.parametrize("seed", range(4))
def test_the_answer_is_never_worse_on_its_rows_than_a_part_of_the_run_that_was_run(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Not even where that part is not far enough ahead to be the prior."""
    monkeypatch.setattr("sewa_cli.solvers.aggregate.estimate.AHEAD", float("inf"))
    problem = two_basins(seed)
    choice = chosen(problem)
    k = problem.trajectory.k
    quarter = [4 / k] * (k // 4) + [0.0] * (k - k // 4)
    loss, other = (
        problem.objective.learning_value(problem.trajectory.mix_few(c))
        for c in (choice.coefficients, quarter)
    )
    assert loss <= other * 1.002
    assert choice.expected is not None
    assert choice.blend is not None
    assert sum(share.share for share in choice.blend.prior) == pytest.approx(1)


def test_select_without_K_or_solver_writes_weights_and_says_what_they_are(
    plain_run: Path, sewa: Sewa
) -> None:
    ended = sewa("select", "ckpts/", "-v")
    assert ended.code == 0, ended.err
    report = report_of()
    assert report["config"]["solver"] == "aggregate"
    assert report["config"]["K"] == "auto"
    weights = [candidate["weight"] for candidate in report["candidates"]]
    assert sum(weights) == pytest.approx(1)
    assert [i for i, w in enumerate(weights) if w] == report["selected"]
    assert f"weighed {report['K']} of 12 checkpoints" in ended.err
    assert "held-out loss " in ended.err
    states = [load_file(plain_run / f"ckpts/step-{10 * (i + 1)}.safetensors") for i in range(12)]
    written = load_file(plain_run / "averaged.safetensors")
    for name, tensor in written.items():
        mean = sum(w * state[name].double() for w, state in zip(weights, states, strict=True))
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-6)
    loss = user_loss("averaged.safetensors", "heldout_data")
    assert report["average"]["heldout_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.usefixtures("plain_run")
def test_K_auto_is_the_default_to_the_byte(sewa: Sewa) -> None:
    assert sewa("select", "-o", "one.safetensors").code == 0
    assert sewa("select", "--K", "auto", "-o", "two.safetensors").code == 0
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()


@pytest.mark.usefixtures("plain_run")
def test_sparse_takes_few_equally(sewa: Sewa) -> None:
    ended = sewa("select", "--sparse")
    assert ended.code == 0, ended.err
    report = report_of()
    assert report["config"]["solver"] == "linear"
    assert report["budget"] is not None
    assert "cross-validated loss by K" in ended.err


@pytest.mark.usefixtures("plain_run")
@pytest.mark.parametrize("tier", ["memory", "bf16", "files"])
def test_it_chooses_alike_wherever_the_checkpoints_are_held(sewa: Sewa, tier: str) -> None:
    assert sewa("select", "-o", "stream.safetensors").code == 0
    assert sewa("select", "--set", f"tier={tier}", "-o", "held.safetensors").code == 0
    losses = [
        report_of(f"{name}.report.json")["average"]["selection_loss"] for name in ("stream", "held")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_broken_checkpoint_is_left_out_as_if_it_had_not_been_there(
    plain_run: Path, sewa: Sewa
) -> None:
    broken = plain_run / "ckpts/step-50.safetensors"
    state = load_file(broken)
    save_file({**state, "0.bias": state["0.bias"] / 0}, broken)
    ended = sewa("select", "-o", "one.safetensors")
    assert ended.code == 0, ended.err
    broken.unlink()
    assert sewa("select", "-o", "two.safetensors").code == 0
    one, two = (report_of(f"{name}.report.json") for name in ("one", "two"))
    assert one["k"] == two["k"] == 11
    assert [c["weight"] for c in one["candidates"]] == pytest.approx(
        [c["weight"] for c in two["candidates"]],
        abs=1e-3,  # the ladder is as long as the run was thought to be
    )


ODD = {
    "shuffled labels": (
        """torch.manual_seed(5)
    return [(x, y[torch.randperm(len(y))]) for x, y in data(1)]""",
        "uniform",
        "the labels say nothing",
    ),
    "thirty rows": ("return data(1, 30)", None, "nothing was learned on top, which takes 100 rows"),
    "eight rows": ("return data(1, 8)", None, "cross-validation takes 10 rows"),
    "one batch": ("return [tuple(map(torch.cat, zip(*data(1))))]", "learned", "expected loss"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_selection_data_lead_to_something_sensible_that_is_said(
    plain_run: Path, sewa: Sewa, name: str
) -> None:
    data, written, said = ODD[name]
    (plain_run / "task.py").write_text(TASK.replace("return data(1)", data))
    ended = sewa("select")
    assert ended.code == 0, ended.err
    assert said in ended.err
    report = report_of()
    assert written in (None, report["written"])
    assert sum(c["weight"] for c in report["candidates"]) == pytest.approx(1)


def test_one_batch_of_a_loss_that_does_not_split_takes_the_best_moving_average(
    plain_run: Path, sewa: Sewa
) -> None:
    whole = TASK.replace("return data(1)", "return data(1, 128)").replace(
        "return F.cross_entropy(outputs, batch[1])",
        "return F.cross_entropy(outputs, batch[1], reduction='sum').sqrt()",
    )
    (plain_run / "task.py").write_text(whole)
    ended = sewa("select")
    assert ended.code == 0, ended.err
    assert "loss() does not split into rows" in ended.err
    report = report_of()
    rungs = ("last", "ema-window", "uniform")
    losses = {with_name(s): s["selection_loss"] for s in report["simple"] if s["name"] in rungs}
    assert report["written"] == min(losses, key=lambda name: losses[name])


def test_nine_honest_rows_take_the_best_moving_average_though_mixed_up_ones_fit_as_well() -> None:
    problem = problem_on(rows=9, seed=86)
    examples = count(problem, USUAL)
    outputs, there = frame(problem, examples, problem.trajectory.mix_few([1 / 9] * 9))
    assert outputs.labels([there], problem.seed) == "weak"
    chosen = Aggregate().choose(problem, AUTO)
    losses = {
        name: problem.objective.value(problem.trajectory.mix_few(family(9)[name]))
        for name in ladder(9)
        if name in family(9)
    }
    assert chosen.name == with_K(*min(losses, key=losses.__getitem__)) != "uniform"
    assert "cross-validation takes 10 rows" in problem.events.warnings[0]


@pytest.mark.parametrize(
    ("seed", "name"),
    [(0, ("uniform", None)), (46, ("ema-window", 4)), (1, ("ema-window", 18)), (3, None)],
)
def test_where_few_rows_point_to_one_rung_it_is_written_whole_and_by_its_name(
    seed: int, name: Name | None
) -> None:
    chosen = Aggregate().choose(problem_on(rows=12, seed=seed), AUTO)
    assert chosen.blend is not None
    if name is None:
        assert chosen.name == "learned"
        assert max(rung.share for rung in chosen.blend.prior) < 1 - chosen.blend.UNMOVED
    else:
        assert chosen.name == with_K(*name)
        assert chosen.coefficients == family(9)[name]


def test_few_rows_choose_among_moving_averages_and_teach_nothing_on_top() -> None:
    few, many = (Aggregate().choose(problem_on(rows=rows), AUTO) for rows in (99, 100))
    assert few.blend is not None
    assert many.blend is not None
    assert few.blend.learned < few.blend.UNMOVED < many.blend.learned
    assert [pull.share for pull in few.blend.path] == [1.0, *[0.0] * len(STRENGTHS)]
    assert few.expected is not None
    assert few.expected.loss > 0


def weakly_informed(rows: int, seed: int, shuffled: bool = False) -> Problem:
    """Labels that hardly depend on the row, while the bias is still on its way to their mean.

    `shuffled`: they depend on it, and belong to other rows.
    """
    random = torch.Generator().manual_seed(seed)
    truth = torch.randn(5, generator=random)
    truth *= (2.0 if shuffled else 0.1) / truth.norm()
    x = torch.randn(rows, 5, generator=random)
    y = (5 + x @ truth + torch.randn(rows, generator=random))[:, None]
    y = y[torch.randperm(rows, generator=random)] if shuffled else y
    done = (torch.arange(30) / 24).clamp_max(1.0)[:, None]
    W = done * torch.cat([truth, torch.tensor([5.0])]) + 0.01 * torch.randn(30, 6, generator=random)
    return problem_of(W, x, y, seed=seed)


@pytest.mark.parametrize("rows", [30, 200])
def test_labels_that_say_little_of_single_rows_still_choose(rows: int) -> None:
    for seed in range(6):
        problem = weakly_informed(rows, seed)
        chosen = Aggregate().choose(problem, AUTO)
        assert chosen.labels in ("matter", "weak")
        assert any(
            "no better than with their rows mixed up" in told for told in problem.events.warnings
        ) == (chosen.labels == "weak")
        loss = problem.objective.value(problem.trajectory.mix_few(chosen.coefficients))
        assert chosen.simple is not None
        assert loss < 1.1 * min(chosen.simple.values()) < chosen.simple["uniform", None] / 3


@pytest.mark.parametrize("rows", [100, 400])
def test_labels_of_other_rows_choose_nothing(rows: int) -> None:
    for seed in range(6):
        chosen = Aggregate().choose(weakly_informed(rows, seed, shuffled=True), AUTO)
        assert (chosen.labels, chosen.name) == ("noise", "uniform")


def test_targets_that_are_all_the_same_are_not_taken_for_a_loss_that_ignores_them() -> None:
    problem = problem_on(labels=torch.full((60, 1), 3.0))
    assert Aggregate().choose(problem, AUTO).labels == "matter"
    assert not any("whatever rows" in told for told in problem.events.warnings)


def test_a_loss_that_ignores_its_batch_is_told_though_something_in_it_is_constant() -> None:
    def loss(outputs: Tensor, _: Any) -> Tensor:
        return (outputs**2).mean()

    problem = problem_on(labels=torch.full((60, 1), 3.0), loss=loss)
    assert Aggregate().choose(problem, AUTO).labels == "unseen"
    assert any("whatever rows" in told for told in problem.events.warnings)


@pytest.mark.parametrize("rows", [10, 20, 50])
def test_few_rows_of_a_settled_run_hardly_ever_take_a_part_of_it(rows: int) -> None:
    """By two standard errors, as of many rows, one time in five."""
    taken = 0.0
    for seed in range(20):
        blend = Aggregate().choose(problem_on(rows=rows, k=40, seed=seed), AUTO).blend
        assert blend is not None
        taken += sum(s.share for s in blend.prior if s.name.startswith("quarter"))
    assert taken <= 1


def with_name(simple: dict[str, Any]) -> str:
    return simple["name"] if simple["K"] is None else f"{simple['name']} K={simple['K']}"


def test_two_checkpoints_are_enough(plain_run: Path, sewa: Sewa) -> None:
    ended = sewa("select", "--last", 2)
    assert ended.code == 0, ended.err
    report = report_of()
    assert report["k"] == 2
    own = report["average"]["selection_loss"]
    ends = [report["references"][name]["selection_loss"] for name in ("last", "uniform")]
    assert own <= max(ends) + 1e-6
    assert (plain_run / "averaged.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "written"),
    [
        ([], "uniform"),
        (["--sparse"], "uniform"),
        (["--K", 5, "--solver", "linear"], "latest K=5"),
        (["--K", 5], "latest K=5"),
    ],
)
def test_checkpoints_that_are_all_equal_give_any_average_of_them_and_no_verdict(
    plain_run: Path, sewa: Sewa, flags: list[object], written: str
) -> None:
    state = load_file(plain_run / "ckpts/step-120.safetensors")
    for checkpoint in (plain_run / "ckpts").iterdir():
        save_file(state, checkpoint)
    ended = sewa("select", "--strict", *flags)  # by rounding some are better
    assert ended.code == 0, ended.err
    assert f"the checkpoints do not differ on the selection data; `{written}` is" in ended.err
    assert f"no gain over the best baseline: `{written}` was chosen" in ended.err
    report = report_of()
    assert report["written"] == written
    assert report["verdict"]["kind"] == "baseline"
    assert report["budget"] is None
    for name, tensor in load_file(plain_run / "averaged.safetensors").items():
        torch.testing.assert_close(tensor, state[name])


def test_losses_are_equal_but_for_rounding_and_nothing_that_is_not_finite_is() -> None:
    assert are_equal(torch.tensor([0.3, 0.3 + 1e-8]).double())
    assert are_equal(torch.zeros(3, 2).double())
    assert not are_equal(torch.tensor([0.3, 0.3001]).double())
    for broken in (torch.inf, torch.nan):
        assert not are_equal(torch.tensor([0.3, broken]))
        assert not are_equal(torch.tensor([broken, broken]))


def test_a_coarse_loss_does_not_make_checkpoints_equal(plain_run: Path, sewa: Sewa) -> None:
    """Every average has the same loss, and still the weights differ."""
    coarse = "return outputs.sum() * 0 + F.cross_entropy(outputs, batch[1]).detach().ceil()"
    task = TASK.replace("return F.cross_entropy(outputs, batch[1])", coarse)
    (plain_run / "task.py").write_text(task)
    ended = sewa("select", "--K", 5)
    assert ended.code == 0, ended.err
    assert "do not differ" not in ended.err
    assert report_of()["K"] == 5


@pytest.mark.parametrize(("flags", "told"), [([], "weighed "), (["--sparse"], "cross-validated")])
def test_without_held_out_data_the_summary_leads_with_what_to_expect(
    plain_run: Path, sewa: Sewa, flags: list[str], told: str
) -> None:
    (plain_run / "task.py").write_text(NO_HELDOUT)
    ended = sewa("select", *flags)
    assert ended.code == 0, ended.err
    lines = ended.err.splitlines()
    places = [i for i, line in enumerate(lines) if line.startswith("expected loss on new rows")]
    (chosen,) = [i for i, line in enumerate(lines) if line.startswith(told)]
    assert places
    assert places[0] < chosen
    expected = report_of()["expected"]
    assert expected["loss"] > 0
    assert expected["interval"]["low"] < expected["by"] < expected["interval"]["high"]


def test_a_choice_that_is_the_last_five_is_not_praised(
    run_dir: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solvers, "REGISTRY", dict(solvers.REGISTRY))
    (run_dir / "newest.py").write_text(
        '''
from sewa_cli.solvers import Choice, Solver, register

class Newest(Solver):
    """The K newest."""
    def choose(self, problem, K):
        k = problem.trajectory.k
        return Choice.of(range(k - K, k), k)

register("newest", Newest)
'''
    )
    train_tiny(run_dir / "ckpts", 12)
    for K in range(2, 11):
        flags = ["--set", "solver_from=newest.py", "--solver", "newest", "--K", K, "--force"]
        ended = sewa("select", *flags)
        assert ended.code == 0, ended.err
        report = report_of()
        assert report["written"] == f"latest K={K}"
        assert report["verdict"]["kind"] == "baseline"
        assert f"no gain over the best baseline: `latest K={K}` was chosen" in ended.err


def last_five_are_best() -> Problem:
    """30 checkpoints on their way, of which the last five lie around its end."""
    random = torch.Generator().manual_seed(1)
    end, late = torch.randn(21, generator=random), 2 * torch.randn(5, 21, generator=random)
    way = torch.arange(25, 0, -1)[:, None] / 2 + 0.6 * torch.randn(25, 21, generator=random)
    x = torch.randn(400, 20, generator=random)
    y = x @ end[:20] + end[20] + 0.5 * torch.randn(400, generator=random)
    return problem_of(torch.cat([end + way, end + late - late.mean(0)]), x, y[:, None])


def test_where_the_last_five_are_best_the_default_does_not_claim_to_beat_simple_averages() -> None:
    problem = last_five_are_best()
    chosen = Aggregate().choose(problem, AUTO)
    assert chosen.simple is not None
    assert chosen.expected is not None
    assert min(chosen.simple, key=chosen.simple.__getitem__) == ("latest", 5)
    assert chosen.expected.interval is None or chosen.expected.interval.low <= 0


def test_a_loss_that_changes_its_batch_is_told_in_one_line(plain_run: Path, sewa: Sewa) -> None:
    changing = TASK.replace(
        "    return F.cross_entropy(outputs, batch[1])",
        "    batch[1][batch[0][:, 0] > 9] = -100\n    return F.cross_entropy(outputs, batch[1])",
    )
    (plain_run / "task.py").write_text(changing)
    ended = sewa("select")
    assert ended.code == 4
    assert "changes the batch in place" in ended.error


@pytest.mark.usefixtures("plain_run")
def test_with_little_memory_all_selection_losses_are_of_the_same_examples(sewa: Sewa) -> None:
    assert sewa("select", "-o", "wide.safetensors").code == 0
    ended = sewa("select", "--memory", "40KB", "-o", "tight.safetensors")
    assert ended.code == 0, ended.err
    wide, tight = (report_of(f"{name}.report.json") for name in ("wide", "tight"))
    assert tight["selection_rows"] == tight["details"]["cache"]["rows"] < wide["selection_rows"]
    assert f"{tight['selection_rows']} of the {wide['selection_rows']} selection" in ended.err
    assert "more --memory would keep all" in ended.err
    simple = {with_name(one): one["selection_loss"] for one in tight["simple"]}
    for name, scores in tight["references"].items():
        assert scores["selection_loss"] == pytest.approx(simple[name], rel=1e-5)
    assert len(simple) == len(wide["simple"])


@pytest.mark.usefixtures("plain_run")
def test_under_a_cap_that_leaves_simple_averages_out_none_is_called_the_best(sewa: Sewa) -> None:
    """The expected loss of the best simple average would be that of some that could be run."""
    free = json.loads(sewa("select", "--json", "-o", "a.safetensors").out)
    assert free["expected"]["by"] is not None
    capped = sewa("select", "--json", "--memory", "24KB", "-o", "b.safetensors")
    assert capped.code == 0, capped.err
    report = json.loads(capped.out)
    assert report["expected"]["by"] is None
    assert report["expected"]["interval"] is None
    assert "(nested cross-validation)\n" in capped.err + "\n"


@pytest.mark.usefixtures("run_dir")
def test_sparse_and_a_number_do_not_go_together(sewa: Sewa) -> None:
    ended = sewa("select", "--sparse", "--K", 4)
    assert ended.code == 2
    assert "leave out one of them" in ended.error


@pytest.mark.usefixtures("plain_run")
def test_compare_makes_masks_whatever_solver_weighs(sewa: Sewa) -> None:
    ended = sewa("compare", "--solver", "aggregate", "--methods", "sewa,last", "--K", 4, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["rows"][0]["size"] == 4


@pytest.mark.usefixtures("plain_run")
def test_where_learning_makes_it_worse_the_prior_is_written_with_its_own_expected_loss(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the prediction had been false: what was learned is run with other weights."""
    true = Surrogate.true_loss
    monkeypatch.setattr(Surrogate, "true_loss", lambda self, flat: true(self, -3 * flat))
    ended = sewa("select", "--set", "aggregate.rounds=1")
    assert ended.code == 0, ended.err
    assert "no better than the" in ended.err
    report = report_of()
    weights = [candidate["weight"] for candidate in report["candidates"]]
    assert weights == pytest.approx(report["blend"]["weights"])
    assert report["blend"]["path"][0]["share"] == 1
    assert report["expected"]["loss"] == pytest.approx(report["blend"]["path"][0]["loss"])


@pytest.mark.usefixtures("plain_run")
def test_compare_has_the_default_as_a_row_and_select_agrees(sewa: Sewa) -> None:
    found = json.loads(sewa("compare", "--methods", "aggregate,uniform", "--json").out)
    assert sewa("select").code == 0
    row = found["rows"][0]
    assert (row["method"], row["K"]) == ("aggregate", None)
    assert row["heldout_loss"] == pytest.approx(report_of()["average"]["heldout_loss"], rel=1e-4)
    fast = json.loads(sewa("compare", "--fast", "--methods", "aggregate,uniform", "--json").out)
    assert sum(fast["rows"][0]["coefficients"][0]) == pytest.approx(1)
