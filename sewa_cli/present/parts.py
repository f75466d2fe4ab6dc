"""Parts of a view that several kinds of report have: sentences, tables, sections."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Final

from sewa_cli.present.charts import (
    Chart,
    Panel,
    Series,
    half_of,
    logged_panels,
    places_of,
    weights_panel,
)
from sewa_cli.present.view import Cell, Facts, Part, Picture, Points, Rows, Section, Table, Words
from sewa_cli.report.findings import Blend, History, Mask
from sewa_cli.text import few, number, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import (
        Candidate,
        Cost,
        Interval,
        LeftOut,
        Lora,
        Motion,
        Placement,
        Standing,
    )

MOST_DRAWN: Final = 60  # rows of a chart
MOTION: Final = "Compared with three simple ways of moving"


def upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def than_last(value: float | None, last: float | None, *, is_loss: bool = True) -> str:
    """Say in words how far a score is from the last checkpoint's."""
    if value is None or last is None or not isfinite(value - last):
        return ""
    if value == last:
        return ", as the last checkpoint's"
    way = "below" if value < last else "above"
    return f", {_change(value, last, is_loss)} {way} the last checkpoint's"


def and_last(value: float | None, last: float | None, *, is_loss: bool = True) -> str:
    """Show a score of the last checkpoint next to another, and the change."""
    if last is None:
        return ""
    by = ""
    if value is not None and value != last and isfinite(value - last):
        by = f", {'−' if value < last else '+'}{_change(value, last, is_loss)}"
    return f" (last checkpoint {number(last, 3)}{by})"


def _change(value: float, last: float, is_loss: bool) -> str:
    """Return how far a score is from another one, without a sign: of a loss in per cent.

    Per cent of an accuracy would read as percentage points.
    """
    if not is_loss or last <= 0:
        return number(abs(value - last), 3)
    by = 100 * abs(value - last) / last
    return f"{by:.0f} %" if by >= 10 else f"{by:.2g} %"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def difference(by: float, interval: Interval | None) -> str:
    """Say how far a score is from another one, and whether that is significant."""
    said = signed(by, plus=True)
    if interval is None:
        return said
    significant = "not significant" if interval.has_zero() else "significant"
    return f"{said}, 95 % CI {ends(interval.low, interval.high)}, {significant}"


def gained(by: float, interval: Interval | None) -> str:
    """Say the same of `by` less: a loss that is lower by so much."""
    return difference(0.0 - by, interval and interval.turned())


def ends(low: float, high: float) -> str:
    return f"[{signed(low)}, {signed(high)}]"


def signed(value: float, *, plus: bool = False) -> str:
    """Return three digits of a number, with a minus sign that is as wide as a plus."""
    sign = "−" if value < 0 else "+" if plus and value > 0 else ""
    return f"{sign}{number(abs(value), 3)}"


def wrote(output: str | None) -> list[str]:
    return [] if output in (None, "-") else [f"wrote {output}"]


def recalled(cost: Cost) -> list[str]:
    return [f"{cost.recalled:,} results recalled from --cache"] if cost.recalled else []


def describe_lora(lora: Lora) -> str:
    apart = f"{lora.largest:.2%} at most, {lora.mean:.2%} on average, over {lora.pairs} pairs"
    if lora.mode == "merged":
        return f"products B·A averaged and re-factored to the same rank; error {apart}"
    return f"A and B averaged apart; the product is off the mean of products by {apart}"


def standing(found: Standing | None) -> list[str]:
    if found is None:
        return []
    return [f"the run is {found.explanation}"]


def section(title: str, *parts: Part | None) -> list[Section]:
    """Return a section, or none if there is nothing to show."""
    there = [part for part in parts if part is not None]
    return [Section(title, there)] if there else []


def by_step(points: Iterable[tuple[int | None, float | None]]) -> Points:
    """Return a curve for trackers: by step, or by index where there is none."""
    return [(i if step is None else step, value) for i, (step, value) in enumerate(points)]


def checkpoints(
    candidates: Sequence[Candidate],
    left_out: Sequence[LeftOut],
    probabilities: Sequence[float] = (),
) -> list[Part]:
    rows: Rows = []
    for one in candidates:
        row: dict[str, Cell] = {"step": one.step}
        if any(other.weight is not None for other in candidates):
            row["weight"] = one.weight
        if probabilities:
            row["probability"] = probabilities[one.index]
        row |= {f"logged {name}": value for name, value in (one.logged or {}).items()}
        rows.append({**row, "checkpoint": one.path})
    found: list[Part] = [Table(f"All {len(rows)} checkpoints", rows, is_folded=True)]
    if left_out:
        gone: Rows = [
            {"step": one.step, "checkpoint": one.path, "why": one.reason} for one in left_out
        ]
        found.append(Table("Left out", gone))
    return found


def taken(report: Report) -> str:
    weights = [candidate.weight or 0.0 for candidate in report.candidates]
    used = [weight for weight in weights if weight]
    which = f"{report.K} of {report.k} checkpoints used"
    if len({round(weight, 9) for weight in used}) <= 1:
        named = [
            str(index if step is None else step)
            for index, step in zip(report.selected, report.selected_steps, strict=True)
        ]
        steps = "checkpoint" if report.selected_steps[0] is None else "step"
        steps += "" if report.K == 1 else "s"
        each = "" if report.K == 1 else " with equal weights"
        return f"{which}{each}: {steps} {few(named, 20)}"
    first, last = (report.candidates[at] for at in half_of(weights))
    if first.step is None or last.step is None:
        where = f"checkpoints {first.index}–{last.index}"
    else:
        where = f"steps {first.step}–{last.step}" if first is not last else f"step {first.step}"
    effective = sum(weights) ** 2 / sum(weight**2 for weight in weights)
    return f"{which} (effective number {effective:.3g}), half of the weight on {where}"


def weights_chart(report: Report) -> Chart:
    candidates = report.candidates
    steps = [candidate.step for candidate in candidates]
    weights = [candidate.weight for candidate in candidates]
    mask, blend = report.find(Mask), report.find(Blend)
    if mask is not None:
        likely = mask.probabilities
        places, x_label = places_of(steps)
        chosen = {*report.selected}
        panel = weights_panel(steps, likely)
        where = [places[i] for i in sorted(chosen)]
        high = [likely[i] for i in sorted(chosen)]
        dots = Series(f"{len(chosen)} chosen", where, high, marker="D")
        stems = [*panel.series, dots]
        panel = Panel(stems, x_label, "mask probability", y_limits=(0.0, 1.05))
        title = "Mask along the run"
    else:
        prior = []
        if blend and not report.instead_of:
            shape = places_of(steps)[0], blend.weights
            prior = [Series("prior", *shape, "--", color="0.55", width=1.6)]
        panel, title = weights_panel(steps, weights, prior), "Coefficients along the run"
    known = [weight or 0.0 for weight in weights]
    most = max(range(len(known)), key=known.__getitem__)
    heaviest = candidates[most].path if steps[most] is None else f"step {steps[most]}"
    below = logged_panels(steps, [candidate.logged for candidate in candidates])
    return Chart(
        title,
        f"{report.K} of {report.k} checkpoints have a coefficient; the largest, "
        f"{number(known[most])}, is that of {heaviest}"
        f"{'; below, the loss that the trainer logged' if below else ''}.",
        [panel, *below],
    )


def weights_section(report: Report, *more: str) -> list[Section]:
    mask = report.find(Mask)
    return section(
        "Which checkpoints, and how much of each",
        Words([taken(report), *more]),
        Picture(weights_chart(report)),
        *checkpoints(report.candidates, report.left_out, mask.probabilities if mask else ()),
    )


def curves(report: Report) -> dict[str, Points]:
    history = report.find(History)
    return {
        "history": list(enumerate(history.values if history else [], 1)),
        "weight": by_step((one.step, one.weight) for one in report.candidates),
    }


def standing_section(found: Standing | None) -> list[Section]:
    if found is None:
        return []
    title = f"{MOTION}, by {found.weights:,} weights of each checkpoint"
    table = Table(title, motion_rows(found.motion))
    return section("Where the run stands", Words(standing(found)), table)


def motion_rows(motion: Motion) -> Rows:
    titles = {"line": "straight line", "walk": "random walk", "noise": "noise around a point"}
    every = {"this run": motion.run}
    every |= {titles[name]: signs for name, signs in (motion.expected or {}).items()}
    names = {
        "net_to_path": "net displacement / path",
        "cosine": "mean cosine of steps",
        "trend": "explained by a line",
    }
    return [
        {"motion": title, **{way: getattr(signs, name) for way, signs in every.items()}}
        for name, title in names.items()
    ]


def cost_section(found: Cost, placement: Placement) -> Section:
    took = found.seconds
    facts: dict[str, Cell] = {
        "seconds in all": took.total,
        "reading": took.read,
        "learning": took.learn,
        "evaluating": took.evaluate,
        "writing": took.write,
        "forward passes": found.forward_passes,
        "backward passes": found.backward_passes,
        "read from checkpoints": size(found.bytes_read),
        "peak memory": size(found.peak_memory_bytes),
    }
    if found.peak_device_memory_bytes is not None:
        facts["peak memory of the device"] = size(found.peak_device_memory_bytes)
    if found.recalled is not None:
        facts["results from --cache"] = found.recalled
    why = Words([f"checkpoints held in tier `{placement.tier}`: {placement.reason}"])
    return Section("What it cost", [Facts(facts), why])


def seconds(report: Report) -> Iterator[str]:
    took = report.cost.seconds
    yield (
        f"{took.total:.1f} s on {report.device} (reading {took.read:.1f}, learning "
        f"{took.learn:.1f}, evaluating {took.evaluate:.1f}, writing {took.write:.1f})"
    )
    yield f"checkpoints held in tier `{report.placement.tier}`: {report.placement.reason}"
