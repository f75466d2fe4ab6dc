"""Show each finding in the view of `select`; one without a function is in the JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present.charts import Chart, Panel, Series, drawable, ends_of, running_mean
from sewa_cli.present.parts import gained, percent
from sewa_cli.present.view import Part, Picture
from sewa_cli.report.findings import Blend, Budget, Details, Expected, History, Validated
from sewa_cli.text import few, number, with_K

if TYPE_CHECKING:
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Measured


@dataclass(frozen=True)
class Shown:
    """Lines and parts that findings add to a view.

    choice, weights, details  lines of -v above and below the checkpoints used, and after these
    parts                     of the page, which has `weights` too
    own                       lines of the page, by a user's own solver
    """

    choice: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    own: list[str] = field(default_factory=list)


def show_findings(report: Report) -> Shown:
    shown = Shown()
    for one in report.findings:
        if one.kind in SHOWN:
            SHOWN[one.kind](one, report, shown)
    return shown


def compared_scores(report: Report) -> dict[str, Measured]:
    """Return the scores of the choice, unless it is a baseline, and of the baselines."""
    own = {}
    if report.instead_of and report.learned:
        own = {report.instead_of: report.learned}
    elif report.written not in report.references:
        own = {report.written: report.average}
    return {**own, **report.references}


def expected(report: Report) -> str:
    """Say the expected loss; where data are held out, they alone say what is significant."""
    found, is_judged = report.find(Expected), report.heldout_rows is not None
    assert found is not None
    whose = ""
    if report.instead_of:
        is_learned = report.instead_of == "learned"
        whose = " of what was learned" if is_learned else f" of `{report.instead_of}`"
    how = " (cross-validated on the selection data)" if is_judged else ""
    said = f"expected loss{whose} on new data{how} {number(found.loss, 3)}"
    if found.error is not None:
        low, high = found.loss - 1.96 * found.error, found.loss + 1.96 * found.error
        said += f", 95 % CI [{number(low, 3)}, {number(high, 3)}]"
    if found.by is None or is_judged:
        return said
    return f"{said}; vs best baseline: {gained(found.by, found.interval)}"


def overfits(report: Report) -> str:
    """Answer whether the choice is worse on other data than a baseline it was preferred to."""
    own = report.learned or report.average
    for better in report.verdict.beaten_by:
        loss = report.references[better.name].selection_loss
        is_preferred = own.selection_loss is None or (loss or 0.0) > own.selection_loss
        if better.interval is not None and not better.interval.has_zero() and is_preferred:
            return f"yes: `{better.name}` has a significantly lower held-out loss"
    if report.heldout_rows is not None and report.verdict.interval is not None:
        return "no: no baseline that it was preferred to has a significantly lower held-out loss"
    found = report.find(Expected)
    if found is None or found.interval is None:
        return "unknown: too few data were held out"
    if report.heldout_rows is None and found.interval.high < 0:
        return "yes: cross-validation expects a significantly lower loss of the best baseline"
    return "no: cross-validation does not expect a significantly lower loss of the best baseline"


def _details(found: Details, _report: Report, shown: Shown) -> None:
    shown.details.extend(found.says())
    shown.own.extend(found.says())


def _blend(found: Blend, report: Report, shown: Shown) -> None:
    if report.instead_of:
        return
    averages = sorted(found.prior, key=lambda one: -one.share)
    named = [f"{with_K(one.name, one.K)} ({percent(one.share)})" for one in averages]
    most = max(1, sum(one.share >= 0.05 for one in averages))
    learned = "nothing was learned on top"
    if found.learned >= found.UNMOVED:
        strength = max(found.path, key=lambda one: one.share).strength
        mostly = "" if strength is None else f", mostly at regularisation strength {strength:g}"
        learned = f"learning moved {percent(found.learned)} of the weight to others{mostly}"
    elif (report.selection_groups or report.selection_rows) < found.FEW:
        learned += (
            f", which takes {found.FEW} {'groups' if report.selection_groups else 'examples'}"
        )
    shown.weights.append(f"prior: {few(named[:most], 5)}; {learned}")
    hints = {
        "prior" if one.strength is None else f"{one.strength:g}": f"loss {number(one.loss)}, share "
        f"of the choice {percent(one.share)}"
        for one in found.path
    }
    levels = {}
    if expects := report.find(Expected):
        levels = {f"choice, expected {number(expects.loss)}": expects.loss}
        if expects.by is not None:
            best = expects.loss + expects.by
            levels[f"best baseline, expected {number(best)}"] = best
    alt = (
        "From the prior alone to weights that are regularised little; the intervals are those of "
        "the difference from the lowest loss."
    )
    shown.parts.append(_curve("regularisation strength", found.path, hints, levels, alt))


def _budget(found: Budget, _report: Report, shown: Shown) -> None:
    learned = [one for one in found.options if one.name == "learned"]
    known = [one for one in found.options if one.name != "learned" and one.loss is not None]
    chosen = next(one for one in found.options if one.chosen)
    best = min(known, key=lambda one: one.loss or 0.0, default=chosen)
    name = with_K(best.name, best.K)
    shown.choice.append(
        f"cross-validated loss by K: {', '.join(f'{o.K}: {number(o.loss)}' for o in learned)}; "
        f"best baseline {name}: {number(best.loss)}; chosen: {with_K(chosen.name, chosen.K)}"
    )
    hints = {f"{one.K}": f"loss {number(one.loss)}" for one in learned}
    levels = {name: best.loss or 0.0} if known else {}
    alt = "Learned masks of K checkpoints, and the best baseline as a level."
    shown.parts.append(_curve("K", learned, hints, levels, alt))


def _curve(
    x_label: str,
    options: Sequence[Validated],
    hints: Mapping[str, str],
    levels: Mapping[str, float],
    alt: str,
) -> Picture:
    """Draw the cross-validated loss of options with these names."""
    losses = [drawable(one.loss) for one in options]
    ends = [ends_of(one.loss, one.error) for one in options]
    places, before = list(range(len(hints))), "K=" if x_label == "K" else ""
    said = [f"{before}{name}, {hint}" for name, hint in hints.items()]
    series = Series("", places, losses, "-", "o", intervals=ends, hints=said)
    at = {float(place): name for place, name in enumerate(hints)}
    panel = Panel([series], x_label, "cross-validated loss", levels, at)
    return Picture(Chart(f"Cross-validated loss by {x_label}", alt, [panel]))


def _history(found: History, report: Report, shown: Shown) -> None:
    losses = [drawable(loss) for loss in found.values]
    if (count := len(losses)) < (found.at_most or 0):
        shown.details.append(
            f"learning stopped after {count} of {found.at_most} iterations, as the choice and the "
            "loss did not change any more"
        )
    if not any(loss is not None for loss in found.values):
        return
    at = list(range(1, count + 1))
    smooth = running_mean(losses, max(1, count // 20))
    levels = {
        f"{name} {number(one.selection_loss)}": one.selection_loss
        for name, one in compared_scores(report).items()
        if one.selection_loss is not None
    }
    series = [
        Series("each iteration", at, losses, "-", color="0.7", width=0.7),
        Series("running mean", at, smooth, "-", color="0.5", width=2.0),
    ]
    chart = Chart(
        "Loss while learning",
        f"{count} iterations; the selection losses of averages are levels.",
        [Panel(series, "iteration", "loss on selection data", levels)],
    )
    shown.parts.append(Picture(chart))


SHOWN: Final[dict[str, Callable[[Any, Report, Shown], None]]] = {
    "blend": _blend,
    "budget": _budget,
    "details": _details,
    "history": _history,
}
