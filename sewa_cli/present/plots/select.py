"""What `sewa select` learned: the mask over the checkpoints, and how the loss went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present.plots import (
    drawable,
    fit_losses,
    house,
    label,
    legend_above,
    legend_beside,
    name_level,
    name_steps,
    places_of,
    set_margins,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sewa_cli.report.select import Blend, BudgetOption, Report

_STYLES: Final = ("-", ":", "--", "-.", (0, (8, 2)), (0, (1, 4)))


def plot(report: Report) -> Figure:
    """Weights or mask by step, and how the loss went: by the pull, by iteration, by K."""
    from matplotlib.figure import Figure

    if report.blend and not report.instead_of:
        return _plot_blend(report, report.blend)
    with house():
        panels = 3 if report.budget else 2
        figure = Figure(figsize=(8, 3 * panels))
        set_margins(figure)
        mask, losses, *curve = figure.subplots(panels, 1)
        _draw_mask(mask, report)
        if report.budget:
            _draw_curve(curve[0], report.budget)
        _name_levels(figure, losses, _draw_losses(losses, report))
    return figure


def _plot_blend(report: Report, blend: Blend) -> Figure:
    """Weights by step with the prior they were pulled to; cross-validated loss by the pull."""
    from matplotlib.figure import Figure

    with house():
        figure = Figure(figsize=(8, 6))
        set_margins(figure)
        weights, losses = figure.subplots(2, 1)
        places, by_step = places_of([candidate.step for candidate in report.candidates])
        heights = [candidate.weight or 0.0 for candidate in report.candidates]
        text = f"{report.K} weighed, worth {blend.effective:.3g} equal ones"
        weights.vlines(places, 0, heights, color="black", lw=1.4, label=text)
        weights.plot(places, blend.weights, color="0.55", lw=1.6, ls="--", label="the prior")
        weights.set_ylim(0, None)
        name_steps(weights, by_step)
        weights.set_ylabel("weight")
        legend_above(weights)
        _draw_path(losses, report, blend)
    return figure


def _draw_path(axes: Axes, report: Report, blend: Blend) -> None:
    """Cross-validated loss by the pull, errors from the best; area of a dot: its share."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    at = range(len(blend.path))
    losses = [drawable(pull.loss) for pull in blend.path]
    errors = [drawable(pull.error) for pull in blend.path]
    axes.errorbar(at, losses, yerr=errors, color="0.4", lw=1.2, capsize=2)
    sizes = [250 * pull.share + 2 for pull in blend.path]
    axes.scatter(at, losses, sizes, color="black", zorder=3, label="share in the answer, by area")
    levels = [
        loss + way * (error if isfinite(error) else 0.0)
        for loss, error in zip(losses, errors, strict=True)
        for way in (-1, 1)
    ]
    if report.expected:
        lines = [("expected of this", report.expected.loss, "-")]
        if report.expected.by is not None:
            lines.append(("of the best simple", report.expected.loss + report.expected.by, ":"))
        for name, level, style in lines:
            axes.axhline(level, ls=style, lw=1.1, color="black", label=f"{name} {level:.5g}")
            levels.append(level)
    fit_losses(axes, [loss for loss in levels if isfinite(loss)])
    names = ["prior" if pull.strength is None else f"{pull.strength:g}" for pull in blend.path]
    axes.xaxis.set_major_locator(FixedLocator(list(at)))
    axes.xaxis.set_major_formatter(FixedFormatter(names))
    axes.set_xlabel("pull towards the prior, strong to weak")
    axes.set_ylabel("cross-validated loss")
    legend_above(axes)


def _draw_mask(axes: Axes, report: Report) -> None:
    """A bar for each candidate, black with a marker on top if it was chosen."""
    places, by_step = places_of([candidate.step for candidate in report.candidates])
    chosen = set(report.selected)
    learned = any(candidate.probability is not None for candidate in report.candidates)
    heights = [
        candidate.probability or 0.0 if learned else float(candidate.index in chosen)
        for candidate in report.candidates
    ]
    ordered = sorted(places)
    gap = min((b - a for a, b in pairwise(ordered)), default=1)
    width = min(0.7 * gap, (ordered[-1] - ordered[0] or 1) / 70)
    for is_chosen in (False, True):
        here = [i for i, c in enumerate(report.candidates) if (c.index in chosen) == is_chosen]
        if not here:
            continue
        at, high = [places[i] for i in here], [heights[i] for i in here]
        colour = "black" if is_chosen else "0.75"
        # however many bars there are, an edge of 0.7 points lets each be seen
        look: dict[str, Any] = {"color": colour, "edgecolor": colour, "linewidth": 0.7}
        if is_chosen:
            axes.bar(at, high, width, **look, zorder=3)
            size, text = max(2.0, 5.5 - len(here) / 50), f"{len(here)} chosen"
            axes.plot(at, high, "D", ms=size, color=colour, label=text, zorder=4, clip_on=False)
        else:
            axes.bar(at, high, width, **look, zorder=2, label=f"{len(here)} not chosen")
    axes.set_ylim(0, 1.05)
    name_steps(axes, by_step)
    axes.set_ylabel("mask probability" if learned else "chosen or not")
    legend_above(axes)


def _draw_losses(axes: Axes, report: Report) -> dict[str, float]:
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
            style, lw = _STYLES[i % len(_STYLES)], 1.1 if i else 1.6
            axes.axhline(loss, ls=style, lw=lw, color="black", label=text, gid="level")
    fit_losses(axes, [*finite, *levels.values()])
    axes.set_xlim(0.5, max(len(history), 1) + 0.5)
    axes.set_xlabel("iteration" if finite else "no loss history")
    axes.set_ylabel("loss on selection data")
    return levels


def _draw_curve(axes: Axes, options: Sequence[BudgetOption]) -> None:
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
            linestyle=_STYLES[i % len(_STYLES)],
            lw=1.6 if name == "learned" else 1.0,
            color="black" if name == "learned" else "0.5",
            capsize=2,
            label=label(name),
        )
    for i, option in enumerate(o for o in options if o.K is None and o.loss is not None):
        style, text = _STYLES[(i + 1) % len(_STYLES)], label(f"{option.name} {option.loss:.4g}")
        axes.axhline(option.loss or 0.0, ls=style, lw=1.0, color="0.3", label=text)
    taken = next(option for option in options if option.chosen)
    if taken.K is not None and taken.loss is not None:
        axes.plot(taken.K, taken.loss, "D", ms=7, color="black", label="taken", zorder=5)
    finite = [option.loss for option in options if option.loss is not None]
    fit_losses(axes, finite)
    sizes = sorted({option.K for option in options if option.K is not None})
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel("K")
    axes.set_ylabel("cross-validated loss")
    legend_beside(axes)


def _name_levels(figure: Figure, axes: Axes, levels: dict[str, float]) -> None:
    """Name each level at its right end; in a legend if the names would overlap there."""
    names = [name_level(axes, text, level) for text, level in levels.items()]
    figure.draw_without_rendering()
    boxes = sorted((name.get_window_extent() for name in names), key=lambda box: box.y0)
    if any(low.y1 > high.y0 for low, high in pairwise(boxes)):
        for name in names:
            name.remove()
        legend_beside(axes)


def running_mean(values: Sequence[float], half: int) -> list[float]:
    """Mean of the finite values among the 2·half around each, NaN where there are none.

    An even number: batches that come in turns, easy and hard, leave no ripple.
    """
    means = []
    for i in range(len(values)):
        near = [x for x in values[max(0, i - half) : i + half] if isfinite(x)]
        means.append(sum(near) / len(near) if near else nan)
    return means
