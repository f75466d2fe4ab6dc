"""A loss of known classes, piece by piece: the same numbers as in one go, in bounded memory."""

import json

import pytest
import torch
from helpers.objectives import objective_of
from helpers.tiny import TASK, train_tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sewa_cli.objective.classes import PIECE
from sewa_cli.objective.tree import rows
from sewa_cli.task import make_task

V = 11


class Speaker(nn.Module):
    """A word and the one before it ↦ logits of the next; each row for itself."""

    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(V, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.mix = nn.Linear(12, 5)
        self.head = nn.Linear(5, V)

    def body(self, ids):
        x = self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2)
        return self.mix(torch.cat([x, x.roll(1, 1)], -1)).tanh()

    def forward(self, ids):
        return self.head(self.body(ids))


def batches(sizes, ignored=0.3, seed=0):
    """Of n rows and T words each; a share of the words are not to be predicted."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for shape in sizes:
        ids, labels = (torch.randint(V, shape, generator=draw) for _ in range(2))
        labels[torch.rand(shape, generator=draw) < ignored] = -100
        labels[0, 0] = 3  # never none at all
        found.append({"ids": ids, "labels": labels, "note": ["row"] * shape[0]})
    return found


def mean_over_targets(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())


def weighted(outputs, batch):
    each = F.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten(), reduction="none")
    return (each.reshape(batch["labels"].shape) * by_place(batch)).sum()


def by_place(batch):
    """Later words count for more, those that are not to be predicted for as much as others."""
    n, T = batch["labels"].shape
    return torch.linspace(0.5, 1.5, T).reshape(1, T) / (n * T)


PLAIN = {
    "build_model": Speaker,
    "loss": mean_over_targets,
    "predict": lambda model, batch: model(batch["ids"]),
}
TARGETS = {"targets": lambda batch: batch["labels"]}
WEIGHTED = {"loss": weighted, "targets": lambda batch: (batch["labels"], by_place(batch))}
HEAD = {
    "features": lambda model, batch: model.body(batch["ids"]),
    "head": lambda model, hidden: model.head(hidden),
}


def task_of(data, *functions):
    given = {**PLAIN, "selection_data": lambda: data}
    for some in functions:
        given |= some
    return make_task(given, source="somewhere/task.py", args={})


def naive(data, says, **others):
    """The user's loss of all logits."""
    silent = {name: f for name, f in says.items() if name != "targets"}
    return objective_of(task_of(data, silent), Speaker(**others))


def agree(found, expected, data):
    assert found.mean_loss(data)[0] == pytest.approx(expected.mean_loss(data)[0], rel=1e-5)
    units = found.unit_losses(data)
    assert units.mean == pytest.approx(expected.unit_losses(data).mean, rel=1e-5)
    for batch, share, value in zip(
        data, torch.split(units.rows, [rows(b) for b in data]), units.batches, strict=True
    ):
        torch.testing.assert_close(share.mean(), value)
        assert len(share) == rows(batch)
    flat = expected.model.flat.clone()
    theirs, mine = expected.gradient(flat, data), found.gradient(flat, data)
    assert float(mine[0]) == pytest.approx(float(theirs[0]), rel=1e-5)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-7)


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(2, 6)), min_size=1, max_size=3)


@given(
    sizes=SIZES,
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    memory_left=st.sampled_from([1, 100, 300, 1000, PIECE]),
    says=st.sampled_from([TARGETS, WEIGHTED]),
    has_head=st.booleans(),
)
def test_pieces_make_up_the_loss_its_rows_and_its_gradient(
    sizes, ignored, memory_left, says, has_head
):
    data = batches(sizes, ignored)
    task = task_of(data, says, HEAD if has_head else {})
    said = []
    found = objective_of(task, Speaker(), memory_left, said.append)
    agree(found, naive(data, says), data)
    assert not said


@pytest.mark.parametrize("gradient", [False, True])
def test_the_head_never_makes_more_logits_than_there_is_room_for(gradient):
    data = batches([(8, 9), (7, 5)])
    memory_left = 4 * V * 10
    model, largest = Speaker(), list[int]()
    found = objective_of(task_of(data, TARGETS, HEAD), model, memory_left)
    found.mean_loss(data)  # what the task says is looked at once, on two rows of each batch

    def measure(_, __, logits):
        largest.append(4 * logits.numel())

    model.head.register_forward_hook(measure)
    if gradient:
        found.gradient(found.model.flat.clone(), data)
    else:
        found.unit_losses(data)
    assert 0 < max(largest) <= memory_left
    assert len(largest) > 4


def mean_of_rows(outputs, batch):
    each = [
        mean_over_targets(o, {"labels": x}) for o, x in zip(outputs, batch["labels"], strict=True)
    ]
    return torch.stack(each).nanmean()


@pytest.mark.parametrize(
    "loss", [mean_of_rows, lambda outputs, batch: 2 * mean_over_targets(outputs, batch)]
)
def test_targets_that_are_not_what_the_loss_is_made_of_are_left_alone(loss):
    data, said = batches([(4, 6), (3, 6)], ignored=0.5), list[str]()
    found = objective_of(task_of(data, TARGETS, HEAD, {"loss": loss}), Speaker(), 100, said.append)
    expected = objective_of(task_of(data, {"loss": loss}), Speaker())
    assert found.targets(data[0]) is None
    flat = expected.model.flat.clone()
    assert found.mean_loss(data) == expected.mean_loss(data)
    assert torch.equal(found.gradient(flat, data)[1], expected.gradient(flat, data)[1])
    [text] = said
    assert text.startswith("targets(): their cross-entropies sum up to ")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("batch[1].float()", "targets() must return whole numbers, found torch.float32"),
        ("batch[1].tolist()", "targets() must return a tensor of classes, or a pair of one and its "
         "weights; found list"),
        ("batch[1][:-1]", "targets() must have the batch's 128 rows first, found shape [127]"),
        ("batch[1][:, None]", "targets() must have the shape of predict() but for its last "
         "dimension: that gives [1, 2], targets [1, 1]"),
        ("batch[1] + 1", "targets(): 2 is not a class: predict() gives 2, numbered from 0; use "
         "-100 where there is none"),
        ("batch[1] * 0 - 100", "targets(): a batch has no target; leave it out of the data"),
        ("(batch[1], torch.ones(5))", "targets(): weights of shape [5] do not fit targets of shape "
         "[128]"),
        ("batch['y']", "targets() raised TypeError: tuple indices must be integers or slices, not "
         "str"),
    ],
)  # fmt: skip
def test_wrong_targets_are_one_line(targets, said, run_dir, sewa):
    with (run_dir / "task.py").open("a") as task:
        task.write(f"\ndef targets(batch):\n    return {targets}\n")
    ended = sewa("validate")
    assert ended.code == 4
    assert ended.error == said


WITH_HEAD = """
def targets(batch):
    return batch[1]

def features(model, batch):
    return model[:2](batch[0])

def head(model, features):
    return model[2](features)
"""


def test_a_run_says_the_same_with_targets_as_without(run_dir, sewa):
    train_tiny(run_dir / "ckpts")
    reports = []
    for text in (TASK, TASK + WITH_HEAD):
        (run_dir / "task.py").write_text(text)
        for command in (("evaluate",), ("select", "--memory", "1MiB", "--force")):
            ended = sewa(*command, "--json")
            assert ended.code == 0, ended.err
            reports.append(json.loads(ended.out))
    evaluated, selected, by_pieces, selected_by_pieces = reports
    for one, two in zip(evaluated["files"], by_pieces["files"], strict=True):
        for key in ("selection_loss", "heldout_loss"):
            assert one[key] == pytest.approx(two[key], rel=1e-5)
    assert selected["selected"] == selected_by_pieces["selected"]
    ours, theirs = selected["average"], selected_by_pieces["average"]
    assert ours["heldout_loss"] == pytest.approx(theirs["heldout_loss"], rel=1e-5)
    assert selected["cost"]["forward_passes"] == selected_by_pieces["cost"]["forward_passes"]
    assert not selected_by_pieces["warnings"] or selected["warnings"]
