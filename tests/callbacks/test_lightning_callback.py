"""The callback of lightning.Trainer leaves what `sewa select` needs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.saved import assert_means, metadata, steps
from helpers.tiny import TASK
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# of the trainer itself
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


def lit(*, by_hand=False):
    """Return a module that steps once a batch, or by hand and twice."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
            self.automatic_optimization = not by_hand

        def training_step(self, batch, _):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss)
            if by_hand:
                for _ in range(2):
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(F.cross_entropy(self.net(x), y))
                    optimizer.step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.3)

    return Lit()


def save_for_sewa(*arguments, **settings):
    from sewa_cli.callbacks.lightning import SaveForSewa

    return SaveForSewa(*arguments, **settings)


def fit(callback, folder, module, **settings):
    """Train; return the weights of `net` after each step."""
    import lightning

    class Keeper(lightning.Callback):
        states: ClassVar[dict[int, Any]] = {}

        def on_train_batch_end(self, trainer, pl_module, *_):
            weights = {name: tensor.clone() for name, tensor in pl_module.net.state_dict().items()}
            self.states[trainer.global_step] = weights

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 6, generator=generator)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    resume = settings.pop("ckpt_path", None)
    made = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, Keeper()],
        **settings,
    )
    made.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
    return Keeper.states


@pytest.fixture(autouse=True)
def quiet_lightning():
    names = ("lightning.pytorch", "lightning.fabric")
    levels = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)


def test_sewa_selects_from_what_lightning_left(tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = lit()
    callback = save_for_sewa("ckpts", every=3, start=0.5, part="net", means=True)
    states = fit(callback, tmp_path, module, max_epochs=3, accumulate_grad_batches=2)
    # 20 batches an epoch, two of them a step, three epochs
    assert steps(Path("ckpts")) == [15, 18, 21, 24, 27, 30]
    expected = {step: [states[step - n] for n in range(3)] for step in range(15, 31, 3)}
    assert_means(Path("ckpts"), expected)
    last = load_file("ckpts/step-30.safetensors")
    assert all(torch.equal(last[name], x) for name, x in module.net.state_dict().items())
    assert "train_loss" in json.loads(metadata(Path("ckpts/step-30.safetensors"))["metrics"])
    Path("task.py").write_text(TASK)
    ended = sewa(
        *("select", "ckpts", "--from", "snapshots", "--task", "task.py", "--K", 3),
        *("--set", "gumbel.iterations=3", "--json"),
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)["references"]["last"]["heldout_loss"]
    names = {}
    exec(TASK, names)
    with torch.no_grad():
        parts = [(len(y), F.cross_entropy(module.net(x), y)) for x, y in names["heldout_data"]()]
    naive = float(sum(n * loss for n, loss in parts)) / sum(n for n, _ in parts)
    assert found == pytest.approx(naive, rel=1e-5)


@pytest.mark.breadth
def test_lightning_by_hand_with_two_steps_a_batch_is_saved_as_often(tmp_path):
    callback = save_for_sewa(tmp_path / "ckpts", every=5, start=0.5)
    fit(callback, tmp_path, lit(by_hand=True), max_steps=30)
    assert steps(tmp_path / "ckpts") == [16, 20, 26, 30]
    assert "net.0.weight" in load_file(tmp_path / "ckpts" / "step-30.safetensors")
