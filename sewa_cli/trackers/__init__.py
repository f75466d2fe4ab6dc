"""Send a report to TensorBoard, Weights & Biases, or wherever a package sends it.

`--log NAME:WHERE` calls a function of the report and of WHERE: ours, or that of an entry point of
the group `sewa.trackers` (docs/how-to/reports.md has one in ten lines).

All runs share tags. A tag has no space, and never the name of an average that another run may not
have: the loss of the best baseline is `baseline_loss` in every run, and its name is under `names`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.errors import ConfigError
from sewa_cli.present import view_of
from sewa_cli.task import user_code

if TYPE_CHECKING:
    from sewa_cli.present.charts import Chart
    from sewa_cli.report.shared import ReportHead

BUILTIN: Final = ("tensorboard", "wandb")  # each the name of its module here


def find(asked: str) -> Callable[[ReportHead], None]:
    """The tracker that `NAME:WHERE` names, ready to be given a report. Refused now, if it must."""
    name, _, where = asked.partition(":")
    if name in BUILTIN:
        module = import_module(f"sewa_cli.trackers.{name}")
        return partial(module.log, where=module.check(where))
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group="sewa.trackers")}
    if name not in found:
        known = ", ".join([*BUILTIN, *found])
        raise ConfigError(f"--log: there is no tracker {name!r}; there are {known}")
    with user_code(f"entry point {name}"):
        function: Callable[..., Any] = found[name].load()

    def log(report: ReportHead) -> None:
        with user_code(name):
            function(report, where)

    return log


def numbers(report: ReportHead) -> dict[str, float]:
    """Return every finite number by its tag, such as `sewa/heldout_loss`."""
    found = view_of(report).numbers.items()
    return {
        _tag(report, name): float(value)
        for name, value in found
        if value is not None and isfinite(value)
    }


def curves(report: ReportHead) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for name, points in view_of(report).curves.items():
        known = [(at, value) for at, value in points if value is not None and isfinite(value)]
        if known:
            found[_tag(report, name)] = known
    return found


def names(report: ReportHead) -> dict[str, str]:
    """Return the names that tags leave out: what was written, the best baseline, the metric."""
    found = view_of(report).names.items()
    return {_tag(report, name): text for name, text in found if text is not None}


def charts(report: ReportHead) -> Iterator[Chart]:
    yield from view_of(report).charts


def _tag(report: ReportHead, name: str) -> str:
    root = "sewa" if report.kind == "select" else f"sewa/{report.kind}"
    plain = re.sub(r"[^\w.,:=/-]+", "_", name)
    return f"{root}/{plain}"
