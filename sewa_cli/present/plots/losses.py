"""How the loss went in `sewa select`: by the pull, by iteration, by K."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import isfinite, log10, nan
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present.plots import (
    drawable,
    fit_losses,
    hint,
    label,
    legend_above,
    legend_beside,
    name_level,
)
from sewa_cli.text import number, with_K

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sewa_cli.report.select import Blend, BudgetOption, Report

STYLES: Final = ("-", ":", "--", "-.", (0, (8, 2)), (0, (1, 4)))


def draw_path(axes: Axes, report: Report, blend: Blend) -> None:
    """Cross-validated loss by the pull, errors from the best; area of a dot: its share."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    at = range(len(blend.path))
    losses = [drawable(pull.loss) for pull in blend.path]
    errors = [drawable(pull.error) for pull in blend.path]
    axes.errorbar(at, losses, yerr=errors, color="0.4", lw=1.2, capsize=2)
    sizes = [250 * pull.share + 2 for pull in blend.path]
    axes.scatter(at, losses, sizes, color="black", zorder=3, label="share in the answer, by area")
    for i, pull in enumerate(blend.path):
        if isfinite(losses[i]):
            name = "the prior" if pull.strength is None else f"pull {pull.strength:g}"
            said = f"loss {number(pull.loss)}", f"share {number(pull.share)}"
            hint(axes, i, losses[i], name, *said)
    levels = [
        loss + way * (error if isfinite(error) else 0.0)
        for loss, error in zip(losses, errors, strict=True)
        for way in (-1, 1)
    ]
    if report.expected:
        lines = [("expected of this", report.expected.loss, "-")]
        if report.expected.by is not None:
            lines.append(("of the best baseline", report.expected.loss + report.expected.by, ":"))
        for name, level, style in lines:
            if not isfinite(level):
                continue
            axes.axhline(level, ls=style, lw=1.1, color="black", label=f"{name} {level:.5g}")
            levels.append(level)
    fit_losses(axes, [loss for loss in levels if isfinite(loss)])
    names = ["prior" if pull.strength is None else f"{pull.strength:g}" for pull in blend.path]
    axes.xaxis.set_major_locator(FixedLocator(list(at)))
    axes.xaxis.set_major_formatter(FixedFormatter(names))
    axes.set_xlabel("pull towards the prior, strong to weak")
    axes.set_ylabel("cross-validated loss")
    legend_above(axes)


def draw_losses(axes: Axes, report: Report) -> dict[str, float]:
    """The noisy history, its running mean, and a level for each average; label → level."""
    from matplotlib.ticker import MaxNLocator

    history = [drawable(loss) for loss in report.history]
    finite = [loss for loss in history if isfinite(loss)]
    iterations = range(1, len(history) + 1)
    if finite:
        # a loss between two missing ones is a line without length: give it a dot
        dots = "." if len(finite) < max(len(history), 30) else ""
        axes.plot(
            iterations, history, lw=0.7, marker=dots, ms=3, color="0.7", label="each iteration"
        )
        smooth = running_mean(history, half=max(1, len(history) // 20))
        axes.plot(iterations, smooth, lw=2, color="0.5", label="running mean")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
        legend_above(axes)
    else:
        axes.set_xticks([])
    levels = {}
    for i, (name, scores) in enumerate({"chosen": report.average, **report.references}.items()):
        loss = drawable(scores.selection_loss)
        if isfinite(loss):
            text = label(f"{name} {loss:.5g}")
            levels[text] = loss
            style, lw = STYLES[i % len(STYLES)], 1.1 if i else 1.6
            axes.axhline(loss, ls=style, lw=lw, color="black", label=text, gid="level")
    fit_losses(axes, [*finite, *levels.values()])
    axes.set_xlim(0.5, max(len(history), 1) + 0.5)
    axes.set_xlabel("iteration" if finite else "no loss history")
    axes.set_ylabel("loss on selection data")
    return levels


def draw_curve(axes: Axes, options: Sequence[BudgetOption]) -> None:
    """Cross-validated loss by K, with one standard error of the difference from the best."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    families: dict[str, list[BudgetOption]] = {}
    for option in options:
        if option.K is not None and option.loss is not None:
            families.setdefault(option.name, []).append(option)
    for i, (name, family) in enumerate(families.items()):
        axes.errorbar(
            [option.K or 0 for option in family],
            [option.loss or 0.0 for option in family],
            yerr=[option.error or 0.0 for option in family],
            linestyle=STYLES[i % len(STYLES)],
            lw=1.6 if name == "learned" else 1.0,
            color="black" if name == "learned" else "0.5",
            capsize=2,
            label=label(name),
        )
        for option in family:
            said = with_K(name, option.K), f"loss {number(option.loss)}"
            hint(axes, option.K or 0, option.loss, *said)
    for i, option in enumerate(o for o in options if o.K is None and o.loss is not None):
        style, text = STYLES[(i + 1) % len(STYLES)], label(f"{option.name} {option.loss:.4g}")
        axes.axhline(option.loss or 0.0, ls=style, lw=1.0, color="0.3", label=text)
    taken = next(option for option in options if option.chosen)
    if taken.K is not None and taken.loss is not None:
        axes.plot(taken.K, taken.loss, "D", ms=7, color="black", label="taken", zorder=5)
    finite = [option.loss for option in options if option.loss is not None]
    fit_losses(axes, finite)
    sizes = _apart({option.K for option in options if option.K is not None})
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel("K")
    axes.set_ylabel("cross-validated loss")
    legend_beside(axes)


def draw_simple(axes: Axes, report: Report) -> None:
    """A line for each family over K; those without a K are levels."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    families: dict[str, list[tuple[int, float]]] = {}
    for one in report.simple:
        if one.K is not None and isfinite(drawable(one.selection_loss)):
            families.setdefault(one.name, []).append((one.K, drawable(one.selection_loss)))
    for i, (name, points) in enumerate(families.items()):
        look: dict[str, Any] = {
            "marker": "os^Dv"[i % 5],
            "ms": 4.0,
            "mfc": "white" if i % 2 else "0.3",
        }
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, ls=STYLES[i % len(STYLES)], lw=1.0, color="0.3", label=label(name), **look)
        for K, loss in points:
            hint(axes, K, loss, with_K(name, K), f"selection loss {number(loss)}")
    level = drawable(report.average.selection_loss)
    if isfinite(level):
        text = f"{report.written} {number(level)}"
        axes.axhline(level, color="black", lw=1.6, label=label(text))
    finite = [loss for points in families.values() for _, loss in points]
    fit_losses(axes, [*finite, *([level] if isfinite(level) else [])])
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(_apart({K for points in families.values() for K, _ in points}))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel("K")
    axes.set_ylabel("selection loss")
    legend_beside(axes)


def name_levels(figure: Figure, axes: Axes, levels: dict[str, float]) -> None:
    """Name each level at its right end; in a legend if the names would overlap there."""
    names = [name_level(axes, text, level) for text, level in levels.items()]
    figure.draw_without_rendering()
    boxes = sorted((name.get_window_extent() for name in names), key=lambda box: box.y0)
    if any(low.y1 > high.y0 for low, high in pairwise(boxes)):
        for name in names:
            name.remove()
        legend_beside(axes)


def _apart(Ks: Collection[int]) -> list[int]:
    """As many of them as there is room for on a logarithmic axis."""
    ticks: list[int] = []
    for K in sorted(Ks):
        if not ticks or log10(K / ticks[-1]) >= 0.04 * log10(max(Ks) / min(Ks)):
            ticks.append(K)
    return ticks


def running_mean(values: Sequence[float], half: int) -> list[float]:
    """Mean of the finite values among the 2·half around each, NaN where there are none.

    An even number: batches that come in turns, easy and hard, leave no ripple.
    """
    sums = [0.0, *accumulate(x if isfinite(x) else 0.0 for x in values)]
    counts = [0, *accumulate(int(isfinite(x)) for x in values)]
    means = []
    for i in range(len(values)):
        low, high = max(0, i - half), min(len(values), i + half)
        near = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / near if near else nan)
    return means
