"""The view of `average`: which checkpoints went into it, and with what weight."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from sewa_cli.present.charts import Chart, weights_panel
from sewa_cli.present.parts import section
from sewa_cli.present.view import Picture, Rows, View
from sewa_cli.present.words import describe_lora, wrote

if TYPE_CHECKING:
    from sewa_cli.report.kinds import AverageReport


def view(report: AverageReport) -> View:
    sources = report.recipe.sources
    count, method = len(sources), report.recipe.metadata.get("sewa_method", "an average")
    said = [f"{method} of {count} checkpoints"]
    if report.lora is not None and report.lora.mode == "merged":
        said.append(describe_lora(report.lora))
    panel = weights_panel([one.step for one in sources], [one.coefficient for one in sources])
    chart = Chart("Weights by step", f"A line for each of {count} checkpoints.", [panel])
    name = "An average" if report.output in (None, "-") else PurePath(report.output).name
    return View(
        headline=f"An average of {count} checkpoints",
        caveat=f"{name} was made by `{method}`, without a model or data",
        says=[*said, *wrote(report.output)],
        rows=weighed((one.path, one.step, one.coefficient) for one in sources),
        sections=section("Which checkpoints", Picture(chart)),
        plot=chart,
    )


def weighed(sources: Iterable[tuple[object, int | None, float]]) -> Rows:
    """Return a row for each checkpoint: path, step and weight."""
    return [{"path": str(path), "step": step, "weight": weight} for path, step, weight in sources]
