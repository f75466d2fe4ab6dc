"""Callbacks: real trainers leave what `sewa select` needs, and nothing half-written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from helpers.hf_runs import (
    build,
    load,
    naive_examples,
    naive_loss,
    text_rows,
    write_model,
    write_rows,
)
from helpers.tiny import TASK, Sewa
from safetensors import safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sewa_cli.callbacks import save_weights, saving
from sewa_cli.callbacks.huggingface import SaveForSewa as SaveFromTrainer
from sewa_cli.callbacks.lightning import SaveForSewa as SaveFromLightning
from sewa_cli.callbacks.saving import Moments

# of the trainers themselves
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def steps(folder: Path) -> list[int]:
    assert not list(folder.glob(".*")), "something half-written is left"
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.iterdir())


# ---- a plain loop -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        base = torch.arange(12.0)
        self.register_buffer("odd", base[::2])  # two views of one tensor, one of them strided
        self.register_buffer("low", base[:4])


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, torch.compile])
def test_bare_weights_are_written_once_whatever_wraps_the_model(wrap: Any, tmp_path: Path) -> None:
    model = Tied()
    path = save_weights(wrap(model), tmp_path / "new" / "folder", 7, {"loss": torch.tensor(0.5)})
    assert path == tmp_path / "new" / "folder" / "step-7.safetensors"
    found, expected = load_file(path), model.state_dict()
    del expected["head.weight"]
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert metadata(path) == {"format": "pt", "step": "7", "metrics": '{"loss": 0.5}'}


def test_dtype_is_that_of_floating_point_tensors_only(tmp_path: Path) -> None:
    found = load_file(save_weights(Tied(), tmp_path, 1, dtype=torch.bfloat16))
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    floats = {tensor.dtype for name, tensor in found.items() if "tracked" not in name}
    assert floats == {torch.bfloat16}


def test_metrics_are_json_whatever_they_are(tmp_path: Path) -> None:
    given = {"nan": float("nan"), "text": "no number", "many": torch.zeros(3), "one": 1}
    path = save_weights(nn.Linear(2, 2), tmp_path, 1, given)
    assert json.loads(metadata(path)["metrics"]) == {"nan": None, "one": 1.0}


def test_a_file_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_weights(model, tmp_path, 3)
    nn.init.ones_(model.weight)
    assert load_file(save_weights(model, tmp_path, 3))["weight"].eq(1).all()
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("broken", ["save_file", "os.replace"])
def test_a_failing_write_leaves_the_older_file_and_no_other(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    before = save_weights(model, tmp_path, 3).read_bytes()
    nn.init.ones_(model.weight)

    def fail(_: Any, path: Any, *__: Any) -> None:
        if broken == "save_file":
            Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    owner, name = (os, "replace") if broken == "os.replace" else (saving, "save_file")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="No space left"):
        save_weights(model, tmp_path, 3)
    monkeypatch.undo()
    assert steps(tmp_path) == [3]
    assert (tmp_path / "step-3.safetensors").read_bytes() == before


def test_a_model_that_is_sharded_over_processes_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_id = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="sharded over processes"):
        save_weights(model, tmp_path, 1)
    with pytest.raises(ValueError, match="sharded over processes"):
        save_weights(nn.Linear(2, 2, device="meta"), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_the_recipe_in_the_docs_runs_and_sewa_selects_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "saving.md").read_text()
    recipe = page.split("```python\n")[1].split("```")[0]
    assert len(recipe.split("\n")) - recipe.count("\n\n") - 1 == 5
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train_one_step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    exec(recipe, {"model": model, "steps": 1000, "train_one_step": train_one_step})
    assert steps(tmp_path / "ckpts") == list(range(750, 1001, 50))
    Path("task.py").write_text(TASK)
    ended = sewa("select", "ckpts/", "--task", "task.py", "--K", 2, "--iterations", 3)
    assert ended.code == 0, ended.err


# ---- when ---------------------------------------------------------------------------------------


def test_the_last_part_is_saved_and_the_last_step_too() -> None:
    moments = Moments(every=50, start=0.75)
    due = [step for step in range(1, 1024) if moments.is_due(step - 1, step, 1023)]
    assert due == [800, 850, 900, 950, 1000, 1023]


def test_steps_that_jump_are_not_missed() -> None:
    moments = Moments(every=10, start=0)
    seen = list(range(0, 100, 3))
    due = [b for a, b in pairwise(seen) if moments.is_due(a, b, 99)]
    assert due == [12, 21, 30, 42, 51, 60, 72, 81, 90, 99]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 2.5}, {"start": 1.0}, {"start": -0.1}])
def test_wrong_moments_are_refused_when_the_callback_is_made(wrong: dict[str, Any]) -> None:
    for callback in (SaveFromTrainer, SaveFromLightning):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            callback("ckpts", **wrong)


# ---- transformers.Trainer -----------------------------------------------------------------------


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, rows: list[dict[str, Any]], model: Path) -> None:
        words = transformers.AutoTokenizer.from_pretrained(model)
        texts = [row["text"] for row in rows]
        self.rows = words(texts, truncation=True, max_length=32)["input_ids"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index]}


def trainer(
    folder: Path, callback: SaveFromTrainer, output: Path, save_steps: int = 100
) -> transformers.Trainer:
    words = transformers.AutoTokenizer.from_pretrained(folder / "model")
    settings: dict[str, Any] = {
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.03,
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_steps": save_steps,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    torch.manual_seed(0)
    return transformers.Trainer(
        model=build("causal-lm", folder / "model"),
        args=transformers.TrainingArguments(str(output), **settings),
        train_dataset=Texts(text_rows()[100:200], folder / "model"),
        eval_dataset=Texts(text_rows()[200:210], folder / "model"),
        data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
        callbacks=[callback],
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of transformers.Trainer with the callback, and the YAML for it."""
    folder = tmp_path_factory.mktemp("trained")
    write_model(folder / "model", "causal-lm")
    for part, rows in (("selection", text_rows()[:40]), ("heldout", text_rows()[40:80])):
        write_rows(folder / "data" / f"{part}.jsonl", rows)
    made = trainer(folder, SaveFromTrainer(folder / "ckpts", every=2, start=0.5), folder / "out")
    made.train()
    assert made.model is not None
    torch.save(made.model.state_dict(), folder / "last.pt")
    (folder / "sewa.yaml").write_text(
        "task: huggingface\n"
        "args: {kind: causal-lm, model: model, selection: data/selection.jsonl, "
        "heldout: data/heldout.jsonl}\n"
        "checkpoints: ckpts\nK: 3\ndevice: cpu\ngumbel: {iterations: 4}\n"
    )
    return folder


def test_a_trainers_run_is_saved_in_its_last_part_with_step_and_metrics(trained: Path) -> None:
    assert steps(trained / "ckpts") == [10, 12, 14, 16, 18, 20]  # optimizer steps, not batches
    last = torch.load(trained / "last.pt")
    path = trained / "ckpts" / "step-20.safetensors"
    found = load_file(path)
    assert set(last) - set(found) == {"lm_head.weight"}  # tied
    assert all(torch.equal(found[name], last[name]) for name in found)
    assert metadata(path)["step"] == "20"
    metrics = json.loads(metadata(path)["metrics"])
    assert {"loss", "eval_loss", "learning_rate", "epoch"} <= set(metrics)
    first = json.loads(metadata(trained / "ckpts" / "step-10.safetensors")["metrics"])
    assert "eval_loss" not in first  # evaluated after it was saved
    assert first["loss"] != metrics["loss"]


def test_sewa_selects_from_what_a_trainer_left_and_reports_the_naive_loss(
    trained: Path, sewa: Sewa, tmp_path: Path
) -> None:
    output = tmp_path / "out.safetensors"
    ended = sewa("select", "--config", trained / "sewa.yaml", "-o", output, "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    examples = naive_examples(trained, "causal-lm", "heldout")
    for path, found in (
        (output, report["average"]["heldout_loss"]),
        (trained / "ckpts" / "step-20.safetensors", report["references"]["last"]["heldout_loss"]),
    ):
        loss, _ = naive_loss(load("causal-lm", trained / "model", path), examples, "causal-lm")
        assert found == pytest.approx(loss, rel=1e-4)


def test_an_averaged_file_loads_with_from_pretrained(
    trained: Path, sewa: Sewa, tmp_path: Path
) -> None:
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "config.json").write_bytes((trained / "model" / "config.json").read_bytes())
    output = folder / "model.safetensors"
    assert sewa("select", "--config", trained / "sewa.yaml", "-o", output).code == 0
    for file in (output, trained / "ckpts" / "step-20.safetensors"):
        content = file.read_bytes()
        output.write_bytes(content)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(model.lm_head.weight, load_file(file)["transformer.wte.weight"])


def test_a_new_run_does_not_mix_with_an_older_one(trained: Path) -> None:
    before = {path: path.read_bytes() for path in (trained / "ckpts").iterdir()}
    with pytest.raises(FileExistsError, match="holds 6 checkpoints of an earlier run"):
        trainer(trained, SaveFromTrainer(trained / "ckpts", every=2), trained / "out").train()
    assert {path: path.read_bytes() for path in (trained / "ckpts").iterdir()} == before


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_resumed_run_goes_on_where_it_was_and_replaces_its_own_later_steps(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> transformers.Trainer:
        callback = SaveFromTrainer(tmp_path / "ckpts", every=2, start=0.5)
        return trainer(trained, callback, tmp_path / "trainer", save_steps=14)

    run().train()
    whole = {path.name: load_bytes(path.read_bytes()) for path in (tmp_path / "ckpts").iterdir()}
    (tmp_path / "ckpts" / "step-16.safetensors").write_bytes(b"to be replaced")
    (tmp_path / "ckpts" / "step-20.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        run().train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-14"))
    assert "2 checkpoints of steps after 14 are replaced as the run reaches them" in caplog.text
    assert steps(tmp_path / "ckpts") == [10, 12, 14, 16, 18, 20]
    for name, tensors in whole.items():
        found = load_file(tmp_path / "ckpts" / name)
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    metrics = json.loads(metadata(tmp_path / "ckpts" / "step-16.safetensors")["metrics"])
    assert "eval_loss" in metrics  # of step 10, before it was resumed


# ---- lightning ----------------------------------------------------------------------------------


class Lit(lightning.LightningModule):
    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            for _ in range(2):
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self.net(x), y))
                optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fit(callback: SaveFromLightning, folder: Path, module: Lit, **settings: Any) -> Any:
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
        callbacks=[callback],
        **settings,
    )
    made.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
    return made


@pytest.fixture(autouse=True)
def quiet_lightning() -> Iterator[None]:
    names = ("lightning.pytorch", "lightning.fabric")
    levels = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)


def test_sewa_selects_from_what_lightning_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = Lit()
    callback = SaveFromLightning("ckpts", every=3, start=0.5, part="net")
    fit(callback, tmp_path, module, max_epochs=3, accumulate_grad_batches=2)
    # 20 batches an epoch, two of them a step, three epochs
    assert steps(Path("ckpts")) == [15, 18, 21, 24, 27, 30]
    last = load_file("ckpts/step-30.safetensors")
    assert all(torch.equal(last[name], x) for name, x in module.net.state_dict().items())
    assert "train_loss" in json.loads(metadata(Path("ckpts/step-30.safetensors"))["metrics"])
    Path("task.py").write_text(TASK)
    ended = sewa("select", "ckpts", "--task", "task.py", "--K", 3, "--iterations", 3, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)["references"]["last"]["heldout_loss"]
    names: dict[str, Any] = {}
    exec(TASK, names)
    with torch.no_grad():
        parts = [(len(y), F.cross_entropy(module.net(x), y)) for x, y in names["heldout_data"]()]
    naive = float(sum(n * loss for n, loss in parts)) / sum(n for n, _ in parts)
    assert found == pytest.approx(naive, rel=1e-5)


def test_lightning_by_hand_with_two_steps_a_batch_is_saved_as_often(tmp_path: Path) -> None:
    callback = SaveFromLightning(tmp_path / "ckpts", every=5, start=0.5)
    made = fit(callback, tmp_path, Lit(by_hand=True), max_steps=30)
    assert made.global_step == 30
    assert steps(tmp_path / "ckpts") == [16, 20, 26, 30]
    assert "net.0.weight" in load_file(tmp_path / "ckpts" / "step-30.safetensors")


def test_a_new_lightning_run_is_refused_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    callback = SaveFromLightning(tmp_path / "ckpts", every=8, start=0)
    made = fit(callback, tmp_path, Lit(), max_epochs=1)
    assert steps(tmp_path / "ckpts") == [8, 16, 20]
    made.save_checkpoint(tmp_path / "at-20.ckpt", weights_only=False)
    with pytest.raises(FileExistsError, match="holds 3 checkpoints of an earlier run"):
        fit(SaveFromLightning(tmp_path / "ckpts", every=8), tmp_path, Lit(), max_epochs=1)
    fit(callback, tmp_path, Lit(), max_epochs=2, ckpt_path=tmp_path / "at-20.ckpt")
    assert steps(tmp_path / "ckpts") == [8, 16, 20, 24, 32, 40]


def test_a_lightning_run_without_an_end_needs_start_0(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the number of steps is not known in advance"):
        fit(
            SaveFromLightning(tmp_path / "a"),
            tmp_path,
            Lit(),
            max_epochs=-1,
            max_time="00:00:00:01",
        )
    with pytest.raises(ValueError, match="the LightningModule has no such part"):
        fit(SaveFromLightning(tmp_path / "a", part="model"), tmp_path, Lit(), max_steps=2)


@pytest.mark.slow
def test_one_callback_does_not_import_what_another_needs() -> None:
    """What is None in sys.modules cannot be imported. In one process, from the strictest on."""
    code = "import sys\n"
    for module, never in [
        ("sewa_cli.callbacks", ["transformers", "lightning", "pytorch_lightning", "typer", "rich"]),
        ("sewa_cli.callbacks.huggingface", ["lightning", "pytorch_lightning", "typer"]),
        ("sewa_cli.callbacks.lightning", ["typer"]),
    ]:
        code += f"sys.modules |= dict.fromkeys({never!r})\nimport {module}\n"
        code += f"for name in {never!r}: del sys.modules[name]\n"
    subprocess.run([sys.executable, "-c", code], check=True)
