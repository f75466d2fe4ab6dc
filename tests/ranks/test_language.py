"""A sharded Llama, from the Trainer and as FSDP2 saves it, selected on two ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.shells import environment
from helpers.tiny import Sewa
from helpers.together import TORCHRUN, alike, report_of, sewa_on
from helpers.trainers import (
    LANGUAGE,
    heldout_loss,
    third_party,
    train_with_transformers,
    write_task,
)

pytestmark = pytest.mark.breadth
SETTINGS = "task: ./task.py\nK: 3\nsolver: gumbel\ndevice: cpu\ngumbel: {iterations: 6}\n"


def test_a_run_of_the_trainer_loads_with_from_pretrained_and_has_the_reported_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    task = write_task(tmp_path, LANGUAGE)
    Path("sewa.yaml").write_text(SETTINGS)
    with third_party():
        torch.manual_seed(0)
        train_with_transformers(task.build_model(), task.examples(), Path("run"), "10KB")
    assert sewa("select", "run", "-o", "one").code == 0
    ended = sewa_on(2, "select", "run", "-o", "two")
    assert ended.code == 0, ended.err
    one, two = report_of("one/sewa.report.json"), report_of("two/sewa.report.json")
    alike(two, one)
    assert two["cost"]["bytes_read"] <= 1.1 * one["cost"]["bytes_read"] / 2
    with third_party():
        model = LlamaForCausalLM.from_pretrained("two")
    assert heldout_loss(task, model) == pytest.approx(two["average"]["heldout_loss"], rel=1e-5)
    for file in Path("one").glob("*.safetensors"):
        assert Path("two", file.name).read_bytes() == file.read_bytes()


def test_a_checkpoint_that_two_processes_saved_with_fsdp_is_read_by_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path, LANGUAGE)
    Path("sewa.yaml").write_text(SETTINGS)
    script = Path(__file__).with_name("train_fsdp.py")
    trained = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", str(script), "task.py", "ckpts"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert len(list(Path("ckpts/step-1").glob("*.distcp"))) == 2
    assert sewa("select", "ckpts", "-o", "one.safetensors").code == 0
    ended = sewa_on(2, "select", "ckpts", "-o", "two.safetensors")
    assert ended.code == 0, ended.err
    one, two = report_of("one.report.json"), report_of("two.report.json")
    alike(two, one)
    assert two["cost"]["bytes_read"] <= 1.1 * one["cost"]["bytes_read"] / 2
    assert Path("two.safetensors").read_bytes() == Path("one.safetensors").read_bytes()
    ended = sewa("evaluate", "two.safetensors", "--json")
    [file] = json.loads(ended.out)["files"]
    assert file["heldout_loss"] == pytest.approx(two["average"]["heldout_loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_average_as_a_distributed_checkpoint_is_loaded_by_torch(
    run_dir: Path, sewa: Sewa, ranks: int
) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    arguments = ["select", "--solver", "gumbel"]
    assert sewa(*arguments, "-o", "one.safetensors").code == 0
    arguments += ["--set", "output_format=dcp", "-o", "averaged"]
    ended = sewa(*arguments) if ranks == 1 else sewa_on(ranks, *arguments)
    assert ended.code == 0, ended.err
    expected = load_file(run_dir / "one.safetensors")
    state = {"model": {name: torch.zeros_like(x) for name, x in expected.items()}}
    with third_party():
        dcp.load(state, checkpoint_id="averaged", no_dist=True)  # type: ignore[attr-defined]
    for name, tensor in expected.items():
        assert torch.equal(state["model"][name], tensor)
    assert sewa("verify", "averaged/sewa.report.json").code == 0
    # and by ourselves, beside files
    ended = sewa("evaluate", "averaged", "one.safetensors", "--json")
    there, here = json.loads(ended.out)["files"]
    assert there["heldout_loss"] == here["heldout_loss"]
