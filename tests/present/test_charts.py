"""Charts show the report's numbers, every word can be read, and a file is whole or not there."""

import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.figures import assert_readable, row
from helpers.pages import raw, report

from sewa_cli.cli.request import check_plot, save_figure
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.present import draw, view_of
from sewa_cli.present.charts import Chart, Panel, running_mean
from sewa_cli.present.figures import figure_of, label
from sewa_cli.report.findings import Blend, Expected, History, Mask
from sewa_cli.report.kinds import Comparison
from sewa_cli.report.select import Report
from sewa_cli.report.shared import Candidate, to_json

BREADTH = pytest.mark.breadth
TAKING = ["sewa", "lawa", "latest", "random", "forward", "topk"]
TAKING_NONE = ["last", "best", "uniform", "swa", "ema:decay=0.99", "greedy", "twa", "wsm"]


@pytest.fixture(scope="module")
def weighed():
    found = report(raw("select"))
    assert isinstance(found, Report)
    return found


@pytest.fixture(scope="module")
def masked():
    found = report(raw("mask"))
    assert isinstance(found, Report)
    return found


def series_of(chart):
    return [series for panel in chart.panels for series in panel.series]


def chart_of(found, title):
    [chart] = [one for one in view_of(found).charts if one.title == title]
    return chart


def test_the_weights_their_prior_and_the_path_are_the_reports(weighed):
    blend, expected = weighed.find(Blend), weighed.find(Expected)
    prior, weights = series_of(chart_of(weighed, "Coefficients along the run"))
    known = [(c.step, c.weight) for c in weighed.candidates]
    assert list(zip(weights.x, weights.y, strict=True)) == known
    assert list(prior.y) == blend.weights
    path = chart_of(weighed, "Cross-validated loss by regularisation strength").panels[0]
    assert list(path.series[0].y) == [pull.loss for pull in blend.path]
    assert expected.loss in path.levels.values()
    assert path.x_names[0] == "prior"


def test_a_mask_shows_every_probability_and_marks_the_chosen(masked):
    mask, known = masked.find(Mask), masked.find(History)
    likely, chosen = series_of(chart_of(masked, "Mask along the run"))
    assert list(likely.y) == mask.probabilities
    assert list(chosen.x) == masked.selected_steps
    history, smooth = series_of(chart_of(masked, "Loss while learning"))
    assert list(history.y) == known.values
    assert max(smooth.y) <= max(history.y)


def checkpoints(weighed, k, steps):
    chance = random.Random(k)
    found = [chance.random() ** 4 for _ in range(k)]
    candidates = [
        Candidate(index=i, path="a", step=steps(i), weight=weight / sum(found))
        for i, weight in enumerate(found)
    ]
    update = {"k": k, "K": k, "candidates": candidates}
    update["findings"] = [History(values=[0.5, None, 0.3])]
    return weighed.model_copy(update=update)


RUNS = {
    "one": (1, lambda _: 10),
    "uneven steps": (20, lambda i: 2**i),
    "no steps": (12, lambda i: None if i == 3 else i),
    "beyond a float": (9, lambda i: 10**400 + i),
    "a thousand": (1000, lambda i: 10_000_000 + 1000 * i),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_any_selection_can_be_drawn_and_read(weighed, run):
    found = checkpoints(weighed, *run)
    figure = draw(found)
    assert_readable(figure)
    by_index = any(step is None or step > 2**53 for step in map(run[1], range(run[0])))
    assert ("by index" in figure.axes[0].get_xlabel()) == by_index


def comparison(rows, *, is_held=True):
    """The lowest is marked as best, all that lies within 0.01 of it as ties."""
    found = report(raw("compare"))
    assert isinstance(found, Comparison)
    losses = [one.heldout_loss for one in rows if one.heldout_loss is not None]
    lowest = min(losses, default=None)
    marked = []
    for one in rows:
        loss, mark = one.heldout_loss, None
        if loss is not None and lowest is not None and is_held:
            mark = "best" if loss == lowest else "tie" if loss < lowest + 0.01 else "worse"
        update = {"mark": mark}
        if not is_held:
            update |= {"heldout_loss": None, "interval": None, "spread": None}
        marked.append(one.model_copy(update=update))
    best = next((i for i, one in enumerate(marked) if one.mark == "best"), None)
    held = found.heldout_rows if is_held else None
    update = {"rows": marked, "best": best, "heldout_rows": held, "judged": None}
    update["verdict"] = "none" if best is None else "tie"
    return found.model_copy(update=update)


def rows_for(Ks, taking, none):
    chance = random.Random(0)
    rows = [row(method, K, 0.15 + 0.1 * chance.random()) for method in taking for K in Ks]
    return rows + [row(method, None, 0.15 + 0.1 * chance.random()) for method in none]


COMPARISONS = {
    "all methods": rows_for([5, 10, 20, 50], TAKING, TAKING_NONE),
    "one row": [row("last", None, 0.2)],
    "nothing finite": [row("last", None, None)],
    "many K": [row("lawa", K, -3 - K / 100) for K in range(1, 101)],
    "decades": [row("a", 5, 1e-4, None), row("a", 10, 1e-2, None), row("b", 5, 9e-2, None)],
    "strange names": rows_for(
        [5, 10],
        ["_mine", "cost$in$", "ema:decay=0.9999,start=0.25,every=100,another=value"],
        ["wsm:shape=1-sqrt,start=0.25", "verylongnamewithoutanyplacetobreakit", "last"],
    ),
}


@pytest.mark.parametrize("is_held", [True, pytest.param(False, marks=BREADTH)])
@pytest.mark.parametrize("rows", COMPARISONS.values(), ids=COMPARISONS)
def test_any_comparison_can_be_drawn_and_read(rows, is_held):
    figure = draw(comparison(rows, is_held=is_held))
    assert_readable(figure)
    what = "held-out loss" if is_held else "selection loss (nothing held out)"
    assert figure.axes[0].get_xlabel() == what


def test_a_label_keeps_every_letter():
    assert label("ema:decay=0.99,match=window", 18) == "ema:decay=0.99,\nmatch=window"
    assert label("a$b$") == r"a\$b\$"
    assert label("_mine") == " _mine"  # matplotlib leaves labels with a leading _ out
    assert label("a\x1b[2J\nb") == r"a\x1b[2J\nb"


def test_the_running_mean_skips_missing_values():
    nan = float("nan")
    assert running_mean([1.0, 3.0, nan, 5.0], half=1) == [1.0, 2.0, 3.0, 5.0]
    assert running_mean([1.0, 2.0] * 20, half=5)[5:-5] == [1.5] * 30
    assert running_mean([], half=1) == []


def test_the_same_report_gives_the_same_bytes_whatever_the_users_settings(masked, tmp_path):
    import matplotlib as mpl

    (tmp_path / "report.json").write_text(to_json(masked))
    code = (
        "import sys; from pathlib import Path; from sewa_cli.report.select import Report\n"
        "from sewa_cli.cli.request import save_figure\n"
        "from sewa_cli.present import draw\n"
        "assert 'matplotlib' not in sys.modules\n"
        "report = Report.model_validate_json(Path('report.json').read_text())\n"
        "for suffix in ('png', 'svg', 'pdf'): save_figure(draw(report), Path(f'a.{suffix}'))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True)
    kinds = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    with mpl.rc_context({"font.size": 30, "axes.grid": True, "savefig.transparent": True}):
        before = dict(mpl.rcParams)
        for suffix, start in kinds.items():
            save_figure(draw(masked), tmp_path / f"b.{suffix}")
            written = (tmp_path / f"b.{suffix}").read_bytes()
            assert written == (tmp_path / f"a.{suffix}").read_bytes()
            assert written.startswith(start)
        assert dict(mpl.rcParams) == before


def test_an_unknown_suffix_and_a_missing_matplotlib_are_refused_before_any_work(
    monkeypatch, tmp_path
):
    for name in ("plot.jpg", "plot", "png", "plot.png.bak"):
        with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
            check_plot(tmp_path / name, force=False)
    check_plot(tmp_path / "a.png", force=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_plot(tmp_path / "a.png", force=False)


def test_a_picture_replaces_nothing_without_force_and_is_whole_or_not_there(tmp_path):
    def savefig(file, **_):
        file.write(b"half")
        raise KeyboardInterrupt

    path = tmp_path / "a.svg"
    path.write_text("mine")
    figure = figure_of(Chart("", "", [Panel([], "x", "y")]))
    with pytest.raises(OutputError, match="use --force"):
        check_plot(path, force=False)
    broken = SimpleNamespace(savefig=savefig)
    with pytest.raises(KeyboardInterrupt):
        save_figure(broken, path, force=True)
    assert path.read_text() == "mine"
    save_figure(figure, path, force=True)
    assert path.read_text().startswith("<?xml")
    assert list(tmp_path.iterdir()) == [path]
