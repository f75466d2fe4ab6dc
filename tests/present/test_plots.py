"""Pictures of selections and comparisons: what is marked, and that every word can be read."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from helpers.figures import assert_readable, marks, row, words
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from sewa_cli.cli.pictures import check_plot, save_figure
from sewa_cli.commands.select import run_select
from sewa_cli.demo import run_demo
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.events import Events
from sewa_cli.present.plots import label
from sewa_cli.present.plots.compare import K_scale
from sewa_cli.present.plots.compare import plot as plot_comparison
from sewa_cli.present.plots.losses import running_mean
from sewa_cli.present.plots.select import plot as plot_selection
from sewa_cli.report.compare import Comparison, Row
from sewa_cli.report.part import to_json
from sewa_cli.report.select import Blend, Pulled, Report, Share
from sewa_cli.report.shared import Candidate, Scores
from sewa_cli.session.extensions import load_settings
from sewa_cli.task import load_task

TAKING = ["sewa", "lawa", "latest", "random", "forward", "topk"]
TAKING_NONE = ["last", "best", "uniform", "swa", "ema:decay=0.99", "greedy", "twa", "wsm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plots") / "demo"


@pytest.fixture(scope="module")
def weighed(folder: Path) -> Report:
    """A real run, by the default: weights on 100 checkpoints."""
    return run_demo(folder, 0, Events()).report


@pytest.fixture(scope="module")
def demo(weighed: Report, folder: Path) -> Report:  # noqa: ARG001
    """The same run by SeWA's mask: 10 of 100 checkpoints."""
    config = load_settings(folder / "sewa.yaml", {"K": 10})
    return run_select(config, load_task(str(folder / "task.py"), {}), write=False).report


def selection(
    demo: Report,
    k: int,
    K: int,
    *,
    step: Callable[[int], int | None] = lambda i: 10 * i,
    history: Sequence[float | None] = (0.5, 0.4, 0.3),
    losses: Sequence[float | None] = (0.1, 0.3, 0.9, 0.5),
    learned: bool = True,
) -> Report:
    chance = random.Random(k)
    s = [chance.random() ** 4 for _ in range(k)]
    average, *others = [Scores(selection_loss=loss) for loss in losses]
    names = ["latest K=5", "last", "uniform"][-len(others) :]  # the best may be one of the two
    return demo.model_copy(
        update={
            "k": k,
            "K": K,
            "candidates": [
                Candidate(index=i, path="", step=step(i), probability=s[i] if learned else None)
                for i in range(k)
            ],
            "selected": sorted(sorted(range(k), key=lambda i: -s[i])[:K]),
            "history": list(history),
            "average": average,
            "references": dict(zip(names, others, strict=True)),
        }
    )


def weighing(
    weighed: Report,
    k: int,
    path: Sequence[float | None] = (0.3, 0.2, 0.25),
    *,
    step: Callable[[int], int | None] = lambda i: 10 * i,
    expected: bool = True,
) -> Report:
    """Weights that grow, pulled to the mean of all under ever weaker pulls."""
    total = k * (k + 1) / 2
    weights = [(i + 1) / total for i in range(k)]
    finite = [loss for loss in path if loss is not None and np.isfinite(loss)]
    blend = Blend(
        prior=[Share(name="uniform", K=None, share=1.0)],
        path=[
            Pulled(
                strength=10.0 ** (1 - i) if i else None,
                loss=loss,
                behind=loss - min(finite) if loss in finite else None,
                error=0.01 if loss in finite else None,
                share=1 / len(finite) if loss in finite else 0.0,
            )
            for i, loss in enumerate(path)
        ],
        weights=[1 / k] * k,
        effective=1 / sum(weight**2 for weight in weights),
        learned=sum(abs(weight - 1 / k) for weight in weights) / 2,
    )
    return weighed.model_copy(
        update={
            "k": k,
            "K": k,
            "candidates": [
                Candidate(index=i, path="", step=step(i), weight=weights[i]) for i in range(k)
            ],
            "selected": list(range(k)),
            "blend": blend,
            "expected": weighed.expected if expected else None,
        }
    )


def comparison(demo: Report, rows: Sequence[Row], heldout: bool = True) -> Comparison:
    """Marks the lowest as best, what lies within 0.01 of it as ties."""
    losses = [
        r.heldout_loss if r.heldout_loss is not None and np.isfinite(r.heldout_loss) else np.inf
        for r in rows
    ]
    lowest = min(losses)
    marked = []
    for r, loss in zip(rows, losses, strict=True):
        mark = None
        if heldout and loss < np.inf:
            mark = "best" if loss == lowest else "tie" if loss < lowest + 0.01 else "worse"
        update: dict[str, Any] = {"mark": mark}
        if not heldout:
            update |= {"heldout_loss": None, "interval": None, "spread": None}
        marked.append(r.model_copy(update=update))
    return Comparison(
        versions=demo.versions,
        created=demo.created,
        config={},
        task="task.py",
        device="cpu",
        seed=0,
        k=100,
        parameters=10,
        candidates=demo.candidates,
        left_out=[],
        selection_rows=500,
        heldout_rows=500 if heldout else None,
        unit="rows" if heldout else None,
        rows=marked,
        best=losses.index(lowest) if heldout and lowest < np.inf else None,
        winner=None,
        batchnorm=None,
        averages_evaluated=len(rows),
        placement=demo.placement,
        cost=demo.cost,
        output=None,
        recipe=None,
        warnings=[],
    )


def rows_for(Ks: Sequence[int], taking: Sequence[str], none: Sequence[str]) -> list[Row]:
    chance = random.Random(0)
    return [
        *(
            row(method, K, 0.15 + 0.1 * chance.random(), spread=0.02 * (method == "random") or None)
            for method in taking
            for K in Ks
        ),
        *(row(method, None, 0.15 + 0.1 * chance.random()) for method in none),
    ]


@pytest.mark.parametrize("place", [(0.52, 0.51), (0.98, 0.2)], ids=["on another", "cut off"])
def test_the_check_itself_sees_an_unreadable_text(place: tuple[float, float]) -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "words")
    assert_readable(figure)
    figure.text(*place, "words")
    with pytest.raises(AssertionError):
        assert_readable(figure)


def chosen_places(axes: Axes) -> list[float]:
    (line,) = axes.lines
    return [float(x) for x in np.asarray(line.get_xdata())]


# --- select


def test_a_real_selection_shows_every_probability_and_marks_the_chosen_steps(demo: Report) -> None:
    figure = plot_selection(demo)
    mask, losses = figure.axes
    assert chosen_places(mask) == demo.selected_steps
    bars = sorted(mask.patches, key=lambda bar: bar.get_x())  # type: ignore[attr-defined]
    assert len(bars) == demo.k
    for bar, candidate in zip(bars, demo.candidates, strict=True):
        black = to_hex(bar.get_facecolor()) == "#000000"
        assert black == (candidate.index in demo.selected)
        assert bar.get_height() == candidate.probability  # type: ignore[attr-defined]
    raw, smooth, *levels = losses.lines
    assert np.asarray(raw.get_ydata()).tolist() == demo.history
    assert np.asarray(smooth.get_ydata()).std() < np.asarray(raw.get_ydata()).std()
    averages = [demo.average, *demo.references.values()]
    assert [line.get_ydata()[0] for line in levels] == [  # type: ignore[index]
        scores.selection_loss for scores in averages
    ]
    seen = words(figure)
    best = next(iter(demo.references))
    for word in ("training step", "mask probability", "iteration", "10 chosen", f"{best} 0."):
        assert word in seen
    assert_readable(figure)


SELECTIONS: dict[str, dict[str, Any]] = {
    "two": {"k": 2, "K": 1, "history": [1.0], "losses": [1.0, 1.0, None, 1.0]},
    "all": {"k": 30, "K": 30, "learned": False, "history": []},
    "thousand": {
        "k": 1000,
        "K": 100,
        "step": lambda i: 10_000_000 + 1000 * i,
        "history": [2 + 1 / (1 + i) for i in range(1000)],
        "losses": [2.1, 2.1001, 2.2, 2.1002],
    },
    "one of many": {"k": 1000, "K": 1, "step": lambda _: None},
    "holes": {"k": 40, "K": 5, "history": [None if i % 3 else 1.0 for i in range(50)]},
    "nothing finite": {"k": 5, "K": 2, "history": [None] * 9, "losses": [None] * 4},
    "best simple one is last": {"k": 9, "K": 2, "losses": [0.1, 0.2, 0.3]},
    "far apart": {"k": 9, "K": 2, "losses": [1e-4, 1.0, 2e3, 5.0]},
    "negative": {"k": 9, "K": 2, "losses": [-2.0, -1.6, -1.0, -1.5]},
    "tiny": {"k": 9, "K": 2, "history": [3e-9], "losses": [1e-9, 2e-9, 4e-9, 3e-9]},
    "all the same": {"k": 9, "K": 2, "history": [0.0], "losses": [0.0] * 4},
    "steps beyond a float": {"k": 9, "K": 2, "step": lambda i: 10**400 + i},
    "uneven steps": {"k": 20, "K": 3, "step": lambda i: 2**i},
    "one checkpoint": {"k": 1, "K": 1},
}


@pytest.mark.parametrize("case", SELECTIONS.values(), ids=SELECTIONS)
def test_any_selection_can_be_drawn_and_read(demo: Report, case: dict[str, Any]) -> None:
    report = selection(demo, **case)
    figure = plot_selection(report)
    mask = figure.axes[0]
    assert len(mask.patches) == report.k
    assert len(chosen_places(mask)) == report.K
    assert_readable(figure)


def test_checkpoints_without_steps_are_placed_by_index(demo: Report) -> None:
    report = selection(demo, 12, 4, step=lambda i: None if i == 3 else i)
    figure = plot_selection(report)
    assert chosen_places(figure.axes[0]) == report.selected
    assert "by index" in words(figure)


def test_levels_too_close_to_name_beside_go_into_a_legend(demo: Report) -> None:
    apart = plot_selection(selection(demo, 9, 3, losses=[0.1, 0.3, 0.9, 0.5])).axes[1]
    close = plot_selection(selection(demo, 9, 3, losses=[0.1, 0.101, 0.5, 0.3])).axes[1]
    assert len(apart.texts) == 4
    assert not close.texts
    legend = close.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()][-4:] == [
        "chosen 0.1",
        "latest K=5 0.101",
        "last 0.5",
        "uniform 0.3",
    ]


def weights_drawn(axes: Axes) -> list[tuple[float, float]]:
    """Place and height of every line in the panel of weights."""
    (lines,) = axes.collections
    assert isinstance(lines, LineCollection)
    ends = [np.asarray(segment) for segment in lines.get_segments()]
    assert all(foot[0] == top[0] and foot[1] == 0 for foot, top in ends)
    return [(float(top[0]), float(top[1])) for _, top in ends]


def path_drawn(axes: Axes) -> list[float]:
    """Heights of the dots in the panel of pulls, NaN where there is nothing to draw."""
    (dots,) = [found for found in axes.collections if isinstance(found, PathCollection)]
    return [float(y) for _, y in np.ma.filled(dots.get_offsets(), np.nan)]


def test_a_real_blend_shows_every_weight_its_prior_and_the_loss_under_every_pull(
    weighed: Report,
) -> None:
    assert weighed.blend is not None
    assert weighed.expected is not None
    figure = plot_selection(weighed)
    weights, losses = figure.axes
    assert weights_drawn(weights) == [(c.step, c.weight) for c in weighed.candidates]
    (prior,) = weights.lines
    assert np.asarray(prior.get_ydata()).tolist() == weighed.blend.weights
    assert weights.get_ylim()[1] > max(weighed.blend.weights)
    assert path_drawn(losses) == [pull.loss for pull in weighed.blend.path]
    seen = words(figure)
    for word in (
        "training step",
        "the prior",
        f"{weighed.K} weighed",
        "cross-validated loss",
        f"expected of this {weighed.expected.loss:.5g}",
        f"of the best baseline {weighed.expected.loss + (weighed.expected.by or 0.0):.5g}",
    ):
        assert word in seen
    strengths = [text.get_text() for text in losses.get_xticklabels()]
    assert strengths == [
        "prior" if pull.strength is None else f"{pull.strength:g}" for pull in weighed.blend.path
    ]
    assert_readable(figure)


WEIGHINGS: dict[str, dict[str, Any]] = {
    "two": {"k": 2},
    "thousand": {"k": 1000, "step": lambda i: 10_000_000 + 1000 * i},
    "without steps": {"k": 12, "step": lambda i: None if i == 3 else i},
    "steps beyond a float": {"k": 9, "step": lambda i: 10**400 + i},
    "nothing expected": {"k": 9, "expected": False},
    "holes": {"k": 9, "path": [0.3, None, 0.2, float("nan")]},
    "nothing finite": {"k": 9, "path": [None, None], "expected": False},
    "the prior alone": {"k": 9, "path": [0.3]},
    "far apart": {"k": 9, "path": [1e-4, 2e3, 1.0]},
    "negative": {"k": 9, "path": [-2.0, -1.6, -1.0]},
    "all the same": {"k": 9, "path": [0.0] * 4},
}


@pytest.mark.parametrize("case", WEIGHINGS.values(), ids=WEIGHINGS)
def test_any_blend_can_be_drawn_and_read(weighed: Report, case: dict[str, Any]) -> None:
    report = weighing(weighed, **case)
    assert report.blend is not None
    figure = plot_selection(report)
    weights, losses = figure.axes
    heights = [height for _, height in weights_drawn(weights)]
    assert heights == [candidate.weight for candidate in report.candidates]
    (prior,) = weights.lines
    assert np.asarray(prior.get_ydata()).tolist() == report.blend.weights
    found = [np.nan if pull.loss is None else pull.loss for pull in report.blend.path]
    np.testing.assert_array_equal(path_drawn(losses), found)
    assert_readable(figure)


def test_the_running_mean_skips_what_is_missing() -> None:
    nan = float("nan")
    assert running_mean([1.0, 3.0, nan, 5.0], half=1) == [1.0, 2.0, 3.0, 5.0]
    assert np.isnan(running_mean([nan, nan], half=1)).all()
    assert running_mean([1.0, 2.0] * 20, half=5)[5:-5] == [1.5] * 30
    assert running_mean([], half=1) == []


# --- compare


def test_every_row_is_drawn_once_with_its_interval(demo: Report) -> None:
    rows = rows_for([5, 10, 20, 50], TAKING, TAKING_NONE)
    figure = plot_comparison(comparison(demo, rows))
    drawn = marks(figure, "best", "tie", "worse")
    losses = sorted(float(np.asarray(mark.get_ydata())[0]) for mark in drawn)
    assert losses == sorted(r.heldout_loss for r in rows if r.heldout_loss is not None)
    intervals = sorted(tuple(np.asarray(m.get_ydata())) for m in marks(figure, "interval"))
    assert intervals == sorted((r.interval.low, r.interval.high) for r in rows if r.interval)
    assert len(marks(figure, "method")) == len(TAKING)
    seen = words(figure)
    for name in [*TAKING, *TAKING_NONE, "held-out loss", "K", "95 % interval"]:
        assert name in seen
    assert_readable(figure)


def test_the_best_is_a_star_ties_are_hollow_and_the_rest_filled(demo: Report) -> None:
    rows = [
        row("sewa", 5, 0.15),
        row("sewa", 10, 0.12),
        row("lawa", 5, 0.125),
        row("last", None, 1),
    ]
    figure = plot_comparison(comparison(demo, rows))
    (best,) = marks(figure, "best")
    (tie,) = marks(figure, "tie")
    assert best.get_marker() == "*"
    assert list(np.asarray(best.get_ydata())) == [0.12]
    assert to_hex(tie.get_markerfacecolor()) == "#ffffff"
    assert len(marks(figure, "worse")) == 2
    for mark in marks(figure, "worse"):
        assert to_hex(mark.get_markerfacecolor()) != "#ffffff"


def test_random_rows_show_their_spread_over_draws(demo: Report) -> None:
    rows = [row("random", 5, 0.2, spread=0.05), row("random", 10, 0.3), row("lawa", 5, 0.2)]
    figure = plot_comparison(comparison(demo, rows))
    (spread,) = marks(figure, "spread")
    assert np.asarray(spread.get_ydata()).tolist() == pytest.approx([0.15, 0.25])
    assert "standard deviation over draws" in words(figure)


def test_intervals_at_the_same_K_stand_beside_each_other(demo: Report) -> None:
    figure = plot_comparison(comparison(demo, rows_for([5, 10, 20, 50], TAKING, [])))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    left = sorted(
        float(axes.transData.transform((np.asarray(m.get_xdata())[0], 0.2))[0]) * 72 / figure.dpi
        for m in marks(figure, "interval")
    )
    assert min(np.diff(left)) > 3  # points
    assert axes.get_xlim()[0] < 5 < 50 < axes.get_xlim()[1]


def test_no_two_methods_look_alike(demo: Report) -> None:
    names = [f"method {i}" for i in range(14)]
    figure = plot_comparison(comparison(demo, rows_for([5, 10], names, [])))
    (legend,) = figure.legends
    keys = [line for line in legend.get_lines() if str(line.get_label()) in names]
    looks = [(k.get_marker(), k.get_linestyle(), k.get_color()) for k in keys]
    assert len({look[0] for look in looks}) == 14
    assert len({look[1:] for look in looks}) == 14
    assert len({look[2] for look in looks}) <= 4


@pytest.mark.parametrize(
    ("Ks", "methods", "expected"),
    [
        ([5, 10, 20], 3, "even"),
        ([5, 10, 20, 50], 14, "log"),
        ([10, 11, 100], 1, "ordinal"),
        ([5, 10, 20, 40, 80, 100], 3, "log"),
        ([5, 10, 20, 40, 80, 100], 14, "ordinal"),
    ],
)
def test_the_K_axis_suits_the_Ks(Ks: list[int], methods: int, expected: str) -> None:
    assert K_scale(Ks, methods) == expected


def test_with_one_K_every_method_is_a_named_column(demo: Report) -> None:
    figure = plot_comparison(comparison(demo, rows_for([10], TAKING, TAKING_NONE)))
    left, right = figure.axes
    assert [text.get_text() for text in left.get_xticklabels()] == TAKING
    assert [text.get_text() for text in right.get_xticklabels()] == TAKING_NONE
    assert left.get_xlabel() == "K = 10"
    assert not marks(figure, "method")
    assert_readable(figure)


def test_without_heldout_data_the_axis_says_selection_loss_and_nothing_is_crowned(
    demo: Report,
) -> None:
    rows = rows_for([5, 10], TAKING, TAKING_NONE)
    figure = plot_comparison(comparison(demo, rows, heldout=False))
    assert figure.axes[0].get_ylabel() == "selection loss (nothing held out)"
    assert len(marks(figure, "unmarked")) == len(rows)
    assert "lowest" not in words(figure)
    assert_readable(figure)


def test_rows_without_a_finite_loss_are_named_and_not_drawn(demo: Report) -> None:
    rows = [
        row("sewa", 5, 0.2),
        row("sewa", 10, 0.21),
        row("topk", 5, None),
        row("topk", 10, float("nan")),
        row("last", None, float("inf"), half=None),
    ]
    figure = plot_comparison(comparison(demo, rows))
    assert len(marks(figure, "best", "tie", "worse", "unmarked")) == 2
    note = words(figure).replace("\n", " ")
    assert "no finite loss: topk at K=5, topk at K=10, last" in note
    assert_readable(figure)


def test_a_row_far_above_all_others_does_not_flatten_them(demo: Report) -> None:
    rows = [*rows_for([5, 10, 20], TAKING, ["uniform"]), row("last", None, 52.3)]
    figure = plot_comparison(comparison(demo, rows))
    assert figure.axes[0].get_ylim()[1] < 1
    assert "off the scale: last 52.3" in words(figure)


COMPARISONS: dict[str, list[Row]] = {
    "one row": [row("last", None, 0.2)],
    "nothing finite": [row("last", None, None)],
    "three": [row("lawa", 10, 0.209), row("swa", None, 0.22), row("ema", None, 0.213)],
    "fourteen over K": rows_for([5, 10, 20, 40, 80, 100], [f"method-{i}" for i in range(14)], []),
    "fourteen without K": rows_for([], [], [f"method-{i}" for i in range(14)]),
    "many K": [row("lawa", K, -3 - K / 100) for K in range(1, 101)],
    "factor of six": [row("last", None, 0.6), row("swa", None, 0.1), row("ema", None, 0.2)],
    "almost twenty": [row("last", None, 1.95, None), row("swa", None, 0.1, None)],
    "decades": [row("a", 5, 1e-4, None), row("a", 10, 1e-2, None), row("b", 5, 9e-2, None)],
    "fine": [row(m, K, 3.20001 + 1e-6 * K, 1e-7) for m in "ab" for K in (5, 10)],
    "strange names": rows_for(
        [5, 10],
        ["_mine", "cost$in$", "ema:decay=0.9999,start=0.25,every=100,another=value"],
        ["wsm:shape=1-sqrt,start=0.25", "verylongnamewithoutanyplacetobreakit", "last"],
    ),
    "all bad but one": [row("x", 5, 0.1), *(row(f"bad{i}", 5, None) for i in range(30))],
}


@pytest.mark.parametrize("heldout", [True, False])
@pytest.mark.parametrize("rows", COMPARISONS.values(), ids=COMPARISONS)
def test_any_comparison_can_be_drawn_and_read(demo: Report, rows: list[Row], heldout: bool) -> None:
    assert_readable(plot_comparison(comparison(demo, rows, heldout)))


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_any_name_can_be_drawn(tmp_path: Path, demo: Report, suffix: str) -> None:
    names = [
        "$x_1$ \\frac",
        "$",
        "a\\$b",
        "\x1b[2J",
        "a\nb\0",
        "\u202e",
        "\udcff",
        "_a",
        "模型👩\u200d🔬",
    ]
    rows = [row(name, None, 0.1 * i) for i, name in enumerate(names, 1)]
    rows += [row(name, K, 0.1 * i) for i, name in enumerate(names, 1) for K in (3, 9)]
    save_figure(plot_comparison(comparison(demo, rows)), tmp_path / f"p{suffix}")
    assert label("a\x1b[2J\nb") == r"a\x1b[2J\nb"


def test_a_label_keeps_every_letter() -> None:
    assert label("ema:decay=0.99,match=window", 18) == "ema:decay=0.99,\nmatch=window"
    assert label("a$b$") == r"a\$b\$"
    assert label("_mine") == " _mine"  # matplotlib leaves labels with a leading _ out


def test_a_name_that_the_font_lacks_is_no_reason_to_warn(demo: Report, tmp_path: Path) -> None:
    rows = [row("平均", 5, 0.1), row("平均", 10, 0.2), row("最後", None, 0.2)]
    for suffix in ("png", "svg", "pdf"):
        path = tmp_path / f"a.{suffix}"
        save_figure(plot_comparison(comparison(demo, rows)), path)
        assert path.stat().st_size > 1000  # drawn, and no warning became an error


# --- saving


@pytest.mark.parametrize("name", ["a.png", "a.SVG", "a.pdf"])
@pytest.mark.parametrize("which", ["demo", "weighed"])
def test_the_same_report_gives_the_same_bytes(
    request: pytest.FixtureRequest, tmp_path: Path, which: str, name: str
) -> None:
    report = request.getfixturevalue(which)
    written = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save_figure(plot_selection(report), tmp_path / folder / name)
        written.append((tmp_path / folder / name).read_bytes())
    assert written[0] == written[1]
    kinds = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert written[0].startswith(kinds[name[-3:].lower()])


def test_bytes_do_not_depend_on_the_process_or_the_users_settings_and_pyplot_is_left_alone(
    demo: Report, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(to_json(demo))
    code = (
        "import sys; from pathlib import Path; from sewa_cli.report.select import Report\n"
        "from sewa_cli.cli.pictures import save_figure\n"
        "from sewa_cli.present.plots.select import plot\n"
        "import sewa_cli.present.plots.compare\n"
        "assert 'matplotlib' not in sys.modules\n"
        "report = Report.model_validate_json(Path('report.json').read_text())\n"
        "save_figure(plot(report), Path('theirs.svg'))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True)
    with mpl.rc_context({"font.size": 30, "axes.grid": True, "savefig.transparent": True}):
        before = dict(mpl.rcParams)
        save_figure(plot_selection(demo), tmp_path / "ours.svg")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "ours.svg").read_bytes() == (tmp_path / "theirs.svg").read_bytes()


@pytest.mark.parametrize("name", ["plot.jpg", "plot", "png", "plot.png.bak"])
def test_an_unknown_suffix_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        check_plot(tmp_path / name, force=False)


def test_without_matplotlib_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_plot(tmp_path / "a.png", force=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        check_plot(tmp_path / "a.png", force=False)


def test_a_picture_replaces_nothing_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text("mine")
    with pytest.raises(OutputError, match="use --force"):
        save_figure(Figure(), path)
    assert path.read_text() == "mine"
    save_figure(Figure(), path, force=True)
    assert path.read_text().startswith("<?xml")


def test_a_picture_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def savefig(file: Any, **_: object) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    broken: Any = SimpleNamespace(savefig=savefig)
    with pytest.raises(KeyboardInterrupt):
        save_figure(broken, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
