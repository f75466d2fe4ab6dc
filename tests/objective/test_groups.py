"""Examples that depend on each other: the group is the unit of intervals, folds and splits."""

from pathlib import Path

import pytest
import torch

from sewa_cli.errors import TaskError
from sewa_cli.objective.units import Grouping, UnitLosses, groups_of, keep_aside, paired
from sewa_cli.report.findings import Expected
from sewa_cli.report.select import Report
from sewa_cli.stats import difference

COPIES = 8
# 30 held-out and 40 selection examples, each of them COPIES times, in batches that split groups
TASK = f"""
import torch
from torch import nn
from torch.nn import functional as F

def data(seed, rows, copies):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    order = torch.randperm({COPIES} * rows, generator=generator) % rows
    if not copies:
        order = torch.tensor(list(dict.fromkeys(order.tolist())))
    return list(zip(*(part.split(64) for part in (x[order], y[order], order))))

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def selection_data(copies=True):
    return data(1, 40, copies)

def heldout_data(copies=True):
    return data(2, 30, copies)

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])
"""
GROUPS = """
def groups(batch):
    return batch[2]
"""


def intervals(n=40):
    """Return a difference's interval by n examples, by groups of copies, and by all copies."""
    losses = torch.randn(2, n, dtype=torch.float64) + torch.tensor([[0.2], [0.0]])
    order = torch.randperm(COPIES * n) % n
    counts = torch.tensor([len(some) for some in order.split(7)], dtype=torch.float64)
    found = [
        UnitLosses(torch.stack([x.mean() for x in own[order].split(7)]), counts, own[order])
        for own in losses
    ]
    groups = groups_of([order], lambda batch: batch.tolist())
    grouped = [UnitLosses(one.batches, one.counts, one.rows, groups=groups) for one in found]
    alone = [UnitLosses(own, torch.ones(n, dtype=torch.float64), own) for own in losses]
    return [
        difference(*losses, weights)[1]
        for losses, weights, _ in map(paired, (alone, grouped, found))
    ]


def test_an_interval_of_groups_of_copies_is_as_wide_as_without_the_copies():
    torch.manual_seed(0)
    alone, grouped, as_rows = intervals()
    assert alone
    assert grouped
    assert as_rows
    width = alone.high - alone.low
    assert grouped.high - grouped.low == pytest.approx(width, rel=0.1)  # drawn in another order
    assert as_rows.high - as_rows.low < 0.4 * width


def test_a_group_in_several_batches_counts_once_by_its_size():
    groups = groups_of([["a", "b"], ["b", "c", "c"]], lambda batch: batch)
    units = Grouping.make([2, 3], by_row=True, groups=groups)
    assert units.weights.tolist() == [1, 2, 2]
    assert units.means(torch.tensor([1.0, 2, 4, 5, 6])).tolist() == [1, 3, 5.5]
    by_batch = Grouping.make([1, 2, 1, 1], by_row=False, groups=torch.tensor([0, 1, 2, 0, 3]))
    assert by_batch.of.tolist() == [0, 1, 0, 2]  # the first and the third batch share a group


def test_groups_are_kept_aside_whole():
    x = torch.arange(60)
    selection, heldout = keep_aside(x.split(7), 0.3, seed=1, label=lambda b: (b % 10).tolist())
    sides = [set((torch.cat(side) % 10).tolist()) for side in (selection, heldout)]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [7, 3]
    assert sum(map(len, selection + heldout)) == 60


def test_labels_must_be_as_many_as_examples():
    with pytest.raises(TaskError, match="one label for each of the 4 examples of a batch, found 3"):
        groups_of([torch.zeros(4)], lambda _: [1, 2, 3])


def report(sewa, *args):
    ended = sewa("select", *args, "-o", "out.safetensors", "--force")
    assert ended.code == 0, ended.err
    return Report.model_validate_json(Path("out.report.json").read_text())


@pytest.mark.parametrize("solver", [(), pytest.param(("--sparse",), marks=pytest.mark.breadth)])
def test_a_choice_by_groups_of_copies_is_that_without_the_copies(sewa, run_dir, solver):
    """Folds, intervals, the verdict: copies of an example are no further evidence."""
    (run_dir / "task.py").write_text(TASK)
    as_rows = report(sewa, "--K", "auto", *solver)
    alone = report(sewa, "--K", "auto", "--set", "args.copies=false", *solver)
    (run_dir / "task.py").write_text(TASK + GROUPS)
    grouped = report(sewa, "--K", "auto", *solver)
    assert (grouped.selection_rows, grouped.selection_groups) == (40 * COPIES, 40)
    assert (grouped.heldout_rows, grouped.heldout_groups) == (30 * COPIES, 30)
    assert alone.selection_groups is None
    weights = [[c.weight for c in one.candidates] for one in (alone, grouped, as_rows)]
    assert weights[1] == pytest.approx(weights[0], abs=1e-4)
    assert weights[2] != pytest.approx(weights[0], abs=1e-2)
    one, other = alone.find(Expected), grouped.find(Expected)
    assert other.loss == pytest.approx(one.loss, rel=1e-3)
    assert other.error == pytest.approx(one.error, rel=1e-3)
