"""Joins the wings. Nothing here prints; whoever listens is told through a `Listener`.

bench     what every command with a task needs before any work
scales    an average into the model, and onto the user's data
recipe    an average as sources, weights and names; built and built again
outputs   where results go, refused early, written together
select    the main job        validate   a dry look at everything
"""

from sewa_cli.run.bench import Listener, seeded
from sewa_cli.run.outputs import run_apply
from sewa_cli.run.select import Selection, run_select
from sewa_cli.run.validate import Check, run_validate

__all__ = ["Check", "Listener", "Selection", "run_apply", "run_select", "run_validate", "seeded"]
