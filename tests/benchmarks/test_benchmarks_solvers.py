"""The benchmarks of the solvers still run, on runs too short to say anything."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a benchmark by its name, as if started in its folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


def test_the_quality_benchmark_measures_every_solver(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--tasks", "diabetes", "--seeds", "2", "--quick", "--json", str(tmp_path / "found")]
    benchmark("solvers").main(asked)
    printed = capsys.readouterr().out
    runs = json.loads((tmp_path / "found").read_text())["runs"]
    assert [(run["task"], run["seed"]) for run in runs] == [("diabetes", 0), ("diabetes", 1)]
    for run in runs:
        assert all(isfinite(run[w]["heldout"]) for w in ("gumbel", "linear", "sparse", "shuffled"))
        assert run["gumbel"]["K"] == run["linear"]["K"] == 10
        assert sum(option["chosen"] for option in run["sparse"]["options"]) == 1
        assert run["sparse"]["references"]["last"] == run["gumbel"]["references"]["last"]
        assert run["sparse"]["over"] == next(iter(run["sparse"]["references"]))
        assert run["linear"]["bytes_read"] < run["bytes_streamed"]["gumbel"] / 10
        assert run["linear"]["forward_equivalents"] < run["gumbel"]["forward_equivalents"]
    assert runs[0]["gumbel"]["heldout"] != runs[1]["gumbel"]["heldout"]  # two runs, not one twice
    assert "| diabetes | linear |" in printed
    assert "`--sparse` is worse than the best simple average by selection rows" in printed
    assert "With shuffled labels it takes a simple average in" in printed


def test_the_speed_benchmark_counts_fewer_bytes_for_the_linear_solver(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = "--checkpoints 14 --width 48 --rows 40 --batch 20 --iterations 20 --rounds 1"
    benchmark("solver_speed").main([*tiny.split(), "--json", str(tmp_path / "speed")])
    rows = json.loads((tmp_path / "speed.select").read_text())["rows"]
    read = {row["command"]: row["GB read"] for row in rows}
    assert read["select: linear"] < read["select: gumbel, W streamed"] / 5
    assert read["select: gumbel, W in memory"] < read["select: linear"]
    assert len(json.loads((tmp_path / "speed.compare").read_text())["rows"]) == 3
    assert "faster" in capsys.readouterr().out
