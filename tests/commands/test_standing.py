"""Where the run stands: `select` and `compare` say what `inspect` says, and read nothing for it."""

import json
from pathlib import Path

import pytest

COMPARED = "--methods", "last,uniform", "--format", "json"


@pytest.mark.usefixtures("run_dir")
def test_select_compare_and_inspect_say_the_same_of_a_run(sewa):
    looked = json.loads(sewa("inspect", "--json").out)
    assert sewa("select", "-o", "mask.safetensors").code == 0
    assert sewa("select", "--K", "auto", "-o", "all.safetensors").code == 0
    compared = sewa("compare", "-v", *COMPARED)
    found = [
        json.loads(Path("mask.report.json").read_text()),
        json.loads(Path("all.report.json").read_text()),
        json.loads(compared.out),
    ]
    for content in found:
        standing = content["standing"]
        assert standing["weights"] == looked["parameters"]
        assert standing["verdict"] == looked["verdict"]
        assert standing["explanation"] == looked["explanation"]
        assert standing["motion"]["run"] == pytest.approx(looked["motion"]["run"])
        assert standing["motion"]["radius"] == pytest.approx(looked["motion"]["radius"])
    assert f"the run is {looked['explanation']}" in compared.err
