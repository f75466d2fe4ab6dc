"""Where the run stands: `select` and `compare` say what `inspect` says, and read nothing for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.tiny import Sewa

from sewa_cli.ranks import ALONE
from sewa_cli.trajectory import standing
from sewa_cli.trajectory.geometry import Geometry

COMPARED = "--methods", "last,uniform", "--format", "json"


@pytest.mark.usefixtures("run_dir")
def test_select_compare_and_inspect_say_the_same_of_a_run(sewa: Sewa) -> None:
    looked = json.loads(sewa("inspect", "--json").out)
    assert sewa("select", "-o", "mask.safetensors").code == 0
    assert sewa("select", "--K", "auto", "-o", "all.safetensors").code == 0
    compared = sewa("compare", *COMPARED)
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


@pytest.mark.parametrize("way", ["line", "walk", "noise"])
def test_a_sample_says_what_all_weights_say(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Of layers that move very differently, some of them hardly at all."""
    monkeypatch.setattr(standing, "MOST", 40 * 1024)
    generator, k, P = torch.Generator().manual_seed(3), 40, 30_000
    W = torch.randn(k, P, generator=generator)
    W = {"line": W + torch.linspace(0, 30, k)[:, None], "walk": W.cumsum(0), "noise": W}[way]
    W *= torch.tensor([0.01, 1.0, 3.0]).repeat_interleave(P // 3)
    W += 5 * torch.randn(P, generator=generator)
    steps = [100 * i for i in range(k)]
    geometry = Geometry(standing.times_of(steps))
    geometry.add(W.double())
    shape = geometry.measure()
    sample = standing.WeightSample(k + 1, P)
    sample.keep(0, torch.full((P,), torch.nan))  # a broken one is not among the used
    for i, row in enumerate(W, 1):
        sample.keep(i, row)
    found = sample.standing(range(1, k + 1), steps, ALONE)
    assert found is not None
    assert found.weights == 1024
    assert found.verdict == shape.verdict
    assert found.motion.run.trend == pytest.approx(shape.signs.trend, abs=0.03)
    assert found.motion.radius == pytest.approx(shape.radius, rel=0.1)
    assert found.motion.norm == pytest.approx(shape.norm, rel=0.1)
