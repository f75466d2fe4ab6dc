"""Runs of the Trainer, in shards, and of FSDP2 on two processes, selected on two ranks."""

import json
from pathlib import Path

import pytest
import torch
from helpers.frozen import heldout_loss, third_party
from helpers.tiny import report_of
from helpers.together import alike, sewa_on

pytestmark = pytest.mark.breadth
SETTINGS = "task: ./task.py\nK: 3\nsolver: gumbel\ndevice: cpu\ngumbel: {iterations: 6}\n"


def test_a_run_of_the_trainer_loads_with_from_pretrained_and_has_the_reported_loss(frozen, sewa):
    task = frozen("sharded").task
    Path("sewa.yaml").write_text(SETTINGS)
    assert sewa("select", "run", "-o", "one").code == 0
    ended = sewa_on(2, "select", "run", "-o", "two")
    assert ended.code == 0, ended.err
    one, two = report_of("one/sewa.report.json"), report_of("two/sewa.report.json")
    alike(two, one)
    assert two["cost"]["bytes_read"] <= 1.1 * one["cost"]["bytes_read"] / 2
    with third_party():
        model = type(task.build_model()).from_pretrained("two")
    assert heldout_loss(task, model) == pytest.approx(two["average"]["heldout_loss"], rel=1e-5)
    for file in Path("one").glob("*.safetensors"):
        assert Path("two", file.name).read_bytes() == file.read_bytes()


def test_a_checkpoint_that_two_processes_saved_with_fsdp_is_read_by_slices(frozen, sewa):
    frozen("fsdp_two_ranks")
    Path("sewa.yaml").write_text(SETTINGS)
    assert len(list(Path("run/step-10").glob("*.distcp"))) == 2
    assert sewa("select", "run", "-o", "one.safetensors").code == 0
    ended = sewa_on(2, "select", "run", "-o", "two.safetensors")
    assert ended.code == 0, ended.err
    one, two = report_of("one.report.json"), report_of("two.report.json")
    alike(two, one)
    assert two["cost"]["bytes_read"] <= 1.1 * one["cost"]["bytes_read"] / 2
    assert Path("two.safetensors").read_bytes() == Path("one.safetensors").read_bytes()
    ended = sewa("evaluate", "two.safetensors", "--json")
    [file] = json.loads(ended.out)["files"]
    assert file["heldout_loss"] == pytest.approx(two["average"]["heldout_loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_average_as_a_distributed_checkpoint_is_loaded_by_torch(run_dir, sewa, ranks):
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
        dcp.load(state, checkpoint_id="averaged", no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(state["model"][name], tensor)
    assert sewa("verify", "averaged/sewa.report.json").code == 0
    # and by ourselves, beside files
    ended = sewa("evaluate", "averaged", "one.safetensors", "--json")
    there, here = json.loads(ended.out)["files"]
    assert there["heldout_loss"] == here["heldout_loss"]
