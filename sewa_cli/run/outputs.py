"""Where results go: decided and refused before the work, written together after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel

from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.report import Rebuildable, to_json
from sewa_cli.run.recipe import Averaged, from_recipe
from sewa_cli.write import check_free, first_free, publish_together, staged

R = TypeVar("R", bound=BaseModel)
DEFAULT_OUTPUT = "averaged.safetensors"


@dataclass(frozen=True)
class Outputs:
    """Where results go. None: not written."""

    average: Path | None
    report: Path | None
    stdout: IO[bytes] | None  # the averaged file goes here instead
    force: bool

    @property
    def named(self) -> str:
        return str(self.average) if self.average is not None else STDOUT


def decide_outputs(
    config: Config, inputs: Sequence[Path], force: bool, stdout: IO[bytes] | None
) -> Outputs:
    """Decide where results go, and refuse now what would fail in the end."""
    if str(config.report) == STDOUT:
        raise ConfigError("report: - is not a file; --json prints the report")
    if config.output == STDOUT:
        if stdout is None:
            raise ConfigError("output: - needs a standard output to write to")
        average = None
        report = config.report
    else:
        if config.output is not None:
            average = Path(config.output)
            check_free(average, force)
        else:  # nobody named a file, so a name that is taken is no reason to stop
            average = Path(DEFAULT_OUTPUT)
            if not force:
                average = first_free(average, lambda path: [report_path(path)])
        report = config.report or report_path(average)
        check_apart(average, report)
    to_stdout = stdout if config.output == STDOUT else None
    return check_outputs(Outputs(average, report, to_stdout, force), inputs)


def check_outputs(outputs: Outputs, inputs: Sequence[Path]) -> Outputs:
    """Refuse now what would fail in the end, and what would overwrite an input."""
    taken = {path.resolve() for path in inputs}
    for path in (outputs.average, outputs.report):
        if path is None:
            continue
        check_free(path, outputs.force)
        if path.resolve() in taken:
            raise OutputError(f"{path}: is one of the inputs, which are never overwritten")
    return outputs


def check_apart(average: Path, report: Path) -> None:
    if report.resolve() == average.resolve():
        raise ConfigError(f"{report}: --report and --output name the same file")


def report_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}.report.json")


def write_results(averaged: Averaged | None, outputs: Outputs, make_report: Callable[[], R]) -> R:
    """The average and the report appear together: both are complete before either gets its name."""
    with ExitStack() as stack:
        stages = []
        if averaged is None:
            pass
        elif outputs.stdout is not None:
            averaged.write(outputs.stdout)
            outputs.stdout.flush()
        elif outputs.average is not None:
            stages.append(stack.enter_context(staged(outputs.average, outputs.force)))
            averaged.write(stages[-1].file)
        report = make_report()
        if outputs.report is not None:
            stages.append(stack.enter_context(staged(outputs.report, outputs.force)))
            stages[-1].file.write(to_json(report).encode())
        publish_together(stages)
    return report


def run_apply(
    report: Rebuildable, read_from: Path, output: Path | IO[bytes], *, force: bool = False
) -> None:
    """Rebuild the averaged file of a report, byte for byte."""
    if isinstance(output, Path):
        check_free(output, force)
    averaged = from_recipe(report.recipe, read_from.parent)
    if not isinstance(output, Path):
        averaged.write(output)
        return
    inputs = [read_from, *(checkpoint.path for checkpoint in averaged.sources)]
    if output.resolve() in {path.resolve() for path in inputs}:
        raise OutputError(f"{output}: is one of the inputs, which are never overwritten")
    with staged(output, force) as stage:
        averaged.write(stage.file)
        publish_together([stage])
