"""Joins the wings. Nothing here prints; whoever listens is told through a `Listener`.

bench       what every command with a task needs before any work
candidates  the checkpoints that take part
memory      how much there is, and whether it ran out
placing     where the checkpoints are held, under a cap
learning    asks the configured solver
streaming   checkpoints read once, and never held
chosen      what a solver has decided
choosing    the linear solver: what to take, by outputs
surveying   checkpoints stream past the model
guarding    rows kept aside, and what was gained
scales      an average into the model, and onto the user's data
recipe      an average as sources, weights and names; built and built again
outputs     where results go, refused early, written together
accounts    cost, versions, metadata
proposing   methods registered, named, asked for coefficients
court       what methods see of a run, and the judge of what they propose
drafting    every method at every K, before rows are compared
reaching    from when on an average does as well as the run's last checkpoint
select      the main job            compare     every method, fairly
windows     the same along the run
averaging   without a task          evaluating  files, one by one
validate    does it all fit?        planning    what will it cost?
inspect     what is there, and how the run moved

Each is imported when it is first asked for: averaging does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sewa_cli.run.averaging import run_average
    from sewa_cli.run.bench import seeded
    from sewa_cli.run.compare import run_compare
    from sewa_cli.run.evaluating import run_evaluate
    from sewa_cli.run.inspect import Inspection, run_inspect
    from sewa_cli.run.listener import Listener
    from sewa_cli.run.outputs import run_apply
    from sewa_cli.run.planning import run_forecast
    from sewa_cli.run.proposing import register_methods
    from sewa_cli.run.select import Selection, run_select
    from sewa_cli.run.validate import Check, run_validate
    from sewa_cli.run.windows import run_windows

__all__ = [
    "Check",
    "Inspection",
    "Listener",
    "Selection",
    "register_methods",
    "run_apply",
    "run_average",
    "run_compare",
    "run_evaluate",
    "run_forecast",
    "run_inspect",
    "run_select",
    "run_validate",
    "run_windows",
    "seeded",
]

_HOME = {
    "Check": "validate",
    "Inspection": "inspect",
    "Listener": "listener",
    "Selection": "select",
    "register_methods": "proposing",
    "run_apply": "outputs",
    "run_average": "averaging",
    "run_compare": "compare",
    "run_evaluate": "evaluating",
    "run_forecast": "planning",
    "run_inspect": "inspect",
    "run_select": "select",
    "run_validate": "validate",
    "run_windows": "windows",
    "seeded": "bench",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
