"""Interval means: exact means of the weights of all steps since the last save."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.saved import assert_means, metadata
from safetensors.torch import load_file
from torch import nn

from sewa_cli.callbacks import IntervalMean, save_weights


class Net(nn.Module):
    """Tied, frozen and normalised, with an integer buffer and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.frozen(self.embed(x))))


def train(model, steps):
    """Yield after each step of a short training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        x = torch.randint(5, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x + 1) % 5).backward()
        optimizer.step()
        yield step


def copy(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


COMPILED = pytest.param(
    lambda m: torch.compile(m, backend="eager"),
    marks=[pytest.mark.breadth, pytest.mark.filterwarnings("ignore:.*torch.jit.*")],
)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, COMPILED])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_mean_is_that_of_all_steps_since_the_last_save(wrap, device, tmp_path):
    model = Net()
    wrapped = wrap(model)
    mean = IntervalMean(wrapped, device=device)
    kept = []
    expected = {}
    for step in train(wrapped, 12):
        mean.update()
        kept.append(copy(model))
        if step in (5, 12):
            save_weights(wrapped, tmp_path, step, mean=mean)
            expected[step], kept = kept, []
    for states in expected.values():  # as `average` does it
        for state in states:
            state["norm.num_batches_tracked"] = states[-1]["norm.num_batches_tracked"]
    assert_means(tmp_path, expected)
    about = metadata(tmp_path / "step-12.mean.safetensors")
    assert (about["step"], about["sewa_mean_from"]) == ("12", "6")
    assert load_file(tmp_path / "step-12.mean.safetensors")["norm.num_batches_tracked"] == 12


def test_a_mean_of_every_third_step_has_those_steps_and_never_none(tmp_path):
    model = Net()
    mean = IntervalMean(model, every=3)
    states = []
    for step in train(model, 8):
        mean.update()
        states.append(copy(model)["embed.weight"].double())
        if step in (7, 8):
            save_weights(model, tmp_path, step, mean=mean)
    found = load_file(tmp_path / "step-7.mean.safetensors")["embed.weight"]
    torch.testing.assert_close(found.double(), (states[2] + states[5]) / 2, rtol=1e-6, atol=1e-7)
    found = load_file(tmp_path / "step-8.mean.safetensors")["embed.weight"]
    assert torch.equal(found.double(), states[7])


def test_bfloat16_weights_are_averaged_in_float32_and_written_as_the_model_has_them(tmp_path):
    model = nn.Linear(3, 1, bias=False).bfloat16()
    mean = IntervalMean(model)
    for step in range(1, 1001):  # a sum in bfloat16 would stop growing at 256
        nn.init.constant_(model.weight, 1.0 + step % 2)
        mean.update()
    save_weights(model, tmp_path, 1000, mean=mean)
    found = load_file(tmp_path / "step-1000.mean.safetensors")["weight"]
    assert found.dtype == torch.bfloat16
    assert found.float().tolist() == [[1.5] * 3]


def test_a_mean_that_was_never_updated_or_is_of_another_model_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"call update\(\) after each optimizer step"):
        save_weights(model, tmp_path, 1, mean=IntervalMean(model))
    with pytest.raises(ValueError, match="mean is of another model"):
        save_weights(model, tmp_path, 1, mean=IntervalMean(nn.Linear(2, 2)))
    assert not list(tmp_path.iterdir())


def test_a_snapshot_without_a_mean_removes_the_mean_of_an_earlier_run(tmp_path):
    model = nn.Linear(2, 2)
    mean = IntervalMean(model)
    mean.update()
    save_weights(model, tmp_path, 1, mean=mean)
    save_weights(model, tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.safetensors"]


KILLED = """
import torch, sys
from sewa_cli.callbacks import IntervalMean, save_weights
model = torch.nn.Linear(300, 300)
mean = IntervalMean(model)
for step in range(1, 10**9):
    with torch.no_grad():
        model.weight.fill_(step)
    mean.update()
    if step % 4 == 0:
        save_weights(model, sys.argv[1], step, mean=mean)
"""


@pytest.mark.breadth
def test_a_killed_training_leaves_whole_means_and_no_snapshot_without_one(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    while len(list(tmp_path.glob("step-*.safetensors"))) < 20:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    means = {int(metadata(p)["step"]): p for p in tmp_path.glob("*.mean.safetensors")}
    snapshots = {path.name for path in tmp_path.glob("step-*")} - {p.name for p in means.values()}
    assert snapshots <= {f"step-{step}.safetensors" for step in means}
    for step, path in means.items():
        assert load_file(path)["weight"][0, 0] == step - 1.5


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:.*")  # of torch.distributed
def test_each_process_averages_its_shards_of_an_fsdp2_model(tmp_path):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        mean = IntervalMean(model)
        kept = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            mean.update()
            kept.append([p.full_tensor().detach().clone() for p in model.parameters()])
        with pytest.raises(ValueError, match="IntervalMean"):
            save_weights(model, tmp_path, 3, mean=mean)
        state = {"model": mean.state_dict(), "step": 3, "sewa_mean_steps": mean.steps}
        dcp.save(state, checkpoint_id=tmp_path / "step-3.mean")
    finally:
        dist.destroy_process_group()
    from sewa_cli.checkpoints import Reads, open_checkpoint

    found = open_checkpoint(tmp_path / "step-3.mean", Reads())
    assert (found.step, found.mean_steps) == (3, 3)
    for name, *all_steps in zip(dict(model.named_parameters()), *kept, strict=True):
        torch.testing.assert_close(found.read(name), torch.stack(all_steps).mean(0))


def test_watch_says_what_averaging_would_give_and_leaves_the_training_as_it_was(tmp_path, caplog):
    x = torch.randint(5, (32,))

    def watch(model):
        torch.rand(1)
        return float(nn.functional.cross_entropy(model(x), (x + 1) % 5).detach())

    def run(folder, loss):
        torch.manual_seed(0)
        model = Net()
        mean = IntervalMean(model, watch=loss)
        for step in train(model, 12):
            nn.functional.dropout(torch.ones(1))  # draws a random number
            mean.update()
            if step % 4 == 0:
                save_weights(model, folder, step, {"loss": 1.0}, mean=mean)
        assert model.training
        return {**copy(model), "random": torch.rand(3)}

    with caplog.at_level("INFO"):
        watched = run(tmp_path / "a", watch)
    plain = run(tmp_path / "b", None)
    assert all(torch.equal(watched[name], tensor) for name, tensor in plain.items())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    model = Net().eval()
    for step, line in zip((4, 8, 12), lines, strict=True):
        numbers = json.loads(metadata(tmp_path / "a" / f"step-{step}.safetensors")["metrics"])
        model.load_state_dict(load_file(tmp_path / "a" / f"step-{step}.safetensors"), strict=False)
        assert numbers["watch_loss"] == pytest.approx(watch(model), rel=1e-5)
        model.load_state_dict(load_file(tmp_path / "a" / f"step-{step}.mean.safetensors"), False)
        assert numbers["watch_average_loss"] <= watch(model) + 1e-5
        assert f"step {step}: held-out loss {numbers['watch_loss']:.4g}, of an average" in line
        assert f"{numbers['watch_average_loss']:.4g} (" in line


def test_a_watched_loss_that_fails_leaves_the_weights_as_they_were(tmp_path):
    def fail(model):
        if model.weight[0, 0] != 2:
            raise RuntimeError("no data")
        return 1.0

    model = nn.Linear(2, 2)
    mean = IntervalMean(model, watch=fail)
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        mean.update()
    with pytest.raises(RuntimeError, match="no data"):
        save_weights(model, tmp_path, 2, mean=mean)
    assert model.weight.tolist() == [[2.0, 2.0]] * 2
    assert model.training
