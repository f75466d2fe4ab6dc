"""Entries of `--cache`: found under the same key, and nowhere else."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from sewa_cli.cache import Cache, _checksum, digest
from sewa_cli.events import Events
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.rng import seeded

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary(max_size=3)
)
nests = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@given(nests, nests)
def test_two_nests_have_one_digest_only_if_they_are_the_same(one, two):
    assert (digest(one) == digest(two)) == (repr(one) == repr(two))


def test_tensors_count_by_all_that_they_hold():
    x = torch.arange(6.0)
    others = [x.double(), x.view(2, 3), x.view(3, 2), -x, x.bfloat16(), x.numpy(), x.tolist()]
    assert len({digest(other) for other in [x, *others]}) == len(others) + 1
    assert digest(x.view(2, 3).T) == digest(x.view(2, 3).T.contiguous())
    assert digest([x, x]) == digest([x, x.clone()])  # one object or two
    assert digest([few := [1], few]) == digest([[1], [1]])


def opened(folder, run="run"):
    return Cache(folder / "kept", run, Events())


def objective_with(memo, seed=0):
    model = FlatModel(nn.Linear(1, 1), torch.device("cpu"))
    functions = (None, None, None)
    return Objective(model, *functions, seed=seed, memo=memo)


def value(found):
    return None if found is None else found[""].tolist()


class Bomb:
    """Runs code where a pickle of it is loaded."""

    def __reduce__(self):
        return pytest.fail, ("code of the cache has run",)


def rewritten(path, what):
    """Damage an entry; or forge one, with the right checksum, as who knows the format would."""
    import pickle

    whole = path.read_bytes()
    bodies = {
        "pickle": pickle.dumps(Bomb()),
        "archive": b"PK" + bytes(100),
        "nothing": b"",
        "name": save({"x y": torch.ones(4)}),
    }
    if what == "folder":
        path.unlink()
        path.mkdir()
    elif what == "foreign":
        path.unlink()
        other = opened(path.parents[2])
        other.keep(("another",), {"": torch.zeros(4)})
        [found] = (path.parents[1]).glob("??/" + "?" * 64)
        found.rename(path)
    elif what in bodies:
        path.write_bytes(_checksum(path, bodies[what]) + bodies[what])
    else:
        cut = {"torn": whole[:-1], "bit": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}
        path.write_bytes(cut[what])


SPOILT = ["torn", "bit", "empty", "folder", "foreign", "pickle", "archive", "nothing", "name"]


@pytest.mark.parametrize("what", SPOILT)
def test_a_damaged_or_foreign_entry_is_as_good_as_none(tmp_path, what):
    opened(tmp_path).keep(("a",), {"": torch.ones(4)})
    [path] = (tmp_path / "kept").glob("??/*")
    rewritten(path, what)
    memo = opened(tmp_path)
    made = objective_with(memo).recall(("a",), lambda: {"": torch.full((4,), 2.0)})
    assert made[""].tolist() == [2, 2, 2, 2]
    assert memo.recalled == 0
    if what != "folder":
        assert value(opened(tmp_path).known(("a",))) == [2, 2, 2, 2]


def drawn():
    return {"": torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])}


def test_random_numbers_are_the_same_with_a_full_cache_an_empty_one_and_none(tmp_path):
    found = []
    for memo in (None, opened(tmp_path), opened(tmp_path)):
        objective = objective_with(memo, seed=3)
        with seeded(5):
            made = [objective.recall(("a", draw), drawn, draw) for draw in range(2)]
            found.append([one[""].tolist() for one in (*made, drawn())])
    assert found[0] == found[1] == found[2]
    assert len({tuple(each) for each in found[0]}) == 3
