"""`--solver linear`, K: auto, guard and fallback through the whole command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.memory import WIDE_TASK, peaks
from helpers.tiny import TASK, Sewa, train_tiny
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli import select
from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.text import with_K

LINEAR = ("select", "--solver", "linear")
SHUFFLED = """torch.manual_seed(5)
    return [(x, y[torch.randperm(len(y))]) for x, y in data(1)]"""


LARGE_OUTPUTS = """
import torch
from torch import nn

def build_model():
    return nn.Linear(8, 24000)

def selection_data():
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(128)
    return list(zip(x.split(32), y.split(32)))

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""


def report_of(path: str = "averaged.report.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def rows(seed: int, count: int = 300) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return list(zip(torch.split(x, 128), torch.split(y, 128), strict=True))


def loss_of(path: Path, data: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    model.load_state_dict(load_file(path))
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


def test_the_written_average_has_the_losses_that_the_report_says(run_dir: Path, sewa: Sewa) -> None:
    ended = sewa(*LINEAR)
    assert ended.code == 0, ended.err
    report = report_of()
    written = run_dir / "averaged.safetensors"
    assert report["average"]["selection_loss"] == pytest.approx(loss_of(written, rows(1)), rel=1e-5)
    assert report["average"]["heldout_loss"] == pytest.approx(loss_of(written, rows(2)), rel=1e-5)
    assert len(report["selected"]) == 4
    assert ended.out.split() == report["selected_paths"]
    assert report["cost"]["backward_passes"] == 0
    last = report["details"]["rounds"][-1]
    assert report["details"]["surrogate_error"] == pytest.approx(
        last["predicted"] - report["average"]["selection_loss"], abs=1e-4
    )
    assert sum(c["probability"] for c in report["candidates"]) == pytest.approx(4)


@pytest.mark.usefixtures("run_dir")
def test_it_chooses_no_worse_than_the_best_of_a_hundred_random_masks(sewa: Sewa) -> None:
    sewa(*LINEAR)
    chosen = report_of()["average"]["selection_loss"]
    sewa("compare", "--methods", "random:draws=100", "--format", "json", "--report", "r.json")
    from sewa_cli.methods import Run, parse_one  # the same draws as the command's

    draws = parse_one("random:draws=100")(Run(12), 4)
    states = [load_file(f"ckpts/step-{10 * (i + 1)}.safetensors") for i in range(12)]
    losses = []
    for draw in draws:
        mean = {n: sum(c * s[n] for c, s in zip(draw, states, strict=True)) for n in states[0]}
        save_file(mean, "m.safetensors")  # type: ignore[arg-type]
        losses.append(loss_of(Path("m.safetensors"), rows(1)))
    assert chosen <= min(losses) * 1.02


@pytest.mark.parametrize(
    "flags",
    [
        ["--K", 4],
        ["--K", 5, "--set", "linear.rounds=1"],
        ["--K", 3, "--set", "linear.rounds=3"],
        ["--K", 11],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_every_checkpoint_is_read_at_most_twice_a_round(
    run_dir: Path, sewa: Sewa, flags: list[object]
) -> None:
    assert sewa(*LINEAR, *flags).code == 0
    report = report_of()
    cost = report["cost"]
    assert cost["backward_passes"] == 0
    one = sum(t.numel() * 4 for t in load_file(run_dir / "ckpts/step-10.safetensors").values())
    k, K, rounds = 12, report["K"], len(report["details"]["rounds"])
    # scouted once, surveyed once a round; the average found is read to be the next base, to be
    # checked, to be evaluated as it will be written, and to be written
    expected = k + rounds * k + (rounds - 1) * K + K + 2 * K
    assert cost["bytes_read"] == expected * one


@pytest.mark.usefixtures("run_dir")
def test_the_same_seed_gives_the_same_bytes(sewa: Sewa) -> None:
    for name in ("one", "two"):
        assert sewa(*LINEAR, "-o", f"{name}.safetensors", "--seed", 3).code == 0
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()


@pytest.mark.parametrize("solver", ["aggregate", "linear"])
@pytest.mark.usefixtures("run_dir")
def test_a_checkpoint_with_nan_is_as_if_it_were_not_there(sewa: Sewa, solver: str) -> None:
    flags = ("select", "--solver", solver, "--K", "4" if solver == "linear" else "auto")
    broken = Path("ckpts/step-50.safetensors")
    state = load_file(broken)
    state["0.bias"][0] = torch.nan
    save_file(state, broken)
    with_it = sewa(*flags, "-o", "with.safetensors")
    assert with_it.code == 0, with_it.err
    broken.unlink()
    assert sewa(*flags, "-o", "without.safetensors").code == 0
    one, two = (report_of(f"{name}.report.json") for name in ("with", "without"))
    assert [out["step"] for out in one["left_out"]] == [50]
    assert one["k"] == two["k"] == 11
    assert one["blend"] == two["blend"]
    assert Path("with.safetensors").read_bytes() == Path("without.safetensors").read_bytes()


def test_batchnorm_and_integer_buffers_go_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    net = "nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))"
    plain = "nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))"
    training = "\n\ndef training_data():\n    return data(3)\n"
    Path("task.py").write_text(TASK.replace(plain, net) + training)
    Path("ckpts").mkdir()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, 11):
        x = torch.randn(64, 6)
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        save_file(model.state_dict(), f"ckpts/step-{step}.safetensors")
    flags = ("ckpts/", "--task", "task.py", "--K", 3, "--device", "cpu")
    forecast = json.loads(sewa(*LINEAR, *flags, "--dry-run", "--json").out)
    ended = sewa(*LINEAR, *flags)
    assert ended.code == 0, ended.err
    report = report_of()
    assert report["batchnorm"]["data"] == "training_data"
    assert report["cost"]["bytes_read"] <= forecast["bytes_read"]
    assert report["cost"]["forward_passes"] <= forecast["forward_passes"]


# ---- memory ------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_checkpoints_beyond_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 and 60 checkpoints of 4 MB, of which a cache of a row of outputs holds 4 kB each."""
    if not Path("/proc/self/status").exists():
        pytest.skip("anonymous memory is read from /proc")
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(WIDE_TASK)
    Path("ckpts").mkdir()
    torch.manual_seed(0)
    for n in range(60):
        state = {"weight": torch.randn(1000, 1000) / 30, "bias": torch.zeros(1000)}
        save_file(state, f"ckpts/step-{n + 1}.safetensors")
    command = "select ckpts/ --task task.py --K 3 --solver linear --device cpu --memory 200MB"
    command += " --set linear.swaps=2 --set linear.iterations=2"
    few, many = peaks(f"{command} --last {k} -o {k}.safetensors" for k in (10, 60))
    assert many < 200e6
    # W of the other 50 would be 200 MB. The same command twice differs by up to 50 MB: simple
    # averages are summed up in pieces of the room, and what is freed is not given back at once
    assert many - few < 100e6


@pytest.mark.usefixtures("run_dir")
def test_a_cap_too_small_for_all_rows_takes_some_and_says_so(sewa: Sewa) -> None:
    P = 6 * 16 + 16 + 16 * 2 + 2
    ended = sewa(*LINEAR, "--memory", 10 * 4 * P + 12_000)
    assert ended.code == 0, ended.err
    cache = report_of()["details"]["cache"]
    assert cache["rows"] < cache["of_rows"] == 300
    assert cache["bytes"] <= 12_000
    assert ended.err.count(f"{cache['rows']} of the 300 selection rows are used") == 1


@pytest.mark.usefixtures("run_dir")
def test_a_cap_too_small_for_anything_is_refused(sewa: Sewa) -> None:
    ended = sewa(*LINEAR, "--memory", 1000)
    assert ended.code == 2
    assert "memory" in ended.error
    ended = sewa(*LINEAR, "--memory", 10 * 4 * 146 + 40)
    assert ended.code == 2
    assert "raise --memory" in ended.error


def test_large_outputs_stay_within_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of 12 MB for each of 12 checkpoints, and --K auto, which keeps more of them."""
    if not Path("/proc/self/status").exists():
        pytest.skip("anonymous memory is read from /proc")
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(LARGE_OUTPUTS)
    Path("ckpts").mkdir()
    torch.manual_seed(0)
    for n in range(12):
        state = {"weight": torch.randn(24000, 8) / 3, "bias": torch.zeros(24000)}
        save_file(state, f"ckpts/step-{n + 1}.safetensors")
    command = "select ckpts/ --task task.py --solver linear --device cpu --memory 200MB"
    command += " --set linear.folds=2 --set linear.swaps=2 --set linear.iterations=2"
    for peak in peaks(f"{command} --K {K} -o {K}.safetensors" for K in (3, "auto")):
        # vmap and autograd take some forty MB when they are first used, malloc what it likes
        assert peak < 200e6 + 90e6
    for K in (3, "auto"):
        cache = report_of(f"{K}.report.json")["details"]["cache"]
        assert cache["bytes"] <= 200e6
        assert cache["rows"] < cache["of_rows"]


@pytest.mark.usefixtures("run_dir")
def test_the_rounds_of_a_cache_of_few_rows_are_judged_on_its_own(sewa: Sewa) -> None:
    P = 6 * 16 + 16 + 16 * 2 + 2
    flags = ("--memory", 10 * 4 * P + 12_000)
    sewa(*LINEAR, *flags)
    report = report_of()
    true = report["average"]["selection_loss"]
    assert report["selection_rows"] == report["details"]["cache"]["rows"] < 300
    assert min(r["loss"] for r in report["details"]["rounds"]) == pytest.approx(true, rel=1e-4)


# ---- K: auto -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_dir")
def test_auto_reports_the_curve_and_takes_what_is_within_one_error_of_the_best(sewa: Sewa) -> None:
    ended = sewa(*LINEAR, "--K", "auto", "--plot", "p.svg")
    assert ended.code == 0, ended.err
    report = report_of()
    options = report["budget"]
    assert [o["K"] for o in options if o["name"] == "learned"] == [1, 2, 5, 10]
    assert {o["name"] for o in options} >= {"learned", "last", "uniform", "ema-window", "latest"}
    (taken,) = [o for o in options if o["chosen"]]
    assert taken["behind"] <= taken["error"] or taken["behind"] == 0
    K = None if taken["name"] == "learned" else taken["K"]
    assert report["written"] == with_K(taken["name"], K)
    if taken["name"] == "learned":
        assert report["K"] == taken["K"]
        safer = [o for o in options if o["name"] != "learned" or o["K"] > taken["K"]]
        assert all(o["behind"] > o["error"] for o in safer)
    assert "cross-validated loss by K: 1: " in ended.err
    assert "cross-validated loss" in Path("p.svg").read_text()
    assert report["config"]["K"] == "auto"


def test_with_shuffled_labels_auto_takes_a_simple_average_and_says_that_there_is_no_gain(
    run_dir: Path, sewa: Sewa
) -> None:
    (run_dir / "task.py").write_text(TASK.replace("return data(1)", SHUFFLED))
    ended = sewa(*LINEAR, "--K", "auto")
    assert ended.code == 0, ended.err
    report = report_of()
    assert report["labels"] == "noise"
    assert report["written"] == "uniform"
    assert "no gain: the labels say nothing; `uniform` was written" in ended.err
    assert report["details"]["rounds"] == []


@pytest.mark.usefixtures("run_dir")
def test_a_simple_average_that_auto_takes_is_written_with_its_own_weights(sewa: Sewa) -> None:
    Path("task.py").write_text(TASK.replace("return data(1)", SHUFFLED))
    sewa(*LINEAR, "--K", "auto")
    report = report_of()
    taken = next(o for o in report["budget"] if o["chosen"])
    flags = [] if taken["K"] is None else ["--K", taken["K"]]
    sewa("average", "ckpts/", "--method", taken["name"], *flags, "-o", "same.safetensors")
    ours, same = load_file("averaged.safetensors"), load_file("same.safetensors")
    assert all(torch.equal(ours[name], same[name]) for name in same)


@pytest.mark.usefixtures("run_dir")
def test_a_loss_that_does_not_split_is_cross_validated_by_batches(sewa: Sewa) -> None:
    batch_loss = "return F.cross_entropy(outputs, batch[1]) + outputs.std() * 0.01"
    task = TASK.replace("return F.cross_entropy(outputs, batch[1])", batch_loss)
    Path("task.py").write_text(task)
    ended = sewa(*LINEAR, "--K", "auto")
    assert ended.code == 4
    assert "K: auto needs 5 or more selection batches" in ended.error
    Path("task.py").write_text(task.replace("split(128)", "split(60)"))
    ended = sewa(*LINEAR, "--K", "auto")
    assert ended.code == 0, ended.err


def test_runs_of_several_basins_do_not_make_the_labels_noise(run_dir: Path, sewa: Sewa) -> None:
    # the mean of networks that have nothing to do with each other is broken; each alone is not
    for path in sorted((run_dir / "ckpts").iterdir()):
        seed = int(path.stem.split("-")[1])
        state, order = (
            load_file(path),
            torch.randperm(16, generator=torch.Generator().manual_seed(seed)),
        )
        shuffled = {
            "0.weight": state["0.weight"][order],
            "0.bias": state["0.bias"][order],
            "2.weight": state["2.weight"][:, order],
            "2.bias": state["2.bias"],
        }
        save_file({n: t.contiguous() for n, t in shuffled.items()}, path)
    sewa(*LINEAR, "--K", "auto")
    report = report_of()
    assert report["labels"] == "matter"
    simple = report["references"]
    assert report["average"]["selection_loss"] <= simple["last"]["selection_loss"] * 1.05
    assert report["average"]["selection_loss"] <= simple["uniform"]["selection_loss"]


def test_a_loss_that_the_model_computes_itself_is_told(run_dir: Path, sewa: Sewa) -> None:
    own = TASK.replace("return F.cross_entropy(outputs, batch[1])", "return outputs['loss']")
    own += """
def predict(model, batch):
    logits = model(batch[0])
    return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits}
"""
    (run_dir / "task.py").write_text(own)
    ended = sewa(*LINEAR)
    assert ended.code == 0, ended.err
    assert "loss() gives the same value whatever rows the batch has" in ended.err


def test_labels_that_have_nothing_to_do_with_the_outputs_are_told(
    run_dir: Path, sewa: Sewa
) -> None:
    (run_dir / "task.py").write_text(TASK.replace("return data(1)", SHUFFLED))
    ended = sewa(*LINEAR)
    assert "is no better than with their rows mixed up" in ended.err
    (run_dir / "task.py").write_text(TASK)
    assert "mixed up" not in sewa(*LINEAR, "--force").err


# ---- guard and fallback ------------------------------------------------------------------------


NO_HELDOUT = TASK.replace("def heldout_data", "def unused")


def test_guarded_rows_are_held_out_and_never_chosen_by(run_dir: Path, sewa: Sewa) -> None:
    (run_dir / "task.py").write_text(NO_HELDOUT)
    for solver in ("gumbel", "linear"):
        ended = sewa("select", "--solver", solver, "--guard", 0.2, "--force")
        assert ended.code == 0, ended.err
        report = report_of()
        assert report["guard"] == {"share": 0.2, "rows": 60}
        assert (report["selection_rows"], report["heldout_rows"]) == (240, 60)
        assert report["verdict"]["interval"] is not None
    x, y = (torch.cat(parts) for parts in zip(*rows(1), strict=True))
    aside = torch.zeros(300, dtype=torch.bool)
    aside[torch.randperm(300, generator=torch.Generator().manual_seed(0))[:60]] = True
    written = run_dir / "averaged.safetensors"
    kept, rest = (
        loss_of(written, [(x[aside], y[aside])]),
        loss_of(written, [(x[~aside], y[~aside])]),
    )
    assert report["average"]["heldout_loss"] == pytest.approx(kept, rel=1e-5)
    assert report["average"]["selection_loss"] == pytest.approx(rest, rel=1e-5)


def test_a_shuffling_loader_cannot_mix_guarded_rows_with_the_others(
    run_dir: Path, sewa: Sewa
) -> None:
    shuffled = """
def selection_data():
    class Loader:
        def __iter__(self):
            for x, y in data(1):
                order = torch.randperm(len(y))
                x, y = x[order], y[order]
                yield {"x": x, "y": y, "name": [str(float(v)) for v in x[:, 0]]}
    return Loader()

def predict(model, batch):
    # all of a row moves together
    assert [str(float(v)) for v in batch["x"][:, 0]] == batch["name"]
    return model(batch["x"])
"""
    task = NO_HELDOUT.replace("def selection_data():\n    return data(1)", shuffled)
    (run_dir / "task.py").write_text(task.replace("batch[1]", 'batch["y"]'))
    ended = sewa(*LINEAR, "--guard", 0.25)
    assert ended.code == 0, ended.err
    assert report_of()["heldout_rows"] == 75


INVERTED = TASK.replace("return data(1)", "return [(x, 1 - y) for x, y in data(1)]")


@pytest.mark.parametrize("solver", ["gumbel", "linear"])
def test_fallback_writes_the_better_simple_average_and_says_so(
    run_dir: Path, sewa: Sewa, solver: str
) -> None:
    (run_dir / "task.py").write_text(INVERTED)
    flags = ("select", "--solver", solver, "--K", 1, "--fallback", "--strict")
    ended = sewa(*flags)
    assert ended.code == 0, ended.err
    report = report_of()
    name = report["written"]
    assert name in ("last", "uniform", "lawa")
    assert report["verdict"]["beaten_by"][0]["name"] == name
    assert report["learned"]["heldout_loss"] > report["average"]["heldout_loss"]
    assert report["average"]["heldout_loss"] == pytest.approx(
        report["references"][name]["heldout_loss"], rel=1e-5
    )
    assert f"--fallback: the {name} average is written instead" in ended.err
    assert f"`{name}` was written instead" in ended.err
    sewa("average", "ckpts/", "--method", name, "--K", 1, "-o", "same.safetensors")
    ours, same = load_file("averaged.safetensors"), load_file("same.safetensors")
    assert all(torch.allclose(ours[n], same[n], atol=1e-6) for n in same)
    assert open_checkpoint(Path("averaged.safetensors"), Reads()).metadata["sewa_method"] == name
    assert sewa("apply", "averaged.report.json", "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path("averaged.safetensors").read_bytes()


@pytest.mark.usefixtures("run_dir")
def test_a_choice_that_is_better_stands(sewa: Sewa) -> None:
    # held out is what was chosen by, so nothing can be better by much
    Path("task.py").write_text(TASK.replace("return data(2)", "return data(1)"))
    assert sewa(*LINEAR, "--fallback", "--strict").code == 0
    report = report_of()
    assert report["verdict"]["beaten_by"] == []
    assert report["written"] == "learned"
    assert report["instead_of"] is None


def test_a_choice_without_a_finite_held_out_loss_falls_back(run_dir: Path, sewa: Sewa) -> None:
    # weights of step 10 alone give NaN held out: those that move away from it do not
    first = load_file(run_dir / "ckpts/step-10.safetensors")["0.bias"][0].item()
    (run_dir / "task.py").write_text(
        INVERTED
        + f"""
def predict(model, batch):
    out = model(batch[0])
    near = abs(float(model[0].bias[0]) - {first!r}) < 1e-6
    return out * float("nan") if near and len(batch[0]) == 77 else out
""".replace("return out * ", "return out * ")
    )
    task = (run_dir / "task.py").read_text().replace("return data(2)", "return data(2, rows=77)")
    (run_dir / "task.py").write_text(task)
    ended = sewa(*LINEAR, "--K", 1, "--strict")
    assert report_of()["selected_steps"] == [10]
    assert ended.code == 5
    assert "is NaN or Inf" in ended.err
    ended = sewa(*LINEAR, "--K", 1, "--fallback", "--force")
    assert ended.code == 0
    assert report_of()["average"]["heldout_loss"] is not None
    assert report_of()["verdict"]["beaten_by"][0]["difference"] is None


def test_a_loader_that_shuffles_held_out_rows_leaves_losses_paired(
    run_dir: Path, sewa: Sewa
) -> None:
    gains = []
    for loader in ("list(rows)", "DataLoader(rows, batch_size=50, shuffle=True)"):
        extra = f"""
from torch.utils.data import DataLoader

def heldout_data():
    x, y = (torch.cat(parts) for parts in zip(*data(2)))
    rows = list(zip(x, y))
    return {loader.replace("list(rows)", "DataLoader(rows, batch_size=50)")}
"""
        (run_dir / "task.py").write_text(TASK + extra)
        assert sewa("select", "--force").code == 0
        gains.append(report_of()["verdict"]["interval"])
    widths = [gain["high"] - gain["low"] for gain in gains]
    assert widths[1] == pytest.approx(widths[0], rel=0.1)


@pytest.mark.parametrize(
    "flags",
    [
        ("--K", "auto"),
        pytest.param(("--K", "auto", "--sparse"), marks=pytest.mark.breadth),
        pytest.param(("--K", "4", "--solver", "gumbel"), marks=pytest.mark.breadth),
    ],
)
def test_a_loader_that_draws_examples_draws_the_same_for_all_losses_of_a_table(
    run_dir: Path, sewa: Sewa, flags: tuple[str, ...]
) -> None:
    extra = """
from torch.utils.data import DataLoader, RandomSampler

def selection_data():
    x, y = (torch.cat(parts) for parts in zip(*data(1)))
    rows = list(zip(x, y))
    return DataLoader(rows, batch_size=20, sampler=RandomSampler(rows, num_samples=60))
"""
    (run_dir / "task.py").write_text(TASK + extra)
    ended = sewa("select", *flags, "-o", "out.safetensors")
    assert ended.code == 0, ended.err
    found = report_of(Path("out.report.json"))
    uniform = found["references"]["uniform"]["selection_loss"]
    [simple] = [one for one in found["simple"] if one["name"] == "uniform"]
    assert simple["selection_loss"] == pytest.approx(uniform, rel=1e-5)
    evaluated = sewa("evaluate", "out.safetensors", "ckpts/step-120.safetensors", "--format=json")
    losses = [file["selection_loss"] for file in json.loads(evaluated.out)["files"]]
    expected = [found["average"], found["references"]["last"]]
    assert losses == pytest.approx([one["selection_loss"] for one in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--solver", "gumbel", "--K", "auto"],
            "K: auto needs a solver that finds K: --solver aggregate or --solver linear; or name",
        ),
        (
            ["--solver", "gumbel", "--sparse", "--K", "auto"],
            "K: auto needs a solver that finds K: --solver linear; or name",
        ),
        (["--solver", "aggregate", "--K", "4"], "aggregate weighs all checkpoints; leave out --K"),
        (["--solver", "aggregate", "--sparse", "--K", "auto"], "leave out --solver aggregate"),
        (["--guard", "0.2"], "has heldout_data already"),
        (["--guard", "1.5"], "--guard"),
        (["--solver", "newton"], "--solver"),
        (["--set", "linear.h=0"], "linear.h"),
        (["--set", "linear.hh=0.1"], "did you mean h"),
    ],
)
@pytest.mark.usefixtures("run_dir")
def test_settings_that_do_not_go_together_are_refused(
    sewa: Sewa, flags: list[str], said: str
) -> None:
    ended = sewa("select", *flags)
    assert ended.code == 2
    assert said in ended.error


def test_fallback_without_anything_to_judge_by_is_refused(run_dir: Path, sewa: Sewa) -> None:
    (run_dir / "task.py").write_text(NO_HELDOUT)
    ended = sewa("select", "--fallback")
    assert ended.code == 2
    assert "--guard 0.2" in ended.error
    assert sewa("average", "ckpts/", "--method", "lawa", "--K", "13").code == 2


# ---- compare -----------------------------------------------------------------------------------


METHODS = "sewa,best,topk,greedy,forward,twa,random,uniform,lawa,last"


def test_fast_rows_are_judged_exactly_and_tell_how_far_the_prediction_is_off(
    run_dir: Path, sewa: Sewa
) -> None:
    ended = sewa("compare", "--fast", "--methods", METHODS, "--K", "3", "--format", "json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    states = [load_file(run_dir / f"ckpts/step-{10 * (i + 1)}.safetensors") for i in range(12)]
    for row in found["rows"]:
        losses = []
        for draw in row["coefficients"]:
            mean = {n: sum(c * s[n] for c, s in zip(draw, states, strict=True)) for n in states[0]}
            save_file(mean, run_dir / "m.safetensors")
            losses.append(loss_of(run_dir / "m.safetensors", rows(1)))
        true = sum(losses) / len(losses)
        assert row["selection_loss"] == pytest.approx(true, rel=1e-4)
        assert row["surrogate_error"] == pytest.approx(row["predicted_loss"] - true, abs=1e-4)
    by_name = {row["method"]: row for row in found["rows"]}
    # fixed averages pay for nothing that only the others need
    assert by_name["uniform"]["cost"]["forward_passes"] < 20
    searching = {by_name[n]["cost"]["forward_passes"] for n in ("greedy", "forward", "topk")}
    assert len(searching) == 1  # the cache, and one average judged
    assert by_name["twa"]["cost"]["backward_passes"] == 0


def test_on_a_linear_model_fast_finds_what_the_exact_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    net = "nn.Linear(6, 2)"
    Path("task.py").write_text(
        TASK.replace("nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))", net)
    )
    Path("ckpts").mkdir()
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        state = {
            "weight": torch.randn(2, 6, generator=generator),
            "bias": torch.randn(2, generator=generator),
        }
        save_file(state, f"ckpts/step-{step}.safetensors")
    flags = ("ckpts/", "--task", "task.py", "--methods", "greedy,forward,topk,best", "--K", "3")
    exact = json.loads(sewa("compare", *flags, "--format", "json").out)
    fast = json.loads(sewa("compare", *flags, "--fast", "--format", "json").out)
    for one, two in zip(exact["rows"], fast["rows"], strict=True):
        assert one["coefficients"] == two["coefficients"]
        assert abs(two["surrogate_error"]) < 1e-4
    assert not any("--fast" in warning for warning in fast["warnings"])


def test_a_prediction_that_is_far_off_is_warned_of(run_dir: Path, sewa: Sewa) -> None:
    # a network of steep steps: nothing about it is linear
    steep = TASK.replace("nn.ReLU()", "Steep()").replace(
        "def build_model",
        "class Steep(nn.Module):\n    def forward(self, x):\n"
        "        return torch.sin(40 * x)\n\ndef build_model",
    )
    (run_dir / "task.py").write_text(steep)
    ended = sewa("compare", "--fast", "--methods", "topk,greedy,uniform", "--K", "3")
    assert ended.code == 0, ended.err
    assert "its predicted loss is off by" in ended.err
    assert "run it without --fast" in ended.err


@pytest.mark.usefixtures("run_dir")
def test_compare_with_the_linear_solver_scouts_once_for_every_K(sewa: Sewa) -> None:
    ended = sewa(
        "compare", "--solver", "linear", "--methods", "sewa", "--K", "2,4", "--format", "json"
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    sewa(*LINEAR, "--K", 4)
    one = found["rows"][1]
    assert one["selection_loss"] == pytest.approx(
        report_of()["average"]["selection_loss"], rel=0.02
    )
    assert found["cost"]["forward_passes"] < sum(r["cost"]["forward_passes"] for r in found["rows"])


def test_batches_of_one_row_are_mixed_up_among_each_other(run_dir: Path, sewa: Sewa) -> None:
    (run_dir / "task.py").write_text(TASK.replace("split(128)", "split(1)").replace("300", "40"))
    ended = sewa(*LINEAR, "--K", 2, "--set", "linear.iterations=5")
    assert ended.code == 0, ended.err
    assert report_of()["labels"] == "matter"
    assert "whatever rows" not in ended.err


# ---- from Python -------------------------------------------------------------------------------


def test_select_from_python_takes_auto_and_the_linear_solver(tmp_path: Path) -> None:
    train_tiny(tmp_path / "ckpts")
    found = select(
        tmp_path / "ckpts",
        model=nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        selection_data=rows(1),
        heldout_data=rows(2),
        K="auto",
        solver="linear",
        device="cpu",
        linear={"iterations": 10, "swaps": 10, "folds": 2},
    )
    assert found.report.budget is not None
    assert len(found.selected) == found.report.K


def test_outputs_beyond_the_limit_are_of_fewer_rows_and_judged_on_the_same_ones(
    run_dir: Path, sewa: Sewa
) -> None:
    ended = sewa(*LINEAR, "--K", "auto", "--set", "linear.outputs=200")
    assert ended.code == 0, ended.err
    report = report_of()
    cache = report["details"]["cache"]
    assert cache["rows"] == 100  # two logits each
    assert "100 of the 300 selection rows are used" in ended.err
    assert "--set linear.outputs=600 would keep all" in ended.err
    assert report["selection_rows"] == 100
    few = sewa(*LINEAR, "--K", 3, "--set", "linear.outputs=2", "--force")
    assert few.code == 0, few.err
    assert report_of()["details"]["cache"]["rows"] == 32
    assert (run_dir / "averaged.safetensors").is_file()
