"""Each toolkit's run is found as it was left, and its average is read as the toolkit reads it."""

import json

import pytest
import torch
from helpers.toolkit_runs import RUNS, STEPS, weights

LEFT_OUT = {
    "fairseq": ["checkpoint.best_loss_4.1000.pt", "checkpoint_best.pt", "checkpoint_last.pt"],
    "icefall": ["best-valid-loss.pt", "pretrained.pt"],
    "ESPnet": ["checkpoint.pth", "valid.acc.ave_10best.pth", "valid.acc.ave_5best.till10epoch.pth"],
}


@pytest.mark.parametrize("toolkit", RUNS)
def test_a_toolkits_run_is_found_in_order_and_its_average_is_read_by_its_loader(
    tmp_path, sewa, toolkit
):
    make, suffix, read = RUNS[toolkit]
    run, output = tmp_path / "run", tmp_path / f"out{suffix}"
    run.mkdir()
    make(run)
    inspected = sewa("inspect", run, "--json", "--from", "snapshots", "-v")
    assert inspected.code == 0, inspected.err
    assert [c["step"] for c in json.loads(inspected.out)["checkpoints"]] == list(STEPS)
    if toolkit in LEFT_OUT:
        [note] = [line for line in inspected.err.splitlines() if f"of {toolkit}, but" in line]
        assert note.endswith(f": {', '.join(LEFT_OUT[toolkit])}")
    options = ["--method", "latest", "--K", 5, "--from", "snapshots"]
    if toolkit in ("Megatron-Core", "OLMo-core"):
        options += ["--set", "output_format=dcp"]
    averaged = sewa("average", run, *options, "-o", output)
    assert averaged.code == 0, averaged.err
    if not suffix and "output_format=dcp" not in options:
        assert sewa("average", run, *options, "-o", output, "--force").code == 0
    found = read(output)
    states = [weights(step) for step in STEPS[-5:]]
    assert found.keys() == states[0].keys()
    for name, tensor in found.items():
        expected = torch.stack([state[name] for state in states]).double().mean(0)
        assert torch.allclose(tensor.double(), expected, atol=1e-6)
