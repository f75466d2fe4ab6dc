"""A few numbers for each target in place of all logits: exact at the base, as good elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import Sewa
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.objective.classes import Classes
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.solvers import Problem, Sizes
from sewa_cli.solvers.linear.build import FEWEST, Keep, build, count, frame, settle
from sewa_cli.solvers.linear.digest import Digest, _largest
from sewa_cli.solvers.linear.surrogate import Surrogate, mean
from sewa_cli.solvers.linear.units import Units
from sewa_cli.solvers.linear.whole import Whole
from sewa_cli.text import with_K
from sewa_cli.trajectory.dense import Dense

WORDS, K = 300, 10
KEEP = Keep(largest=8, samples=8)
TASK = f"""
import torch
from torch import nn
from torch.nn import functional as F

def build_model():
    return nn.Sequential(nn.Embedding({WORDS}, 12), nn.Tanh(), nn.Linear(12, {WORDS}))

def data(seed, rows=60):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint({WORDS}, (rows, 9), generator=generator)
    for i in range(1, 9):  # each word mostly tells the next
        step = (torch.rand(rows, generator=generator) * 3).long()
        likely = (7 * x[:, i - 1] + 1 + step) % {WORDS}
        x[:, i] = torch.where(torch.rand(rows, generator=generator) < 0.8, likely, x[:, i])
    y = x[:, 1:].clone()
    y[::7, 5:] = -100
    y[3] = -100  # a row without any
    return [{{"x": a, "labels": b}} for a, b in zip(x[:, :-1].split(8), y.split(8))]

def selection_data():
    return data(1)

def heldout_data():
    return data(2)

def predict(model, batch):
    return model(batch["x"])

def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

def targets(batch):
    return batch["labels"]
"""


@cache
def functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(TASK, found)
    return found


@cache
def trained() -> tuple[dict[str, Tensor], ...]:
    """A real run, at a rate at which it still jumps about."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = functions()["build_model"]()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    found = []
    for step in range(1, 10 * K + 101):
        batch = functions()["data"](100 + step, 64)[step % 8]
        adam.zero_grad()
        functions()["loss"](model(batch["x"]), batch).backward()
        adam.step()
        if step > 100 and step % 10 == 0:
            found.append({name: x.detach().clone() for name, x in model.state_dict().items()})
    return tuple(found)


def problem_of(targets: Any = None, room: int = 10**9, rows: int = 60) -> Problem:
    task = functions()
    model = FlatModel(task["build_model"](), torch.device("cpu"))
    W = torch.empty(K, model.layout.size)
    for row, state in zip(W, trained(), strict=True):
        model.load(state.items())
        row.copy_(model.flat)
    find = targets or (lambda batch: (batch["labels"], None))
    classes = Classes(task["predict"], task["loss"], find)

    def backward(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    objective = Objective(
        model, task["predict"], task["loss"], backward, task["data"](1, rows), classes=classes
    )
    return Problem(objective, Dense(W, model.layout), room, 0, Events())


def base_of(problem: Problem) -> Tensor:
    return problem.trajectory.mix_few([1 / K] * K)


def digested(problem: Problem, keep: Keep = KEEP) -> Surrogate:
    found = build(problem, base_of(problem), 0.1, keep=keep)
    assert isinstance(found.outputs, Digest)
    return found


def whole(problem: Problem) -> Surrogate:
    found = build(replace_classes(problem), base_of(problem), 0.1)
    assert isinstance(found.outputs, Whole)
    return found


def replace_classes(problem: Problem) -> Problem:
    return replace(problem, objective=replace(problem.objective, classes=None))


def random_averages(n: int, least: int = 5) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        size = int(torch.randint(least, K + 1, (), generator=generator))
        yield mean(torch.randperm(K, generator=generator)[:size].tolist(), K)


# ---- losses ------------------------------------------------------------------------------------


def test_it_is_exact_at_the_base_and_true_of_any_other_weights() -> None:
    problem = problem_of()
    here = digested(problem)
    assert here.size.numbers < whole(problem).size.numbers / 10
    assert here.loss(here.base) == pytest.approx(problem.objective.value(base_of(problem)))
    for i in (0, K - 1):  # single checkpoints lie far from the base
        flat = problem.trajectory.row(i).clone()
        assert here.true_loss(flat) == pytest.approx(problem.objective.value(flat), rel=1e-5)
        framed, at = frame(problem, count(problem, KEEP), flat, KEEP)  # before there is a base
        assert framed.loss(at) == pytest.approx(problem.objective.value(flat), rel=1e-5)


def test_it_predicts_averages_as_well_as_all_logits() -> None:
    problem = problem_of()
    few, every = digested(problem), whole(problem)
    errors = []
    for c in random_averages(20):
        true = problem.objective.value(problem.trajectory.mix_few(c.tolist()))
        errors.append([abs(here.loss(here.mix(c)) - true) for here in (few, every)])
    of_digest, of_all = torch.tensor(errors).mean(0).tolist()
    assert of_digest <= 1.2 * of_all


def test_losses_of_rows_are_those_of_the_model_and_make_up_the_loss() -> None:
    problem = problem_of()
    here = digested(problem)
    flat = problem.trajectory.row(2).clone()
    each = here.outputs.unit_losses(here.outputs.at(flat))
    problem.objective.model.set(flat)
    true = problem.objective.unit_losses(problem.objective.selection).rows
    assert each is not None
    assert true is not None
    torch.testing.assert_close(each, true, rtol=1e-4, atol=1e-6)
    assert float(each[3]) == 0  # it has no target
    batches = here.outputs.batch_losses(here.outputs.at(flat))
    torch.testing.assert_close(batches, torch.stack([x.mean() for x in torch.split(each, 8)]))


def test_the_gradient_is_autograds_of_the_cross_entropy_written_out() -> None:
    problem = problem_of()
    here = digested(problem)
    each = 1 + KEEP.largest + KEEP.samples
    targets = [problem.objective.targets(batch) for batch in problem.objective.selection]
    weights = torch.cat([t.weights * t.shape[0] for t in targets if t is not None]) / 60
    c = next(random_averages(1)).requires_grad_(True)
    rows = torch.stack([here.mix(one) for one in torch.eye(K).double()])
    d = (c.float() @ rows).view(-1, each)
    naive = weights @ F.cross_entropy(d, torch.zeros(len(d), dtype=torch.long), reduction="none")
    naive.backward()  # type: ignore[no-untyped-call]
    loss, gradient = here.loss_and_gradient(c.detach())
    assert c.grad is not None
    assert loss == pytest.approx(float(naive.detach()), rel=1e-5)
    # what all of them share is lost to rounding in one of the two
    torch.testing.assert_close(
        gradient - gradient.mean(), c.grad - c.grad.mean(), rtol=1e-3, atol=1e-5
    )


def test_many_samples_of_the_rows_at_once_are_as_each_alone() -> None:
    here = digested(problem_of())
    units = Units(here.outputs, here.base)
    assert units.by_row
    generator = torch.Generator().manual_seed(0)
    members = torch.rand(5, len(units), generator=generator) < 0.6
    C = torch.softmax(torch.randn(5, K, generator=generator), 1).double()
    found = units.gradient_on(here, members, 10**9)(C)
    in_blocks = here.gradients(C, here.outputs.factors(members / members.sum(1, True), True), 500)
    for p in range(5):
        _, alone = here.on(members[p]).loss_and_gradient(C[p])
        torch.testing.assert_close(found[p], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(in_blocks[p], alone, rtol=1e-4, atol=1e-5)
        each = here.outputs.unit_losses(here.mix(C[p]))
        assert each is not None
        torch.testing.assert_close(units.losses_of(here, C)[p], each, rtol=1e-5, atol=1e-6)
        some = here.on(members[p]).loss(here.mix(C[p]))
        assert some == pytest.approx(float(each[members[p]].mean()), rel=1e-5)


def test_the_same_seed_draws_the_same_samples() -> None:
    one, two = digested(problem_of()), digested(problem_of())
    c = next(random_averages(1))
    assert torch.equal(one.mix(c), two.mix(c))


def test_logits_of_minus_infinity_are_nothing_to_sample() -> None:
    """A model may forbid words: what is forbidden stays so."""
    problem = problem_of()
    predict = problem.objective.predict

    def forbids(model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = predict(model, batch).clone()
        allowed = torch.zeros(WORDS, dtype=torch.bool)
        allowed[batch["labels"][batch["labels"] >= 0]] = True  # a few words for each batch
        return logits.masked_fill(~allowed, -torch.inf)

    classes = Classes(forbids, problem.objective.loss, lambda batch: (batch["labels"], None))
    objective = replace(problem.objective, predict=forbids, classes=classes)
    objective.selection = [functions()["data"](1)[0], functions()["data"](5)[0]]
    here = digested(replace(problem, objective=objective), Keep(largest=40, samples=8))
    assert here.loss(here.base) == pytest.approx(objective.value(base_of(problem)), rel=1e-5)
    for c in random_averages(3):
        loss, gradient = here.loss_and_gradient(c)
        true = objective.value(problem.trajectory.mix_few(c.tolist()))
        assert loss == pytest.approx(true, rel=0.05)
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("V", [64, 300, 1000, 1024])
def test_the_largest_are_found_by_groups(V: int) -> None:
    x = torch.randn(5, V, generator=torch.Generator().manual_seed(V))
    x[0, 7] = torch.inf
    assert torch.equal(_largest(x, 8), x.topk(8, 1).indices)


# ---- labels ------------------------------------------------------------------------------------


def test_labels_that_were_shuffled_are_noise_and_their_own_matter() -> None:
    here = digested(problem_of())
    assert here.outputs.labels([here.base]) == "matter"
    verdicts = []
    for seed in range(8):
        problem = problem_of()
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(60, generator=generator)
        batches = functions()["data"](1)
        labels = torch.cat([batch["labels"] for batch in batches])[order]
        shuffled = [b | {"labels": y} for b, y in zip(batches, torch.split(labels, 8), strict=True)]
        problem.objective.selection = shuffled
        found = digested(problem)
        verdicts.append(found.outputs.labels([found.base], seed))
    assert verdicts.count("noise") >= 6


def test_shuffled_labels_of_copies_fit_by_luck_no_more_often_than_those_of_one() -> None:
    whole = functions()["data"](1)
    x = torch.cat([batch["x"] for batch in whole])
    y = torch.cat([batch["labels"] for batch in whole])
    verdicts: dict[bool, list[str]] = {True: [], False: []}
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        labels = y[torch.randperm(60, generator=generator)]
        group = torch.randint(12, (150,), generator=generator)  # of several sizes
        parts = zip(*(part.split(40) for part in (x[group], labels[group], group)), strict=True)
        batches = [dict(zip(("x", "labels", "group"), part, strict=True)) for part in parts]
        for is_grouped, found in verdicts.items():
            problem = problem_of()
            problem.objective.selection = batches
            problem.objective.label_groups = (lambda b: b["group"].tolist()) if is_grouped else None
            here = digested(problem)
            found.append(here.outputs.labels([here.base], seed))
    assert verdicts[True].count("matter") <= 1
    assert verdicts[False].count("matter") >= 2


# ---- rows --------------------------------------------------------------------------------------


def test_targets_that_are_not_those_of_the_loss_end_it() -> None:
    def shifted(batch: Any) -> tuple[Tensor, None]:
        return batch["labels"].roll(1, 1), None

    problem = problem_of(shifted)
    # it does not look itself
    problem.objective.classes = replace(problem.objective.classes, proven=True)  # type: ignore[type-var]
    with pytest.raises(TaskError, match=r"targets\(\) and loss\(\) differ"):
        build(problem, base_of(problem), 0.1, keep=KEEP)


def test_few_classes_are_kept_as_they_are() -> None:
    problem = problem_of()
    keep = Keep(largest=40, samples=40)
    assert isinstance(build(problem, base_of(problem), 0.1, keep=keep).outputs, Whole)


def test_rows_that_do_not_fit_are_told_and_too_few_are_refused() -> None:
    problem = problem_of(rows=200)
    everything = count(problem, KEEP)
    size = digested(problem).size
    half = replace(problem, room=size.bytes // 3, events=Events())
    settled, kept = settle(half, everything, KEEP)
    assert FEWEST <= kept.count < 200
    [line] = half.events.warnings
    assert line.startswith(f"{kept.count} of the 200 selection rows are used")
    assert settled.objective.mean_loss(settled.objective.selection)[1] == kept.count
    targets = everything.numbers // KEEP.each
    sizes = Sizes(K, 0, 1, half.room, 1, targets=targets, classes=WORDS)
    _, share = KEEP.fit(sizes, held=0)
    assert kept.count == pytest.approx(200 * share, rel=0.1)
    with pytest.raises(ConfigError, match="32 rows at least do not fit"):
        settle(replace(problem, room=size.bytes // 20), everything, KEEP)


# ---- whole commands ----------------------------------------------------------------------------


@pytest.fixture
def words_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TASK)
    Path("sewa.yaml").write_text(
        "checkpoints: ckpts\ntask: task.py\n"
        "linear: {largest: 8, samples: 8}\naggregate: {largest: 8, samples: 8}\n"
    )
    Path("ckpts").mkdir()
    for i, state in enumerate(trained(), 1):
        save_file(state, f"ckpts/step-{10 * i}.safetensors")
    return tmp_path


def report_of(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(output).read_text())
    return found


@pytest.mark.usefixtures("words_run")
def test_losses_of_files_are_those_of_files_though_w_is_rounded(sewa: Sewa) -> None:
    reports = []
    for tier in ("auto", "bf16"):
        flags = () if tier == "auto" else ("--set", f"tier={tier}")
        ended = sewa("select", *flags, "-o", f"{tier}.safetensors")
        assert ended.code == 0, ended.err
        reports.append(report_of(f"{tier}.report.json")["references"])
    exact, rounded = reports
    for name in exact.keys() & rounded.keys():
        assert rounded[name]["selection_loss"] == pytest.approx(
            exact[name]["selection_loss"], rel=1e-7
        )


@pytest.mark.usefixtures("words_run")
def test_what_is_left_out_is_told_with_the_value_that_keeps_it_and_nothing_is_run_again(
    sewa: Sewa,
) -> None:
    every = json.loads(sewa("select", "-o", "every.safetensors", "--json").out)
    numbers = every["details"]["cache"]["numbers"]
    some = sewa("select", "--set", f"aggregate.outputs={numbers - 1}", "--json", "--force")
    report = json.loads(some.out)
    assert report["selection_rows"] == report["details"]["cache"]["rows"] < 60
    assert f"--set aggregate.outputs={numbers} would keep all" in some.err
    simple = {with_K(one["name"], one["K"]): one["selection_loss"] for one in report["simple"]}
    for name, scores in report["references"].items():
        assert scores["selection_loss"] == pytest.approx(simple[name], rel=1e-5)
    assert report["cost"]["forward_passes"] < every["cost"]["forward_passes"] + 8  # a pass
    kept = json.loads(
        sewa("select", "--set", f"aggregate.outputs={numbers}", "--json", "--force").out
    )
    assert kept["selection_rows"] == 60


@pytest.mark.usefixtures("words_run")
def test_the_default_runs_on_a_digest_with_few_passes_and_true_losses(sewa: Sewa) -> None:
    ended = sewa("select", "-o", "out.safetensors", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    batches, rounds = 8, len(report["details"]["rounds"])
    assert report["details"]["cache"]["rows"] == 60
    assert report["details"]["by_row"]
    # what learning needs, twice; besides, references and the average on held-out rows
    assert report["cost"]["forward_passes"] <= (2 * K * rounds + 14) * batches
    forecast = json.loads(sewa("select", "--dry-run", "--json").out)
    assert report["cost"]["forward_passes"] <= forecast["forward_passes"]
    problem = problem_of()
    simple = {(one["name"], one["K"]): one["selection_loss"] for one in report["simple"]}
    last = problem.objective.value(problem.trajectory.row(K - 1))
    assert simple["last", None] == pytest.approx(last, rel=1e-4)
    references = report["references"]
    assert references["last"]["selection_loss"] == pytest.approx(last, rel=1e-4)
    best = report["simple"][0]["selection_loss"]
    assert min(x["selection_loss"] for x in references.values()) == pytest.approx(best)


@pytest.mark.usefixtures("words_run")
@pytest.mark.parametrize("how", [["--sparse"], ["--K", 3, "--solver", "linear"]])
def test_masks_are_chosen_on_a_digest(sewa: Sewa, how: list[Any]) -> None:
    ended = sewa("select", *how, "-o", "out.safetensors", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    tokens = sum(int((batch["labels"] >= 0).sum()) for batch in functions()["data"](1))
    assert report["details"]["cache"]["numbers"] == 17 * tokens
    weights = [candidate["weight"] or 0.0 for candidate in report["candidates"]]
    problem = problem_of()
    true = problem.objective.value(problem.trajectory.mix_few(weights))
    assert report["average"]["selection_loss"] == pytest.approx(true, rel=1e-4)


@pytest.mark.usefixtures("words_run")
def test_compare_predicts_from_a_digest(sewa: Sewa) -> None:
    ended = sewa("compare", "--fast", "--K", 3, "--methods", "sewa,last,uniform", "--json")
    assert ended.code == 0, ended.err
    assert len(json.loads(ended.out)["rows"]) >= 3


@pytest.mark.usefixtures("words_run")
def test_a_cap_too_small_for_32_rows_ends_in_one_line_before_any_work(sewa: Sewa) -> None:
    for how in (["--memory", "600KB"], ["--memory", "600KB", "--sparse"]):
        ended = sewa("select", *how)
        assert ended.code == 2, ended.err
        assert "raise --memory" in ended.error
