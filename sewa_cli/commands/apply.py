"""`sewa apply`: build a report's average again, byte for byte, without the task."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from sewa_cli.checkpoints import paths_of
from sewa_cli.commands import make_card
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, write_results
from sewa_cli.output.layouts import folder_is_ours, form_of
from sewa_cli.output.sources import Places
from sewa_cli.publish import check_free
from sewa_cli.report.recipe import Rebuildable


def run_apply(
    report: Rebuildable,
    read_from: Path,
    output: Path | IO[bytes],
    *,
    root: Path | None = None,
    force: bool = False,
) -> str:
    """Rebuild the averaged file or folder of a report; return its name.

    root: the one folder to look for the sources in; None: next to the report, and where it says.
    """
    if isinstance(output, Path):  # before the sources are hashed, which takes long
        check_free(output, force, folder_is_ours if output.is_dir() else None)
    average = Average.from_recipe(report.recipe, Places.of(report, read_from, root))
    newest = average.sources[-1]
    # an adapter is always one file, whatever the report says
    shard_size = None if newest.kind == "adapter" else report.recipe.shard_size
    form = form_of(output, newest, shard_size)
    outputs = Outputs(output, force=force, form=form, shard_size=shard_size)
    outputs = outputs.check([read_from, *paths_of(average.sources)])
    average = average.as_written(form)
    write_results(average, outputs, lambda: None, make_card)
    return outputs.named
