"""Run directories as real trainers leave them: every command works, and the result loads."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.tiny import Sewa
from helpers.trainers import (
    CLASSIFIER,
    LANGUAGE,
    LIGHTNING,
    heldout_loss,
    third_party,
    train_in_a_loop,
    train_with_lightning,
    train_with_transformers,
    write_task,
)
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("transformers")
STEPS = list(range(2, 17, 2))


class Run:
    """A folder with task.py and run/, as the trainer left it."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        self.path = folder / "run"
        self.task: ModuleType = write_task(folder, source)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("llama"), LANGUAGE)
    with third_party():
        train_with_transformers(run.task.build_model(), run.task.examples(), run.path)
    return run


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In shards of 6 kB."""
    run = Run(tmp_path_factory.mktemp("bert"), CLASSIFIER)
    with third_party():
        train_with_transformers(run.task.build_model(), run.task.examples(), run.path, "6KB")
    return run


@pytest.fixture(scope="session")
def lit(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("lightning")
    run = Run(tmp_path_factory.mktemp("lit"), LIGHTNING)
    with third_party():
        train_with_lightning(run.task.build_model(), run.task.data(0), run.path)
    return run


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A loop of one's own: model, optimizer and step in one .pt"""
    run = Run(tmp_path_factory.mktemp("plain"), LIGHTNING)
    run.path.mkdir()

    def save(model: nn.Module, optimizer: Any, step: int) -> None:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(content, run.path / f"ckpt_{step // 2}.pt")

    with third_party():
        train_in_a_loop(run.task.build_model(), run.task, save)
    return run


@contextmanager
def process_group(file: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Real FSDP (fully_shard) in one process, saved by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run = Run(tmp_path_factory.mktemp("fsdp"), LIGHTNING)

    def save(model: nn.Module, optimizer: Any, step: int) -> None:
        weights, moments = get_state_dict(model, optimizer)
        content = {"model": weights, "optim": moments, "step": step}
        dcp.save(content, checkpoint_id=run.path / f"step-{step}")  # type: ignore[attr-defined]

    with third_party(), process_group(run.folder / "store"):
        model = run.task.build_model()
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.body:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train_in_a_loop(model, run.task, save)
    return run


def work_in(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run to work in."""
    shutil.copytree(run.folder, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "work"


def snapshot(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def check_commands(sewa: Sewa, *select: object) -> dict[str, Any]:
    """inspect, average, compare, evaluate and select on ./run; returns select's report."""
    before = snapshot(Path("run"))
    inspected = sewa("inspect", "run", "--json")
    assert inspected.code == 0, inspected.err
    assert [c["step"] for c in json.loads(inspected.out)["checkpoints"]] == STEPS
    averaged = sewa("average", "run", "--method", "lawa", "--K", 3)
    assert averaged.code == 0, averaged.err
    assert len(averaged.out.split()) == 3
    settings = ["--task", "task.py", "--K", 3, "--set", "gumbel.iterations=6", "--device", "cpu"]
    compared = sewa("compare", "run", *settings, "--methods", "sewa,last,uniform")
    assert compared.code == 0, compared.err
    selected = sewa("select", "run", *settings, "--json", *select)
    assert selected.code == 0, selected.err
    report: dict[str, Any] = json.loads(selected.out)
    assert [c["step"] for c in report["candidates"]] == STEPS
    evaluated = sewa("evaluate", report["output"], "--task", "task.py", "--format", "json")
    assert evaluated.code == 0, evaluated.err
    [row] = json.loads(evaluated.out)["files"]
    assert row["heldout_loss"] == pytest.approx(report["average"]["heldout_loss"], abs=1e-6)
    assert snapshot(Path("run")) == before
    return report


def load_whole(kind: Any, folder: str) -> nn.Module:
    """By from_pretrained, which must find every tensor it wants and no other."""
    with third_party():
        model, about = kind.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    return model  # type: ignore[no-any-return]


def check_loss(run: Run, model: nn.Module, report: dict[str, Any]) -> None:
    with third_party():
        assert heldout_loss(run.task, model) == pytest.approx(
            report["average"]["heldout_loss"], abs=1e-5
        )


def test_a_hugging_face_run_becomes_a_folder_that_from_pretrained_loads(
    llama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    from transformers import AutoModelForCausalLM

    work_in(llama, tmp_path, monkeypatch)
    Path("run/checkpoint-14/tokenizer.json").write_text("{}")
    report = check_commands(sewa, "-o", "out")
    expected = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    expected |= {"sewa.report.json"}
    with_tokenizer = {"tokenizer.json"} if report["selected_steps"][-1] == 14 else set()
    assert {p.name for p in Path("out").iterdir()} == expected | with_tokenizer
    assert (
        load_file("out/model.safetensors").keys()
        == load_file("run/checkpoint-2/model.safetensors").keys()
    )
    model = load_whole(AutoModelForCausalLM, "out")
    check_loss(llama, model, report)
    assert all(c["logged"]["loss"] > 0 for c in report["candidates"])
    card = Path("out/README.md").read_text()
    steps = ", ".join(map(str, report["selected_steps"]))
    assert f"| steps | {steps} |" in card
    assert f"{report['average']['heldout_loss']:.6g}" in card
    assert "$ sewa select run --task task.py" in card


def test_a_sharded_run_becomes_a_sharded_folder(
    bert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    from transformers import BertForSequenceClassification

    work_in(bert, tmp_path, monkeypatch)
    assert not Path("run/checkpoint-2/model.safetensors").exists()
    report = check_commands(sewa)
    assert report["output"] == "averaged-2"  # `average` has taken the first name
    shards = sorted(Path("averaged-2").glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    index = json.loads(Path("averaged-2/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {p.name for p in shards}
    model = load_whole(BertForSequenceClassification, "averaged-2")
    check_loss(bert, model, report)
    assert sewa("apply", "averaged-2/sewa.report.json", "-o", "again").code == 0
    for shard in shards:
        assert (Path("again") / shard.name).read_bytes() == shard.read_bytes()


def test_a_lightning_run_becomes_safetensors_or_a_ckpt_that_load_from_checkpoint_loads(
    lit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    work_in(lit, tmp_path, monkeypatch)
    assert Path("run/last.ckpt").exists()
    report = check_commands(sewa)
    assert report["output"].endswith(".safetensors")
    assert all("train_loss" in c["logged"] for c in report["candidates"])
    model = lit.task.build_model()
    model.load_state_dict(load_file(report["output"]))
    check_loss(lit, model, report)

    again = check_commands(sewa, "-o", "best.ckpt")
    assert again["average"] == report["average"]
    with third_party():
        loaded = lit.task.Net.load_from_checkpoint("best.ckpt", weights_only=True)
    assert loaded.hparams["width"] == 16
    check_loss(lit, loaded, report)
    content = torch.load("best.ckpt", weights_only=True)
    assert content["global_step"] == report["selected_steps"][-1]
    assert not {"optimizer_states", "loops", "callbacks"} & content.keys()
    assert sewa("apply", "best.report.json", "-o", "again.ckpt").code == 0
    assert Path("again.ckpt").read_bytes() == Path("best.ckpt").read_bytes()


def test_streaming_from_pytorch_files_gives_what_holding_them_gives(
    plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    work_in(plain, tmp_path, monkeypatch)
    settings = ["--task", "task.py", "--K", 3, "--set", "gumbel.iterations=6", "--device", "cpu"]
    reports = {}
    for tier, memory in (("memory", "1GiB"), ("files", "9KB")):
        output = ["-o", f"{tier}.pt", "--memory", memory, "--json"]
        ended = sewa("select", "run", *settings, *output)
        assert ended.code == 0, ended.err
        reports[tier] = json.loads(ended.out)
        assert reports[tier]["placement"]["tier"] == tier
    assert reports["files"]["selected"] == reports["memory"]["selected"]
    assert reports["files"]["average"] == reports["memory"]["average"]


def test_an_fsdp_run_becomes_safetensors_that_load_state_dict_takes(
    fsdp: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    work_in(fsdp, tmp_path, monkeypatch)
    report = check_commands(sewa)
    model = fsdp.task.build_model()
    model.load_state_dict(load_file(report["output"]))
    check_loss(fsdp, model, report)
    name = report["output"].replace(".safetensors", ".report.json")
    assert sewa("apply", name, "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path(report["output"]).read_bytes()


# ---- where results may go --------------------------------------------------------------------


@pytest.mark.parametrize("output", ["run", "run/checkpoint-4", "run/checkpoint-4/new", "."])
def test_an_output_may_not_hold_or_be_in_an_input(
    llama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa, output: str
) -> None:
    work_in(llama, tmp_path, monkeypatch)
    before = snapshot(Path())
    for force in ([], ["--force"]):
        ended = sewa("average", "run", "-o", output, *force)
        assert ended.code == 3, ended.err
    assert snapshot(Path()) == before


def test_another_dtype_is_told_in_the_config(
    llama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    from transformers import AutoModelForCausalLM

    work_in(llama, tmp_path, monkeypatch)
    assert sewa("average", "run", "-o", "out", "--output-dtype", "bfloat16").code == 0
    with third_party():
        model = AutoModelForCausalLM.from_pretrained("out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_shards_are_those_of_huggingface_hub(
    llama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    work_in(llama, tmp_path, monkeypatch)
    assert sewa("average", "run", "-o", "whole").code == 0
    assert sewa("average", "run", "-o", "out", "--shard-size", "5KB").code == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    whole = load_file("whole/model.safetensors")
    in_order = {name: whole[name] for name in _names_as_they_come(Path("run/checkpoint-2"))}
    expected = split_torch_state_dict_into_shards(in_order, max_shard_size="5KB")
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"]["total_size"] == expected.metadata["total_size"]


def _names_as_they_come(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_files_beside_the_weights_come_from_the_newest_selected_else_from_the_run(
    llama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    work_in(llama, tmp_path, monkeypatch)
    Path("run/tokenizer_config.json").write_text("of the run")
    Path("run/merges.txt").write_text("of the run")
    Path("run/train.py").write_text("a script, not the model's code")
    Path("run/checkpoint-16/merges.txt").write_text("of the newest")
    Path("run/checkpoint-16/modeling_own.py").write_text("the model's code")
    Path("run/checkpoint-14/merges.txt").write_text("of another")
    assert sewa("average", "run", "-o", "out", "--last", 2).code == 0
    found = {p.name: p.read_text() for p in Path("out").iterdir() if p.suffix != ".safetensors"}
    assert found["tokenizer_config.json"] == "of the run"
    assert found["merges.txt"] == "of the newest"
    assert found["modeling_own.py"] == "the model's code"
    assert not {"train.py", "optimizer.pt", "trainer_state.json", "training_args.bin"} & set(found)


def test_apply_tells_when_a_shard_has_changed(
    bert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    work_in(bert, tmp_path, monkeypatch)
    assert sewa("average", "run", "-o", "out", "--report", "r.json").code == 0
    recipe = json.loads(Path("r.json").read_text())["recipe"]
    source = Path(recipe["sources"][0]["path"])
    files = " ".join(sorted(p.name for p in source.glob("model*")))
    command = f"sha256sum {files} | sha256sum"
    listed = subprocess.run(
        command, shell=True, cwd=source, capture_output=True, text=True, check=True
    )
    assert listed.stdout.split()[0] == recipe["sources"][0]["sha256"]
    shard = next(source.glob("model-00002-of-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    ended = sewa("apply", "r.json", "-o", "again")
    assert ended.code == 3
    assert f"{source}: has changed since the report: expected SHA-256" in ended.error
