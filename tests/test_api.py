"""From Python: the README's example runs, and the objects handed in stay as they were."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers.tiny import train_tiny
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli import Selection, select
from sewa_cli.errors import ConfigError, UserCodeError
from sewa_cli.templates import write_template

README = Path(__file__).parent.parent / "README.md"


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def batches(seed):
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(seed))
    labels = (x[:, 0] * x[:, 1] > 0).long()
    return [(x[:100], labels[:100]), (x[100:], labels[100:])]


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def test_select_on_objects_does_the_same_job(tmp_path):
    paths = train_tiny(tmp_path / "ckpts")
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    result = select(
        tmp_path / "ckpts",
        model=model,
        loss=loss,
        selection_data=batches(1),
        heldout_data=lambda: iter(batches(2)),
        K=3,
        output=tmp_path / "out.safetensors",
        device="cpu",
        gumbel={"iterations": 5},
    )
    assert isinstance(result, Selection)
    assert len(result.selected) == 3
    assert result.paths == [paths[i] for i in result.selected]
    assert result.steps == [10 * (i + 1) for i in result.selected]
    assert len(result.probabilities) == 12
    assert result.output == tmp_path / "out.safetensors"
    assert (tmp_path / "out.report.json").is_file()
    written = load_file(tmp_path / "out.safetensors")
    for name, tensor in result.state_dict().items():
        assert torch.equal(tensor, written[name])
    # the caller's model and random numbers are untouched
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_without_an_output_nothing_is_written(tmp_path, monkeypatch):
    paths = train_tiny(tmp_path / "ckpts")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    settings = {"last": 8, "gumbel": {"iterations": 2}}
    result = select(
        list(reversed(paths)),
        model=network(),
        loss=loss,
        selection_data=batches(1),
        K=2,
        **settings,
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert result.output is None
    assert result.report.recipe is None  # it takes a hash of every checkpoint
    assert result.summary().startswith(result.table())
    assert result.report.k == 8
    network().load_state_dict(result.state_dict())


TRACE = """
import os, sys, warnings
import torch
from torch import nn

os.chdir = None
filters, path = list(warnings.filters), list(sys.path)
from sewa_cli import select

x = torch.randn(200, 6)
select("ckpts", model=nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)), K=2,
       loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
       selection_data=[(x, (x[:, 0] > 0).long())], gumbel={"iterations": 2})
new = [one for one in warnings.filters if one not in filters and "sympy" not in str(one)]
assert not new, new  # torch imports sympy
assert sys.path == path
assert "sewa_cli.cli" not in sys.modules  # which sets up a process of its own: signals, memory
"""


def test_select_leaves_no_trace_in_its_host(tmp_path):
    train_tiny(tmp_path / "ckpts", k=4)
    subprocess.run([sys.executable, "-c", TRACE], cwd=tmp_path, check=True)


def test_faults_are_typed_exceptions(tmp_path):
    train_tiny(tmp_path, k=3)
    with pytest.raises(ConfigError, match="--K 3: there are 3 checkpoints; K is at most 2"):
        select(tmp_path, model=network(), loss=loss, selection_data=batches(1), K=3)
    with pytest.raises(ConfigError, match="lats: unknown key; did you mean last"):
        select(tmp_path, model=network(), loss=loss, selection_data=batches(1), K=2, lats=3)

    def broken(outputs, batch):
        raise RuntimeError(f"no loss for {type(batch).__name__} {outputs.shape}")

    with pytest.raises(UserCodeError, match=r"loss\(\) raised RuntimeError: no loss for tuple"):
        select(tmp_path, model=network(), loss=broken, selection_data=batches(1), K=2)


def test_the_readmes_python_example_runs(tmp_path, monkeypatch):
    """It is typed in the demo's folder."""
    pytest.importorskip("sklearn")
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    [example] = [text for text in examples if "from sewa_cli import select" in text]
    write_template("demo", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "task", raising=False)
    task = import_module("task")
    Path("ckpts").mkdir()
    for step in range(1, 9):
        save_file(task.build_model().state_dict(), f"ckpts/step-{step}.safetensors")
    namespace = {}
    exec(compile(example, "README.md", "exec"), namespace)
    result = namespace["result"]
    assert isinstance(result, Selection)
    assert result.state_dict()
