"""Outputs of averages are predicted: exactly for linear models, from all outputs or a digest."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.linear_problems import (
    backward,
    predicted,
    problem_of,
    random_averages,
    random_problem,
    squared,
)
from helpers.tiny import finding
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.objective.classes import Classes
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.solvers import Problem
from sewa_cli.solvers.outputs.digest import Digest
from sewa_cli.solvers.outputs.predictions import mean
from sewa_cli.trajectory.tiers import Dense


def root(outputs, batch):
    """A loss that does not split into examples."""
    return ((outputs - batch[1]) ** 2).sum().sqrt()


def true_losses(problem, C):
    flats = [problem.trajectory.mix_few(c.tolist()) for c in C]
    return torch.tensor([problem.objective.value(flat) for flat in flats], dtype=torch.float64)


@pytest.mark.parametrize(("loss", "splits"), [(squared, True), (root, False)])
def test_predictions_of_a_linear_model_are_its_losses(loss, splits):
    problem, C = random_problem(loss=loss), random_averages(9)
    found = predicted(problem, splits)
    torch.testing.assert_close(found.means(C), true_losses(problem, C), rtol=1e-4, atol=1e-6)
    by_unit = found.losses(C) @ found.weights / found.weights.sum()
    torch.testing.assert_close(by_unit, found.means(C), rtol=1e-5, atol=1e-7)
    assert len(found.weights) == (60 if splits else 3)


@pytest.mark.parametrize("batch", [2, 25])
@pytest.mark.parametrize(("loss", "splits"), [(squared, True), (root, False)])
def test_gradients_on_samples_of_the_units_are_those_of_their_mean_loss(loss, splits, batch):
    found = predicted(random_problem(loss=loss, batch=batch), splits)
    generator, C = torch.Generator().manual_seed(0), random_averages(9)
    members = torch.rand(4, len(found.weights), generator=generator) < 0.6
    members[:, 0] = True
    gradients = found.gradient_on(members)(C)

    def mean_loss(c, some):
        weights = found.weights * some
        return float(found.losses(c[None])[0] @ weights / weights.sum())

    for member, c, gradient in zip(members, C, gradients, strict=True):
        direction = torch.zeros(9, dtype=torch.float64)
        direction[0], direction[5] = 1, -1
        step = 0.005 * direction  # a difference in a direction that keeps the sum
        slope = (mean_loss(c + step, member) - mean_loss(c - step, member)) / 0.01
        assert float(gradient @ direction) == pytest.approx(slope, rel=2e-2, abs=1e-3)


def bent_problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    start = FlatModel(net, torch.device("cpu")).flat.clone()
    x, y = torch.randn(60, 5), torch.randn(60, 1)
    return problem_of(start + torch.randn(9, len(start)), x, y, net=net)


def test_the_base_is_predicted_exactly_though_the_model_is_bent():
    problem, base = bent_problem(), random_averages(9)[0]
    found = predicted(problem, base=base)
    true = true_losses(problem, base[None])
    torch.testing.assert_close(found.means(base[None]), true, rtol=1e-5, atol=1e-7)


def test_half_the_precision_is_enough_where_memory_is_short():
    problem, C = random_problem(k=40), random_averages(40)
    wide = predicted(problem)
    narrow = predicted(replace(problem, memory_left=wide.size.bytes - 1))
    assert (wide.size.dtype, narrow.size.dtype) == ("float32", "bfloat16")
    torch.testing.assert_close(narrow.means(C), wide.means(C), rtol=1e-2, atol=1e-3)


def test_examples_that_do_not_fit_are_left_out_and_too_few_are_refused():
    problem = random_problem(examples=200, k=40)
    need = predicted(problem).size.bytes
    some = replace(problem, memory_left=need // 4, events=Events())
    found = predicted(some)
    assert 32 <= found.size.rows < found.size.of_rows == 200
    assert found.size.bytes <= need // 4
    assert f"{found.size.rows} of the 200 selection examples are used" in some.events.warnings[0]
    with pytest.raises(ConfigError, match="do not fit"):
        predicted(replace(problem, memory_left=need // 40))


def test_masked_outputs_stay_as_they_are():
    mask = torch.tensor([0.0, -torch.inf, 0.0])

    def loss(outputs, batch):
        return F.cross_entropy(outputs + mask, batch[1])

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator), torch.tensor([0, 2] * 20)
    net, W = nn.Linear(5, 3), torch.randn(6, 18, generator=generator)
    problem = problem_of(W, x, y, loss, net=net)
    problem.objective.predict = lambda model, batch: model(batch[0]) + mask
    found, C = predicted(problem), random_averages(6)
    torch.testing.assert_close(found.means(C), true_losses(problem, C), rtol=1e-4, atol=1e-6)
    everything = torch.ones(4, 40, dtype=torch.bool)
    assert bool(torch.isfinite(found.gradient_on(everything)(C)).all())


@pytest.mark.parametrize(
    ("predict", "error", "words"),
    [
        (
            lambda m, b: m(b[0])[: 25 - int(m.bias.abs() > 1)],
            TaskError,
            "size depends on the weights",
        ),
        (lambda m, b: m(b[0]) / (m.bias.abs() < 1), CheckpointError, "NaN or Inf"),
        (lambda m, b: m(b[0]).long(), TaskError, "no floating-point tensors"),
    ],
)
def test_outputs_that_cannot_be_predicted_are_refused(predict, error, words):
    problem = random_problem()
    W = problem.trajectory.mix(torch.eye(9)).clone()
    W[:, 5] = 0.0
    W[3, 5] = 100.0  # the bias; no other average is as far
    problem = replace(problem, trajectory=Dense(W, problem.trajectory.layout))
    problem.objective.predict = predict
    base = mean([0, 1], 9)
    with pytest.raises(error, match=words):
        predicted(problem, base=base)


WORDS, K = 300, 8
KEEP = {"largest": 8, "samples": 8}
LANGUAGE = f"""
import torch
from torch import nn
from torch.nn import functional as F

def build_model():
    return nn.Sequential(nn.Embedding({WORDS}, 12), nn.Tanh(), nn.Linear(12, {WORDS}))

def data(seed, rows=40):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint({WORDS}, (rows, 9), generator=generator)
    for i in range(1, 9):  # each word mostly tells the next
        step = (torch.rand(rows, generator=generator) * 3).long()
        likely = (7 * x[:, i - 1] + 1 + step) % {WORDS}
        x[:, i] = torch.where(torch.rand(rows, generator=generator) < 0.8, likely, x[:, i])
    y = x[:, 1:].clone()
    y[::7, 5:] = -100
    y[3] = -100  # an example without any target
    return [{{"x": a, "labels": b}} for a, b in zip(x[:, :-1].split(8), y.split(8))]

def selection_data():
    return data(1)

def predict(model, batch):
    return model(batch["x"])

def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

def targets(batch):
    return batch["labels"]
"""


@cache
def task():
    found = {}
    exec(LANGUAGE, found)
    return found


@cache
def trained():
    """A real run [K, P], at a rate at which it still jumps about."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = task()["build_model"]()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    found = []
    for step in range(1, 10 * K + 101):
        batch = task()["data"](100 + step, 64)[step % 8]
        adam.zero_grad()
        backward(task()["loss"](model(batch["x"]), batch))
        adam.step()
        if step > 100 and step % 10 == 0:
            found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return torch.stack(found)


def language_problem(digest):
    model = FlatModel(task()["build_model"](), torch.device("cpu"))
    predict, loss = task()["predict"], task()["loss"]
    classes = Classes(predict, loss, lambda batch: (batch["labels"], None)) if digest else None
    data = task()["selection_data"]()
    objective = Objective(model, predict, loss, backward, data, classes=classes)
    return Problem(objective, Dense(trained(), model.layout), 10**9, 0, Events())


def test_a_digest_is_exact_at_the_base_and_nearly_all_logits_elsewhere():
    digest = predicted(language_problem(digest=True), **KEEP)
    whole = predicted(language_problem(digest=False))
    assert isinstance(digest.kept, Digest)
    assert digest.kept.numbers < whole.kept.numbers / 10
    base = mean(range(K), K)[None]
    torch.testing.assert_close(digest.means(base), whole.means(base), rtol=1e-4, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    C = torch.stack(
        [mean(torch.randperm(K, generator=generator)[:5].tolist(), K) for _ in range(5)]
    )
    spread = float((whole.means(C) - whole.means(base)).abs().mean())
    assert float((digest.means(C) - whole.means(C)).abs().max()) < 0.25 * spread


def test_a_digests_gradient_is_that_of_its_loss():
    found, C = predicted(language_problem(digest=True), **KEEP), random_averages(K, 2)
    gradients = found.gradient_on(torch.ones(2, len(found.weights), dtype=torch.bool))(C)
    direction = torch.zeros(K, dtype=torch.float64)
    direction[0], direction[5] = 1, -1
    slopes = (found.means(C + 0.01 * direction) - found.means(C - 0.01 * direction)) / 0.02
    torch.testing.assert_close(gradients @ direction, slopes, rtol=1e-2, atol=1e-4)


def test_a_task_with_targets_chooses_by_a_digest(tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(LANGUAGE)
    model = FlatModel(task()["build_model"](), torch.device("cpu"))
    for step, row in enumerate(trained()):
        model.set(row)
        state = {name: x.detach().clone() for name, x in model.module.state_dict().items()}
        save_file(state, f"step-{step}.safetensors")
    flags = "--set", "aggregate.largest=8", "--set", "aggregate.samples=8"
    ended = sewa("select", ".", "--task", "task.py", "--device", "cpu", "--json", *flags)
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    count = sum(int((batch["labels"] >= 0).sum()) for batch in task()["selection_data"]())
    predicted = finding(report, "predicted")
    assert predicted["numbers"] == 17 * count
    assert abs(predicted["surrogate_error"]) < 0.01 * report["average"]["selection_loss"]
    baselines = [one["selection_loss"] for one in report["simple"]]
    assert report["average"]["selection_loss"] < 1.01 * min(baselines)
