"""Train the runs of this folder: `python tests/frozen/make.py [NAME …] [--into FOLDER]`.

Each is left by a real trainer, and small: 8 checkpoints, steps 2 to 16. Tests copy them with
`helpers.frozen` instead of training. `make test-all PART=frozen` trains them anew and compares names,
keys, shapes and dtypes, so that a newer version of a trainer is noticed.

To be small, large files that no command reads are kept in the newest checkpoint alone. Where a run
was made is left out of its files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS, EVERY = 16, 2


def transformers(task: Any) -> None:
    """The Trainer, with optimizer, scheduler and states; one safetensors file a checkpoint."""
    train_with_trainer(task)
    keep_in_the_newest_only("rng_state.pth", "optimizer.pt", "training_args.bin")


def sharded(task: Any) -> None:
    """The Trainer with weights alone (save_only_model), in shards of 2 kB."""
    train_with_trainer(task, shard_size="2KB", save_only_model=True)
    keep_in_the_newest_only("training_args.bin")


def peft(task: Any) -> None:
    """A LoRA adapter by the Trainer; the base model is in base/."""
    task.build_base().save_pretrained("base")
    train_with_trainer(task, save_only_model=True)
    keep_in_the_newest_only("README.md", "training_args.bin")


def keep_in_the_newest_only(*names: str) -> None:
    for path in Path("run").glob("*/*"):
        if path.name in names and path.parent.name != f"checkpoint-{STEPS}":
            path.unlink()


def train_with_trainer(task: Any, shard_size: str | None = None, **more: Any) -> None:
    from transformers import Trainer, TrainingArguments

    model = task.build_model()
    if shard_size is not None:  # the Trainer calls save_pretrained without a size
        save = model.save_pretrained
        model.save_pretrained = lambda *a, **k: save(*a, max_shard_size=shard_size, **k)
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=EVERY,
        logging_steps=EVERY,
        per_device_train_batch_size=8,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=task.examples())
    trainer.train()
    trainer.save_model()


def lightning(task: Any) -> None:
    """epoch=0-step=2.ckpt … and last.ckpt, which is the newest once more."""
    import torch
    from lightning import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    keep = ModelCheckpoint(
        dirpath="run",
        filename="{epoch}-{step}",
        monitor="train_loss",
        every_n_train_steps=EVERY,
        save_top_k=-1,
        save_last=True,
    )
    Trainer(
        max_steps=STEPS,
        callbacks=[keep],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task.build_model(), DataLoader(TensorDataset(*task.data(0)), batch_size=8))
    for path in Path("run").glob("*.ckpt"):
        content = torch.load(path, weights_only=False)
        torch.save(without_folder(content, str(Path.cwd().resolve())), path)


def without_folder(content: Any, folder: str) -> Any:
    if isinstance(content, str):
        return content.replace(folder, "/home/user")
    if isinstance(content, dict):
        made = {without_folder(k, folder): without_folder(v, folder) for k, v in content.items()}
        return type(content)(made)
    return [without_folder(v, folder) for v in content] if type(content) is list else content


def loop(task: Any) -> None:
    """A loop of one's own: model, optimizer and step in one file, ckpt_1.pt to ckpt_8.pt."""
    import torch

    Path("run").mkdir()

    def save(model: Any, optimizer: Any, step: int) -> None:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(content, f"run/ckpt_{step // EVERY}.pt")

    train_in_a_loop(task, task.build_model(), save)


def fsdp(task: Any) -> None:
    """FSDP2 (fully_shard) on one process, saved by torch.distributed.checkpoint."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def save(model: Any, optimizer: Any, step: int) -> None:
        weights, moments = get_state_dict(model, optimizer)
        content = {"model": weights, "optim": moments, "step": step}
        dcp.save(content, checkpoint_id=f"run/step-{step}")

    store = Path("store").resolve()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = task.build_model()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.body:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    train_in_a_loop(task, fully_shard(model, mesh=mesh), save)
    dist.destroy_process_group()
    store.unlink(missing_ok=True)


def fsdp_two_ranks(_: Any) -> None:
    """A Llama under torchrun, its weights alone saved by two processes; steps 10 to 16."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    subprocess.run([*command, "--as-rank"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def train_as_rank() -> None:
    """Do what one of the two processes does, in the folder of the run."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    task = load_task()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = task.build_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    rows = torch.stack([row["input_ids"] for row in task.examples()])
    for step in range(1, STEPS + 1):
        picked = torch.randint(len(rows), (8,), generator=torch.Generator().manual_seed(step))
        own = rows[picked][dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
        if step > STEPS - 4 * EVERY and step % EVERY == 0:
            state = {"model": get_model_state_dict(model), "step": step}
            dcp.save(state, checkpoint_id=f"run/step-{step}")
    dist.destroy_process_group()


def train_in_a_loop(task: Any, model: Any, save: Callable[[Any, Any, int], None]) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    inputs, labels = task.data(0)
    for step in range(1, STEPS + 1):
        at = slice(8 * (step % 12), 8 * (step % 12) + 8)
        optimizer.zero_grad()
        task.loss(model(inputs[at]), (inputs[at], labels[at])).backward()
        optimizer.step()
        if step % EVERY == 0:
            save(model, optimizer, step)


RUNS = {
    trainer.__name__: trainer
    for trainer in (transformers, sharded, peft, lightning, loop, fsdp, fsdp_two_ranks)
}


def load_task() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("task", "task.py")
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    return task


def make(name: str, into: Path) -> None:
    """Train one run next to its task.py, which stays, in the place of the one that is there."""
    import torch

    folder = into / name
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(HERE / name / "task.py", place)
        before = Path.cwd()
        os.chdir(place)  # so that no file has an absolute path
        try:
            with warnings.catch_warnings(), torch.random.fork_rng():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                RUNS[name](load_task())
        finally:
            os.chdir(before)
        for path in [*Path(place).rglob("*.json"), *Path(place).rglob("*.md")]:
            path.write_text(path.read_text().replace(f"{Path(place).resolve()}/", ""))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place, folder, ignore=shutil.ignore_patterns("__pycache__"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS])
    parser.add_argument("--into", type=Path, default=HERE)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_rank:
        return train_as_rank()
    for name in asked.names or RUNS:
        make(name, asked.into)
    return None


if __name__ == "__main__":
    main()
