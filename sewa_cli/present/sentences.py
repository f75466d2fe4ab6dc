"""What reports say, a function for each kind: a list of sentences, one line each."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from sewa_cli.direction import comparative
from sewa_cli.present import contest as by_metric
from sewa_cli.present.card import describe_lora
from sewa_cli.text import few, number, with_K

if TYPE_CHECKING:
    from sewa_cli.report.average import AverageReport
    from sewa_cli.report.compare import Comparison
    from sewa_cli.report.forecast import Forecast
    from sewa_cli.report.select import BudgetOption, Report
    from sewa_cli.report.shared import Interval
    from sewa_cli.report.standing import Standing
    from sewa_cli.report.validate import Validation
    from sewa_cli.report.verdict import Better, Verdict
    from sewa_cli.report.verify import Verification


def select(report: Report) -> list[str]:
    """Say how good the average is, against the last checkpoint and the best baseline."""
    return [*scores(report), *best_baseline(report), verdict(report), *wrote(report.output)]


def select_details(report: Report) -> list[str]:
    """Say what was chosen, what the run looks like, and what it took."""
    said = [taken(report)]
    if report.budget:
        said.insert(0, budget(report.budget))
    if report.standing:
        said += standing(report.standing)
    if report.details and len(report.history) < report.details.get("at_most", 0):
        said.append(
            f"learning stopped after {len(report.history)} of {report.details['at_most']} "
            "iterations: the choice and the loss changed no more"
        )
    if report.batchnorm and report.batchnorm.data:
        found = report.batchnorm
        layers = f"{found.layers} layer{'' if found.layers == 1 else 's'}"
        said.append(
            f"BatchNorm statistics of {layers} recomputed on {found.data} ({found.rows} rows)"
        )
    if report.lora and report.lora.mode == "merged":
        said.append(describe_lora(report.lora))
    took = report.cost.seconds
    said += [
        f"{took.total:.1f} s on {report.device} (reading {took.read:.1f}, learning "
        f"{took.learn:.1f}, evaluating {took.evaluate:.1f}, writing {took.write:.1f})",
        f"checkpoints held in tier `{report.placement.tier}`: {report.placement.reason}",
    ]
    if report.expected and report.heldout_rows is not None:
        said.append(expected(report))
    return said


def headline(report: Report) -> str:
    """Say what was gained over the last checkpoint."""
    if report.heldout_rows is None and report.expected and not report.instead_of:
        return f"Expected loss on new data {number(report.expected.loss, 3)}"
    name, own, last = _losses(report)
    return f"{name[0].upper()}{name[1:]} {number(own, 3)}{by_metric.than_last(own, last)}"


def scores(report: Report) -> list[str]:
    """Say the loss and the metrics, each next to those of the last checkpoint."""
    name, own, last = _losses(report)
    said = [f"{name} {number(own, 3)}{by_metric.and_last(own, last)}"]
    if report.heldout_rows is None and report.expected:
        said = [expected(report)]
    before = report.references["last"].metrics or {}
    for metric, value in (report.average.metrics or {}).items():
        change = by_metric.and_last(value, before.get(metric))
        said.append(f"{metric} {number(value, 3)}{change}")
    return said


def _losses(report: Report) -> tuple[str, float | None, float | None]:
    """Name a loss, and return that of what was written and that of the last checkpoint."""
    own, last = report.average, report.references["last"]
    if report.heldout_rows is None:
        return "selection loss", own.selection_loss, last.selection_loss
    return "held-out loss", own.heldout_loss, last.heldout_loss


def best_baseline(report: Report) -> list[str]:
    """Say what the best baseline scores, unless that is what was written."""
    name, found = next(iter(report.references.items()))
    if name == report.written:
        return []
    loss = f"selection loss {number(found.selection_loss, 3)}"
    if report.heldout_rows is not None:
        loss = f"held-out loss {number(found.heldout_loss, 3)}"
    metrics = [f"{metric} {number(value, 3)}" for metric, value in (found.metrics or {}).items()]
    return [f"best baseline: {', '.join([name, loss, *metrics])}"]


def contest(report: Report) -> list[str]:
    """Say what a choice by a metric came to."""
    return by_metric.sentences(report)


def contest_details(report: Report) -> list[str]:
    """Say which checkpoints a choice by a metric took, and what it cost."""
    return by_metric.details(report)


def taken(report: Report) -> str:
    """Which checkpoints, with what weight."""
    if report.blend and not report.instead_of:
        return blend(report)
    if report.k == report.K:
        return f"took all {report.k} ({report.written})"
    steps = zip(report.selected, report.selected_steps, strict=True)
    names = ", ".join(str(index if step is None else step) for index, step in steps)
    what = "checkpoints" if report.selected_steps[0] is None else "steps"
    return f"chose {report.K} of {report.k}: {what} {names}"


def blend(report: Report) -> str:
    """How many checkpoints, how far from a moving average, and from which."""
    found = report.blend
    assert found is not None
    weights = [candidate.weight or 0.0 for candidate in report.candidates]
    early, late = _half(weights), _half(weights[::-1])
    end, count = ("last", late) if late <= early else ("first", early)
    where = end if count == 1 else f"{end} {count}"
    rungs = sorted(found.prior, key=lambda rung: -rung.share)
    named = [f"{with_K(r.name, r.K)} ({percent(r.share)})" for r in rungs if r.share >= 0.05]
    start = few(named or [with_K(rungs[0].name, rungs[0].K)])
    how = "nothing was learned on top"
    if (report.selection_groups or report.selection_rows) < found.FEW:
        how += f", which takes {found.FEW} {'groups' if report.selection_groups else 'rows'}"
    if found.learned >= found.UNMOVED:
        pull = max(found.path, key=lambda pull: pull.share)
        under = "" if pull.strength is None else f", most under a pull of {pull.strength:g}"
        how = f"learning moved {percent(found.learned)} of the weight{under}"
    return (
        f"weighed {report.K} of {report.k} checkpoints, worth {found.effective:.3g} equal ones, "
        f"half of the weight on the {where}: from {start}; {how}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _half(weights: list[float]) -> int:
    """The first so many have half of the weight."""
    return next((n for n, s in enumerate(accumulate(weights), 1) if s >= 0.5), len(weights))


def expected(report: Report) -> str:
    """Say the loss on new data by nested cross-validation."""
    found = report.expected
    assert found is not None
    whose = ""
    if report.instead_of:
        learned = report.instead_of == "learned"
        whose = " of what was learned" if learned else f" of `{report.instead_of}`"
    ends = ""
    if found.error is not None:
        half = 1.96 * found.error
        ends = f", {ci(found.loss - half, found.loss + half)}"
    said = f"expected loss{whose} on new data {number(found.loss, 3)}{ends}"
    if found.by is None:
        return said
    return f"{said}; vs best baseline: {turned(found.by, found.interval)}"


def difference(found: Verdict | Better) -> str:
    """Say how far a loss is from another one, and whether that is significant."""
    assert found.difference is not None
    return change(found.difference, found.interval)


def change(by: float, interval: Interval | None) -> str:
    said = signed(by, plus=True)
    if interval is None:
        return said
    significant = "not significant" if interval.has_zero() else "significant"
    return f"{said}, {ci(interval.low, interval.high)}, {significant}"


def turned(by: float, interval: Interval | None) -> str:
    """Say a difference the other way round."""
    if interval is None:
        return change(0.0 - by, None)
    return change(0.0 - by, type(interval)(low=0.0 - interval.high, high=0.0 - interval.low))


def ci(low: float, high: float) -> str:
    return f"95 % CI [{signed(low)}, {signed(high)}]"


def signed(value: float, *, plus: bool = False) -> str:
    """Return three digits of a number, with a minus sign that is as wide as a plus."""
    sign = "−" if value < 0 else "+" if plus and value > 0 else ""
    return f"{sign}{number(abs(value), 3)}"


def wrote(output: str | None) -> list[str]:
    return [] if output in (None, "-") else [f"wrote {output}"]


def verdict(report: Report) -> str:
    """Say how the choice compares with the best baseline, and whether that is significant."""
    found = report.verdict
    instead = f"; `{report.written}` was written instead" if report.instead_of else ""
    chosen = report.instead_of or report.written
    if found.kind == "not finite":
        return f"the held-out loss of what was chosen is NaN or Inf{instead}"
    if found.kind == "baseline not finite":
        return f"the held-out loss of the best baseline (`{found.baseline}`) is NaN or Inf{instead}"
    if found.kind == "baseline" and found.baseline is not None:
        return f"no gain over the best baseline: the choice is `{found.baseline}` itself{instead}"
    if found.kind == "baseline":
        return f"no gain over the best baseline: `{chosen}` was chosen, a baseline{instead}"
    if found.kind == "no held-out data":
        return "no held-out data: define heldout_data in the task, or try --guard 0.2"
    few = "; too few examples for a confidence interval" if found.kind == "too few" else ""
    said = f"vs best baseline ({found.baseline}): {difference(found)}{few}"
    # another baseline that anybody would have tried
    lower = [b for b in found.beaten_by if b.name != found.baseline and b.difference is not None]
    sure = [b for b in lower if b.interval is not None and not b.interval.has_zero()]
    for other in (sure or (lower if found.kind == "better" else []))[:1]:
        said += f"; vs {other.name}: {difference(other)}"
    return f"{said}{instead}"


def overfits(report: Report) -> str:
    """Answer whether what was chosen is worse on other data than what it was preferred to."""
    own = report.learned or report.average
    for better in report.verdict.beaten_by:
        loss = report.references[better.name].selection_loss
        is_preferred = own.selection_loss is None or (loss or 0.0) > own.selection_loss
        if better.interval is not None and not better.interval.has_zero() and is_preferred:
            return f"yes: `{better.name}` has a significantly lower held-out loss"
    if report.heldout_rows is not None and report.verdict.interval is not None:
        return "no: no baseline that it was preferred to has a significantly lower held-out loss"
    found = report.expected
    if found is None or found.interval is None:
        return "unknown: too few data were held out to tell"
    if report.heldout_rows is None and found.interval.high < 0:
        return "yes: cross-validation expects a significantly lower loss of the best baseline"
    return "no: cross-validation does not expect a significantly lower loss of the best baseline"


def budget(options: list[BudgetOption]) -> str:
    """The learned K of the curve, and what was taken."""
    curve = ", ".join(f"{o.K}: {number(o.loss)}" for o in options if o.name == "learned")
    known = [o for o in options if o.name != "learned" and o.loss is not None]
    taken = next(o for o in options if o.chosen)
    simple = min(known, key=lambda o: o.loss or 0.0, default=taken)
    return (
        f"cross-validated loss by K: {curve}; best baseline {with_K(simple.name, simple.K)}: "
        f"{number(simple.loss)}; taken: {with_K(taken.name, taken.K)}"
    )


def standing(found: Standing) -> list[str]:
    """Where the run stands: in weight space, as `inspect` says it, and by its loss."""
    return [f"the run is {found.explanation}"]


def compare(report: Comparison) -> list[str]:
    """Never a winner inside the noise."""
    found = standing(report.standing) if report.standing else []
    return [_winner(report), *failed(report), *found, *wrote(report.output)]


def measured(report: Comparison) -> str:
    """What the best row has: the lowest held-out loss, the highest held-out return."""
    if report.judged is None:
        return "lowest held-out loss"
    return f"{comparative(report.judged.goal)[:-2]}est held-out {report.judged.metric}"


def _winner(report: Comparison) -> str:
    has, unit = f"has the {measured(report)}", report.unit or "rows"
    if report.best is None:
        what = "loss" if report.judged is None else report.judged.metric
        return f"no winner: there is no finite held-out {what} to compare by"
    best = report.rows[report.best]
    name = with_K(best.method, best.K)
    if len({str(row.coefficients) for row in report.rows}) == 1:
        return f"{name} has nothing to be compared with"
    behind = [row.score.behind if row.score else row.difference for row in report.rows]
    if not any(value != 0 for value in behind):
        what = "loss" if report.judged is None else report.judged.metric
        return f"no winner: every row has the same held-out {what}"
    if report.winner is not None:
        return f"{name} {has}, and nothing ties with it"
    if best.mark is None:
        return f"{name} {has}; too few {unit} to rule out luck"
    ties = sum(row.mark == "tie" for row in report.rows)
    return (
        f"no winner: {name} {has}, but {ties} of the other "
        f"{len(report.rows) - 1} cannot be told apart from it"
    )


def failed(report: Comparison) -> list[str]:
    """Held-out parts that some, or all, have no score for."""
    judged = report.judged
    if judged is None:
        return []
    counts = {
        with_K(row.method, row.K): None if score.failed and score.heldout is None else score.failed
        for row in report.rows
        if (score := row.score) is not None
    }
    return by_metric.failures(
        counts, judged.parts, judged.left_out, judged.failure_counts_as, judged.metric
    )


def average(report: AverageReport) -> list[str]:
    method = report.recipe.metadata.get("sewa_method", "an average")
    said = [f"{method} of {len(report.recipe.sources)} checkpoints"]
    if report.lora is not None and report.lora.mode == "merged":
        said.append(describe_lora(report.lora))
    return [*said, *wrote(report.output)]


def forecast(report: Forecast) -> list[str]:
    if report.is_declared:
        return []
    return [f"{report.solver}: declares no plan, so what it takes itself is not counted"]


def validate(_: Validation) -> list[str]:
    return ["everything fits together"]


def verify(report: Verification) -> list[str]:
    """One verdict, and what it does not cover."""
    count, faults = len(report.files), sum(not one.ok for one in report.files)
    if count == 1:
        verdict = f"the file {'is not' if faults else 'is'}"
    elif faults:
        verdict = f"{faults} of {count} files {'is' if faults == 1 else 'are'} not"
    else:
        verdict = f"the {count} files checked are" if report.unchecked else f"all {count} files are"
    return [f"{verdict} as the report says", *(f"not checked: {it}" for it in report.unchecked)]
