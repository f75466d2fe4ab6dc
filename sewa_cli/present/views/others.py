"""The views of `average`, `evaluate`, `inspect`, `validate`, `verify` and of a dry run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from sewa_cli.checkpoints.means import short_name
from sewa_cli.present.charts import (
    Chart,
    Dots,
    Panel,
    Series,
    drawable,
    logged_panels,
    name_of,
    places_of,
    rows_panel,
    weights_panel,
)
from sewa_cli.present.parts import (
    MOST_DRAWN,
    MOTION,
    by_step,
    describe_lora,
    motion_rows,
    section,
    upper,
    wrote,
)
from sewa_cli.present.view import Cell, Facts, Picture, Rows, Table, View, Words, metrics_of, titled
from sewa_cli.report.shared import TaskHead
from sewa_cli.text import duration, few, number, size

if TYPE_CHECKING:
    from sewa_cli.report.kinds import (
        AverageReport,
        Evaluated,
        Evaluation,
        Forecast,
        InspectedFile,
        Inspection,
        Validation,
        Verification,
    )


def average(report: AverageReport) -> View:
    sources = report.recipe.sources
    count, method = len(sources), report.recipe.metadata.get("sewa_method", "an average")
    said = [f"{method} of {count} checkpoints"]
    if report.lora is not None and report.lora.mode == "merged":
        said.append(describe_lora(report.lora))
    panel = weights_panel([one.step for one in sources], [one.coefficient for one in sources])
    chart = Chart("Coefficients by step", f"A line for each of {count} checkpoints.", [panel])
    name = "it" if report.output in (None, "-") else f"`{PurePath(report.output).name}`"
    return View(
        headline=f"An average of {count} checkpoints",
        caveat=f"{name} was made by `{method}`, without a model or data",
        says=[*said, *wrote(report.output)],
        rows=weighed((one.path, one.step, one.coefficient) for one in sources),
        sections=section("Which checkpoints", Picture(chart)),
        plot=chart,
    )


def weighed(sources: Iterable[tuple[object, int | None, float]]) -> Rows:
    return [{"path": str(path), "step": step, "weight": weight} for path, step, weight in sources]


_TITLES: Final = {"heldout_loss": "held-out loss", "selection_loss": "selection loss"}


def evaluate(report: Evaluation) -> View:
    measure = "selection_loss" if report.heldout_rows is None else "heldout_loss"
    known = [one for one in report.files if getattr(one, measure) is not None]
    ranked = sorted(known, key=lambda one: float(getattr(one, measure)))
    count = report.heldout_rows or report.selection_rows
    headline, caveat = "No file has a finite loss", f"{len(report.files)} files"
    if ranked:
        best, *others = ranked
        name, loss = short_name(PurePath(best.path)), getattr(best, measure)
        headline = f"{name} has the lowest {_TITLES[measure]}"
        caveat = f"{number(loss)} on {count:,} examples"
        if others:
            second = number(getattr(others[0], measure))
            caveat += f"; the second is {others[0].path} with {second}"
            caveat += "; `sewa compare` says whether such a difference is significant"
    rows: Rows = [_evaluated(report, file) for file in report.files]
    seen = titled(rows, _TITLES)
    marks = ["best" if ranked and file is ranked[0] else None for file in report.files]
    table = Table("Losses and metrics", seen, len(rows) > 60, marks)
    chart = _losses_chart(report, ranked)
    curves = {
        name: by_step((one.step, getattr(one, name)) for one in report.files) for name in _TITLES
    }
    for metric in dict.fromkeys(name for one in report.files for name in one.metrics or {}):
        curves[f"metrics/{metric}"] = by_step(
            (one.step, (one.metrics or {}).get(metric)) for one in report.files
        )
    return View(
        headline=headline,
        caveat=caveat,
        rows=rows,
        tables=[Table("", seen)],
        sections=section("Each file as it is", Picture(chart), table),
        plot=chart,
        curves=curves,
    )


def _evaluated(report: Evaluation, file: Evaluated) -> dict[str, Cell]:
    row: dict[str, Cell] = {"path": file.path, "step": file.step}
    if report.selection_rows:  # a task that is scored by a metric may have no loss
        row["selection_loss"] = file.selection_loss
    if report.heldout_rows is not None:
        row["heldout_loss"] = file.heldout_loss
    return {**row, **metrics_of(file.metrics, row)}


def _losses_chart(report: Evaluation, ranked: list[Evaluated]) -> Chart:
    files = report.files if len(report.files) <= MOST_DRAWN else ranked[:MOST_DRAWN]
    dots = [Dots("selection", [one.selection_loss for one in files], is_hollow=True)]
    if report.heldout_rows is not None:
        dots.append(Dots("held-out", [one.heldout_loss for one in files]))
    names = [short_name(PurePath(one.path)) for one in files]
    names = names if len(set(names)) == len(names) else [one.path for one in files]
    which = "" if files is report.files else f" The {MOST_DRAWN} with the lowest loss are drawn."
    alt = f"{len(report.files)} files with the losses of the table.{which}"
    return Chart("Loss of each file", alt, [rows_panel(names, dots, "loss")])


def inspect(report: Inspection) -> View:
    found = report.checkpoints
    rows, seen = _inspected(report)
    facts, chart = Facts(_inspection_facts(report)), _distances_chart(report)
    motion = report.motion
    moved = [Table(MOTION, motion_rows(motion))] if motion and motion.expected else []
    logged = logged_panels([one.step for one in found], [one.logged for one in found])
    trained = Chart("What the trainer logged", "The logged losses by step.", logged)
    measures = ("to_last", "to_mean", "length", "cosine")
    curves = {name: by_step((one.step, getattr(one, name)) for one in found) for name in measures}
    return View(
        headline=f"The run is {report.verdict}",
        caveat=upper(report.explanation),
        rows=rows,
        tables=[facts, Table("", seen), *moved, Words([report.explanation])],
        sections=[
            *section(
                "Where the run stands", Picture(chart), Picture(trained) if logged else None, *moved
            ),
            *section(
                "What is there", facts, Table("Each checkpoint", seen, is_folded=len(seen) > 60)
            ),
        ],
        plot=chart,
        curves=curves,
    )


def _inspected(report: Inspection) -> tuple[Rows, Rows]:
    found = report.checkpoints
    losses = dict.fromkeys(name for one in found for name in one.logged if "loss" in name)
    rows: Rows = []
    seen: Rows = []
    for one in found:
        twin = None if one.same_as is None else found[one.same_as]
        cells = one.model_dump(exclude={"logged", "nonfinite", "same_as"})
        cells |= {"nonfinite": len(one.nonfinite), "same_as": twin and twin.path}
        rows.append({**cells, **metrics_of(one.logged, cells)})
        notes = [f"NaN or Inf in {few(one.nonfinite, 2)}"] if one.nonfinite else []
        notes += [f"same as {_at(twin)}"] if twin else []
        seen.append(
            {
                "step": one.step,
                **{name: one.logged.get(name) for name in losses},
                "from last": one.to_last,
                "from mean": one.to_mean,
                "moved": one.length,
                "cosine": None if one.cosine is None else round(one.cosine, 3),
                "size": size(one.size),
                "file": one.path,
                "note": "; ".join(notes),
            }
        )
    return rows, seen


def _inspection_facts(report: Inspection) -> dict[str, str]:
    found = report.checkpoints
    first, last = found[0].step, found[-1].step
    if first is None:
        steps = "without steps"
    elif first == last:
        steps = f"step {first}"
    else:
        spacing = f"every {report.spacing}" if report.spacing else "unevenly spaced"
        steps = f"steps {first} to {last}, {spacing}"
    sizes = [one.size for one in found]
    each = " to ".join(dict.fromkeys([size(min(sizes)), size(max(sizes))]))
    gaps = [
        f"{gap.after} to {gap.before}" + (f" ({gap.missing} missing)" if gap.missing else "")
        for gap in report.gaps
    ]
    return {
        "checkpoints": f"{len(found)}, {steps}",
        "gaps": few(gaps, 5) or "none",
        "size": f"{size(sum(sizes))}, {each} each",
        "tensors": f"{report.tensors:,}",
        "floating-point values": f"{report.parameters:,}",
        "dtypes": ", ".join(f"{word} ({n:,})" for word, n in report.dtypes.items()),
        "duplicates": few([_at(one) for one in found if one.same_as is not None], 5) or "none",
        "NaN or Inf": few([_at(one) for one in found if one.nonfinite], 5) or "none",
    }


def _at(one: InspectedFile) -> str:
    return one.path if one.step is None else f"step {one.step}"


def _distances_chart(report: Inspection) -> Chart:
    rows = report.checkpoints
    places, x_label = places_of([row.step for row in rows])
    names = [name_of(row.step, i) for i, row in enumerate(rows)]
    size = 3.5 if len(places) <= 200 else 1.5  # an isolated point is a line without length

    def line(name: str, values: list[float | None], dashes: str, *, is_hollow: bool) -> Series:
        hints = [
            f"{at}, {name or 'cosine'} {number(value)}"
            for at, value in zip(names, values, strict=True)
        ]
        known = [drawable(value) for value in values]
        look = Series(name, places, known, dashes, "o", size=size, hints=hints)
        return replace(look, is_hollow=is_hollow)

    away = [
        line("from the last", [row.to_last for row in rows], "-", is_hollow=False),
        line("from the mean", [row.to_mean for row in rows], "--", is_hollow=True),
    ]
    if broken := [x for x, row in zip(places, rows, strict=True) if row.to_last is None]:
        away.append(Series("left out", broken, [0.0] * len(broken), marker="x"))
    cosine = line("", [row.cosine for row in rows], "-", is_hollow=False)
    levels = {"straight line": 1.0, "random walk": 0.0, "noise around a point": -0.5}
    return Chart(
        "Distances along the run",
        "Above, each checkpoint's distance from the last and from the mean; below, the cosine of "
        f"the steps before and after it. {report.explanation}.",
        [
            Panel(away, x_label, "L2 distance of the weights", y_limits=(0.0, None), height=3.2),
            Panel([cosine], x_label, "cosine of the steps", levels, y_limits=(-1.05, 1.05)),
        ],
    )


def validate(report: Validation) -> View:
    kept = {"task", "device"}
    found = report.model_dump(exclude={*TaskHead.model_fields} - kept)
    found["dtypes"] = ", ".join(report.dtypes)
    newest = "newest checkpoint" if report.last_step is None else f"step {report.last_step}"
    titles = {"batch_rows": "examples in the first batch", "loss": f"loss on it, {newest}"}
    facts = {
        titles.get(name, name.replace("_", " ")): _word(value)
        for name, value in found.items()
        if value is not None
    }
    said = "everything fits together"
    return View(
        headline=upper(said),
        caveat=f"{report.checkpoints} checkpoints, {report.parameters:,} parameters",
        says=[said],
        rows=[found],
        tables=[Facts({**facts, "parameters": f"{report.parameters:,}"})],
    )


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, 6) if isinstance(value, float) else str(value)


def verify(report: Verification) -> View:
    rows: Rows = [one.model_dump(include={"path", "role", "ok", "fault"}) for one in report.files]
    seen: Rows = [
        {"role": one.role, "found": one.fault or "as it was", "path": one.path}
        for one in report.files
    ]
    said, table = verdict(report), Table("Files", seen)
    not_checked = [f"not checked: {it}" for it in report.unchecked]
    return View(
        headline=upper(said),
        caveat="; ".join(not_checked),
        says=[said, *not_checked],
        rows=rows,
        tables=[table],
    )


def verdict(report: Verification) -> str:
    count, faults = len(report.files), sum(not one.ok for one in report.files)
    if count == 1:
        are = f"the file {'is not' if faults else 'is'}"
    elif faults:
        are = f"{faults} of {count} files {'is' if faults == 1 else 'are'} not"
    else:
        are = f"the {count} files checked are" if report.unchecked else f"all {count} files are"
    return f"{are} as the report says"


def forecast(report: Forecast) -> View:
    rows: Rows = [
        {
            "stage": stage.name,
            "passes": stage.passes,
            "heldout_passes": stage.heldout,
            "backward_passes": stage.backward,
            "at_least": stage.at_least,
        }
        for stage in report.stages
    ]
    seen: Rows = [
        {
            "stage": stage.name,
            "passes": _count(stage.passes),
            "held out": _count(stage.heldout),
            "BatchNorm": _count(stage.training),
            "backward": _count(stage.backward),
            "optional": "" if stage.at_least == 1 else "in part" if stage.at_least else "yes",
        }
        for stage in report.stages
    ]
    facts, stages = Facts(_forecast_facts(report)), Table("Stages", seen)
    said = []
    if not report.is_declared:
        said = [f"{report.solver}: declares no plan, so what it takes itself is not counted"]
    return View(
        headline="What the run will take",
        caveat="; ".join([f"{duration(report.seconds)} in the model", *said]),
        says=said,
        rows=rows,
        tables=[facts, stages],
    )


def _forecast_facts(report: Forecast) -> dict[str, str]:
    passes = f"{report.at_least:,} to {report.forward_passes:,} batches"
    used = f"{report.selection_rows:,}"
    if report.rows_used < report.selection_rows:
        used += f", of which memory holds {report.rows_used:,}"
    return {
        "task": report.task,
        "device": report.device,
        "checkpoints": f"{report.k} of {report.found} found, {report.parameters:,} parameters",
        "selection examples": used,
        "solver": f"{report.solver}, K {report.K}",
        "tier": f"{report.placement.tier}: {report.placement.reason}",
        "memory": size(report.peak_memory_bytes),
        "bytes read": size(report.bytes_read),
        "forward passes": passes,
        **({"backward": f"{report.backward_passes:,} batches"} if report.backward_passes else {}),
        "one batch": duration(report.batch_seconds),
        "time": f"{duration(report.seconds)} in the model, without reading and arithmetic",
    }


def _count(number: float) -> str:
    return f"{number:,.4g}" if number else ""
