"""The main job, through the real command line on tiny real checkpoints."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from helpers.tiny import TASK, files_in, report_of, train_tiny, user_loss
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn


def test_select_prints_the_chosen_paths_and_writes_the_average_and_its_report(run_dir, sewa):
    before = files_in(run_dir)
    ended = sewa("select", "ckpts/", "--K", 4)
    assert ended.code == 0, ended.err
    chosen = ended.out.splitlines()
    assert len(chosen) == 4
    after = files_in(run_dir)
    assert after.keys() - before.keys() == {"averaged.safetensors", "averaged.report.json"}
    assert all(after[name] == content for name, content in before.items())

    written = load_file("averaged.safetensors")
    sources = [load_file(path) for path in chosen]
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, torch.stack([s[name] for s in sources]).mean(0))


def test_the_reported_losses_are_those_of_the_files_as_the_user_computes_them(run_dir, sewa):
    assert sewa("select").code == 0
    report = report_of()
    for data, key in (("selection_data", "selection_loss"), ("heldout_data", "heldout_loss")):
        found = user_loss("averaged.safetensors", data)
        assert found == pytest.approx(report["average"][key], rel=1e-6)
        found = user_loss("ckpts/step-120.safetensors", data)
        assert found == pytest.approx(report["references"]["last"][key], rel=1e-6)
    states = [load_file(path) for path in (run_dir / "ckpts").iterdir()]
    uniform = {n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]}
    save_file(uniform, "uniform.safetensors")
    found = user_loss("uniform.safetensors", "heldout_data")
    assert found == pytest.approx(report["references"]["uniform"]["heldout_loss"], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.usefixtures("run_dir")
def test_checkpoints_of_other_dtypes_come_out_as_they_went_in(sewa, dtype):
    train_tiny(Path("ckpts"), dtype=dtype)
    ended = sewa("select")
    assert ended.code == 0, ended.err
    written = load_file("averaged.safetensors")
    sources = [load_file(path) for path in ended.out.splitlines()]
    for name, tensor in written.items():
        exact = torch.stack([s[name] for s in sources]).double().mean(0)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, exact.float().to(dtype)) or torch.allclose(
            tensor.double(), exact, rtol=torch.finfo(dtype).eps
        )
    # what was evaluated is what was written, rounding included
    found = user_loss("averaged.safetensors", "heldout_data")
    assert found == pytest.approx(report_of()["average"]["heldout_loss"], rel=1e-6)


@pytest.mark.usefixtures("run_dir")
def test_the_output_dtype_can_be_chosen_and_is_what_is_evaluated(sewa):
    assert sewa("select", "--output-dtype", "bfloat16").code == 0
    assert all(t.dtype == torch.bfloat16 for t in load_file("averaged.safetensors").values())
    found = user_loss("averaged.safetensors", "heldout_data")
    assert found == pytest.approx(report_of()["average"]["heldout_loss"], rel=1e-6)


@pytest.mark.usefixtures("run_dir")
def test_the_same_seed_gives_the_same_bytes_and_says_who_wrote_them(sewa):
    for name in ("one", "two"):
        assert sewa("select", "--seed", 3, "-o", f"{name}.safetensors").code == 0
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()
    with safe_open("one.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["sewa_method"] == "gumbel"
    steps = report_of("one.report.json")["selected_steps"]
    assert metadata["sewa_steps"] == ",".join(map(str, steps))


def test_baselines_are_compared_on_batches_from_all_over_the_data(run_dir, sewa):
    """The examples come in an order: the easy ones first."""
    ordered = TASK.replace("x.split(128), y.split(128)", "x.split(2), y.split(2)").replace(
        "    y = (", "    x = x[(x[:, 0] * x[:, 1]).abs().argsort(descending=True)]\n    y = ("
    )
    (run_dir / "task.py").write_text(ordered)
    assert sewa("select").code == 0
    report = report_of()
    simple = {one["name"]: one["selection_loss"] for one in report["simple"] if not one["K"]}
    assert report["simple_rows"] == 64
    for name in ("last", "uniform"):
        full = report["references"][name]["selection_loss"]
        assert simple[name] == pytest.approx(full, rel=0.4)


@pytest.mark.usefixtures("run_dir")
def test_an_unhelpful_choice_is_told_and_strict_makes_it_exit_5(sewa):
    # selection labels are inverted, so that what is chosen is bad held out
    task = TASK.replace("return data(1)", "return [(x, 1 - y) for x, y in data(1)]")
    Path("task.py").write_text(task)
    ended = sewa("select", "--strict", "--K", 1, "--set", "gumbel.iterations=40")
    assert ended.code == 5
    report = report_of()
    best = report["verdict"]["beaten_by"][0]
    losses = {n: s["heldout_loss"] for n, s in report["references"].items()}
    assert best["name"] == min(losses, key=lambda name: losses[name])
    assert best["difference"] == pytest.approx(report["average"]["heldout_loss"] - best["score"])
    assert f"the {best['name']} average did better" in " ".join(report["warnings"])
    # what is said is against the first: the one that the selection rows would have chosen
    first = next(iter(losses))
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["baseline"]) == ("worse", first)
    assert verdict["interval"]["low"] > 0
    assert verdict["difference"] == pytest.approx(report["average"]["heldout_loss"] - losses[first])
    assert f"vs best baseline ({first}): +" in ended.err
    # better where it was chosen, worse elsewhere: that has a name, and there is something to do
    own, other = report["average"], report["references"][best["name"]]
    assert own["selection_loss"] < other["selection_loss"]
    [told] = [text for text in report["warnings"] if "overfits" in text]
    assert f"{other['selection_loss'] - own['selection_loss']:.3g} below `{best['name']}`" in told
    assert told.endswith("use more selection examples, or leave out --K")
    assert sewa("select", "--K", 1, "--set", "gumbel.iterations=40").code == 0


@pytest.mark.usefixtures("run_dir")
def test_without_held_out_data_the_summary_says_so(sewa):
    Path("task.py").write_text(TASK.replace("def heldout_data", "def unused"))
    ended = sewa("select")
    assert ended.code == 0
    assert "no held-out data: " in ended.err
    assert report_of()["average"]["heldout_loss"] is None


@pytest.mark.usefixtures("run_dir")
def test_metrics_are_reported_for_the_average_and_the_references(sewa):
    Path("task.py").write_text(TASK + "\ndef metrics(model):\n    return {'norm': "
                               "sum(p.norm().item() for p in model.parameters())}\n")  # fmt: skip
    ended = sewa("select")
    assert ended.code == 0, ended.err
    report = report_of()
    for name, file in (("average", "averaged.safetensors"), ("last", "ckpts/step-120.safetensors")):
        scores = report["average"] if name == "average" else report["references"]["last"]
        expected = sum(t.norm().item() for t in load_file(file).values())
        assert scores["metrics"]["norm"] == pytest.approx(expected, rel=1e-5)
    assert "norm" in ended.err


TIED_TASK = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0))

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))

def build_model():
    return Net()

def selection_data():
    tokens = torch.arange(200) % 5
    return [(tokens, (tokens + 1) % 5)]

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])
"""


@pytest.mark.parametrize("how", ["save_model", "both names", "wrapped"])
def test_tied_weights_have_the_checkpoints_names_and_load_into_the_users_model(
    tmp_path, monkeypatch, sewa, how
):
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TIED_TASK)
    Path("ckpts").mkdir()
    torch.manual_seed(0)
    model = runpy.run_path("task.py")["build_model"]()
    for step in range(1, 7):
        with torch.no_grad():
            model.embed.weight += 0.3 * torch.randn(5, 6)
            model.count += 10
        path = f"ckpts/step-{step}.safetensors"
        if how == "save_model":
            save_model(model, path)
        else:
            prefix = "module._orig_mod." if how == "wrapped" else ""
            save_file({prefix + n: t.clone() for n, t in model.state_dict().items()}, path)
    ended = sewa("select", "ckpts", "--K", 3, "--task", "task.py", "--set", "gumbel.iterations=5")
    assert ended.code == 0, ended.err
    written = load_file("averaged.safetensors")
    fresh = runpy.run_path("task.py")["build_model"]()
    assert len(written) == (2 if how == "save_model" else 3)
    if how == "save_model":
        load_model(fresh, "averaged.safetensors")
    else:
        fresh.load_state_dict(written)
    # an integer is not averaged: it is the newest selected checkpoint's
    assert int(fresh.count) == 10 * report_of()["selected_steps"][-1]
    tokens = torch.arange(200) % 5
    own_loss = nn.functional.cross_entropy(fresh(tokens), (tokens + 1) % 5).item()
    assert own_loss == pytest.approx(report_of()["average"]["selection_loss"], rel=1e-6)


def test_validate_reports_what_fits_and_writes_nothing(run_dir, sewa):
    before = files_in(run_dir)
    ended = sewa("validate", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["checkpoints"] == 12
    assert found["last_step"] == 120
    assert found["batch_rows"] == 128
    assert found["dtypes"] == ["F32"]
    assert found["heldout_data"] is True
    assert found["metrics"] is False
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert files_in(run_dir) == before
    shown = sewa("validate").out
    assert "checkpoints  12" in shown
    assert "loss on it, step 120" in shown
    assert "score" not in shown


def test_init_writes_a_task_and_a_config_that_work_as_they_are(tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    ended = sewa("init")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["sewa.yaml", "task.py"]
    Path("ckpts").mkdir()
    model = runpy.run_path("task.py")["build_model"]()
    for step in range(12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        save_file(model.state_dict(), f"ckpts/step-{step}.safetensors")
    assert sewa("validate").code == 0
    assert sewa("select").code == 0
    assert sewa("select", "--K", 10, "--set", "gumbel.iterations=3").code == 0
    again = sewa("init")
    assert again.code == 3
    assert again.error == (
        "sewa.yaml and task.py: nothing left to write; --force overwrites what is there"
    )
    Path("sewa.yaml").unlink()
    Path("task.py").write_text("# mine")
    third = sewa("init")
    assert third.code == 0
    assert third.out.splitlines() == ["sewa.yaml"]
    assert third.err.splitlines() == ["task.py: exists, and is left as it is"]
    assert Path("task.py").read_text() == "# mine"
    assert sewa("init", "--force").out.splitlines() == ["sewa.yaml", "task.py"]
