"""What `sewa select` learned: the mask over the checkpoints, and how the loss went."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sewa_cli.present.plots import (
    WIDE,
    Picture,
    draw_logged,
    draw_weights,
    drawable,
    hint,
    house,
    legend_above,
    losses_of,
    name_of,
    name_steps,
    panels,
    places_of,
    set_margins,
)
from sewa_cli.present.plots.dots import Series, draw_dots
from sewa_cli.present.plots.losses import (
    draw_curve,
    draw_losses,
    draw_path,
    draw_simple,
    name_levels,
)
from sewa_cli.text import number, with_K

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sewa_cli.report.select import Blend, Report


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
            draw_curve(curve[0], report.budget)
        name_levels(figure, losses, draw_losses(losses, report))
    return figure


def _plot_blend(report: Report, blend: Blend) -> Figure:
    """Weights by step with the prior they were pulled to; cross-validated loss by the pull."""
    from matplotlib.figure import Figure

    with house():
        figure = Figure(figsize=(8, 6))
        set_margins(figure)
        weights, losses = figure.subplots(2, 1)
        _draw_blend(weights, report, blend)
        draw_path(losses, report, blend)
    return figure


def pictures(report: Report) -> Iterator[tuple[str, Picture]]:
    """For each part of a page, by its name."""
    yield (
        "scores",
        Picture(
            "Loss of the average and of baselines",
            "A row for each average with its selection, expected and held-out loss, as in the "
            "table.",
            lambda: panels(
                lambda axes: draw_dots(axes, _names(report), _series(report)),
                height=1.0 + 0.42 * len(_names(report)),
            ),
        ),
    )
    yield "weights", weights_picture(report)
    if report.blend and not report.instead_of:
        found = report.blend
        best = min(found.path, key=lambda pull: drawable(pull.loss))
        named = "the prior itself" if best.strength is None else f"a pull of {best.strength:g}"
        yield (
            "loss",
            Picture(
                "Cross-validated loss by the strength of the pull",
                f"From the prior alone to weights that are pulled little; the lowest loss is that "
                f"of {named}, {number(best.loss)}.",
                lambda: panels(lambda axes: draw_path(axes, report, found)),
            ),
        )
    if options := report.budget:
        taken = next(option for option in options if option.chosen)
        yield (
            "loss",
            Picture(
                "Cross-validated loss by K",
                f"Learned masks and baselines of K checkpoints; taken was "
                f"{with_K(taken.name, taken.K)} with {number(taken.loss)}.",
                lambda: panels(lambda axes: draw_curve(axes, options)),
            ),
        )
    if any(drawable(loss) == loss for loss in report.history):
        yield (
            "loss",
            Picture(
                "Loss while learning",
                f"Over {len(report.history)} iterations, with the selection losses of the average "
                "and of its references as levels.",
                lambda: _history(report),
            ),
        )
    if any(one.K is not None for one in report.simple):
        yield (
            "loss",
            Picture(
                "Selection loss of the baselines by K",
                f"Of {len(report.simple)} baselines "
                f"{with_K(report.simple[0].name, report.simple[0].K)} has the lowest, "
                f"{number(report.simple[0].selection_loss)}.",
                lambda: panels(lambda axes: draw_simple(axes, report)),
            ),
        )


def weights_picture(report: Report) -> Picture:
    steps = [candidate.step for candidate in report.candidates]
    logged = [candidate.logged for candidate in report.candidates]
    blend = report.blend if not report.instead_of else None
    weighed = [candidate.weight or 0.0 for candidate in report.candidates]
    learned = any(candidate.probability is not None for candidate in report.candidates)

    def draw(axes: Axes) -> None:
        if blend:
            _draw_blend(axes, report, blend)
        elif learned:
            _draw_mask(axes, report)
        else:
            draw_weights(axes, steps, weighed)

    def draw_below(axes: Axes) -> None:
        draw_logged(axes, steps, logged)

    most = max(range(len(weighed)), key=weighed.__getitem__)
    named = name_of(steps[most], most)
    also = "; below, the loss that the trainer logged" if losses_of(logged) else ""
    return Picture(
        "Weights along the run" if blend or not learned else "Mask along the run",
        f"{report.K} of {report.k} checkpoints have a weight; the largest, "
        f"{number(weighed[most])}, is that of {named}{also}.",
        lambda: panels(draw, draw_below) if losses_of(logged) else panels(draw),
    )


def _names(report: Report) -> list[str]:
    taken = {} if report.written in report.references else {report.written: None}
    chosen = {report.instead_of: None} if report.instead_of else taken
    return [name or "" for name in {**chosen, **report.references}]


def _series(report: Report) -> list[Series]:
    chosen = report.learned if report.instead_of and report.learned else report.average
    scores = [report.references.get(name, chosen) for name in _names(report)]
    found = [Series("selection", [one.selection_loss for one in scores], "o", hollow=True)]
    if report.expected and _names(report)[0] not in report.references:
        expected, error = [report.expected.loss, *[None] * (len(scores) - 1)], report.expected.error
        name = "expected" if error is None else "expected ± 95 %"
        found.append(Series(name, expected, "D", errors=[1.96 * error] if error else ()))
    if report.heldout_rows is not None:
        found.append(Series("held-out", [one.heldout_loss for one in scores], "o"))
    return found


def _history(report: Report) -> Figure:
    from matplotlib.figure import Figure

    with house():
        figure = Figure(figsize=(WIDE, 2.9))
        set_margins(figure)
        axes = figure.subplots()
        name_levels(figure, axes, draw_losses(axes, report))
    return figure


def _draw_blend(axes: Axes, report: Report, blend: Blend) -> None:
    """Weights by step, and the prior that they were pulled to."""
    steps = [candidate.step for candidate in report.candidates]
    text = f"{report.K} weighed, worth {blend.effective:.3g} equal ones"
    # first, as `draw_weights` fixes the axis for all that is there
    axes.plot(places_of(steps)[0], blend.weights, color="0.55", lw=1.6, ls="--", label="the prior")
    draw_weights(axes, steps, [candidate.weight or 0.0 for candidate in report.candidates], text)
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
    for i, (x, candidate) in enumerate(zip(places, report.candidates, strict=True)):
        is_taken = "chosen" if candidate.index in chosen else "not chosen"
        likely = "" if not learned else f"probability {number(candidate.probability)}"
        hint(axes, x, None, name_of(candidate.step, i), is_taken, likely)
    axes.set_ylim(0, 1.05)
    name_steps(axes, by_step)
    axes.set_ylabel("mask probability" if learned else "chosen or not")
    legend_above(axes)
