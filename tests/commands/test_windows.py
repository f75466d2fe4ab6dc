"""Windows that move along the run: each is a comparison of its own, and reaching is no luck."""

from __future__ import annotations

import csv
import gc
import io
import json
import weakref
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from helpers.figures import assert_readable, marks, row, words
from helpers.tiny import TASK, WEIGHTS, Sewa
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sewa_cli.cli.pictures import save_figure
from sewa_cli.commands.windows import place_windows
from sewa_cli.comparison.milestones import find_reach, find_reaches, find_touch, level_of, mark_best
from sewa_cli.present import say as verdict
from sewa_cli.present import tables
from sewa_cli.present.plots.windows import plot as plot_windows
from sewa_cli.report.compare import Row
from sewa_cli.report.shared import Placement
from sewa_cli.report.windows import Window, Windows
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.placement import Placed, Placer

METRIC = """
def metrics(model):
    return {"weight": model[0].weight.abs().sum().item()}
"""


def windows(sewa: Sewa, *arguments: object) -> dict[str, Any]:
    ended = sewa("compare", *arguments, "--format", "json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    assert found["kind"] == "windows"
    return found


# ---- where windows lie ---------------------------------------------------------------------------


@given(k=st.integers(1, 60), size=st.integers(2, 20), stride=st.integers(1, 25))
def test_the_last_window_ends_with_the_run_and_no_window_is_missing(
    k: int, size: int, stride: int
) -> None:
    found = [range(k)[window] for window in place_windows(k, size, stride)]
    naive = [
        range(end - size, end) for end in range(k + 1) if end >= size and not (k - end) % stride
    ]
    assert found == naive
    if k >= size:
        assert found[-1][-1] == k - 1


# ---- each is a comparison ------------------------------------------------------------------------


def without_costs(row: dict[str, Any]) -> dict[str, Any]:
    of_others = ("cost", "mark", "interval", "difference", "difference_interval")
    return {key: value for key, value in row.items() if key not in of_others}


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("more", [(), ("--fast",), ("--solver", "linear"), ("--memory", "6000")])
def test_a_window_is_what_compare_says_of_its_checkpoints(sewa: Sewa, more: tuple[str]) -> None:
    Path("task.py").write_text(TASK + METRIC)
    asked = ["--methods", "sewa,lawa,ema,swa,random,greedy,last", "--K", "2,3", *more]
    found = windows(sewa, *asked, "--windows", 5, "--stride", 3)
    ends = [(window["first_step"], window["last_step"]) for window in found["windows"]]
    assert ends == [(20, 60), (50, 90), (80, 120)]
    tiers = {window["placement"]["tier"] for window in found["windows"]}
    assert tiers == ({"files"} if "--memory" in more else {"memory"})
    for window in found["windows"]:
        within = ["--from-step", window["first_step"], "--to-step", window["last_step"]]
        twin = json.loads(sewa("compare", *asked, *within, "--format", "json").out)
        paths = [found["candidates"][i]["path"] for i in window["candidates"]]
        assert paths == [candidate["path"] for candidate in twin["candidates"]]
        assert [without_costs(r) for r in window["rows"]] == [
            without_costs(r) for r in twin["rows"]
        ]
        lowest = min(r["heldout_loss"] for r in twin["rows"])
        for r in window["rows"]:
            assert (r["mark"] == "best") == (r["heldout_loss"] == lowest)


@pytest.mark.usefixtures("bn_run")
def test_batchnorm_is_recomputed_in_every_window_as_in_a_comparison(sewa: Sewa) -> None:
    asked = ["--methods", "uniform,lawa,sewa,last", "--K", 2]
    found = windows(sewa, *asked, "--windows", 4)
    assert found["batchnorm"] == "training_data"
    assert len(found["windows"]) == 2
    for window in found["windows"]:
        within = ["--from-step", window["first_step"], "--to-step", window["last_step"]]
        twin = json.loads(sewa("compare", *asked, *within, "--format", "json").out)
        assert list(map(without_costs, window["rows"])) == list(map(without_costs, twin["rows"]))


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("more", [(), ("--fast",), ("--solver", "linear"), ("--memory", "6000")])
def test_one_window_at_a_time_is_held(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch, more: tuple[str]
) -> None:
    held: list[weakref.ref[Trajectory]] = []

    plain = Placer.place

    def place(self: Placer) -> Placed:
        assert [trajectory for trajectory in held if trajectory() is not None] == []
        placed = plain(self)
        held.append(weakref.ref(placed.trajectory))
        return placed

    monkeypatch.setattr(Placer, "place", place)
    gc.disable()  # it must go by itself: collecting takes as long as a small window
    try:
        found = windows(sewa, "--methods", "sewa,greedy,twa", "--K", 2, "--windows", 3, *more)
    finally:
        gc.enable()
    assert len(held) == len(found["windows"]) == 4


@pytest.mark.usefixtures("run_dir")
def test_the_model_is_built_once_and_each_checkpoint_read_once(sewa: Sewa) -> None:
    Path("task.py").write_text(
        TASK.replace("def build_model():", "def build_model():\n    print('BUILT')")
    )
    ended = sewa("compare", "--methods", "lawa", "--K", 2, "--windows", 4, "--format", "json")
    assert ended.err.count("BUILT") == 1
    assert json.loads(ended.out)["cost"]["bytes_read"] == 12 * WEIGHTS


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_dir")
def test_the_level_is_the_loss_of_the_newest_file(sewa: Sewa) -> None:
    Path("task.py").write_text(TASK + METRIC)
    found = windows(sewa, "--methods", "lawa,uniform", "--K", 2, "--windows", 4)
    [newest] = json.loads(sewa("evaluate", "ckpts/step-120.safetensors", "--json").out)["files"]
    level = found["level"]
    assert level["value"] == pytest.approx(newest["heldout_loss"], rel=1e-6)
    assert level["metrics"]["weight"] == pytest.approx(newest["metrics"]["weight"], rel=1e-6)
    assert (level["measure"], level["at"]) == ("heldout_loss", 120)
    assert [(r["method"], r["K"]) for r in found["reaches"]] == [
        ("lawa", 2),
        ("uniform", None),
        ("last", None),
    ]
    last = found["reaches"][-1]
    assert last["window"] is not None  # its own level, in the last window at the latest
    for i, reach in enumerate(found["reaches"]):
        losses = [w["rows"][i]["heldout_loss"] for w in found["windows"]]
        kept = [n for n in range(3) if all(x <= level["value"] for x in losses[n:])]
        assert reach["window"] == (kept[0] if kept else None)
        if kept:
            assert reach["at"] == found["windows"][kept[0]]["last_step"]
            assert reach["share"] == reach["at"] / 120
            assert reach["loss"] == losses[kept[0]]


LOSSES = st.lists(st.none() | st.floats(0, 10, allow_nan=False), min_size=1, max_size=12)


@given(LOSSES, st.floats(0, 10))
def test_a_level_is_reached_where_it_is_kept_and_not_before(
    losses: list[float | None], level: float
) -> None:
    at = [loss is not None and loss <= level for loss in losses]
    kept = [i for i in range(len(at)) if all(at[i:])]
    assert find_reach(losses, level) == (kept[0] if kept else None)
    assert find_touch(losses, level) == (at.index(True) if any(at) else None)
    assert find_reach(losses, None) is None


@given(st.lists(st.floats(0, 10), min_size=1).map(lambda x: sorted(x, reverse=True)))
def test_a_run_that_only_falls_reaches_its_last_level_where_it_first_touches_it(
    losses: list[float],
) -> None:
    assert find_reach(losses, losses[-1]) == find_touch(losses, losses[-1])
    assert find_reach(losses, losses[-1]) == losses.index(losses[-1])


def test_one_lucky_window_is_no_claim() -> None:
    assert find_reach([5, 1, 5, 5], 2) is None
    assert find_touch([5, 1, 5, 5], 2) == 1
    assert find_reach([1, 5, 1, 1], 2) == 2
    assert find_reach([1, 1, 1, 1], 2) == 0
    assert find_reach([5, 5, 5, 2], 2) == 3
    assert find_reach([1, None, 1], 2) == 2  # a loss that is not finite reaches nothing
    assert find_reach([3, 3], 2) is None


def made(
    losses: dict[str, list[float | None]],
    *,
    metric: bool = False,
    steps: list[int] | None = None,
    by: Any = "step",
    heldout: bool = True,
) -> Windows:
    """A report of windows at steps 1000, 2000 …; `losses`: of each method, window by window."""
    n = len(losses["last"])
    steps = steps or [1000 * (i + 1) for i in range(n)]
    measure: Any = "heldout_loss" if heldout else "selection_loss"
    placement = Placement(tier="memory", reason="", cap_bytes=1, planned_bytes=1)

    def cell(name: str, loss: float | None) -> Row:
        method, _, K = name.partition(" K=")
        metrics = {"accuracy": None if loss is None else 1 - loss / 10} if metric else None
        update: dict[str, Any] = {"metrics": metrics}
        if not heldout:
            update["heldout_loss"] = None
        return row(method, int(K) if K else None, loss, None).model_copy(update=update)

    found = [
        Window(
            at=steps[i],
            first_step=0,
            last_step=steps[i],
            candidates=[],
            rows=mark_best([cell(name, curve[i]) for name, curve in losses.items()], measure),
            placement=placement,
        )
        for i in range(n)
    ]
    construct: Any = Windows.model_construct  # of what is drawn and told, and no more
    constructed: Windows = construct(
        size=10,
        by=by,
        windows=found,
        level=level_of(found[-1], measure),
        reaches=find_reaches(found, measure),
    )
    return constructed


def test_what_is_saved_is_told_in_steps_and_in_share_of_the_training() -> None:
    found = made(
        {
            "sewa K=5": [0.5, 0.3, 0.2, 0.2, 0.2],
            "lawa K=5": [0.5, 0.2, 0.4, 0.2, 0.2],
            "uniform": [0.9, 0.8, 0.7, 0.6, 0.5],
            "last": [0.9, 0.8, 0.5, 0.4, 0.3],
        },
        metric=True,
    )
    told = verdict(found)
    assert told[0] == (
        "sewa K=5 reaches the last checkpoint's level (held-out loss 0.3 at step 5,000) after "
        "2,000 steps: 40 % of the training"
    )
    assert told[1] == "accuracy of sewa K=5 there: 0.97; in the end, of `last`: 0.97"
    assert told[2] == "`last` itself does so after 5,000 steps: 100 % of the training"
    assert len(told) == 3
    title, whens = tables.windows(found).parts[-1]
    assert isinstance(whens, list)
    assert "held-out loss 0.3 at step 5,000" in title
    assert [(w["method"], w["after step"], w["first touched"]) for w in whens] == [
        ("sewa K=5", "2,000", 2000),
        ("lawa K=5", "4,000", 2000),  # lucky at 2,000
        ("uniform", "never", None),
        ("last", "5,000", 5000),
    ]


def test_nothing_is_claimed_where_training_itself_was_there_as_early() -> None:
    told = verdict(made({"lawa K=5": [0.5, 0.2, 0.2], "last": [0.2, 0.2, 0.3]}))
    assert "`last` itself does so as early: averaging saves no training here" in told
    assert "2 of the 2 windows before it" in told[-1]
    assert "reaching it says little" in told[-1]
    told = verdict(made({"lawa K=5": [0.5, 0.4, 0.4], "last": [0.9, 0.4, 0.3]}))
    assert told == [
        "no average reaches the last checkpoint's level (held-out loss 0.3 at step 3,000) and "
        "keeps it"
    ]
    assert "no level to reach" in verdict(made({"lawa": [0.5, 0.4], "last": [0.9, None]}))[0]
    assert verdict(made({"lawa": [0.5], "last": [0.9]})) == []
    by_index = verdict(made({"lawa": [0.5, 0.4], "last": [0.9, 0.6]}, by="checkpoint"))
    assert "at checkpoint 2,000) after 1,000 checkpoints: 50 %" in by_index[0]


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_dir")
def test_the_report_fits_its_schema_and_is_written_whole(sewa: Sewa) -> None:
    asked = ["--methods", "last,lawa,random", "--K", "2,3", "--windows", 5]
    found = windows(sewa, *asked, "--report", "w.json")
    assert json.loads(Path("w.json").read_text()) == found
    schema = json.loads(sewa("schema", "windows").out)
    jsonschema.validate(found, schema)
    assert found.keys() == schema["properties"].keys()
    assert found["in_no_window"] == 2
    assert (found["size"], found["stride"], found["by"]) == (5, 5, "step")
    assert len(found["candidates"]) == 10
    assert [r["method"] for r in found["windows"][0]["rows"]].count("last") == 1
    different = [
        {tuple(c) for r in window["rows"] for c in r["coefficients"]} for window in found["windows"]
    ]
    assert found["averages_evaluated"] == sum(map(len, different))
    refused = sewa("compare", *asked, "--report", "w.json")
    assert refused.code == 3
    assert sewa("apply", "w.json", "-o", "x.safetensors").code == 3  # there is nothing to build


@pytest.mark.usefixtures("run_dir")
def test_tables_are_wide_for_people_and_long_for_programs(sewa: Sewa) -> None:
    Path("task.py").write_text(TASK + METRIC)
    asked = ["compare", "--methods", "last,best,lawa", "--K", "2,3", "--windows", 3]
    ended = sewa(*asked)
    by_loss, by_metric, when = ended.out.split("\n\n")
    assert by_loss.splitlines()[0] == "held-out loss, in windows of 3 checkpoints"
    columns = ["after step", "last", "best", "lawa K=2", "lawa K=3", "lowest"]
    assert by_loss.splitlines()[1].split("  ")[0] == "after step"
    assert [name in by_loss.splitlines()[1] for name in columns] == [True] * 6
    assert [line.split()[0] for line in by_loss.splitlines()[2:]] == ["30", "60", "90", "120"]
    assert by_metric.splitlines()[0] == "weight"
    assert "level is reached and kept" in when.splitlines()[0]
    assert len(when.splitlines()) == 2 + 4
    assert "the last checkpoint's level" in ended.err
    rows = list(csv.DictReader(io.StringIO(sewa(*asked, "--format", "csv").out)))
    lines = [json.loads(s) for s in sewa(*asked, "--format", "jsonl").out.splitlines()]
    assert len(rows) == len(lines) == 4 * 4
    assert [float(r["heldout_loss"]) for r in rows] == [line["heldout_loss"] for line in lines]
    assert {line["at"] for line in lines} == {30, 60, 90, 120}
    for at in (30, 60, 90, 120):
        here = [line for line in lines if line["at"] == at]
        lowest = min(line["heldout_loss"] for line in here)
        assert all(line["best"] == (line["heldout_loss"] == lowest) for line in here)
    markdown = sewa(*asked, "--format", "markdown").out
    assert markdown.startswith("**held-out loss, in windows of 3 checkpoints**\n\n| after step |")


@pytest.mark.usefixtures("run_dir")
def test_the_yaml_can_ask_for_windows_and_last_narrows_them(sewa: Sewa) -> None:
    with Path("sewa.yaml").open("a") as file:
        file.write("compare: {methods: [uniform], windows: 4, stride: 2}\n")
    assert [w["at"] for w in windows(sewa)["windows"]] == [40, 60, 80, 100, 120]
    assert [w["at"] for w in windows(sewa, "--last", 6)["windows"]] == [100, 120]
    assert [w["at"] for w in windows(sewa, "--windows", 6)["windows"]] == [60, 80, 100, 120]


@pytest.mark.usefixtures("run_dir")
def test_one_window_is_judged_and_said_to_be_alone(sewa: Sewa) -> None:
    ended = sewa("compare", "--methods", "uniform", "--windows", 7)
    assert ended.code == 0
    assert "there is only one window: 7 of 12 checkpoints" in ended.err
    assert "reaches" not in ended.err


@pytest.mark.usefixtures("run_dir")
def test_without_held_out_data_the_selection_loss_decides_and_it_says_so(sewa: Sewa) -> None:
    Path("task.py").write_text(TASK.replace("def heldout_data", "def unused"))
    ended = sewa("compare", "--methods", "uniform", "--windows", 4, "--format", "json")
    found = json.loads(ended.out)
    assert found["level"]["measure"] == "selection_loss"
    assert found["level"]["value"] == found["windows"][-1]["rows"][1]["selection_loss"]
    assert "no held-out data: windows are judged by selection losses" in ended.err


@pytest.mark.usefixtures("run_dir")
def test_checkpoints_without_steps_are_counted(sewa: Sewa) -> None:
    for n, path in enumerate(sorted(Path("ckpts").iterdir(), key=lambda p: int(p.stem[5:]))):
        path.rename(f"ckpts/{'abcdefghijkl'[n]}.safetensors")
    found = windows(sewa, "--methods", "uniform", "--windows", 5)
    assert found["by"] == "checkpoint"
    assert [w["at"] for w in found["windows"]] == [7, 12]
    assert found["windows"][0]["last_step"] is None
    # how much training came before the first of them, nobody knows
    assert all(reach["share"] is None for reach in found["reaches"])
    assert found["reaches"][-1]["at"] is not None


@pytest.mark.usefixtures("run_dir")
def test_a_broken_checkpoint_is_left_out_of_its_windows_and_told_once(sewa: Sewa) -> None:
    for step in (60, 120):
        path = f"ckpts/step-{step}.safetensors"
        save_file({n: torch.full_like(t, float("nan")) for n, t in load_file(path).items()}, path)
    asked = ["compare", "--methods", "lawa", "--K", 2, "--windows", 4, "--stride", 1]
    ended = sewa(*asked, "--format", "json")
    found = json.loads(ended.out)
    assert ended.err.count("step-60.safetensors: left out") == 1
    assert [Path(out["path"]).name for out in found["left_out"]] == [
        "step-60.safetensors",
        "step-120.safetensors",
    ]
    assert [w["at"] for w in found["windows"]] == [40, 50, 50, 70, 80, 90, 100, 110, 110]
    assert found["level"]["at"] == 110
    for window in found["windows"]:
        assert len(window["rows"][0]["coefficients"][0]) == len(window["candidates"])
    refused = sewa(*asked[:-6], "--K", 4, "--windows", 4)
    assert refused.code == 2
    assert "K: 4 of 3 whole checkpoints between" in refused.error
    assert sewa(*asked, "--nonfinite", "error").code == 3


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("broken", "why"),
    [((60,), "K: 4 of 3 whole checkpoints"), ((50, 60, 70, 80), "all 4 checkpoints hold NaN")],
)
def test_an_older_window_with_too_few_whole_checkpoints_does_not_lose_the_newer_ones(
    sewa: Sewa, broken: tuple[int, ...], why: str
) -> None:
    for step in broken:
        path = f"ckpts/step-{step}.safetensors"
        save_file({n: torch.full_like(t, float("nan")) for n, t in load_file(path).items()}, path)
    ended = sewa("compare", "--methods", "lawa", "--K", 4, "--windows", 4, "--format", "json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert [w["at"] for w in found["windows"]] == [40, 120]
    assert found["in_no_window"] == 4
    assert [out["step"] for out in found["left_out"]] == list(broken)
    assert sum("a window is left out: " in w and why in w for w in found["warnings"]) == 1


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["--windows", "13"], 2, "windows: 13 checkpoints in a window, but only 12 take part"),
        (["--windows", "6", "--last", "5"], 2, "6 checkpoints in a window, but only 5 take part"),
        (["--windows", "1"], 2, "--windows: must be greater than or equal to 2"),
        (["--windows", "many"], 2, "--windows: must be a whole number, found 'many'"),
        (["--windows", "4", "--stride", "0"], 2, "--stride: must be greater than or equal to 1"),
        (["--stride", "4"], 2, "--stride needs windows"),
        (["--windows", "3", "--K", "4"], 2, "K: 4 of 3 checkpoints in a window is too many"),
        (["--windows", "4", "--output-best", "x.safetensors"], 2, "--output-best: windows have no"),
        (["--windows", "4", "--methods", "swaa"], 2, "methods: unknown method 'swaa'"),
        (["--windows", "4", "--plot", "x.bmp"], 2, "x.bmp: unknown kind of picture"),
        (["--windows", "4", "--report", "sewa.yaml", "--force"], 3, "sewa.yaml"),
        (["--windows", "4", "--report", "x.png", "--plot", "x.png"], 2, "different files"),
    ],
)
def test_bad_input_gets_one_clear_line(
    sewa: Sewa, arguments: list[str], code: int, error: str
) -> None:
    ended = sewa("compare", *["--methods", "lawa", *arguments])
    assert ended.code == code, ended.err
    assert error in ended.error
    assert ended.out == ""


@pytest.mark.usefixtures("run_dir")
def test_a_loss_that_is_never_finite_is_found_in_the_first_window(sewa: Sewa) -> None:
    Path("task.py").write_text(
        TASK.replace("F.cross_entropy(outputs, batch[1])", "outputs.sum() * float('nan')")
    )
    ended = sewa("compare", "--methods", "uniform", "--windows", 3)
    assert ended.code == 4
    assert "NaN or Inf on the selection data for every average of the last window" in ended.error


# ---- the picture ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_dir")
def test_windows_can_be_drawn(sewa: Sewa) -> None:
    asked = ["compare", "--methods", "sewa,lawa", "--K", "2,3", "--windows", 4]
    ended = sewa(*asked, "--plot", "w.png", "--quiet")
    assert ended.code == 0, ended.err
    from PIL import Image

    with Image.open("w.png") as image:
        image.verify()
        assert image.width > 1000
    before = Path("w.png").read_bytes()
    assert sewa(*asked, "--plot", "w.png").code == 3
    assert Path("w.png").read_bytes() == before
    assert sewa(*asked, "--plot", "w.svg").code == 0
    assert "<svg" in Path("w.svg").read_text()


CURVES: dict[str, list[float | None]] = {
    "sewa K=5": [0.5, 0.3, 0.2, 0.2, 0.2],
    "lawa K=5": [0.5, 0.2, 0.4, 0.2, 0.2],
    "uniform": [0.9, 0.8, None, 0.6, 0.5],
    "last": [0.9, 0.8, 0.5, 0.4, 0.3],
}


def test_every_method_is_a_line_over_the_steps_beside_the_last_checkpoints_level() -> None:
    figure = plot_windows(made(CURVES, metric=True))
    assert len(figure.axes) == 2
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_gid() == "method"]
        assert len(lines) == 4
        assert list(lines[0].get_xdata()) == [1000, 2000, 3000, 4000, 5000]  # type: ignore[arg-type]
    loss, accuracy = marks(figure, "level")
    assert list(loss.get_ydata()) == [0.3, 0.3]  # type: ignore[arg-type]
    assert list(accuracy.get_ydata()) == [0.97, 0.97]  # type: ignore[arg-type]
    rings = {(*ring.get_xdata(), *ring.get_ydata()) for ring in marks(figure, "reached")}  # type: ignore[misc]
    assert rings == {(2000, 0.3), (4000, 0.2), (5000, 0.3)}
    seen = words(figure)
    for word in ("held-out loss", "accuracy", "sewa K=5", "last checkpoint, step 5,000"):
        assert word in seen
    assert_readable(figure)


def test_no_two_lines_look_alike() -> None:
    names = [f"{m} K={K}" for m in ("sewa", "lawa", "random", "latest") for K in (5, 10, 20)]
    names += ["uniform", "swa", "ema", "greedy", "last"]
    figure = plot_windows(made({name: [0.4, 0.3] for name in names}))
    lines = marks(figure, "method")
    looks = {
        (line.get_color(), line.get_marker(), str(vars(line)["_unscaled_dash_pattern"]))
        for line in lines
    }
    assert len(looks) == len(lines) == 17
    assert_readable(figure)


CASES: dict[str, Windows] = {
    "one window": made({"lawa K=5": [0.5], "last": [0.9]}),
    "only last": made({"last": [0.9, 0.8]}),
    "nothing finite": made({"lawa": [None, None], "last": [None, None]}, metric=True),
    "falls far": made({"lawa": [9.0, 0.1, 0.01], "last": [9.5, 0.2, 0.02]}),
    "negative": made({"lawa": [-9.0, -10.0], "last": [-9.5, -9.9]}),
    "hundred windows": made({"lawa": [1 / (i + 1) for i in range(100)], "last": [1.0] * 100}),
    "by index": made(CURVES, by="checkpoint", heldout=False),
    "steps beyond a float": made({"last": [0.9, 0.8]}, steps=[10**400, 2 * 10**400]),
    "thirty methods": made({**{f"m{i}:a=1 K=5": [0.5, i / 30] for i in range(30)}, "last": [1, 1]}),
    "strange names": made(
        {
            "_mine": [0.5, 0.4],
            "a$b$": [0.4, 0.3],
            "ema:decay=0.999,start=0.25,x=y": [1, 1],
            "last": [1, 1],
        }
    ),
}


@pytest.mark.parametrize("found", CASES.values(), ids=CASES)
def test_any_windows_can_be_drawn_and_read(found: Windows, tmp_path: Path) -> None:
    assert_readable(plot_windows(found))
    for name in ("one.svg", "two.svg"):
        save_figure(plot_windows(found), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert tables.windows(found).parts
    verdict(found)


def test_checkpoints_are_not_touched(run_dir: Path, sewa: Sewa) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*.safetensors")}
    windows(sewa, "--methods", "uniform", "--windows", 4)
    assert {path: path.read_bytes() for path in run_dir.rglob("*.safetensors")} == before
