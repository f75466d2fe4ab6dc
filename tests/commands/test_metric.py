"""`--metric`: choices and comparisons by a user's score, and what that score may do to us."""

import json
import signal
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from helpers.shells import shell
from helpers.tiny import TASK, finding
from safetensors.torch import load_file

from sewa_cli.direction import Criterion
from sewa_cli.scoring.heldout import fill_failures
from sewa_cli.text import with_K

HEAD = """
import os, pathlib, random, signal
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

HERE = pathlib.Path(__file__).parent

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def weights(model):
    state = model if isinstance(model, dict) else model.state_dict()
    return torch.cat([state[name].flatten() for name in sorted(state)]).double()

PATHS = sorted(HERE.glob("ckpts/*"), key=lambda path: int(path.stem.partition("-")[2]))
RUN = [weights(load_file(path)) for path in PATHS]
LAST, MEAN = RUN[-1], sum(RUN) / len(RUN)

def is_at(model, point):
    return float((weights(model) - point).norm()) < 1e-4

def score_parts(parts=30):
    return list(range(parts))

def heldout_parts(heldout=30):
    return list(range(1000, 1000 + heldout))
"""
# better towards the end of the run, with noise of its own on each part
SCORE = """
def score(model, part):
    with open(HERE / "calls", "a") as file:
        file.write("x")
    noise = random.Random(hash((round(float(weights(model).sum()), 6), part))).gauss()
    found = float(weights(model).norm()) + 0.01 * noise
    return {"return": found, "length": part, "wer": found, "size": found}
"""
NOISE = """
def score(model, part):
    return random.Random(hash((round(float(weights(model).sum()), 6), part))).gauss()
"""
OUTPUT, REPORT = Path("o.safetensors"), Path("o.report.json")


@pytest.fixture
def task(run_dir):
    """A task with a metric and nothing else: no loss, no data."""
    (run_dir / "sewa.yaml").write_text(
        "task: ./task.py\ncheckpoints: ckpts/\ndevice: cpu\noutput: o.safetensors\n"
        "objective: {metric: return, budget: 60, incumbent: uniform}\n"
    )
    (run_dir / "task.py").write_text(HEAD + SCORE)
    return run_dir / "task.py"


def calls():
    return len(Path("calls").read_text()) if Path("calls").exists() else 0


def report_of(ended):
    assert ended.code == 0, ended.err
    return json.loads(REPORT.read_text())


def contest_of(ended):
    """The contest, and the verdict as `verdict` in it."""
    found = report_of(ended)
    return {**finding(found, "contest"), "verdict": found["verdict"]}


def compared(ended):
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    found["by"] = {row["method"]: row for row in found["rows"]}
    return found


def norm_of(file):
    return float(torch.cat([w.double().flatten() for w in load_file(file).values()]).norm())


# ---- what is chosen ------------------------------------------------------------------------------


@pytest.mark.usefixtures("task")
def test_what_is_written_is_what_the_report_says(sewa):
    report = report_of(sewa("select", "--budget", 150))
    jsonschema.validate(report, json.loads(sewa("schema", "select").out))
    contest = finding(report, "contest")
    assert contest["confirmed"] is True
    assert contest["evidence"] >= 100
    assert calls() == contest["evaluations"] + contest["heldout_evaluations"]
    assert contest["evaluations"] <= 150
    written, *others = contest["scores"].items()
    assert written[0] == contest["leader"] == report["written"]
    assert all(written[1]["heldout"] > scores["heldout"] for _, scores in others)
    assert written[1]["others"]["length"] == 1014.5
    interval = written[1]["interval"]
    assert interval["low"] < written[1]["heldout"] < interval["high"]
    assert report["verdict"]["baseline"] == contest["incumbent"] == "uniform"
    assert report["verdict"]["interval"]["low"] > 0
    assert written[1]["heldout"] == pytest.approx(norm_of(OUTPUT), abs=0.01)
    assert sewa("verify", OUTPUT).code == 0
    assert sewa("apply", REPORT, "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == OUTPUT.read_bytes()
    finding(report, "contest")["scores"] = {}
    Path("none.json").write_text(json.dumps(report))
    assert sewa("report", "none.json", "-o", "-").code == 3


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize("budget", [1, 40, pytest.param(300, marks=pytest.mark.breadth)])
def test_nothing_is_written_that_is_known_to_be_worse_than_the_last_checkpoint(sewa, budget):
    """The mean of all is bad in this run: it is not even the incumbent, unless it is named."""
    ended = sewa("select", "--set", "objective.incumbent=null", "--budget", budget)
    contest = contest_of(ended)
    assert contest["incumbent"] == next(iter(contest["scores"])) == "last"
    assert contest["scores"]["last"]["heldout"] > 2 + contest["scores"]["uniform"]["heldout"]
    assert (contest["unspent"] is None) == (contest["evaluations"] == budget)
    left = budget - contest["evaluations"]
    said = f"{left} of {budget} evaluations unspent: {contest['unspent']}\n"
    assert (said in ended.err) == (contest["unspent"] is not None)
    report = report_of(sewa("select", "--budget", 4, "--force"))
    contest = finding(report, "contest")
    assert (contest["incumbent"], contest["overruled"]) == ("uniform", "uniform")
    assert report["written"] == next(iter(contest["scores"])) == "last"
    assert report["selected_steps"] == [120]
    assert report["verdict"]["interval"]["low"] > 0
    states = {entry["name"]: entry["state"] for entry in contest["entries"]}
    assert states["uniform"] == "overruled"
    assert states.get("last", "taken") == "taken"


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(("metric", "best"), [("wer", min), ("-size", min), ("+size", max)])
def test_the_better_direction_is_chosen(sewa, metric, best):
    """By the metric's name, or by its sign; nothing is assumed."""
    ended = sewa("select", "--metric", metric, "--budget", 200)
    contest = contest_of(ended)
    assert contest["goal"] == best.__name__
    norms = [scores["heldout"] for scores in contest["scores"].values()]
    assert norms[0] == best(norms)
    assert max(norms) - min(norms) > 1
    assert "assuming" not in ended.err
    found = compared(sewa("compare", "--metric", metric, "--methods", "last,uniform", "--json"))
    assert found["judged"]["goal"] == best.__name__
    heldout = [row["score"]["heldout"] for row in found["rows"]]
    assert heldout[found["best"]] == best(heldout)
    behind = [row["score"]["behind"] for row in found["rows"]]
    assert sorted(behind) == [0, pytest.approx(abs(heldout[0] - heldout[1]))]


@pytest.mark.usefixtures("task")
def test_an_assumed_direction_is_the_first_line_of_output(sewa):
    said = "warning: assuming that higher size is better; --metric -size if lower is"
    for command in ("select", "compare", "evaluate", "validate"):
        ended = sewa(command, "--metric", "size")
        assert ended.code == 0, ended.err
        assert ended.err.startswith(said)


@pytest.mark.usefixtures("task")
def test_few_parts_cannot_confirm_a_lead(sewa):
    for parts, confirmed in ((1, None), (24, None), (25, True)):
        flags = ("--set", f"args.parts={parts}", "--budget", 200, "--force")
        contest = contest_of(sewa("select", *flags))
        assert contest["confirmed"] is confirmed
        assert contest["overruled"] is None
        assert contest["parts"] == parts
        assert contest["verdict"]["difference"] > 1


def test_a_leader_that_is_not_confirmed_has_the_duels_e_value(sewa, task):
    task.write_text(HEAD + NOISE)
    contest = contest_of(sewa("select", "--budget", 300, "--seed", 1))
    assert contest["confirmed"] is False
    assert contest["leader"] == contest["verdict"]["baseline"] != contest["incumbent"]
    assert contest["verdict"]["more"] > 0
    [known] = [entry for entry in contest["entries"] if entry["evidence"] is not None]
    assert with_K(known["name"], known["K"]) == contest["leader"]
    assert (known["evidence"], known["state"]) == (contest["evidence"], "leading")
    assert sewa("select", "--strict", "--force", "--budget", 4, "--metric", "wer").code == 5


# ---- what a score may be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("float('nan')", "no part could be scored; part 14: its score is NaN or Inf"),
        ("'good'", "score() must return a number, or a dict"),
        ("{'return': [1]}", "found list"),
        ("part < 0 or 1 / 0", r"score() raised ZeroDivisionError: division by zero (task.py, line"),
    ],
)
def test_what_is_no_score(sewa, task, value, words):
    task.write_text(f"{HEAD}{SCORE}\nold = score\ndef score(model, part):\n    old(model, part)\n")
    task.write_text(f"{task.read_text()}    return {value}\n")
    ended = sewa("select")
    assert (ended.code, words in ended.error) == (4, True), ended.err
    assert not OUTPUT.exists()
    assert calls() <= 30  # all that start have the last checkpoint: it might be to blame


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--solver", "gumbel"), "by the loss, not by --metric return; --solver race would do"),
        (("--solver", "gumbel", "--K", 4), "--solver race or --solver reinforce would do"),
        (("--metric", "-return"), "--metric: higher return is better; drop the -"),
        (("--metric", "+wer"), "--metric: lower wer is better; drop the +"),
        (("--metric", "wer", "--set", "objective.goal=max"), "lower wer is better; drop goal: max"),
        (("--metric", "-size", "--set", "objective.goal=max"), "contradict each other"),
        (("--metric", "bleu"), "is not in what score() returns (length, return, size, wer); add"),
        (("--metric=",), "metric: must have a name"),
        (("--incumbent", "sewa"), "looks at a loss"),
        (("--set", "objective.budgets=3"), "unknown key; did you mean budget?"),
        (("--budget", "soon"), "or a time such as 90s, 10m or 2h"),
        (("--budget", "0"), "must be 1 evaluation or more"),
        (("--guard", 0.2), "the task has held-out parts already"),
        (("--fallback",), "unless another is confirmed"),
        (("--sparse",), "by a metric, name a K"),
        (("--K", 12), "K is at most 11"),
        (("--dry-run",), "only score() knows what a metric takes"),
        (("--solver", "reinforce"), "K: auto needs a solver that finds K: --solver race; or name"),
        (("--set", "objective.part_timeout=soon"), "must be a time such as 30s"),
    ],
)
def test_what_is_refused(sewa, flags, words):
    ended = sewa("select", *flags)
    assert (ended.code, words in ended.error) == (2, True), ended.err
    assert not OUTPUT.exists()
    assert calls() <= 2


def test_tasks_that_have_nothing_to_choose_by(sewa, task):
    def refused(words, *flags):
        ended = sewa("select", *flags)
        assert (ended.code, words in ended.error) == (4, True), ended.err

    task.write_text(TASK)
    refused('has no score() yet; add `def score(model, part): return {"return": ...}`')
    task.write_text(HEAD + SCORE)
    refused("has no loss(outputs, batch), and this needs one", "--set", "objective.metric=null")
    refused("lists no parts", "--set", "args.parts=0")


def test_metrics_alone_are_one_part(sewa, task):
    task.write_text(
        f"{TASK}\ndef metrics(model):\n    return {{'return': float(model[0].weight.norm())}}\n"
    )
    ended = sewa("select", "--K", 4)
    contest = contest_of(ended)
    assert (contest["parts"], contest["heldout_parts"], contest["confirmed"]) == (1, None, None)
    assert "metrics() may use held-out examples" in ended.err
    best, *others = [scores["selection"] for scores in contest["scores"].values()]
    assert all(other is None or other <= best for other in others)
    assert "--strict needs held-out parts" in sewa("select", "--strict", "--force").error


# ---- which parts ---------------------------------------------------------------------------------


def test_copies_of_parts_count_once(sewa, task):
    parts = "[{'seed': [n % 3, torch.ones(2)]} for n in range(30)]"
    heldout = "[{'seed': [n, torch.ones(2)]} for n in (2, 3)]"
    task.write_text(
        f"{HEAD}\ndef score(model, part): return float(weights(model).norm())\n"
        f"def score_parts(): return {parts}\ndef heldout_parts(): return {heldout}\n"
    )
    ended = sewa("select")
    assert "27 of the 30 parts to choose by are listed more than once" in ended.err
    assert "1 held-out parts are also parts to choose by" in ended.err
    contest = contest_of(ended)
    assert (contest["parts"], contest["heldout_parts"], contest["confirmed"]) == (3, 2, None)


@pytest.mark.parametrize(("listed", "left"), [(4, 2), (28, 14), (29, 25), (50, 25), (100, 50)])
def test_without_held_out_parts_some_are_held_back(sewa, task, listed, left):
    """Half of them, but as many are left as can confirm a lead. A constant is one part only."""
    task.write_text(
        f"{HEAD}\ndel heldout_parts\ndef score(model, part): return float(weights(model).norm())"
    )
    ended = sewa("select", "--set", f"args.parts={listed}", "--budget", 200)
    said = f"no held-out parts: {listed - left} of the {listed} to choose by are kept aside"
    assert said in ended.err
    contest = contest_of(ended)
    assert (contest["parts"], contest["heldout_parts"]) == (left, listed - left)
    assert contest["confirmed"] is None
    if listed == 100:
        assert "score() returns the same number for every part" in ended.err


def test_batches_held_back_are_not_chosen_by(sewa, task):
    """Neither by the metric nor by the loss, which would make the incumbent look too good."""
    task.write_text(
        TASK.replace("split(128)", "split(30)").replace("def heldout_data", "def _unused")
        + "\ndef score(model, part):\n"
        "    return (model(part[0]).argmax(1) == part[1]).float().mean()\n"
        "\nseen = set()\ninner = loss\ndef loss(outputs, batch):\n"
        "    if torch.is_grad_enabled():\n"
        "        seen.add(round(float(batch[0].sum()), 3))\n"
        "    return inner(outputs, batch)\n"
    )
    contest = contest_of(sewa("select", "--K", 3, "--set", "objective.incumbent=null"))
    module = sys.modules["task"]  # as the command has imported it
    assert contest["parts"] + contest["heldout_parts"] == 10
    assert 0 < len(module.seen) <= contest["parts"]
    assert contest["incumbent"] == "by loss"


# ---- parts that fail -----------------------------------------------------------------------------


def test_failures_are_filled_in():
    """A part that fails for all is left out; one that fails for some is worse than all scores."""
    nan, inf = float("nan"), float("inf")
    lower, higher = Criterion("loss", "min"), Criterion("return", "max")
    values = torch.tensor([[1.0, nan, 3.0, nan], [2.0, nan, inf, 5.0]])
    found = fill_failures(values, lower)
    assert (found.kept.tolist(), found.left_out) == ([True, False, True, True], 1)
    assert found.failure == 5 + (5 - 1)
    assert found.scores.tolist() == [[1.0, 3.0, 9.0], [2.0, 9.0, 5.0]]
    assert fill_failures(values, higher).failure == 1 - (5 - 1)
    same = fill_failures(torch.tensor([[-2.0], [nan]]), lower)  # there is no range to go by
    assert (same.failure, same.has_scores) == (0.0, [True, False])
    nothing = fill_failures(torch.full((2, 3), nan), lower)
    assert (nothing.left_out, nothing.has_scores, nothing.failure) == (3, [False, False], None)


def failing(task, when, more=""):
    task.write_text(
        f"{HEAD}{SCORE}\nold = score\ndef score(model, part):\n"
        f"    if {when}:\n        raise ValueError('no such level')\n"
        f"    return old(model, part)\n{more}\n"
    )


@pytest.mark.parametrize("name", ["score", "scores"])
def test_a_part_that_fails_for_all_is_left_out(sewa, task, name):
    """Nothing else fails with it, asked at once with it or not."""
    at_once = "def scores(model, parts):\n    return [score(model, p) for p in parts]"
    failing(task, "part % 10 == 3", at_once if name == "scores" else "")
    ended = sewa("select", "--budget", 200)
    contest = contest_of(ended)
    assert contest["confirmed"] is True
    assert (contest["heldout_parts"], contest["heldout_left_out"]) == (30, 3)
    others = next(iter(contest["scores"].values()))["others"]
    rest = [part for part in range(1000, 1030) if part % 10 != 3]
    assert others["length"] == pytest.approx(sum(rest) / 27)
    assert f"held-out part 3 has failed: {name}() raised ValueError: no such level" in ended.err
    parts = {line.partition(":")[0] for line in contest["failures"]}
    assert parts <= {"part 3", "part 13", "part 23"}
    found = compared(sewa("compare", "--methods", "last,uniform", "--json"))
    assert (found["judged"]["parts"], found["judged"]["left_out"]) == (27, 3)
    assert found["judged"]["failure_counts_as"] is None
    assert found["by"]["last"]["mark"] == "best"


# ---- compare -------------------------------------------------------------------------------------


def test_compare_needs_held_out_parts_and_no_loss(sewa, task):
    methods = compared(sewa("compare", "--json"))["by"].keys()
    assert {"race", "last", "uniform", "latest", "ema"} <= methods
    assert methods.isdisjoint({"aggregate", "greedy", "sewa"})
    before = calls()
    task.write_text(f"{HEAD}{SCORE}\ndel heldout_parts\n")
    ended = sewa("compare", "--methods", "race,last", "--set", "args.parts=3")
    assert (ended.code, "compare needs held-out parts" in ended.error) == (2, True)
    assert calls() == before


# ---- ways to run ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("task")
def test_what_was_scored_before_is_recalled(sewa):
    first = contest_of(sewa("select", "--cache", "c"))
    before = calls()
    ended = sewa("select", "--cache", "c", "--force")
    second = contest_of(ended)
    assert calls() - before == second["heldout_evaluations"]
    assert second == first
    spent = first["evaluations"]
    assert f"{spent} results recalled from --cache" in ended.err
    more = sewa("select", "--cache", "c", "--force", "--budget", 80)
    assert "results recalled from --cache" in more.err  # most of the first search


@pytest.mark.parametrize("command", ["select", "compare"])
def test_batchnorm_is_recomputed_for_each_average_that_is_scored(sewa, bn_run, command):
    """The file has the statistics that were scored, though the data are shuffled."""
    text = (bn_run / "task.py").read_text()
    text += "\nfrom torch.utils.data import DataLoader\nordered = training_data\n"
    text += "def training_data():\n    rows = torch.cat([b['signal'] for b in ordered()])\n"
    text += "    shuffled = DataLoader(rows, 60, shuffle=True)\n"
    text += "    return ({'signal': some} for some in shuffled)\n"
    score = "\ndef score_parts(): return list(range(30))\ndef score(model, part):\n"
    score += "    return {'var': float(model.norm.running_var.sum())}\n"
    (bn_run / "task.py").write_text(text + score)
    if command == "select":
        contest = contest_of(sewa("select", "--metric", "+var", "--budget", 60, "-o", OUTPUT))
        heldout = next(iter(contest["scores"].values()))["heldout"]
    else:
        flags = ("--methods", "uniform,latest", "--output-best", OUTPUT, "--json")
        found = compared(sewa("compare", "--metric", "+var", "--K", 3, *flags))
        heldout = found["rows"][found["best"]]["score"]["heldout"]
    total = float(load_file(OUTPUT)["norm.running_var"].sum())
    assert heldout == pytest.approx(total, rel=1e-5)


SIGNALS = """
old = score
def score(model, part):
    found = old(model, part)
    calls = len((HERE / "calls").read_text())
    if calls in WHEN:
        os.kill(os.getpid(), WHEN[calls])
    return found
"""


@pytest.mark.parametrize(
    ("when", "flags", "code"),
    [
        ({20: signal.SIGINT}, "", 0),
        # in the middle of held-out parts: the choice is not lost
        ({70: signal.SIGINT}, "", 0),
        pytest.param({70: signal.SIGINT}, " --strict", 130, marks=pytest.mark.breadth),
        pytest.param({20: signal.SIGINT, 30: signal.SIGINT}, "", 130, marks=pytest.mark.breadth),
        pytest.param({20: signal.SIGTERM}, "", 130, marks=pytest.mark.breadth),
    ],
)
def test_interrupts(task, when, flags, code):
    numbers = {at: int(number) for at, number in when.items()}
    task.write_text(f"{HEAD}{SCORE}\nWHEN = {numbers}{SIGNALS}")
    ended = shell(f"sewa select{flags}")
    assert ended.returncode == code, ended.stderr
    assert OUTPUT.exists() == REPORT.exists() == (code == 0)
    if code == 0:
        contest = finding(json.loads(REPORT.read_text()), "contest")
        assert contest["interrupted"] is True
        assert (contest["evaluations"] in (19, 20)) == (20 in when)
        heldout = {scores["heldout"] for scores in contest["scores"].values()}
        assert (heldout == {None}) == (70 in when)
    else:
        assert "nothing half-written is left" in ended.stderr


@pytest.mark.usefixtures("task")
def test_workers_say_the_same(sewa):
    flags = ("--budget", 20, "--set", "args.heldout=4", "--force")
    alone, weights = contest_of(sewa("select", *flags)), OUTPUT.read_bytes()
    assert contest_of(sewa("select", "--workers", 2, *flags)) == alone
    assert OUTPUT.read_bytes() == weights


@pytest.mark.breadth
def test_a_list_that_changes_from_process_to_process_is_refused(sewa, task):
    task.write_text(
        f"{HEAD}{SCORE}\ndef score_parts(): return [os.getpid() + n for n in range(30)]"
    )
    ended = sewa("select", "--workers", 2)
    assert (ended.code, "lists other parts in a worker" in ended.error) == (4, True)
    assert not OUTPUT.exists()
