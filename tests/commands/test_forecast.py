"""`select --dry-run`: what a run costs, by every solver; of a model that does not fit, too."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import Sewa
from torch import nn

from sewa_cli.methods.family import family
from sewa_cli.objective.observe import META, observe, seconds_of
from sewa_cli.solvers import Sizes
from sewa_cli.solvers.linear.build import FEWEST, Keep
from sewa_cli.solvers.linear.cost import Space

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LLAMA = """
import torch, transformers

def build_model():
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)

def selection_data():
    ids = torch.arange(256).view(2, 128)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}] * 50

def loss(outputs, batch):
    logits, targets = outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets)
"""
PEAK = """
import json, resource, sys
from sewa_cli.cli import main
code = main(sys.argv[1:])
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF)[:3]), file=sys.stderr)
sys.exit(code)
"""


def test_seven_billion_weights_are_planned_in_seconds_from_headers_alone(tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        benchmark = importlib.import_module("forecast")
    finally:
        sys.path.remove(str(BENCHMARKS))
    weights = benchmark.holes(tmp_path / "ckpts", **benchmark.LLAMA_7B)
    (tmp_path / "task.py").write_text(LLAMA)
    flags = ["--dry-run", "--json", "--memory", "4GiB", "--device", "cpu", "--last", "20"]
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, "select", "ckpts", "--task", "task.py", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    user, system, peak = json.loads(ended.stderr.splitlines()[-1])
    assert user + system < 60  # most of it imports; a checkpoint alone is 13 GB
    assert peak * 1024 < 1.5e9
    found = json.loads(ended.stdout)
    assert (found["how"], found["fits"]) == ("from headers", False)
    assert "4.0 GiB that --memory allows" in found["why"]
    assert found["parameters"] == weights == 6_738_415_616
    assert (found["k"], found["selection_rows"], found["tokens"]) == (20, 100, 12800)
    assert found["model_bytes"] == 8 * weights
    # every weight of every checkpoint, twice or more; and no more memory than a few copies
    assert found["bytes_read"] >= 2 * 20 * 2 * weights
    assert 8 * weights < found["peak_memory_bytes"] < 25 * 4 * weights
    assert {plan["solver"] for plan in found["alternatives"]} == {"gumbel", "linear"}
    # 2·P·tokens a pass over the selection rows, by any processor's rate
    assert found["seconds"] > 20 * 2 * weights * 12800 / 1e14
    assert sum(f.stat().st_blocks for f in tmp_path.rglob("*.safetensors")) * 512 < 10e6


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("flags", [[], ["--K", 3], ["--K", 3, "--solver", "linear"]])
def test_the_other_solvers_are_forecast_beside_the_chosen(sewa: Sewa, flags: list[Any]) -> None:
    found = json.loads(sewa("select", "--dry-run", "--json", *flags).out)
    others = {plan["solver"]: plan for plan in found["alternatives"]}
    assert {found["solver"], *others} == {"aggregate", "gumbel", "linear"}
    assert len(others) == 2
    for name, plan in others.items():
        own = ["--solver", name, "--K", plan["K"]]
        alone = json.loads(sewa("select", "--dry-run", "--json", *own).out)
        for key in ("K", "bytes_read", "forward_passes", "backward_passes", "rows_used"):
            assert alone[key] == plan[key], (name, key)
    table = sewa("select", "--dry-run", *flags).out
    assert all(f"\n{name} " in table for name in others)
    assert "how  measured: one checkpoint was read, and one batch run\n" in table


@pytest.mark.usefixtures("run_dir")
def test_the_numbers_add_up_by_hand(sewa: Sewa) -> None:
    flags = ["--K", 3, "--set", "gumbel.iterations=7", "--set", "gumbel.samples=2"]
    found = json.loads(sewa("select", "--dry-run", "--json", *flags).out)
    k, batches, heldout = found["k"], 3, 3
    # 7 iterations of two masks; the family; last, uniform and the best one scored on held-out
    # rows, their selection losses being known; the average on both
    assert found["backward_passes"] == 14
    simple = len(family(k, 3)) * batches
    assert found["forward_passes"] == 14 + simple + 3 * heldout + (batches + heldout)
    weights = found["parameters"]
    assert found["model_bytes"] == 8 * weights
    assert found["placement"]["planned_bytes"] == 4 * weights * (k + 4 + 4)
    assert found["peak_memory_bytes"] > found["placement"]["planned_bytes"] + 8 * weights
    assert (found["fits"], found["rows_used"]) == (True, found["selection_rows"])
    assert found["tokens"] is None


@pytest.mark.usefixtures("run_dir")
def test_a_model_that_memory_does_not_hold_is_not_built(run_dir: Path, sewa: Sewa) -> None:
    task = (run_dir / "task.py").read_text()
    watched = "\nplain = build_model\ndef build_model():\n    model = plain()\n"
    watched += "    assert next(model.parameters()).is_meta\n    return model\n"
    (run_dir / "task.py").write_text(task + watched)
    ended = sewa("select", "--dry-run", "--json", "--memory", "1KiB")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["how"], found["fits"]) == ("from headers", False)
    assert "too little" in found["placement"]["reason"]
    assert "does not fit here" in sewa("select", "--dry-run", "--memory", "1KiB").err


def test_rows_that_take_part_are_as_many_as_there_is_room_for() -> None:
    batch = {"x": torch.zeros(4, 10)}
    sizes = Sizes(5, 0, 25, 100, 2**40, None, batch, lambda: torch.zeros(4, 1000))  # type: ignore[arg-type]
    assert Space.of(sizes, Keep(), 2**40) == Space(100_000, 100, 100_000, 100)
    assert Space.of(sizes, Keep(50_000), 2**40) == Space(100_000, 50, 50_000, 100)
    assert Space.of(sizes, Keep(10), 2**40).rows == FEWEST
    too_little = Space.of(sizes, Keep(), 10**5)
    assert too_little.rows < 10
    assert too_little.too_few


def test_of_many_classes_a_few_numbers_for_each_target_are_counted() -> None:
    def sizes(classes: int) -> Sizes:
        batch, logits = torch.zeros(4, 128), torch.empty(4, 128, classes, device="meta")
        objective: Any = None
        found = Sizes(20, 0, 75, 300, 2**30, objective, batch, lambda: logits)
        return replace(found, targets=300 * 127, classes=classes)

    digested = Space.of(sizes(32_000), Keep(), 2**30)
    assert digested.numbers == digested.kept == 300 * 127 * 65
    assert (digested.rows, digested.digest) == (300, Keep())
    assert Space.of(sizes(200), Keep(), 2**30).digest is None
    everything = Space.of(replace(sizes(32_000), targets=None), Keep(), 2**30)
    assert everything.too_few


def test_a_pass_is_observed_alike_with_numbers_and_without() -> None:
    def seen(device: torch.device) -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20)).to(device)
        x = torch.zeros(8, 30, device=device)
        found = observe(lambda: model(x).sum().backward())
        return found.flops, found.bytes

    real, shapes = seen(torch.device("cpu")), seen(META)
    assert real == shapes
    flops, peak = real
    forward = 2 * 8 * (30 * 50 + 50 * 20)
    assert flops == 3 * forward - 2 * 8 * 30 * 50  # x wants no gradient
    assert 4 * 8 * (50 + 50 + 20) < peak < 4 * 10 * (8 * 120 + 2570)


def test_a_short_time_is_the_best_of_several_and_a_long_one_is_taken_once() -> None:
    calls: list[int] = []
    seconds_of(lambda: calls.append(1))
    assert len(calls) > 3
    calls.clear()
    seconds_of(lambda: calls.append(1), most=0.0)
    assert len(calls) == 1
