"""`sewa select --metric`: what a user's metric may be, and what it may do to us."""

from __future__ import annotations

import csv
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from helpers.figures import assert_readable
from helpers.shells import shell
from helpers.tiny import TASK, Ended, Sewa
from safetensors.torch import load_file

from sewa_cli.present import draw
from sewa_cli.present.card import card_of
from sewa_cli.report.reading import read_any
from sewa_cli.text import number

HEAD = """
import pathlib, random
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def count():
    with open(HERE / "calls", "a") as file:
        file.write("x")
"""
# made of the weights, with noise of its own on each part; better towards the end of the run
SCORE = """
def score_parts(parts=30):
    return list(range(parts))

def heldout_parts(heldout=30):
    return list(range(1000, 1000 + heldout))

def score(model, part):
    count()
    weights = torch.cat([p.flatten() for p in model.parameters()]).double()
    noise = random.Random(hash((round(float(weights.sum()), 6), part))).gauss()
    found = float(weights.norm()) + 0.01 * noise
    return {"return": found, "length": part, "wer": found, "size": found}
"""
OUTPUT = Path("o.safetensors")


@pytest.fixture
def task(run_dir: Path) -> Path:
    """Of a metric and nothing else: no loss, no data."""
    (run_dir / "sewa.yaml").write_text(
        "task: ./task.py\ncheckpoints: ckpts/\ndevice: cpu\noutput: o.safetensors\n"
        "objective: {metric: return, budget: 60, incumbent: uniform}\n"
    )
    (run_dir / "task.py").write_text(HEAD + SCORE)
    return run_dir / "task.py"


def calls() -> int:
    return len(Path("calls").read_text()) if Path("calls").exists() else 0


def report_of(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(Path("o.report.json").read_text())
    return found


def refused(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.err
    for word in words:
        assert word in ended.error
    assert not OUTPUT.exists()
    assert not Path("o.report.json").exists()


@pytest.mark.usefixtures("task")
def test_a_task_without_a_loss(sewa: Sewa) -> None:
    """What is written is what the report says, held out too."""
    ended = sewa("select", "--budget", 150)
    report = report_of(ended)
    contest = report["contest"]
    assert contest["crowned"] is True
    assert contest["evidence"] >= 100
    assert contest["incumbent"] == "uniform"
    assert calls() == contest["evaluations"] + contest["heldout_evaluations"]
    assert contest["evaluations"] <= 150
    written, *others = contest["scores"].items()
    assert written[0] == contest["leader"] == report["written"]
    assert all(written[1]["heldout"] > scores["heldout"] for _, scores in others)
    assert written[1]["others"]["length"] == 1014.5
    low, high = written[1]["interval"]["low"], written[1]["interval"]["high"]
    assert low < written[1]["heldout"] < high
    assert contest["gained"]["over"] == "uniform"
    assert contest["gained"]["interval"]["low"] > 0
    assert sum(c["weight"] != 0 for c in report["candidates"]) == report["K"]
    assert "confirmed to be better than `uniform`" in ended.err
    # it is the very metric of the file
    weights = load_file(OUTPUT)
    norm = float(torch.cat([w.flatten() for w in weights.values()]).double().norm())
    assert written[1]["heldout"] == pytest.approx(norm, abs=0.01)
    # read again, by all that read reports
    assert sewa("verify", OUTPUT).code == 0
    assert sewa("apply", "o.report.json", "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == OUTPUT.read_bytes()
    assert "confirmed to be better" in sewa("report", "o.report.json", "-o", "-").out
    found: Any = read_any(Path("o.report.json"))
    card = card_of(found)
    assert f"{written[1]['heldout']:.6g}" in card
    assert "selection loss" not in card
    schema = json.loads(sewa("schema", "select").out)
    jsonschema.validate(report, schema)
    old = {key: value for key, value in report.items() if key != "contest"}
    Path("old.json").write_text(json.dumps(old | {"references": {"last": report["average"]}}))
    assert sewa("report", "old.json", "-o", "old.html").code == 0
    report["contest"]["scores"] = {}
    Path("none.json").write_text(json.dumps(report))
    refused_report = sewa("report", "none.json", "-o", "-")
    assert refused_report.code == 3
    assert "nobody has scores" in refused_report.error


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize("budget", [1, 12, 40, 300])
def test_nothing_is_written_that_is_known_to_be_worse_than_the_last_checkpoint(
    sewa: Sewa, budget: int
) -> None:
    """The mean of all is bad in this run: it is not even what others have to beat."""
    ended = sewa("select", "--set", "objective.incumbent=null", "--budget", budget)
    contest = report_of(ended)["contest"]
    written, scores = next(iter(contest["scores"].items()))
    assert contest["incumbent"] == "last"
    assert (
        scores["heldout"]
        >= contest["scores"]["last"]["heldout"]
        > 2 + (contest["scores"]["uniform"]["heldout"])
    )
    assert written == "last"


@pytest.mark.usefixtures("task")
def test_a_named_incumbent_that_is_worse_than_the_last_checkpoint_is_overruled(sewa: Sewa) -> None:
    ended = sewa("select", "--budget", 4)
    report = report_of(ended)
    contest = report["contest"]
    assert (contest["incumbent"], contest["overruled"]) == ("uniform", "uniform")
    assert report["written"] == next(iter(contest["scores"])) == "last"
    assert report["selected_steps"] == [120]
    assert "kept `last`: it is significantly better than `uniform`" in ended.err
    assert contest["gained"]["over"] == "uniform"
    assert contest["gained"]["interval"]["low"] > 0
    states = {entry["name"]: entry["state"] for entry in contest["entries"]}
    assert states["uniform"] == "overruled"
    assert states.get("last", "taken") == "taken"
    for name, words in (("nobody", "incumbent: unknown method"), ("sewa", "looks at a loss")):
        refused_ended = sewa("select", "--incumbent", name, "--force")
        assert (refused_ended.code, words in refused_ended.error) == (2, True)


@pytest.mark.usefixtures("task")
def test_entries_name_steps_and_can_be_made_again(sewa: Sewa) -> None:
    report = report_of(sewa("select", "--K", 3, "--budget", 150))
    contest, paths = report["contest"], [c["path"] for c in report["candidates"]]
    stretches = [e for e in contest["entries"] if e["name"].startswith("steps ")]
    assert stretches
    for entry in stretches:
        assert entry["name"] == f"steps {entry['selected_steps'][0]}–{entry['selected_steps'][-1]}"
    assert any(entry["name"] == "last" for entry in contest["entries"])
    written = next(e for e in contest["entries"] if e["state"] == "taken")
    weights = ",".join(map(str, written["coefficients"]))
    files = [paths[i] for i in written["selected"]]
    assert sewa("average", *files, "--weights", weights, "-o", "again.safetensors").code == 0
    again = load_file("again.safetensors")
    for name, tensor in load_file(OUTPUT).items():
        torch.testing.assert_close(again[name], tensor)


def test_equal_averages_are_said_to_be_equal(sewa: Sewa, task: Path) -> None:
    task.write_text(f"{HEAD}{SCORE}\ndef score(model, part):\n    return {{'return': 1.0}}\n")
    ended = sewa("select")
    assert report_of(ended)["contest"]["gained"]["by"] == 0
    assert ": equal\n" in ended.err
    ended = sewa("compare", "--methods", "last,uniform")
    assert "no winner: every row has the same held-out return" in ended.err


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize("budget", [7, 40, 120, 5000])
def test_evaluations_that_are_left_are_accounted_for(sewa: Sewa, budget: int) -> None:
    ended = sewa("select", "--set", "objective.incumbent=null", "--budget", budget, "-v")
    contest = report_of(ended)["contest"]
    is_spent = contest["evaluations"] == budget
    assert (contest["unspent"] is None) == is_spent
    assert ("the rest is unspent: " in ended.err) == (not is_spent)


@pytest.mark.usefixtures("task")
def test_pages_plots_and_trackers(sewa: Sewa) -> None:
    ended = sewa(
        *("select", "--budget", 300, "--set", "objective.incumbent=null", "--html", "p.html"),
        *("--plot", "p.png", "--log", "tensorboard:logs"),
    )
    contest = report_of(ended)["contest"]
    page = Path("p.html").read_text()
    for scores in contest["scores"].values():
        assert number(scores["heldout"]) in page
    assert "All that competed" in page
    assert Path("p.png").stat().st_size > 1000
    assert_readable(draw(read_any(Path("o.report.json"))))
    assert [*Path("logs").iterdir()]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("float('nan')", "no part could be scored; part 14: its score is NaN or Inf"),
        ("'good'", "score() must return a number, or a dict"),
        ("1j", "found complex"),
        ("None", "found NoneType"),
        ("{'return': [1]}", "found list"),
        ("1 / 0", "no part could be scored; part 14: score() raised ZeroDivisionError"),
    ],
)
def test_what_is_no_score(sewa: Sewa, task: Path, value: str, words: str) -> None:
    task.write_text(f"{HEAD}{SCORE}\ndef score(model, part):\n    count()\n    return {value}\n")
    refused(sewa("select"), 4, words)
    assert calls() <= 30  # all that start have the last checkpoint: it might be to blame


def test_what_is_a_score(sewa: Sewa, task: Path) -> None:
    kinds = "True, 2, torch.tensor(2.0), np.float32(3), np.array([3.0]), {'return': np.int64(4)}"
    task.write_text(
        f"{HEAD}{SCORE}\nimport numpy as np\ndef score(model, part):\n"
        f"    return [{kinds}][part % 6]\n"
    )
    contest = report_of(sewa("select"))["contest"]
    assert contest["scores"]["uniform"]["heldout"] == pytest.approx((1 + 2 + 2 + 3 + 3 + 4) / 6)
    assert contest["crowned"] is False


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("score", ""),
        ("scores", "def scores(model, parts):\n    return [score(model, p) for p in parts]"),
    ],
)
def test_some_parts_fail(sewa: Sewa, task: Path, name: str, more: str) -> None:
    """And nothing else does, asked at once with them or not."""
    task.write_text(
        f"{HEAD}{SCORE}\nold = score\ndef score(model, part):\n"
        "    if part % 10 == 3:\n        raise ValueError('no such level')\n"
        f"    return old(model, part)\n{more}\n"
    )
    ended = sewa("select", "--budget", 200)
    report = report_of(ended)
    assert report["contest"]["crowned"] is True
    assert report["contest"]["scores"][report["written"]]["others"] | {"wer": 0, "size": 0} == {
        "wer": 0,
        "size": 0,
        "length": pytest.approx(sum(p for p in range(1000, 1030) if p % 10 != 3) / 27),
    }
    assert f"held-out part 3 has failed: {name}() raised ValueError: no such level" in ended.err
    parts = {line.partition(":")[0] for line in report["contest"]["failures"]}
    assert parts <= {"part 3", "part 13", "part 23"}


def test_too_little_to_tell_anything(sewa: Sewa, task: Path) -> None:
    task.write_text(f"{HEAD}{SCORE}\ndef score(model, part):\n    return {{'return': 1.0}}\n")
    for flags in (("--budget", 1), ("--budget", 1, "--solver", "reinforce", "--K", 3)):
        ended = sewa("select", "--force", *flags)
        assert "the budget was too small to compare two averages" in ended.err
        contest = report_of(ended)["contest"]
        assert next(iter(contest["scores"])) == contest["incumbent"]
        assert contest["evaluations"] <= flags[1]
        assert contest["crowned"] is False


@pytest.mark.usefixtures("task")
def test_few_parts_cannot_confirm_a_lead(sewa: Sewa) -> None:
    for parts, crowned in ((1, None), (24, None), (25, True)):
        ended = sewa("select", "--set", f"args.parts={parts}", "--budget", 200, "--force")
        contest = report_of(ended)["contest"]
        assert contest["crowned"] is crowned
        assert contest["parts"] == parts
        assert ("too few to confirm it" in ended.err) == (crowned is None)
        assert contest["gained"]["by"] > 1


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--solver", "gumbel"), "by the loss, not by --metric return; --solver race would do"),
        (("--solver", "gumbel", "--K", 4), "--solver race or --solver reinforce would do"),
        (("--metric", "-return"), "metric: higher return is better; drop the -"),
        (("--metric", "+wer"), "metric: lower wer is better; drop the +"),
        (("--metric", "wer", "--set", "objective.goal=max"), "lower wer is better; drop goal: max"),
        (("--metric", "-size", "--set", "objective.goal=max"), "contradict each other"),
        (("--set", "objective.budgets=3"), "unknown key; did you mean budget?"),
        (("--budget", "soon"), "or a time such as 90s, 10m or 2h"),
        (("--budget", "0"), "must be 1 evaluation or more"),
        (("--guard", 0.2), "the task has held-out parts already"),
        (("--fallback",), "a choice by a metric needs none"),
        (("--sparse",), "by a metric, name a K"),
        (("--K", 12), "K must be at most 11"),
        (("--dry-run",), "only score() knows what a metric takes"),
        (("--solver", "reinforce"), "K: auto needs a solver that finds K: --solver race; or name"),
        (("--set", "objective.part_timeout=soon"), "must be a time such as 30s"),
    ],
)
def test_what_is_refused(sewa: Sewa, flags: tuple[object, ...], words: str) -> None:
    refused(sewa("select", *flags), 2, words)
    assert calls() == 0


def test_a_metric_that_the_task_does_not_have(sewa: Sewa, task: Path) -> None:
    """The flag is to blame, and the function that gives others is named."""
    words = "--metric bleu: the task has no such metric; score() gives length, return, size, wer"
    for command in ("select", "compare", "evaluate", "validate"):
        ended = sewa(command, "--metric", "bleu")
        assert (ended.code, words in ended.error) == (2, True), ended.err
    task.write_text(f"{TASK}\ndef metrics(model):\n    return {{'accuracy': 0.5}}\n")
    refused(sewa("select"), 2, "--metric return: the task has no such metric; metrics() gives acc")
    task.write_text(TASK)
    assert sewa("evaluate", "--metric", "bleu").code == 4


def test_tasks_that_have_nothing_to_choose_by(sewa: Sewa, task: Path) -> None:
    task.write_text(TASK)
    refused(sewa("select"), 4, "has no score() yet; add `def score(model, part): ")
    config = Path("sewa.yaml")
    config.write_text(
        config.read_text().replace("metric: return, budget: 60, incumbent: uniform", "")
    )
    refused(sewa("select", "--solver", "race"), 2, "race chooses by a metric; name one")
    task.write_text(HEAD + SCORE)
    refused(sewa("select"), 4, "has no loss(outputs, batch), and this needs one")
    refused(sewa("select", "--metric", "return", "--set", "args.parts=0"), 4, "there are no parts")


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(("metric", "best"), [("wer", min), ("-size", min), ("+size", max)])
def test_the_better_direction_is_chosen(
    sewa: Sewa, metric: str, best: Callable[[Iterable[float]], float]
) -> None:
    """By the metric's name, or by its sign; nothing is assumed."""
    ended = sewa("select", "--metric", metric, "--budget", 200)
    contest = report_of(ended)["contest"]
    assert contest["goal"] == best.__name__
    norms = [scores["heldout"] for scores in contest["scores"].values()]
    assert norms[0] == best(norms)
    assert max(norms) - min(norms) > 1
    assert "assuming" not in ended.err
    flags = ("--metric", metric, "--methods", "last,uniform", "--json")
    compared = json.loads(sewa("compare", *flags).out)
    assert compared["judged"]["goal"] == best.__name__
    assert compared["rows"][compared["best"]]["score"]["heldout"] == best(
        row["score"]["heldout"] for row in compared["rows"]
    )


@pytest.mark.usefixtures("task")
def test_an_assumed_direction_is_the_first_line_of_output(sewa: Sewa) -> None:
    said = "warning: assuming that higher size is better; --metric -size if lower is"
    for command in ("select", "compare", "evaluate", "validate"):
        ended = sewa(command, "--metric", "size")
        assert ended.code == 0, ended.err
        assert ended.err.startswith(said)
    assert json.loads(Path("o.report.json").read_text())["contest"]["goal"] == "max"


@pytest.mark.usefixtures("task")
def test_strict(sewa: Sewa) -> None:
    flags = ("--budget", 4, "--set", "args.heldout=4")  # nothing is shown, nor held out
    ended = sewa("select", "--strict", "--force", *flags)
    assert ended.code == 5
    assert "has the better held-out return" in ended.error


def test_metrics_alone_are_one_part(sewa: Sewa, task: Path) -> None:
    task.write_text(
        f"{TASK}\ndef metrics(model):\n    return {{'return': float(model[0].weight.norm())}}\n"
    )
    ended = sewa("select", "--K", 4)
    contest = report_of(ended)["contest"]
    assert (contest["parts"], contest["heldout_parts"], contest["crowned"]) == (1, None, None)
    best, *others = [scores["selection"] for scores in contest["scores"].values()]
    assert all(other is None or other <= best for other in others)
    refused_ended = sewa("select", "--strict", "--force")
    assert refused_ended.code == 2
    assert "--strict needs held-out parts" in refused_ended.error


def test_batches_kept_aside_are_not_chosen_by(sewa: Sewa, task: Path) -> None:
    """Neither by the metric nor by the loss, which would make the incumbent look too good."""
    task.write_text(
        TASK.replace("split(128)", "split(30)").replace("def heldout_data", "def _unused")
        + "\ndef score(model, part):\n"
        "    seen.add(('score', round(float(part[0].sum()), 3)))\n"
        "    return (model(part[0]).argmax(1) == part[1]).float().mean()\n"
        "\nseen = set()\ninner = loss\ndef loss(outputs, batch):\n"
        "    if torch.is_grad_enabled():\n"
        "        seen.add(('loss', round(float(batch[0].sum()), 3)))\n"
        "    return inner(outputs, batch)\n"
        "import atexit\n"
    )
    report = report_of(sewa("select", "--K", 3, "--set", "objective.incumbent=null"))
    module: Any = sys.modules["task"]  # as the command has imported it
    learned = {rows for kind, rows in module.seen if kind == "loss"}
    contest = report["contest"]
    assert contest["parts"] + contest["heldout_parts"] == 10
    assert 0 < len(learned) <= contest["parts"]
    assert contest["incumbent"] == "by loss"


@pytest.mark.usefixtures("task")
def test_what_was_scored_before_is_recalled(sewa: Sewa) -> None:
    first = report_of(sewa("select", "--cache", "c"))["contest"]
    before = calls()
    second = report_of(sewa("select", "--cache", "c", "--force"))["contest"]
    assert calls() - before == second["heldout_evaluations"]
    assert second == first


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(
    "flags",
    [
        ("--output-dtype", "bfloat16"),
        ("--memory", "2MB"),
        ("--set", "tier=files"),
        ("--last", 2),
        ("--last", 2, "--K", 1),
        ("--K", 10, "--solver", "reinforce"),
        ("--K", 11, "--solver", "reinforce"),
    ],
)
def test_ways_to_run(sewa: Sewa, flags: tuple[object, ...]) -> None:
    report = report_of(sewa("select", *flags))
    assert report["contest"]["evaluations"] <= 60
    weights = load_file(OUTPUT)
    norm = float(torch.cat([w.double().flatten() for w in weights.values()]).norm())
    assert report["contest"]["scores"][report["written"]]["heldout"] == pytest.approx(
        norm, abs=0.02
    )


@pytest.mark.usefixtures("task")
def test_streams(sewa: Sewa) -> None:
    found = json.loads(sewa("select", "--json").out)
    assert found["contest"]["metric"] == "return"
    rows = list(csv.DictReader(sewa("select", "--format", "csv", "--force").out.splitlines()))
    assert [float(row["heldout_return"]) for row in rows] == [
        scores["heldout"] for scores in found["contest"]["scores"].values()
    ]


def test_batchnorm(sewa: Sewa, bn_run: Path) -> None:
    """Statistics are recomputed for each average that is scored, where there is data for it."""
    text = (bn_run / "task.py").read_text()
    score = "\ndef score_parts(): return list(range(30))\ndef score(model, part):\n"
    score += "    return {'var': float(sum(m.running_var.sum() for m in model.modules()"
    score += " if hasattr(m, 'running_var')))}\n"
    (bn_run / "task.py").write_text(text + score)
    flags = ("--metric", "var", "--budget", 60, "-o", OUTPUT)
    report = report_of(sewa("select", *flags))
    assert report["contest"]["scores"]
    weights = load_file(OUTPUT)
    total = sum(float(w.sum()) for name, w in weights.items() if name.endswith("running_var"))
    heldout = next(iter(report["contest"]["scores"].values()))["heldout"]
    assert heldout == pytest.approx(total, rel=1e-5)
    assert report["batchnorm"]["rows"] > 0


SIGNALS = """
import os, signal
old = score
def score(model, part):
    found = old(model, part)
    calls = len((HERE / "calls").read_text())
    if calls in WHEN:
        os.kill(os.getpid(), WHEN[calls])
    return found
"""


@pytest.mark.parametrize(
    ("when", "code"),
    [
        ({20: signal.SIGINT}, 0),
        # in the middle of held-out parts
        pytest.param({20: signal.SIGINT, 30: signal.SIGINT}, 130, marks=pytest.mark.breadth),
        pytest.param({20: signal.SIGTERM}, 130, marks=pytest.mark.breadth),
    ],
)
def test_interrupts(task: Path, when: dict[int, int], code: int) -> None:
    numbers = {at: int(number) for at, number in when.items()}
    task.write_text(f"{HEAD}{SCORE}\nWHEN = {numbers}{SIGNALS}")
    ended = shell("sewa select")
    assert ended.returncode == code, ended.stderr
    assert OUTPUT.exists() == (code == 0)
    assert Path("o.report.json").exists() == (code == 0)
    if code == 0:
        assert "interrupted: the choice is made by the" in ended.stderr
        contest = json.loads(Path("o.report.json").read_text())["contest"]
        assert contest["interrupted"] is True
        assert contest["evaluations"] in (19, 20)
        assert contest["overruled"] == contest["incumbent"]  # `last` is better held out
    else:
        assert "nothing half-written is left" in ended.stderr
        assert calls() <= 32


@pytest.mark.parametrize("strict", [False, True])
def test_an_interrupt_among_held_out_parts_does_not_lose_what_was_chosen(
    task: Path, strict: bool
) -> None:
    late = "    if part >= 1000:\n        os.kill(os.getpid(), signal.SIGINT)\n"
    always = f"{SIGNALS.partition('    found')[0]}{late}    return old(model, part)\n"
    task.write_text(f"{HEAD}{SCORE}\n{always}")
    ended = shell(f"sewa select{' --strict' * strict}")
    assert ended.returncode == (130 if strict else 0), ended.stderr
    assert OUTPUT.exists() is not strict
    if not strict:
        assert "interrupted: what was chosen is written without held-out scores" in ended.stderr
        assert "no held-out return: interrupted" in ended.stderr
        contest = json.loads(Path("o.report.json").read_text())["contest"]
        assert contest["interrupted"] is True
        assert {scores["heldout"] for scores in contest["scores"].values()} == {None}
        assert shell(f"sewa verify {OUTPUT}").returncode == 0


@pytest.mark.breadth
def test_workers_say_the_same_and_what_hangs_is_given_up(sewa: Sewa, task: Path) -> None:
    alone = report_of(sewa("select"))["contest"]
    weights = OUTPUT.read_bytes()
    ended = sewa("select", "--workers", 2, "--force")
    assert report_of(ended)["contest"] == alone
    assert OUTPUT.read_bytes() == weights
    task.write_text(
        f"{HEAD}{SCORE}\nimport time\nold = score\ndef score(model, part):\n"
        "    if part == 14:\n        time.sleep(600)\n    return old(model, part)\n"
    )
    began = time.monotonic()
    flags = ("--workers", 2, "--set", "objective.part_timeout=1s", "--budget", 8, "--force")
    ended = sewa("select", *flags)
    assert report_of(ended)["contest"]["evaluations"] == 8
    assert "part 14 has failed: took longer than 1 s" in ended.err
    assert time.monotonic() < began + 120


@pytest.mark.usefixtures("task")
def test_a_budget_in_seconds(sewa: Sewa) -> None:
    report = report_of(sewa("select", "--budget", "1s"))
    assert report["contest"]["evaluations"] > 20
    assert report["cost"]["seconds"]["learn"] < 10
