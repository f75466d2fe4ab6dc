"""On a device that is not the CPU, everything is where it belongs, and the answer is the same.

Not collected by itself: once a process has the device, torch asks it for streams, random numbers
and more wherever it asks a GPU. `test_standin.py` runs this in a process of its own.
"""

import json
from pathlib import Path

import pytest
import torch
from helpers import standin
from helpers.standin import NAME
from safetensors.torch import load_file

in_run_dir = pytest.mark.usefixtures("run_dir")
QUICKLY = ["--set", "aggregate.folds=3"]


def chosen(sewa, device, *arguments):
    """The report and the file of a selection on that device."""
    name = f"{device}.safetensors"
    ended = sewa("select", "--device", device, "-o", name, "--force", "--json", *arguments)
    assert ended.code == 0, ended.err
    return json.loads(ended.out), Path(name).read_bytes()


@in_run_dir
@pytest.mark.parametrize(
    ("solver", "tier"),
    [
        *(("gumbel", tier) for tier in ("memory", "bf16", "host", "files")),
        pytest.param("linear", "memory", marks=pytest.mark.breadth),
        pytest.param("linear", None, marks=pytest.mark.breadth),
        pytest.param("aggregate", None, marks=pytest.mark.breadth),
    ],
)
def test_a_selection_is_the_cpus_in_every_tier(sewa, solver, tier):
    arguments = ["--solver", solver, *QUICKLY]
    arguments += ["--K", "auto"] if solver == "aggregate" else []
    there, written = chosen(sewa, NAME, *arguments, *in_tier(tier))
    # the host's own memory is what it is streamed from
    here, expected = chosen(sewa, "cpu", *arguments, *in_tier("memory" if tier == "host" else tier))
    assert there["device"].startswith(NAME)
    assert there["selected"] == here["selected"]
    losses = [found["average"]["selection_loss"] for found in (there, here)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    if solver != "aggregate":  # whose weights may differ in the last places
        assert written == expected


def in_tier(tier):
    return [] if tier is None else ["--set", f"tier={tier}"]


@in_run_dir
def test_compare_and_evaluate_give_the_cpus_numbers(sewa):
    for command in (
        ["compare", "--methods", "sewa,last,uniform,greedy", "--K", "4"],
        ["evaluate", "ckpts/step-10.safetensors", "ckpts/step-20.safetensors"],
    ):
        found = [sewa(*command, "--json", "--device", device) for device in (NAME, "cpu")]
        assert [ended.code for ended in found] == [0, 0], found[0].err
        rows = [json.loads(ended.out) for ended in found]
        there, here = (one.get("rows") or one["files"] for one in rows)
        assert len(there) == len(here) > 1
        for one, other in zip(there, here, strict=True):
            assert one["heldout_loss"] == pytest.approx(other["heldout_loss"], rel=1e-4)


@in_run_dir
def test_a_tensor_that_is_left_on_the_cpu_is_found(sewa, monkeypatch):
    monkeypatch.setattr("sewa_cli.objective.objective.to_device", lambda batch, _: batch)
    ended = sewa("select", "--device", NAME, "--solver", "gumbel")
    assert ended.code == 4
    assert "met one on standin" in ended.error


@in_run_dir
def test_no_step_waits_for_the_device(sewa):
    """What is looked at now and then, and in the end, does not grow with the steps in between."""
    counted = []
    for iterations in (2, 9):  # both look once on the way
        with standin.counting() as waits:
            chosen(sewa, NAME, "--solver", "gumbel", "--set", f"gumbel.iterations={iterations}")
        counted.append(waits)
    assert counted[0], "the stand-in sees what is looked at"
    assert len(counted[1]) == len(counted[0]), sorted(set(counted[1]))


@pytest.mark.usefixtures("bn_run")
def test_batchnorm_is_recomputed_on_the_device(sewa):
    there, written = chosen(sewa, NAME, "--solver", "gumbel")
    here, _ = chosen(sewa, "cpu", "--solver", "gumbel")
    assert there["batchnorm"]["after"] is not None
    assert there["selected"] == here["selected"]
    after = [found["average"]["selection_loss"] for found in (there, here)]
    assert after[0] == pytest.approx(after[1], rel=1e-4)
    Path("there.safetensors").write_bytes(written)
    for name, tensor in load_file("there.safetensors").items():
        expected = load_file("cpu.safetensors")[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
