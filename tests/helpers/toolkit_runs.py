"""Runs with the files that each toolkit writes, as its own source writes them."""

from __future__ import annotations

import json
import pickle
import tarfile
import warnings
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.saved import save_distributed

STEPS = (100, 200, 300, 400, 500, 600)


def weights(seed: int) -> OrderedDict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (8, 4), "0.bias": (8,), "1.weight": (2, 8), "1.bias": (2,)}
    return OrderedDict((n, torch.randn(s, generator=generator)) for n, s in shapes.items())


def optimizer() -> dict[str, Any]:
    return {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}


def fairseq(folder: Path) -> None:
    def content(step: int) -> dict[str, Any]:
        epoch = (step + 100) // 200
        history = {"criterion_name": "CrossEntropy", "lr_scheduler_state": {"best": None}}
        return {
            "args": None,
            "cfg": {"model": Namespace(arch="transformer", data=PurePosixPath("/data"))},
            "model": weights(step),
            "criterion": None,
            "optimizer_history": [{**history, "num_updates": n} for n in (7, step)],
            "task_state": {},
            "extra_state": {
                "metrics": [(0, "loss", "AverageMeter", {"val": np.float32(2)})],
                "train_iterator": {"epoch": epoch, "shuffle": True},
                "ema": weights(step + 1),
            },
            "last_optimizer_state": optimizer(),
        }

    for step in STEPS:
        epoch = (step + 100) // 200
        name = f"checkpoint{epoch}.pt" if step % 200 == 0 else f"checkpoint_{epoch}_{step}.pt"
        torch.save(content(step), folder / name)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint.best_loss_4.1000.pt"):
        (folder / name).write_bytes((folder / "checkpoint3.pt").read_bytes())


def icefall(folder: Path) -> None:
    for step in STEPS:
        params = {
            "batch_idx_train": step,
            "average_period": 100,
            "best_valid_loss": np.float64(3.5),
            "exp_dir": PurePosixPath("zipformer/exp"),
            "cur_epoch": step // 200,
        }
        content = {
            "model": weights(step),
            "optimizer": optimizer(),
            "scheduler": {"batch": step},
            "grad_scaler": {},
            "sampler": {"epoch": 1, "random": np.random.get_state()},
            "model_avg": weights(step + 1),
        }
        name = f"epoch-{step // 200}.pt" if step % 200 == 0 else f"checkpoint-{step}.pt"
        torch.save(content | params, folder / name)
    torch.save(content | params, folder / f"checkpoint-{step}.pt")
    (folder / "best-valid-loss.pt").write_bytes((folder / "epoch-2.pt").read_bytes())
    torch.save({"model": weights(0)}, folder / "pretrained.pt")


def espnet(folder: Path) -> None:
    for epoch in STEPS:
        torch.save(weights(epoch), folder / f"{epoch}epoch.pth")
    torch.save(weights(0), folder / "valid.acc.ave_10best.pth")
    torch.save(weights(0), folder / "valid.acc.ave_5best.till10epoch.pth")
    state = {"model": weights(600), "reporter": defaultdict(dict), "optimizers": [optimizer()]}
    torch.save(state, folder / "checkpoint.pth")
    links = {"latest": "600epoch", "valid.acc.best": "300epoch", "valid.acc.ave_1best": "300epoch"}
    for name, target in (links | {"valid.acc.ave": "valid.acc.ave_10best"}).items():
        (folder / f"{name}.pth").symlink_to(f"{target}.pth")


def opennmt(folder: Path) -> None:
    for step in STEPS:
        whole = weights(step)
        generator = {"weight": whole.pop("1.weight"), "bias": whole.pop("1.bias")}
        content = {
            "model": dict(whole),
            "generator": generator,
            "vocab": {"src": ["a"], "tgt": ["b"], "data_task": "seq2seq"},
            "opt": Namespace(rnn_size=8, data={"corpus": {"path_src": "x"}}),
            "optim": {"training_step": step, "optimizer": optimizer()},
        }
        torch.save(content, folder / f"model_step_{step}.pt")


def saved(content: Any) -> bytes:
    file = BytesIO()
    torch.save(content, file)
    return file.getvalue()


def nemo(folder: Path, mode: Literal["w:", "w:gz"] = "w:") -> None:
    for epoch in STEPS:
        with tarfile.open(folder / f"conformer--epoch={epoch}.nemo", mode) as tar:
            entry = tarfile.TarInfo(".")
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
            members = {
                "model_config.yaml": b"target: x",
                "model_weights.ckpt": saved(weights(epoch)),
            }
            for name, data in (members | {f"{epoch}_tokenizer.model": b"spm"}).items():
                entry = tarfile.TarInfo(f"./{name}")
                entry.size = len(data)
                tar.addfile(entry, BytesIO(data))


def stable_baselines3(folder: Path) -> None:
    for step in STEPS:
        with ZipFile(folder / f"rl_model_{step}_steps.zip", "w") as archive:
            archive.writestr("data", f'{{"num_timesteps": {step}, ":serialized:": "gAWV"}}')
            archive.writestr("pytorch_variables.pth", saved({}))
            with archive.open("policy.pth", "w", force_zip64=True) as file:
                torch.save(weights(step), file)
            archive.writestr("policy.optimizer.pth", saved(optimizer()))
            archive.writestr("_stable_baselines3_version", "2.9.2")
    (folder / "rl_model_replay_buffer_600_steps.pkl").write_bytes(b"not to be read")
    (folder / "best_model.zip").write_bytes((folder / "rl_model_300_steps.zip").read_bytes())


TORCH = b"ctorch.distributed.checkpoint."


def rename(folder: Path, old: bytes, new: bytes) -> None:
    """Put another class in the metadata of a distributed checkpoint."""
    metadata = pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), 2)
    assert TORCH + old in metadata
    (folder / ".metadata").write_bytes(metadata.replace(TORCH + old, new))


def megatron(folder: Path) -> None:
    own = b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    state = {"optimizer.state.exp_avg.0.weight": torch.ones(8, 4), "0._extra_state/shard_0_1": 7}
    for step in STEPS:
        inside = folder / f"iter_{step:07d}"
        save_distributed({**weights(step), **state}, inside, flat=True)
        rename(inside, b"metadata\nMetadata\n", own)
        (inside / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        torch.save({"args": Namespace(lr=0.1), "iteration": step}, inside / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{STEPS[-1]}")


def olmo_core(folder: Path) -> None:
    own = b"colmo_core.distributed.checkpoint.filesystem\n_StorageInfo\n"
    for step in STEPS:
        content = {"model": weights(step), "optim": {"0.weight.exp_avg": torch.ones(8, 4)}}
        inside = save_distributed(content, folder / f"step{step}" / "model_and_optim")
        rename(inside, b"filesystem\n_StorageInfo\n", own)
        (inside.parent / "config.json").write_text("{}")


def speechbrain(folder: Path) -> None:
    for epoch in STEPS:
        inside = folder / "save" / f"CKPT+2026-11-20+01-{epoch // 100:02d}-00+00"
        inside.mkdir(parents=True)
        (inside / "CKPT.yaml").write_text(
            f"# yamllint disable\nWER: 3.5\nend-of-epoch: true\nunixtime: {epoch + 0.5}\n"
        )
        whole = weights(epoch)
        torch.save({n: one for n, one in whole.items() if n[0] == "0"}, inside / "encoder.ckpt")
        torch.save({n: one for n, one in whole.items() if n[0] == "1"}, inside / "model.ckpt")
        torch.save(optimizer(), inside / "optimizer.ckpt")
        torch.save({"steps": epoch, "losses": []}, inside / "annealing.ckpt")
        (inside / "counter.ckpt").write_text(str(epoch))
        (inside / "brain.ckpt").write_text("avg_train_loss: 1.5\n")
    torch.save({"x": torch.ones(2)}, folder / "save" / "lm.ckpt")


def sentence_transformers(folder: Path) -> None:
    modules = [
        {"idx": n, "name": str(n), "path": p} for n, p in enumerate(("", "1_Pool", "2_Dense"))
    ]
    for step in STEPS:
        inside = folder / f"checkpoint-{step}"
        for name in ("1_Pool", "2_Dense"):
            (inside / name).mkdir(parents=True)
            (inside / name / "config.json").write_text("{}")
        (inside / "modules.json").write_text(json.dumps(modules))
        (inside / "config.json").write_text('{"dtype": "float32"}')
        (inside / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        whole = weights(step)
        dense = {"linear." + name[2:]: whole.pop(name) for name in ("1.weight", "1.bias")}
        save_file(dict(whole), inside / "model.safetensors")
        save_file(dense, inside / "2_Dense" / "model.safetensors")


def load(path: Path) -> Any:
    """Load as the toolkits do, pickled objects and all."""
    return torch.load(path, map_location="cpu", weights_only=False)


def read_fairseq(path: Path) -> dict[str, Tensor]:
    state = load(path)
    assert state["cfg"]["model"].data == PurePosixPath("/data")
    assert state["optimizer_history"][-1]["num_updates"] == STEPS[-1]
    assert "ema" not in state["extra_state"]
    return state["model"]  # type: ignore[no-any-return]


def read_icefall(path: Path) -> dict[str, Tensor]:
    state = load(path)
    assert state["exp_dir"] == PurePosixPath("zipformer/exp")
    assert type(state["best_valid_loss"]) is np.float64
    assert state["sampler"]["random"][0] == "MT19937"
    return state["model"]  # type: ignore[no-any-return]


def read_opennmt(path: Path) -> dict[str, Tensor]:
    state = load(path)
    assert state["opt"] == Namespace(rnn_size=8, data={"corpus": {"path_src": "x"}})
    assert state["vocab"]["tgt"] == ["b"]
    return state["model"] | {f"1.{n}": tensor for n, tensor in state["generator"].items()}


def read_nemo(path: Path) -> dict[str, Tensor]:
    with tarfile.open(path, "r:") as tar, TemporaryDirectory() as folder:
        tar.extractall(folder, filter="data")
        assert Path(folder, f"{STEPS[-1]}_tokenizer.model").read_bytes() == b"spm"
        assert Path(folder, "model_config.yaml").read_bytes() == b"target: x"
        return load(Path(folder, "model_weights.ckpt"))  # type: ignore[no-any-return]


def read_stable_baselines3(path: Path) -> dict[str, Tensor]:
    with ZipFile(path) as archive:
        assert json.loads(archive.read("data"))["num_timesteps"] == STEPS[-1]
        assert torch.load(archive.open("policy.optimizer.pth"))["param_groups"]
        return torch.load(archive.open("policy.pth"), weights_only=True)  # type: ignore[no-any-return]


def load_distributed(folder: Path, *keys: str) -> Any:
    from torch.distributed import checkpoint

    state: dict[str, Any] = {name: torch.zeros_like(one) for name, one in weights(0).items()}
    content = dict.fromkeys(keys, state) or state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        checkpoint.load(content, checkpoint_id=folder, no_dist=True)
    return state


def read_megatron(path: Path) -> dict[str, Tensor]:
    assert load(path / "common.pt") == {"args": Namespace(lr=0.1), "iteration": STEPS[-1]}
    assert (path / "metadata.json").exists()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    assert metadata.state_dict_metadata.keys() == {*weights(0), "0._extra_state/shard_0_1"}
    return load_distributed(path)  # type: ignore[no-any-return]


def read_olmo_core(path: Path) -> dict[str, Tensor]:
    assert (path / "config.json").exists()
    return load_distributed(path / "model_and_optim", "model")  # type: ignore[no-any-return]


def read_speechbrain(path: Path) -> dict[str, Tensor]:
    found = {file.stem: file for file in path.glob("*.ckpt")}
    assert found.keys() == {"encoder", "model", "optimizer", "annealing", "counter", "brain"}
    assert "unixtime: 600.5" in (path / "CKPT.yaml").read_text()
    return {**load(found["encoder"]), **load(found["model"])}


def read_sentence_transformers(path: Path) -> dict[str, Tensor]:
    found = {}
    for module in json.loads((path / "modules.json").read_text()):
        if (file := path / module["path"] / "model.safetensors").exists():
            found |= load_file(file)
        else:
            assert (file.parent / "config.json").exists()
    assert not (path / "trainer_state.json").exists()
    return {name.replace("linear.", "1."): tensor for name, tensor in found.items()}


# toolkit → how its run is made, the suffix of its files, and how they are read
RUNS: dict[str, tuple[Callable[[Path], None], str, Callable[[Path], dict[str, Tensor]]]] = {
    "fairseq": (fairseq, ".pt", read_fairseq),
    "icefall": (icefall, ".pt", read_icefall),
    "ESPnet": (espnet, ".pth", load),
    "OpenNMT-py": (opennmt, ".pt", read_opennmt),
    "NeMo": (nemo, ".nemo", read_nemo),
    "NeMo, packed": (partial(nemo, mode="w:gz"), ".nemo", read_nemo),
    "SpeechBrain": (speechbrain, "", read_speechbrain),
    "sentence-transformers": (sentence_transformers, "", read_sentence_transformers),
    "Megatron-Core": (megatron, "", read_megatron),
    "OLMo-core": (olmo_core, "", read_olmo_core),
    "stable-baselines3": (stable_baselines3, ".zip", read_stable_baselines3),
}
