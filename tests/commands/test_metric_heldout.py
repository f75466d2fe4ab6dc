"""By a metric, held out: what fails, what counts how much, and words that the numbers bear out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from helpers.tiny import Ended, Sewa
from safetensors.torch import load_file

from sewa_cli.direction import Criterion
from sewa_cli.methods.family import family
from sewa_cli.objective.judge import judge_by_metric
from sewa_cli.present import show
from sewa_cli.present.views.metric import choice
from sewa_cli.report.metric import Contest
from sewa_cli.report.reading import read_any
from sewa_cli.session.heldout import fill_failures
from sewa_cli.text import with_K

HEAD = """
import pathlib, random
import torch
from safetensors.torch import load_file
from torch import nn

HERE = pathlib.Path(__file__).parent

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def flat(state):
    return torch.cat([state[name].flatten() for name in sorted(state)]).double()

def weights(model):
    return flat(model.state_dict())

PATHS = sorted(HERE.glob("ckpts/*"), key=lambda path: int(path.stem.partition("-")[2]))
RUN = [flat(load_file(path)) for path in PATHS]
LAST, MEAN = RUN[-1], sum(RUN) / len(RUN)

def far(model, point):
    return float((weights(model) - point).norm())

def count():
    with open(HERE / "calls", "a") as file:
        file.write("x")

def score_parts(parts=30):
    return list(range(parts))

def heldout_parts():
    return list(range(1000, 1030))
"""
# better towards the end of the run, as its weights grow
GROWS = """
def score(model, part):
    count()
    return {"return": float(weights(model).norm()) + 0.001 * (part % 7), "length": part}
"""


@pytest.fixture
def task(run_dir: Path) -> Path:
    (run_dir / "sewa.yaml").write_text(
        "task: ./task.py\ncheckpoints: ckpts/\ndevice: cpu\noutput: o.safetensors\n"
        "objective: {metric: return, budget: 150, incumbent: uniform}\n"
    )
    (run_dir / "task.py").write_text(HEAD + GROWS)
    return run_dir / "task.py"


def calls() -> int:
    return len(Path("calls").read_text()) if Path("calls").exists() else 0


def compare(sewa: Sewa, *flags: object) -> tuple[dict[str, Any], Ended]:
    ended = sewa("compare", "--json", *flags)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    jsonschema.validate(found, json.loads(sewa("schema", "compare").out))
    return found, ended


def select(sewa: Sewa, *flags: object) -> tuple[dict[str, Any], Ended]:
    ended = sewa("select", "--force", *flags)
    assert ended.code == 0, ended.err
    report = json.loads(Path("o.report.json").read_text())
    jsonschema.validate(report, json.loads(sewa("schema", "select").out))
    found: dict[str, Any] = report["contest"]
    return found, ended


# ---- parts that fail ---------------------------------------------------------------------------


def test_failures_are_filled_in() -> None:
    """A part that fails for all is left out; one that fails for some is worse than all scores."""
    nan, inf = float("nan"), float("inf")
    lower, higher = Criterion("loss", "min"), Criterion("return", "max")
    values = torch.tensor([[1.0, nan, 3.0, nan], [2.0, nan, inf, 5.0]])
    found = fill_failures(values, lower)
    assert found.kept.tolist() == [True, False, True, True]
    assert found.left_out == 1
    assert found.failure == 5 + (5 - 1)
    assert found.scores.tolist() == [[1.0, 3.0, 9.0], [2.0, 9.0, 5.0]]
    assert found.has_scores == [True, True]
    assert fill_failures(values, higher).failure == 1 - (5 - 1)
    whole = fill_failures(torch.tensor([[1.0, nan], [1.0, nan]]), lower)
    assert (whole.failure, whole.scores.tolist()) == (None, [[1.0], [1.0]])
    same = fill_failures(torch.tensor([[-2.0], [nan]]), lower)  # there is no range to go by
    assert (same.failure, same.has_scores) == (0.0, [True, False])
    nothing = fill_failures(torch.full((2, 3), nan), lower)
    assert (nothing.left_out, nothing.has_scores, nothing.failure) == (3, [False, False], None)


def test_a_part_that_fails_for_every_row_takes_no_number_away(sewa: Sewa, task: Path) -> None:
    task.write_text(
        f"{HEAD}{GROWS}\nold = score\ndef score(model, part):\n"
        "    if part == 1003:\n        raise ValueError('no such level')\n"
        "    return old(model, part)\n"
    )
    methods = ("--methods", "last,uniform,latest", "--K", 3)
    found, ended = compare(sewa, *methods)
    assert (found["judged"]["parts"], found["judged"]["left_out"]) == (29, 1)
    assert found["judged"]["failure_counts_as"] is None
    assert found["best"] is not None
    rest = [part for part in range(1000, 1030) if part != 1003]
    for row in found["rows"]:
        assert row["score"]["heldout"] > 0
        assert row["score"]["failed"] == 0
        assert row["score"]["interval"]["low"] < row["score"]["heldout"]
        assert row["metrics"] == {"length": pytest.approx(sum(rest) / 29)}
        assert row["mark"] is not None
    assert "1 held-out part has failed for all: left out, the scores are of the other 29" in (
        sewa("compare", *methods).err
    )
    assert "has the highest held-out return" in ended.err
    contest, _ = select(sewa)
    assert (contest["heldout_parts"], contest["heldout_left_out"]) == (30, 1)
    assert "held-out return (29)" in show(read_any(Path("o.report.json")))


def test_a_row_that_fails_is_behind_and_the_others_are_not_touched(sewa: Sewa, task: Path) -> None:
    methods = ("--methods", "last,uniform,latest", "--K", 3)
    before = {row["method"]: row for row in compare(sewa, *methods)[0]["rows"]}
    assert before["last"]["mark"] == "best"
    task.write_text(
        f"{HEAD}{GROWS}\nold = score\ndef score(model, part):\n"
        "    if part % 3 == 1 and far(model, LAST) < 1e-4:\n        raise ValueError('too fast')\n"
        "    return old(model, part)\n"
    )
    found, _ = compare(sewa, *methods)
    rows = {row["method"]: row for row in found["rows"]}
    for name in ("uniform", "latest"):
        assert rows[name]["score"]["heldout"] == before[name]["score"]["heldout"]
        assert rows[name]["score"]["failed"] == 0
    failed = sum(part % 3 == 1 for part in range(1000, 1030))
    worst = found["judged"]["failure_counts_as"]
    lowest = min(row["score"]["heldout"] for row in before.values()) - 0.006
    assert worst < lowest
    assert rows["last"]["score"]["failed"] == failed
    norm = before["last"]["score"]["heldout"]
    expected = (failed * worst + (30 - failed) * norm) / 30
    assert rows["last"]["score"]["heldout"] == pytest.approx(expected, abs=0.001)
    assert rows["last"]["mark"] == "worse"
    assert found["rows"][found["best"]]["method"] == "latest"
    ended = sewa("compare", *methods, "--html", "page.html")
    assert f"of 30 held-out parts, `last` on {failed} failed where others did not" in ended.err
    assert f"last</code> on {failed} failed where others" in Path("page.html").read_text()
    assert "failed" in ended.out.splitlines()[0].split()


def test_a_row_that_always_fails_has_no_number_and_takes_none(sewa: Sewa, task: Path) -> None:
    task.write_text(
        f"{HEAD}{GROWS}\nold = score\ndef score(model, part):\n"
        "    if far(model, MEAN) < 1e-4:\n        raise ValueError('garbage')\n"
        "    return old(model, part)\n"
    )
    found, _ = compare(sewa, "--methods", "last,uniform,latest", "--K", 3)
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["uniform"]["score"]["heldout"] is None
    assert (rows["uniform"]["score"]["failed"], rows["uniform"]["mark"]) == (30, "worse")
    assert rows["last"]["score"]["heldout"] > 0
    ended = sewa("compare", "--methods", "last,uniform,latest", "--K", 3)
    assert "no held-out return of `uniform`: all 30 parts have failed" in ended.err
    # nor does an incumbent that fails take away the number of what is written
    contest, ended = select(sewa)
    written = next(iter(contest["scores"]))
    assert contest["incumbent"] == "uniform" != written
    assert contest["scores"][written]["heldout"] > 0
    assert contest["scores"]["uniform"]["heldout"] is None
    assert contest["scores"]["uniform"]["failed"] == 30
    assert contest["gained"] is None
    assert "no held-out return of `uniform`: all 30 parts have failed" in ended.err


def test_what_fails_where_it_is_hard_is_not_flattered(sewa: Sewa, task: Path) -> None:
    """The winner raises on the hard half of the held-out parts."""
    task.write_text(
        f"{HEAD}{GROWS}\nold, limit = score, float(MEAN.norm()) + 0.3\n"
        "def score(model, part):\n    if part < 1000:\n        return old(model, part)\n"
        "    if part % 2 == 0 and float(weights(model).norm()) > limit:\n"
        "        raise ValueError('crash')\n"
        "    return {'return': 0.0 if part % 2 else -100.0, 'length': part}\n"
    )
    contest, ended = select(sewa)
    assert contest["crowned"] is True
    written = next(iter(contest["scores"]))
    assert contest["failure_counts_as"] == -200
    assert contest["scores"][written]["failed"] == 15
    assert contest["scores"][written]["heldout"] == -100
    assert contest["scores"]["uniform"]["heldout"] == -50
    assert contest["scores"]["uniform"]["failed"] == 0
    assert contest["gained"]["by"] == -50
    assert contest["gained"]["interval"]["high"] < 0
    assert f"`{written}` on 15" in ended.err
    assert "each counts as a return of -200, worse than any there is" in ended.err
    assert "vs uniform: −50, 95 % CI [" in ended.err
    assert sewa("select", "--force", "--strict").code == 5


# ---- parts of several sizes --------------------------------------------------------------------

BATCHES = """
SIZES = (200, *[5] * 23)

def batches(seed):
    x = torch.randn(sum(SIZES), 6, generator=torch.Generator().manual_seed(seed))
    x[:200] *= 10
    return [(part,) for part in x.split(SIZES)]

def selection_data():
    return batches(1)

def heldout_data():
    return batches(2)

def score(model, part):
    return {"err": float(model(part[0]).abs().sum(1).mean()), "rows": len(part[0])}

del score_parts, heldout_parts
"""


def test_batches_count_by_their_rows(sewa: Sewa, task: Path) -> None:
    task.write_text(HEAD + BATCHES)
    contest, _ = select(sewa, "--metric=-err", "--budget", 200)
    module: dict[str, Any] = {"__file__": str(task)}
    exec(task.read_text(), module)
    model = module["build_model"]()
    model.load_state_dict(load_file("o.safetensors"))
    rows = torch.cat([part for (part,) in module["heldout_data"]()])
    with torch.no_grad():
        err = float(model(rows).abs().sum(1).mean())
    scores = next(iter(contest["scores"].values()))
    assert scores["heldout"] == pytest.approx(err, rel=1e-5)
    by_rows = sum(n * n for n in (200, *[5] * 23)) / 315
    assert scores["others"] == {"rows": pytest.approx(by_rows)}
    rival = contest["scores"][contest["gained"]["over"]]["heldout"]
    assert contest["gained"]["by"] == pytest.approx(rival - scores["heldout"])
    assert scores["interval"]["low"] < scores["heldout"] < scores["interval"]["high"]
    found, _ = compare(sewa, "--metric=-err", "--methods", "last", "--output-best", "b.safetensors")
    model.load_state_dict(load_file("b.safetensors"))
    with torch.no_grad():
        err = float(model(rows).abs().sum(1).mean())
    assert found["rows"][0]["score"]["heldout"] == pytest.approx(err, rel=1e-5)
    assert found["rows"][0]["metrics"] == {"rows": pytest.approx(by_rows)}
    assert found["unit"] == "parts"


# ---- compare -----------------------------------------------------------------------------------


def test_the_best_row_is_written_with_the_statistics_that_it_was_scored_with(
    sewa: Sewa, bn_run: Path
) -> None:
    """Though its data are shuffled, and other batches give other statistics."""
    text = (bn_run / "task.py").read_text()
    text += "\nfrom torch.utils.data import DataLoader\nordered = training_data\n"
    text += "def training_data():\n    rows = torch.cat([b['signal'] for b in ordered()])\n"
    text += "    shuffled = DataLoader(rows, 60, shuffle=True)\n"
    text += "    return ({'signal': some} for some in shuffled)\n"
    score = "\ndef score_parts(): return list(range(30))\ndef score(model, part):\n"
    score += "    return {'var': float(model.norm.running_var.sum())}\n"
    (bn_run / "task.py").write_text(text + score)
    found, _ = compare(
        sewa, "--metric", "var", "--methods", "uniform,latest", "--K", 3,
        "--output-best", "best.safetensors",
    )  # fmt: skip
    best = found["rows"][found["best"]]
    var = float(load_file("best.safetensors")["norm.running_var"].sum())
    assert best["score"]["heldout"] == pytest.approx(var, rel=1e-6)
    states = [load_file(c["path"])["norm.running_var"] for c in found["candidates"]]
    mixed = sum(c * w for c, w in zip(best["coefficients"][0], states, strict=True))
    assert isinstance(mixed, torch.Tensor)
    assert abs(var - float(mixed.sum())) > 0.05  # else this would tell nothing


@pytest.mark.usefixtures("task")
def test_of_several_draws_it_is_said_which_is_written(sewa: Sewa) -> None:
    """By a metric none is known but held out, and who picks by that flatters it."""
    found, ended = compare(
        sewa, "--methods", "random", "--K", 2, "--output-best", "best.safetensors"
    )
    best = found["rows"][found["best"]]
    assert len(best["coefficients"]) > 1
    used = [source["coefficient"] for source in found["recipe"]["sources"]]
    assert used == [c for c in best["coefficients"][0] if c]
    steps = [
        c["step"] for c, w in zip(found["candidates"], best["coefficients"][0], strict=True) if w
    ]
    assert [int(Path(s["path"]).stem[5:]) for s in found["recipe"]["sources"]] == steps
    assert "the first draw is written" in ended.err
    assert "lowest selection loss" not in ended.err


def test_a_comparison_without_held_out_parts_is_refused_before_its_first_row(
    sewa: Sewa, task: Path
) -> None:
    task.write_text(f"{HEAD}{GROWS}\ndel heldout_parts\n")
    ended = sewa("compare", "--methods", "race,last", "--set", "args.parts=3")
    assert ended.code == 2
    assert "compare needs held-out parts" in ended.error
    assert calls() == 0


@pytest.mark.usefixtures("task")
def test_rows_say_how_many_parts_they_were_asked_on(sewa: Sewa) -> None:
    flags = ("--methods", "race,reinforce,last", "--K", 3, "--budget", 100)
    found, _ = compare(sewa, *flags)
    race, masks, last = found["rows"]
    assert last["cost"]["evaluations"] == 30
    assert last["contest"] is None
    assert 60 < race["cost"]["evaluations"] <= 130
    assert 60 < masks["cost"]["evaluations"] <= 130
    # an average that two rows share is asked on held-out parts once, and charged to both
    apart = {tuple(row["coefficients"][0]) for row in found["rows"]}
    charged = sum(row["cost"]["evaluations"] for row in found["rows"])
    assert calls() == charged - 30 * (3 - len(apart))
    assert race["contest"] == {"crowned": True, "interrupted": False}
    head, first, *_ = sewa("compare", *flags).out.splitlines()
    assert "evaluations" in head
    assert "forward" not in head
    assert "failed" not in head
    assert "confirmed" in first


# ---- what is said ------------------------------------------------------------------------------


def test_a_search_that_comes_back_is_not_a_budget_that_was_too_small(
    sewa: Sewa, task: Path
) -> None:
    task.write_text(f"{HEAD}\ndef score(model, part):\n    return float(far(model, LAST) < 1e-4)\n")
    flags = ("--last", 2, "--K", 1, "--solver", "reinforce", "--budget", 60, "--incumbent", "last")
    contest, ended = select(sewa, *flags)
    assert contest["leader"] == contest["incumbent"]
    assert contest["asked"] == contest["met"] + 1 > 1
    assert "the budget was too small" not in ended.err
    assert "was better on the same parts" in ended.err


def test_it_is_said_how_many_met(sewa: Sewa, task: Path) -> None:
    task.write_text(f"{HEAD}\ndef score(model, part):\n    return -far(model, MEAN)\n")
    few, ended = select(sewa, "--budget", 7)
    assert few["leader"] == few["incumbent"] == "uniform"
    assert 0 < few["met"] < 7
    many, ended = select(sewa, "--budget", 300)
    assert many["met"] > few["met"]
    assert f"none of {many['met']} other averages was better on the same parts" in ended.err


def test_what_is_written_is_paired_with_the_best_simple_average(sewa: Sewa, task: Path) -> None:
    """Where the incumbent itself is the best; of those that were asked on the most parts."""
    task.write_text(f"{HEAD}\ndef score(model, part):\n    return -far(model, MEAN)\n")
    contest, _ = select(sewa, "--budget", 300)
    simple = [
        entry
        for entry in contest["entries"]
        if (entry["name"], entry["K"]) in family(12) and entry["name"] != "uniform"
    ]
    most = max(entry["parts"] for entry in simple)
    front = [entry for entry in simple if entry["parts"] == most]
    assert len(front) < len(simple)
    best = max(front, key=lambda entry: entry["score"])
    assert contest["gained"]["over"] == with_K(best["name"], best["K"])
    assert contest["gained"]["by"] > 0


NOISE = """
def score(model, part):
    return random.Random(hash((round(float(weights(model).sum()), 6), part))).gauss()
"""


def test_who_leads_is_compared_with_what_is_written_and_has_the_duels_e_value(
    sewa: Sewa, task: Path
) -> None:
    task.write_text(HEAD + NOISE)
    contest, ended = select(sewa, "--budget", 300, "--seed", 1)
    assert contest["crowned"] is False
    leader = contest["leader"]
    assert leader != contest["incumbent"]
    assert contest["gained"]["over"] == leader
    assert f"vs {leader}: " in ended.err
    assert "not significant" in ended.err
    assert contest["gained"]["more"] > 0
    assert f"about {contest['gained']['more']:,} more held-out parts would settle it" in ended.err
    known = [entry for entry in contest["entries"] if entry["evidence"] is not None]
    assert [with_K(entry["name"], entry["K"]) for entry in known] == [leader]
    assert known[0]["evidence"] == contest["evidence"] < 100
    assert known[0]["state"] == "leading"
    assert "e-value" in sewa("report", "o.report.json", "-o", "-").out


def test_means_to_choose_by_say_of_how_many_parts_they_are(sewa: Sewa, task: Path) -> None:
    task.write_text(f"{HEAD}\ndef score(model, part):\n    return -far(model, MEAN)\n")
    contest, _ = select(sewa, "--budget", 300)
    parts = {with_K(e["name"], e["K"]): e["parts"] for e in contest["entries"]}
    written = next(iter(contest["scores"]))
    for name in {written, "uniform", "last"} & contest["scores"].keys():
        assert contest["scores"][name]["selection_parts"] == parts[name]
    assert len({scores["selection_parts"] for scores in contest["scores"].values()}) > 1
    head, first, *_ = show(read_any(Path("o.report.json"))).splitlines()
    assert "of parts" in head
    assert f"  {parts[written]}  " in first


@pytest.mark.usefixtures("task")
def test_older_reports_are_read_and_said(sewa: Sewa) -> None:
    """Without what they did not count."""
    contest, _ = select(sewa)
    for name in ("heldout_left_out", "failure_counts_as", "asked", "met"):
        del contest[name]
    for scores in contest["scores"].values():
        del scores["selection_parts"], scores["failed"]
    old = Contest.model_validate(contest)
    assert old.heldout_used == 30
    assert "confirmed to be better than `uniform`" in choice(old)
    assert not judge_by_metric(old).beaten_by


def test_zero_is_not_printed_as_minus_zero(sewa: Sewa, task: Path) -> None:
    task.write_text(f"{HEAD}\ndef score(model, part):\n    return 0.0\n")
    _, ended = select(sewa)
    report = Path("o.report.json").read_text()
    table = show(read_any(Path("o.report.json")))
    found = sewa("compare", "--methods", "last,uniform", "--json").out
    for text in (ended.err, report, table, found):
        assert not re.search(r"(?<![\w.])-0(\.0)?(?![.\w])", text)
