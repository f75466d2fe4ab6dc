"""`sewa apply`: build a report's average again, byte for byte, without the task."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from sewa_cli.errors import ConfigError
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, paths_of, write_results
from sewa_cli.output.journal import recover
from sewa_cli.output.layouts import folder_is_ours, form_of
from sewa_cli.output.place import check_free
from sewa_cli.output.sources import Places
from sewa_cli.report.recipe import Rebuildable


def run_apply(
    report: Rebuildable,
    read_from: Path,
    output: Path | IO[bytes],
    *,
    root: Path | None = None,
    force: bool = False,
) -> str:
    """Rebuild the averaged file, set or folder of a report; returns its name.

    root: the one folder to look for the sources in; None: beside the report, and where it says.
    """
    shard_size = report.recipe.shard_size
    if isinstance(output, Path):  # before the sources are hashed, which takes long
        recover(output.parent)
        check_free(output, force, folder_is_ours if output.is_dir() else None)
    elif shard_size is not None:
        raise ConfigError(
            f"{read_from}: describes a set of files, which cannot go to standard output; name a "
            "file"
        )
    average = Average.from_recipe(report.recipe, Places.of(report, read_from, root))
    newest = average.sources[-1]
    form = form_of(output, newest)
    if form == "folder" and newest.kind == "adapter":  # always one file, whatever the report says
        shard_size = None
    outputs = Outputs(output, force=force, form=form, shard_size=shard_size)
    outputs = outputs.check([read_from, *paths_of(average.sources)])
    average = average.as_written(form)
    write_results(average, outputs, lambda: None)
    return outputs.written_as(average)
