"""PEFT adapters: A and B apart with the gap told, or the products; PeftModel loads both."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.frozen import FROZEN, heldout_loss, third_party
from safetensors.torch import load_file, save_file

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("task")


@pytest.fixture
def task(frozen):
    """The task of a copy of the run in the working directory."""
    return frozen("peft").task


SELECT = ["select", "run", "--task", "task.py", "--K", 3, "--set", "gumbel.iterations=6", "--json"]


def loaded(folder):
    """The base with the adapter, as a user would load it."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    with third_party():
        base = LlamaForCausalLM.from_pretrained("base")
        return PeftModel.from_pretrained(base, folder)


def products(folder):
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    return {
        name: tensors[name.replace("lora_A", "lora_B")].double() @ A.double()
        for name, A in tensors.items()
        if "lora_A" in name
    }


def test_inspect_compare_and_select_work_and_the_adapter_loads_with_the_reported_loss(task, sewa):
    assert Path("run/adapter_model.safetensors").exists()  # the final one, not a checkpoint
    inspected = sewa("inspect", "run", "--json")
    assert [c["step"] for c in json.loads(inspected.out)["checkpoints"]] == list(range(2, 17, 2))
    compared = sewa(
        "compare", "run", "--task", "task.py", "--K", 3, "--methods", "last,uniform,lawa",
        "--format", "json", "--output-best", "best",
    )  # fmt: skip
    assert compared.code == 0, compared.err
    comparison = json.loads(compared.out)
    best = comparison["rows"][comparison["best"]]["heldout_loss"]
    assert heldout_loss(task, loaded("best")) == pytest.approx(best, abs=1e-5)
    for mode in ("factors", "merged"):
        ended = sewa(*SELECT, "--set", f"lora={mode}", "-o", mode)
        assert ended.code == 0, ended.err
        report = json.loads(ended.out)
        assert report["lora"]["mode"] == mode
        assert report["lora"]["pairs"] == 4
        reported = report["average"]["heldout_loss"]
        assert heldout_loss(task, loaded(mode)) == pytest.approx(reported, abs=1e-5)
        assert {p.name for p in Path(mode).iterdir()} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "sewa.report.json",
        }
        assert "library_name: peft" in Path(mode, "README.md").read_text()
        assert sewa("apply", f"{mode}/sewa.report.json", "-o", f"{mode}-2").code == 0
        one, two = (Path(f, "adapter_model.safetensors").read_bytes() for f in (mode, f"{mode}-2"))
        assert one == two


def test_averaging_factors_apart_warns_with_the_gap(sewa):
    ended = sewa("average", "run", "-o", "out", "--last", 4)
    assert ended.code == 0, ended.err
    every = [products(f"run/checkpoint-{step}") for step in (10, 12, 14, 16)]
    written = products("out")
    gaps = []
    for name, product in written.items():
        mean = torch.stack([p[name] for p in every]).mean(0)
        gaps.append(float((product - mean).norm() / mean.norm()))
    assert f"by {max(gaps):.2%} at most" in ended.err
    assert "--set lora=merged averages the products" in ended.err


def test_merged_averages_the_products_and_tells_the_error(sewa):
    ended = sewa("average", "run", "-o", "out", "--set", "lora=merged")
    assert ended.code == 0, ended.err
    every = [products(f"run/checkpoint-{step}") for step in range(2, 17, 2)]
    errors = []
    for name, product in products("out").items():
        mean = torch.stack([p[name] for p in every]).mean(0)
        best = torch.linalg.svdvals(mean)[2:].norm()
        assert float((product - mean).norm()) == pytest.approx(float(best), abs=1e-5)
        errors.append(float((product - mean).norm() / mean.norm()))
    assert f"error {max(errors):.2%} at most" in ended.err
    assert "warning" not in ended.err
    before = load_file("run/checkpoint-2/adapter_model.safetensors")
    after = load_file("out/adapter_model.safetensors")
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}


def test_merged_is_for_adapters_and_not_for_compare(run_dir, sewa, monkeypatch, tmp_path):
    ended = sewa("average", run_dir / "ckpts", "--set", "lora=merged", "-o", "x.safetensors")
    assert ended.code == 2
    assert "is not a PEFT adapter" in ended.error
    monkeypatch.chdir(tmp_path / "work")
    ended = sewa("compare", "run", "--task", "task.py", "--set", "lora=merged")
    assert ended.code == 2
    assert "compare averages A and B apart" in ended.error


def test_adapters_of_another_rank_or_scaling_are_refused(sewa):
    path = Path("run/checkpoint-4/adapter_config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 8}))
    ended = sewa("average", "run")
    assert ended.code == 3
    assert "checkpoint-4/adapter_config.json: lora_alpha: expected 4" in ended.error


def test_a_model_without_an_adapter_is_told(sewa):
    shutil.copy(FROZEN / "transformers" / "task.py", "plain.py")
    ended = sewa("select", "run", "--task", "plain.py", "--K", 3)
    assert ended.code == 3
    assert "is a PEFT adapter, and the task's model has none" in ended.error


@pytest.mark.parametrize("mode", ["factors", "merged"])
def test_an_adapter_with_nan_is_named(sewa, mode):
    path = Path("run/checkpoint-4/adapter_model.safetensors")
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, path)
    ended = sewa("average", "run", "--set", f"lora={mode}")
    assert ended.code == 3
    assert "run/checkpoint-4: " in ended.error
    assert "holds NaN or Inf; leave it out" in ended.error
