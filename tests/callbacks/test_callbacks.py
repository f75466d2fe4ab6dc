"""Saving from a loop of one's own: whole files, at the right moments, and nothing half-written."""

import json
from pathlib import Path

import pytest
import torch
from helpers.saved import metadata, steps
from helpers.tiny import TASK
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from sewa_cli.callbacks import save_weights
from sewa_cli.callbacks.saving import Moments, Saver


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        base = torch.arange(12.0)
        self.register_buffer("odd", base[::2])  # two views of one tensor, one of them strided
        self.register_buffer("low", base[:4])


COMPILED = pytest.param(
    torch.compile, marks=[pytest.mark.breadth, pytest.mark.filterwarnings("ignore:.*torch.jit.*")]
)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, COMPILED])
def test_bare_weights_are_written_once_whatever_wraps_the_model(wrap, tmp_path):
    model = Tied()
    path = save_weights(wrap(model), tmp_path / "new" / "folder", 7, {"loss": torch.tensor(0.5)})
    assert path == tmp_path / "new" / "folder" / "step-7.safetensors"
    found, expected = load_file(path), model.state_dict()
    del expected["head.weight"]
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert metadata(path) == {"format": "pt", "step": "7", "metrics": '{"loss": 0.5}'}


def test_metrics_are_json_whatever_they_are(tmp_path):
    given = {"nan": float("nan"), "text": "no number", "many": torch.zeros(3), "one": 1}
    path = save_weights(nn.Linear(2, 2), tmp_path, 1, given)
    assert json.loads(metadata(path)["metrics"]) == {"nan": None, "one": 1.0}


def test_a_model_that_is_sharded_over_processes_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    model.weight.ds_id = 3
    with pytest.raises(ValueError, match="sharded over processes"):
        save_weights(model, tmp_path, 1)
    with pytest.raises(ValueError, match="sharded over processes"):
        save_weights(nn.Linear(2, 2, device="meta"), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_the_recipe_in_the_docs_runs_and_sewa_selects_from_it(tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "saving.md").read_text()
    recipe = page.split("```python\n")[1].split("```")[0]
    assert len(recipe.split("\n")) - recipe.count("\n\n") - 1 == 5
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train_one_step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long())
        loss.backward()
        optimizer.step()
        return loss.detach()

    exec(recipe, {"model": model, "steps": 1000, "train_one_step": train_one_step})
    assert steps(tmp_path / "ckpts") == list(range(750, 1001, 50))
    Path("task.py").write_text(TASK)
    ended = sewa("select", "ckpts/", "--task", "task.py", "--K", 2, "--set", "gumbel.iterations=3")
    assert ended.code == 0, ended.err


def test_a_new_run_is_refused_in_the_folder_of_another(tmp_path):
    save_weights(nn.Linear(2, 2), tmp_path, 8)
    with pytest.raises(FileExistsError, match="holds 1 checkpoints of an earlier run"):
        Saver(tmp_path)._begin(nn.Linear(2, 2), 0, 100, is_writer=True)


def test_the_last_part_is_saved_and_the_last_step_too():
    moments = Moments(every=50, start=0.75)
    due = [step for step in range(1, 1024) if moments.is_due(step - 1, step, 1023)]
    assert due == [800, 850, 900, 950, 1000, 1023]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 2.5}, {"start": 1.0}, {"start": -0.1}])
def test_wrong_moments_are_refused_when_the_callback_is_made(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Saver("ckpts", **wrong)
