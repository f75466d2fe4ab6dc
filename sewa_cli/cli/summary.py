"""What `sewa select` says in the end: the average beside its references, and what was gained."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from sewa_cli.cli.console import Talk
from sewa_cli.present.card import describe_lora
from sewa_cli.report.select import BudgetOption, Report
from sewa_cli.report.shared import Scores


def summarise(talk: Talk, report: Report) -> None:
    """The average beside its references, what was chosen, and whether it was worth it."""
    titles = {"uniform": f"uniform (all {report.k})", "lawa": "lawa (equal intervals)"}
    references = {titles.get(n, n): scores for n, scores in report.references.items()}
    chosen = {}
    if report.instead_of and report.learned:
        chosen = {report.instead_of: report.learned}
    elif report.written not in report.references:
        chosen = {report.written: report.average}
    talk.console.print(_scores({**chosen, **references}, report))
    if report.budget:
        talk.say(budget_line(report.budget))
    if report.stability:
        talk.say(stability_line(report))
    steps = ", ".join(
        str(index if step is None else step)
        for index, step in zip(report.selected, report.selected_steps, strict=True)
    )
    what = "steps" if report.selected_steps[0] is not None else "checkpoints"
    if report.k == report.K:
        talk.say(f"took all {report.k} ({report.written})")
    else:
        talk.say(f"chose {report.K} of {report.k}: {what} {steps}")
    if report.batchnorm and report.batchnorm.data:
        talk.say(
            f"BatchNorm statistics of {report.batchnorm.layers} layers recomputed on "
            f"{report.batchnorm.data} ({report.batchnorm.rows} rows)"
        )
    if report.lora and report.lora.mode == "merged":
        talk.say(describe_lora(report.lora))
    seconds = report.cost.seconds
    talk.say(
        f"{seconds.total:.1f} s on {report.device} (reading {seconds.read:.1f}, learning "
        f"{seconds.learn:.1f}, evaluating {seconds.evaluate:.1f}, writing {seconds.write:.1f})"
    )
    placement = report.placement
    talk.say(f"checkpoints held in tier `{placement.tier}`: {placement.reason}")
    talk.say(verdict(report))
    if report.output not in (None, "-"):
        talk.say(f"wrote {report.output}")


def _scores(rows: dict[str, Scores], report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("average")
    table.add_column(f"selection loss ({report.selection_rows})", justify="right")
    if report.heldout_rows is not None:
        table.add_column(f"held-out loss ({report.heldout_rows})", justify="right")
    metrics = list(report.average.metrics or {})
    for name in metrics:
        table.add_column(Text(name), justify="right")
    for name, scores in rows.items():
        cells: list[str | Text] = [name, _number(scores.selection_loss)]
        if report.heldout_rows is not None:
            cells.append(_number(scores.heldout_loss))
        cells += [_number((scores.metrics or {}).get(metric)) for metric in metrics]
        table.add_row(*cells, style="bold" if name == "learned" else None)
    return table


def verdict(report: Report) -> str:
    """One sentence: what was gained, and how sure that is."""
    if report.heldout_rows is None:
        return (
            "no held-out loss: define heldout_data in the task, or keep rows aside with --guard "
            "0.2, to see whether choosing pays"
        )
    instead = f"; `{report.written}` was written instead" if report.instead_of else ""
    chosen = (report.learned or report.average).heldout_loss
    if chosen is None:
        return f"the held-out loss of what was chosen is NaN or Inf{instead}"
    found = report.gained
    if found is None:
        return f"no reference has a finite held-out loss{instead}"
    if report.labels == "noise" and report.budget and not report.instead_of:
        return f"nothing was gained: the labels say nothing; `{report.written}` was written"
    if report.written != "learned" and report.instead_of is None:
        return f"nothing to gain by choosing: cross-validation prefers `{report.written}`"
    interval = found.interval
    name = f"`{found.over}`, the best simple average"
    luck = "; too few rows to say whether by luck" if interval is None else ""
    if found.by < 0:
        sure = f" (95 %: {-interval.high:.5g} .. {-interval.low:.5g})" if interval else ""
        unsure = " for sure" if interval and interval.high >= 0 else ""
        head = "nothing was gained" if unsure else "choosing did not pay"
        return f"{head}: held-out loss {-found.by:.5g}{sure} above that of {name}{luck}{instead}"
    sure = f" (95 %: {interval.low:.5g} .. {interval.high:.5g})" if interval else ""
    if interval is not None and interval.low <= 0:
        return (
            f"nothing was gained for sure: held-out loss {found.by:.5g}{sure} below that of {name}"
        )
    return f"choosing paid: held-out loss {found.by:.5g}{sure} below that of {name}{luck}"


def budget_line(options: list[BudgetOption]) -> str:
    """The learned K of the curve, and what was taken."""
    curve = ", ".join(f"{o.K}: {_number(o.loss)}" for o in options if o.name == "learned")
    known = [o for o in options if o.name != "learned" and o.loss is not None]
    taken = next(o for o in options if o.chosen)
    simple = min(known, key=lambda o: o.loss or 0.0, default=taken)
    return (
        f"cross-validated loss by K: {curve}; best simple average {_option(simple)}: "
        f"{_number(simple.loss)}; taken: {_option(taken)}"
    )


def _option(option: BudgetOption) -> str:
    return option.name + (f" K={option.K}" if option.K is not None else "")


def stability_line(report: Report) -> str:
    found = report.stability
    assert found is not None
    often = sum((report.candidates[i].frequency or 0) >= 0.5 for i in report.selected)
    gain = found.gains["uniform"]
    return (
        f"chosen again by half of {found.resamples} resamples: {often} of {report.K}; on rows not "
        f"drawn, gain over uniform {gain.mean:.4g} ({gain.low:.4g} .. {gain.high:.4g})"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}" if abs(value) < 1e5 else f"{value:.4e}"
