"""PyTorch files and distributed checkpoints: which of their tensors are weights, read lazily."""

import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from helpers.memory import peaks
from helpers.saved import save_distributed

from sewa_cli import checkpoints as library
from sewa_cli.checkpoints import Reads, TensorInfo
from sewa_cli.errors import CheckpointError, ConfigError, Unfinished


def open_one(path, state_key=None):
    return library.open_checkpoint(path, Reads(), state_key)


def state(value=1.0):
    return {"w": torch.full((3, 2), value), "h": torch.full((2,), value).bfloat16()}


@pytest.mark.parametrize("key", [None, "state_dict", "model", "model_state_dict", "ema"])
def test_the_state_dict_is_found_where_trainers_put_it(tmp_path, key):
    content = state() if key is None else {key: state(), "epoch": 3, "args": {}}
    torch.save(content, tmp_path / "step-7.pt")
    found = open_one(tmp_path / "step-7.pt")
    assert found.tensors == {"w": TensorInfo("F32", (3, 2)), "h": TensorInfo("BF16", (2,))}
    assert found.step == 7
    assert found.reads.bytes == 0
    assert torch.equal(found.read("h"), state()["h"])
    assert found.reads.bytes == 4


def test_a_key_of_another_name_may_be_deep_and_is_found_or_named(tmp_path):
    path = tmp_path / "step-1.pt"
    torch.save({"net": {"weights": state()}, "other": {"x": torch.ones(2)}, "epoch": 3}, path)
    assert list(open_one(path).tensors) == ["net.weights.w", "net.weights.h", "other.x"]
    assert list(open_one(path, "net.weights").tensors) == ["w", "h"]
    with pytest.raises(ConfigError, match=r"--state-key: no nets in it; it holds net, other, ep"):
        open_one(path, "nets")


def test_a_file_without_weights_is_refused_by_the_keys_it_has(tmp_path):
    path = tmp_path / "step-1.pt"
    torch.save({"epoch": 3, "optimizer": {"m": torch.ones(2)}, "args": {}}, path)
    with pytest.raises(CheckpointError, match="no weights in it; it holds epoch, optimizer, args"):
        open_one(path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds a list, not a dict of tensors"):
        open_one(path)


def test_tensors_may_share_one_storage_and_need_not_be_contiguous(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    tied = {"a": whole, "b": whole, "t": whole.T, "part": whole[1]}
    torch.save(OrderedDict(tied), tmp_path / "step-1.pt")
    found = open_one(tmp_path / "step-1.pt")
    for name, tensor in tied.items():
        assert torch.equal(found.read(name), tensor)


@pytest.mark.parametrize("content", [b"", b"text, not weights", b"PK\x03\x04 and no more"])
def test_what_is_no_pytorch_file_is_named(tmp_path, content):
    (tmp_path / "step-1.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-1.pt: "):
        open_one(tmp_path / "step-1.pt")


def test_a_format_that_sewa_does_not_read_is_called_unknown(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.writestr("model.ckpt", b"weights")
    with pytest.raises(
        CheckpointError, match=r"m.zip: has no policy.pth in it; it holds model.ckp"
    ):
        open_one(tmp_path / "m.zip")
    (tmp_path / "notes").write_bytes((tmp_path / "m.zip").read_bytes())
    with pytest.raises(CheckpointError, match=r"notes: unknown format; sewa reads \.safetensors"):
        open_one(tmp_path / "notes")


def test_a_distributed_checkpoint_gives_the_models_tensors_and_its_step(tmp_path):
    optimizer = {"state": {"w": {"exp_avg": torch.zeros(3, 2)}}}
    content = {"model": state(), "optim": optimizer, "step": 40}
    found = open_one(save_distributed(content, tmp_path / "final"))
    assert found.tensors == {"h": TensorInfo("BF16", (2,)), "w": TensorInfo("F32", (3, 2))}
    assert found.step == 40
    assert found.kind == "distributed"
    for name, tensor in state().items():
        assert torch.equal(found.read(name), tensor)
    assert found.reads.bytes == 28


def test_the_key_of_a_distributed_checkpoint_can_be_named(tmp_path):
    content = {"app": {"net": state(), "optim": {"m": torch.zeros(2)}}}
    folder = save_distributed(content, tmp_path / "step-4")
    for key in (None, "app.net"):
        found = open_one(folder, key)
        assert sorted(found.tensors) == ["h", "w"]
        assert found.left == {"app.optim": "training"}
    content = {"model": state(), "ema": state(), "scheduled_head": state()}
    both = save_distributed(content, folder / "b")
    names = ["model.h", "model.w", "scheduled_head.h", "scheduled_head.w"]
    assert sorted(open_one(both).tensors) == names
    assert open_one(both).left == {"ema": "copy"}


@pytest.mark.parametrize("fault", ["cut", "missing", "metadata"])
def test_a_half_written_distributed_checkpoint_is_named(tmp_path, fault):
    folder = save_distributed(state(), tmp_path / "step-1")
    [data] = folder.glob("*.distcp")
    if fault == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif fault == "missing":
        data.unlink()
    else:
        path = folder / ".metadata"
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(Unfinished, match=r"step-1/.*(cut short|is missing|not a complete file)"):
        open_one(folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_memory_stays_far_below_one_file(tmp_path):
    """Checkpoints of 120 MB in tensors of 4 MB; the cap is 60 MB, half of one of them."""
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2, 3):
        tensors = {f"w{i}": torch.full((1_000_000,), float(step)) for i in range(30)}
        torch.save({"model": tensors, "optimizer": tensors}, run / f"step-{step}.pt")
    output = tmp_path / "out.safetensors"
    assert max(peaks([f"average {run} -o {output} -q"])) < 60e6
    [mean] = library.open_all([output], Reads(), keep_ours=True)
    assert mean.read("w7")[5] == 2.0
