"""Losses of single rows, however the user's loss and batches are made."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.nn import functional as F

from sewa_cli.objective.units import row_losses, take_evenly
from sewa_cli.task import Batches

OUTPUTS, LABELS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def in_place(outputs, batch):
    outputs.mul_(2.0)
    return F.cross_entropy(outputs, batch)


def in_place_and_looked_at(outputs, batch):
    loss = in_place(outputs, batch)
    assert loss.item() < 1e9  # which vmap refuses, when the outputs are changed already
    return loss


@pytest.mark.parametrize("loss", [in_place, in_place_and_looked_at])
def test_a_loss_that_works_in_place_splits_into_rows_all_the_same(loss):
    outputs = OUTPUTS.clone()
    found = row_losses(loss, outputs, LABELS, 6)
    expected = F.cross_entropy(2 * OUTPUTS, LABELS, reduction="none").double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(outputs, OUTPUTS)


@pytest.mark.parametrize(
    ("labels", "as_tensor"),
    [
        (LABELS.numpy(), torch.from_numpy),
        (LABELS.tolist(), torch.tensor),
        ([str(n) for n in LABELS.tolist()], lambda words: torch.tensor([int(w) for w in words])),
    ],
)
def test_labels_that_are_no_tensors_split_into_rows(labels, as_tensor):
    found = row_losses(
        lambda outputs, batch: F.cross_entropy(outputs, as_tensor(batch["y"])),
        OUTPUTS,
        {"y": labels},
        6,
    )
    expected = F.cross_entropy(OUTPUTS, LABELS, reduction="none").double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@given(some.integers(0, 400), some.integers(1, 40))
def test_some_batches_are_from_all_over_the_data(count, most):
    found = take_evenly([torch.full((2,), n) for n in range(count)], most)
    if count <= most:
        assert found is None
        return
    places = [int(batch[0]) for batch in found or []]
    gaps = torch.tensor([*places, count]).diff()
    assert len(places) == most
    assert places[0] == 0
    assert gaps.min() >= 1
    assert gaps.max() <= 2 * gaps.min() + 1


def test_a_loader_that_knows_its_length_is_not_passed_over_to_count_it():
    def generated():
        yield from range(5)

    class Unread(list[int]):
        def __iter__(self):
            raise AssertionError("was passed over")

    assert Batches(generated, "selection_data").count() == 5
    assert Batches(lambda: Unread(range(7)), "selection_data").count() == 7
