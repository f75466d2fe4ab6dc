"""`sewa apply`: build a report's average again, byte for byte, without the task."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from sewa_cli.config import STDOUT
from sewa_cli.errors import ConfigError
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, check_form_free, check_outputs, write_average
from sewa_cli.output.layouts import form_of
from sewa_cli.report.recipe import Rebuildable


def run_apply(
    report: Rebuildable, read_from: Path, output: Path | IO[bytes], *, force: bool = False
) -> str:
    """Rebuild the averaged file, set or folder of a report; returns its name."""
    recipe = report.recipe
    if not isinstance(output, Path):
        if recipe.shard_size is not None:
            raise ConfigError(
                f"{read_from}: describes a set of files, which cannot go to standard output; name "
                "a file"
            )
        average = Average.from_recipe(recipe, read_from.parent)
        write_average(average, Outputs(None, None, output, force))
        return STDOUT
    # before the sources are hashed, which takes long
    check_form_free(output, force, "folder" if output.is_dir() else "file")
    average = Average.from_recipe(recipe, read_from.parent)
    form = form_of(str(output), average.sources[-1])
    inputs = [path for c in average.sources for path in (c.path, *c.files)]
    outputs = Outputs(output, None, None, force, recipe.shard_size, form)
    check_outputs(outputs, [read_from, *inputs])
    average = average.as_written(form)
    write_average(average, outputs)
    return outputs.written_as(average)
