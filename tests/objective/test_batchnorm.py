"""BatchNorm: statistics of an average are not the average of statistics."""

import json
from pathlib import Path

import pytest
import torch
from helpers.batchnorm import make_net, train_batchnorm
from safetensors.torch import load_file, load_model
from torch import nn

from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective


def heldout_loss(model):
    x = torch.randn(250, 1, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        outputs = model.eval()(signal=x)
    return float(nn.functional.cross_entropy(outputs, (x.sum((1, 2)) > 0).long()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_written_file_has_recomputed_statistics_and_the_loss_of_the_report(bn_run, sewa, dtype):
    if dtype != torch.float32:
        for path in (bn_run / "ckpts").iterdir():
            path.unlink()
        (bn_run / "ckpts").rmdir()
        train_batchnorm(bn_run / "ckpts", dtype)
    ended = sewa("select", "-o", "out.safetensors")
    assert ended.code == 0, ended.err
    report = json.loads(Path("out.report.json").read_text())
    assert report["batchnorm"]["layers"] == 1
    assert report["batchnorm"]["data"] == "training_data"
    assert report["batchnorm"]["rows"] == 450
    assert report["batchnorm"]["before"] != report["batchnorm"]["after"] == report["average"]

    written = load_file("out.safetensors")
    selected = [load_file(path) for path in report["selected_paths"]]
    averaged = torch.stack([s["norm.running_var"].float() for s in selected]).mean(0)
    assert written["norm.running_var"].dtype == dtype
    assert not torch.allclose(written["norm.running_var"].float(), averaged, rtol=1e-4)
    # integers come from the newest selected checkpoint
    assert written["norm.num_batches_tracked"] == selected[-1]["norm.num_batches_tracked"]
    model = make_net()
    load_model(model, "out.safetensors")
    assert heldout_loss(model) == pytest.approx(report["average"]["heldout_loss"], rel=1e-6)


def test_a_single_checkpoint_keeps_its_statistics_in_every_command(bn_run, sewa):
    last = sorted((bn_run / "ckpts").iterdir(), key=lambda path: int(path.stem.split("-")[-1]))[-1]
    model = make_net()
    load_model(model, last)
    compared = json.loads(sewa("compare", "--methods", "last", "--json").out)["rows"][0]
    [evaluated] = json.loads(sewa("evaluate", last, "--json").out)["files"]
    selected = json.loads(sewa("select", "--json").out)["references"]["last"]
    losses = [found["heldout_loss"] for found in (compared, evaluated, selected)]
    assert losses == pytest.approx([heldout_loss(model)] * 3, rel=1e-6)


@pytest.mark.usefixtures("bn_run")
def test_an_average_without_a_model_warns_of_averaged_statistics(sewa):
    said = "BatchNorm statistics (norm.running_mean and 1 more) are averaged; `sewa select`"
    assert said in sewa("average", "ckpts", "-o", "out.safetensors").err
    assert "BatchNorm" not in sewa("average", "ckpts", "--method", "last", "-o", "last.pt").err


def test_off_keeps_the_averaged_statistics(bn_run, sewa):
    assert sewa("select", "--set", "bn=off", "-o", "out.safetensors").code == 0
    report = json.loads((bn_run / "out.report.json").read_text())
    assert report["batchnorm"]["data"] is None
    selected = [load_file(path)["norm.running_var"] for path in report["selected_paths"]]
    written = load_file("out.safetensors")["norm.running_var"]
    torch.testing.assert_close(written, torch.stack(selected).mean(0))


def test_recomputed_statistics_are_the_row_weighted_mean_over_batches():
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3)
    model = FlatModel(nn.Sequential(layer), torch.device("cpu"))
    batches = [torch.randn(n, 3) * n for n in (8, 8, 5, 1)]  # the single row has no variance
    objective = Objective(model, lambda m, x: m(x), lambda o, _: o.mean(), lambda _: None)
    assert objective.recompute_batchnorm(batches) == 22
    means = sum(len(b) * b.mean(0) for b in batches[:3]) / 21
    variances = sum(len(b) * b.var(0) for b in batches[:3]) / 21
    torch.testing.assert_close(layer.running_mean, means)
    torch.testing.assert_close(layer.running_var, variances)
    assert layer.num_batches_tracked == 0
    assert layer.momentum == 0.1
    assert not layer.training


@pytest.mark.usefixtures("bn_run")
def test_a_single_chosen_checkpoint_keeps_its_own_statistics(sewa):
    assert sewa("select", "--K", 1, "-o", "out.safetensors").code == 0
    report = json.loads(Path("out.report.json").read_text())
    assert report["batchnorm"]["data"] is None
    chosen = load_file(report["selected_paths"][0])
    assert all(torch.equal(t, chosen[n]) for n, t in load_file("out.safetensors").items())


@pytest.mark.parametrize(("mode", "word"), [("eval", "eval mode"), ("train", "train mode")])
def test_a_predict_that_sets_the_mode_is_told(bn_run, sewa, mode, word):
    task = bn_run / "task.py"
    changed = task.read_text().replace(
        "    return model(signal", f"    model.{mode}()\n    return model(signal"
    )
    task.write_text(changed)
    ended = sewa("select", "-o", "out.safetensors")
    assert ended.code == 4
    assert word in ended.error
    assert not Path("out.safetensors").exists()


def small_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return FlatModel(model, torch.device("cpu"))


@pytest.mark.parametrize("learning", [False, True])
def test_while_learning_a_batch_is_normalised_by_itself(learning):
    """Against the naive twin: the same network in train mode, or in eval mode."""
    model = small_network()
    objective = Objective(
        model,
        lambda net, batch: net(batch[0]),
        lambda outputs, batch: (outputs - batch[1]).square().mean(),
        torch.Tensor.backward,
        batch_statistics=learning,
    )
    x, y = 3 + 2 * torch.randn(20, 3), torch.randn(20, 2)
    statistics = {n: b.clone() for n, b in model.module.named_buffers()}
    loss, gradient = objective.gradient(model.flat.clone(), [(x, y)])
    seen = objective.outputs((x, y)).detach()
    # nothing is left behind: no statistics, no mode
    assert all(torch.equal(b, statistics[n]) for n, b in model.module.named_buffers())
    assert not any(module.training for module in model.module.modules())
    assert model.module[1].track_running_stats

    twin = small_network().module.train(learning)
    outputs = twin(x)
    twin_loss = (outputs - y).square().mean()
    twin_loss.backward()
    assert torch.allclose(seen, outputs, atol=1e-6)
    assert float(loss) == pytest.approx(twin_loss.item(), rel=1e-5)
    flat = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
    assert sorted(gradient.tolist()) == pytest.approx(sorted(flat.tolist()), abs=1e-6)
