"""Send a report to TensorBoard, Weights & Biases, or wherever a package sends it.

`--log NAME:WHERE` calls a function of the report and of WHERE: ours, or that of an entry point of
the group `sewa.trackers` (docs/page.md has one in ten lines).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.errors import ConfigError
from sewa_cli.task import user_code

if TYPE_CHECKING:
    from sewa_cli.report.shared import Head

BUILTIN: Final = ("tensorboard", "wandb")  # each the name of its module here


def find(asked: str) -> Callable[[Head], None]:
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

    def log(report: Head) -> None:
        with user_code(name):
            function(report, where)

    return log
