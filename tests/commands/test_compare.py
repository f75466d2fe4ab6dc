"""The comparison: every row there, fair, counted, and no winner inside the noise."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch
from helpers.tiny import TASK, user_loss
from safetensors.torch import load_file, save_file

from sewa_cli.methods import REGISTRY
from sewa_cli.text import with_K

pytestmark = pytest.mark.usefixtures("run_dir")

BY_LOSS = {name: method for name, method in REGISTRY.items() if not method.needs_metric}
EVERY = ",".join(BY_LOSS)


def compare(sewa, *arguments):
    ended = sewa("compare", *arguments, "--format", "json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_every_method_at_every_k_has_its_row_with_losses_interval_and_cost(sewa):
    found = compare(sewa, "--methods", EVERY, "--K", "2,4")
    rows = {(row["method"], row["K"]): row for row in found["rows"]}
    expected = {
        (name, K)
        for name, method in BY_LOSS.items()
        for K in ([2, 4] if method.has_budget else [None])
    }
    assert rows.keys() == expected
    for row in rows.values():
        assert row["selection_loss"] > 0
        assert row["interval"]["low"] < row["heldout_loss"] < row["interval"]["high"]
        assert row["difference_interval"]["low"] <= row["difference"]
        assert row["mark"] in ("best", "tie", "worse")
        assert row["cost"]["forward_passes"] >= 6
        assert row["cost"]["seconds"] > 0
    assert sum(row["mark"] == "best" for row in rows.values()) == 1
    best = min(rows.values(), key=lambda row: row["heldout_loss"])
    assert best["mark"] == "best"
    assert found["rows"][found["best"]] == best
    assert rows["sewa", 4]["cost"]["backward_passes"] == 8 * 2
    assert rows["twa", None]["cost"]["backward_passes"] == 100
    assert rows["random", 4]["spread"] > 0
    assert rows["lawa", 4]["spread"] is None
    schema = json.loads(sewa("schema", "compare").out)
    jsonschema.validate(found, schema)


def test_the_losses_are_those_that_the_user_computes(sewa):
    found = compare(sewa, "--methods", "last,uniform,lawa,ema", "--K", "3")
    states = [load_file(c["path"]) for c in found["candidates"]]
    for row in found["rows"]:
        [c] = row["coefficients"]
        mixed = {
            n: sum(w * s[n].double() for w, s in zip(c, states, strict=True)).float()
            for n in states[0]
        }
        save_file(mixed, "mixed.safetensors")
        for data, key in (("selection_data", "selection_loss"), ("heldout_data", "heldout_loss")):
            assert user_loss("mixed.safetensors", data) == pytest.approx(row[key], rel=1e-5)


def test_select_and_compare_agree(sewa):
    assert sewa("select", "--K", 4).code == 0
    selected = json.loads(Path("averaged.report.json").read_text())
    found = compare(sewa, "--methods", "sewa,last,uniform", "--K", 4)
    rows = {row["method"]: row for row in found["rows"]}
    chosen = [i for i, c in enumerate(rows["sewa"]["coefficients"][0]) if c > 0]
    assert chosen == selected["selected"]
    best = selected["simple"][0]  # the first of the references
    [rows[best["name"]]] = compare(
        sewa, "--methods", best["name"], *(["--K", best["K"]] if best["K"] else [])
    )["rows"]
    labels = [with_K(best["name"], best["K"]), "last", "uniform"]
    assert [*selected["references"]] == labels
    for name, label in zip([best["name"], "last", "uniform"], labels, strict=True):
        for key in ("selection_loss", "heldout_loss"):
            assert rows[name][key] == pytest.approx(selected["references"][label][key])


NOISE = """
import torch
from torch import nn
from torch.nn import functional as F

def data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, 6, generator=generator)
    return [(x, torch.randint(2, (400,), generator=generator))]   # the labels mean nothing

def build_model():
    return nn.Linear(6, 2)

def selection_data():
    return data(1)

def heldout_data():
    return data(2)

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])
"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.breadth) for seed in (1, 2, 3))]
)
def test_where_labels_are_shuffled_nobody_wins(sewa, seed):
    """Checkpoints that scatter around a network that knows nothing, on labels that mean nothing."""
    Path("noise.py").write_text(NOISE)
    Path("noise").mkdir()
    torch.manual_seed(seed)
    for step in range(20):
        state = {"weight": 0.02 * torch.randn(2, 6), "bias": 0.02 * torch.randn(2)}
        save_file(state, f"noise/step-{step}.safetensors")
    ended = sewa(
        "compare", "noise", "--task", "noise.py", "--methods", EVERY, "--K", "3,6",
        "--format", "json", "--device", "cpu", "--set", "gumbel.iterations=20",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["winner"] is None
    assert "no winner" in ended.err
    random = [row for row in found["rows"] if row["method"] == "random"]
    assert all(row["mark"] in ("tie", "best") for row in random)


def test_a_real_difference_has_a_winner(sewa):
    # one checkpoint is whole, the others are far off
    for n, path in enumerate(sorted(Path("ckpts").iterdir())):
        if path.name != "step-120.safetensors":
            torch.manual_seed(n)
            state = {name: t + 3 * torch.randn_like(t) for name, t in load_file(path).items()}
            save_file(state, path)
    ended = sewa("compare", "--methods", "last,uniform,lawa", "--format", "json")
    found = json.loads(ended.out)
    assert found["winner"] == "last"
    assert [row["mark"] for row in found["rows"]] == ["best", "worse", "worse"]
    assert "nothing ties with it" in ended.err


def test_the_best_row_is_written_and_can_be_built_again(run_dir, sewa):
    arguments = ["--K", 4, "--output-best", "best.safetensors"]
    found = compare(sewa, "--methods", "last,uniform,ema,random,twa", *arguments)
    best = found["rows"][found["best"]]
    assert json.loads((run_dir / "best.report.json").read_text()) == found
    loss = user_loss("best.safetensors", "heldout_data")
    if best["method"] == "random":
        assert loss <= best["heldout_loss"]
    else:
        assert loss == pytest.approx(best["heldout_loss"], rel=1e-5)
    assert sewa("apply", "best.report.json", "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path("best.safetensors").read_bytes()
    assert sewa("compare", "--methods", "last", "--output-best", "best.safetensors").code == 3


def test_without_held_out_data_it_says_what_it_cannot_report(sewa):
    Path("task.py").write_text(TASK.replace("def heldout_data", "def unused"))
    ended = sewa("compare", "--methods", "last,lawa", "--format", "json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert found["best"] is None
    assert found["winner"] is None
    assert all(row["mark"] is None and row["interval"] is None for row in found["rows"])
    assert "no held-out data: no held-out loss, interval, tie or winner" in ended.err
    refused = sewa("compare", "--methods", "last", "--output-best", "x.safetensors")
    assert refused.code == 2
    assert "--output-best needs held-out data" in refused.error


def test_a_loss_that_is_no_mean_over_rows_is_resampled_by_batches(sewa):
    Path("task.py").write_text(
        TASK.replace("x.split(128), y.split(128)", "x.split(20), y.split(20)").replace(
            "    return F.cross_entropy(outputs, batch[1])",
            "    n = len(batch[1])\n    return F.cross_entropy(outputs, batch[1]) * (1 + (n > 1))",
        )
    )
    found = compare(sewa, "--methods", "last,lawa")
    assert found["unit"] == "batches"
    assert found["heldout_rows"] == 300


def test_too_few_rows_give_losses_but_no_intervals(sewa):
    Path("task.py").write_text(TASK.replace("return data(2)", "return data(2, 6)"))
    ended = sewa("compare", "--methods", "last,lawa", "--format", "json")
    found = json.loads(ended.out)
    assert "6 held-out examples are too few for intervals" in ended.err
    assert found["winner"] is None
    assert all(row["interval"] is None and row["heldout_loss"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--methods", "lawa,swaa"], 2, "methods: unknown method 'swaa'"),
        (["--methods", "ema:dekay=1"], 2, "ema has no option 'dekay'"),
        (["--methods", "ema:decay=2"], 2, "methods: ema:decay=2: ema: the decay must lie in"),
        (["--methods", ""], 2, "methods: none named"),
        (["--methods", "sewa", "--K", "12"], 2, "there are 12 checkpoints; K is at most 11"),
        (["--methods", "last", "--output-best", "-"], 2, "--output-best: - is not a file"),
        (["--methods", "last", "--report", "x.png", "--plot", "x.png"], 2, "different files"),
        (["--methods", "lawa", "--K", "99"], 2, "--K 99: there are 12"),
        (["--methods", "lawa", "--K", "5,ten"], 2, "--K: 1: must be a whole number, found 'ten'"),
        (["--methods", "lawa", "--format", "xml"], 2, "--format: must be one of table"),
        (["--methods", "lawa", "--plot", "x.bmp"], 2, "x.bmp: unknown kind of picture"),
        (["--methods", "mine", "--set", "compare.methods_from=gone.py"], 4, "gone.py: no such"),
    ],
)
def test_bad_input_gets_one_clear_line(sewa, arguments, code, words):
    ended = sewa("compare", *arguments)
    assert ended.code == code, ended.err
    assert words in ended.error
    assert ended.out == ""


OWN = """
from sewa_cli.methods import Run, mean_of, method

@method()
def ends(run: Run, *, heavy: float = 0.5):
    '''The first and the last.'''
    return [1 - heavy, *[0.0] * (run.k - 2), heavy]

@method(needs_loss=True)
def worst(run: Run):
    '''The single checkpoint with the highest loss.'''
    losses = [run.loss(mean_of([i], run.k)) for i in range(run.k)]
    return mean_of([losses.index(max(losses))], run.k)

@method()
def broken(run: Run):
    '''Always fails.'''
    raise KeyError("my own fault")
"""


@pytest.mark.usefixtures("own_registry")
def test_methods_of_a_users_file_appear_by_their_names(sewa):
    Path("own.py").write_text(OWN)
    listed = sewa("methods", "--set", "compare.methods_from=own.py").out
    assert re.search(r"ends +The first and the last\. \[heavy=0\.5\]", listed)
    found = compare(
        sewa, "--methods", "ends:heavy=0.75,worst,best", "--set", "compare.methods_from=own.py"
    )
    assert [row["method"] for row in found["rows"]] == ["ends:heavy=0.75", "worst", "best"]
    assert found["rows"][0]["coefficients"][0] == [0.25, *[0.0] * 10, 0.75]
    assert found["rows"][1]["selection_loss"] > found["rows"][2]["selection_loss"]
    ended = sewa("compare", "--methods", "broken", "--set", "compare.methods_from=own.py")
    assert ended.code == 4
    assert "broken() raised KeyError: 'my own fault'" in ended.error
    assert "own.py" in ended.err
    ended = sewa("average", "ckpts", "--method", "worst", "--set", "compare.methods_from=own.py")
    assert ended.code == 2


@pytest.mark.usefixtures("own_registry")
def test_methods_of_an_installed_package_appear_by_their_names(sewa, tmp_path, monkeypatch):
    package = tmp_path / "site"
    (package / "guest-1.0.dist-info").mkdir(parents=True)
    (package / "guest-1.0.dist-info" / "METADATA").write_text("Name: guest\nVersion: 1.0\n")
    (package / "guest-1.0.dist-info" / "entry_points.txt").write_text(
        "[sewa.methods]\nguest = guest_methods:second\n"
    )
    (package / "guest_methods.py").write_text(
        "def second(run):\n    '''The second checkpoint.'''\n"
        "    return [0.0, 1.0, *[0.0] * (run.k - 2)]\n"
    )
    monkeypatch.syspath_prepend(package)
    assert re.search("guest +The second checkpoint.", sewa("methods").out)
    found = compare(sewa, "--methods", "guest")
    assert found["rows"][0]["coefficients"][0].index(1.0) == 1


def test_a_draw_with_a_loss_that_is_not_finite_is_worse_and_no_crash(sewa):
    Path("task.py").write_text(
        TASK.replace(
            "    return F.cross_entropy(outputs, batch[1])",
            "    big = outputs.abs().max() > 7\n"
            "    return F.cross_entropy(outputs, batch[1]) + (float('nan') if big else 0.0)",
        )
    )
    ended = sewa("compare", "--methods", "uniform,last,random", "--K", 3, "--format", "jsonl")
    assert ended.code == 0, ended.err
    for line in ended.out.splitlines():
        assert "NaN" not in line
        json.loads(line)


def test_shuffled_data_stay_paired_and_no_method_depends_on_its_neighbours(sewa):
    plain = compare(sewa, "--methods", "last,lawa,latest")
    shuffled = TASK.replace(
        "return list(zip(x.split(128), y.split(128)))",
        "return torch.utils.data.DataLoader("
        "torch.utils.data.TensorDataset(x, y), batch_size=128, shuffle=True)",
    )
    assert "DataLoader" in shuffled
    Path("task.py").write_text(shuffled)
    mixed = compare(sewa, "--methods", "last,lawa,latest")
    for one, two in zip(plain["rows"], mixed["rows"], strict=True):
        width = one["difference_interval"]["high"] - one["difference_interval"]["low"]
        for end in ("low", "high"):
            assert two["difference_interval"][end] == pytest.approx(
                one["difference_interval"][end], abs=0.2 * width + 1e-9
            )
    alone = compare(sewa, "--methods", "sewa,twa")["rows"]
    after = compare(sewa, "--methods", "last,twa:lr=0.2,sewa,twa")["rows"][2:]
    for one, two in zip(alone, after, strict=True):
        assert one["heldout_loss"] == pytest.approx(two["heldout_loss"], rel=1e-9)
