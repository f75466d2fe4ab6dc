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
from sewa_cli.write import (
    Staged,
    belongs_to_set,
    check_free,
    first_free,
    index_of,
    index_path,
    publish_together,
    shard_path,
    staged,
)

R = TypeVar("R", bound=BaseModel)
DEFAULT_OUTPUT = "averaged.safetensors"


@dataclass(frozen=True)
class Outputs:
    """Where results go. None: not written."""

    average: Path | None
    report: Path | None
    stdout: IO[bytes] | None  # the averaged file goes here instead
    force: bool
    shard_size: int | None = None  # bytes; an average larger than this becomes a set of files

    @property
    def named(self) -> str:
        return str(self.average) if self.average is not None else STDOUT

    def written_as(self, averaged: Averaged) -> str:
        """The file to open: of a sharded set, its index."""
        is_set = self.average is not None and len(averaged.shards(self.shard_size)) > 1
        return str(index_path(Path(self.named))) if is_set else self.named


def decide_outputs(
    config: Config,
    inputs: Sequence[Path],
    force: bool,
    stdout: IO[bytes] | None,
    always_report: bool = True,
) -> Outputs:
    """Decide where results go, and refuse now what would fail in the end."""
    if str(config.report) == STDOUT:
        raise ConfigError("report: - is not a file; --json prints the report")
    if config.output == STDOUT:
        if stdout is None:
            raise ConfigError("output: - needs a standard output to write to")
        if config.shard_size is not None:
            raise ConfigError(
                "--shard-size: a set of files cannot go to standard output; name one with --output"
            )
        average = None
        report = config.report
    else:
        if config.output is not None:
            average = Path(config.output)
            check_free(average, force)
        else:  # nobody named a file, so a name that is taken is no reason to stop
            average = Path(DEFAULT_OUTPUT)
            if not force:
                sharded = config.shard_size is not None
                average = first_free(
                    average,
                    lambda path: [report_path(path), *(_set_at(path) if sharded else [])],
                )
        report = config.report or (report_path(average) if always_report else None)
        if report is not None:
            check_apart(average, report)
    to_stdout = stdout if config.output == STDOUT else None
    return check_outputs(Outputs(average, report, to_stdout, force, config.shard_size), inputs)


def check_outputs(outputs: Outputs, inputs: Sequence[Path]) -> Outputs:
    """Refuse now what would fail in the end, and what would overwrite an input."""
    taken = {path.resolve() for path in inputs}
    for path in (outputs.average, outputs.report):
        if path is None:
            continue
        check_free(path, outputs.force)
        if path.resolve() in taken:
            raise OutputError(f"{path}: is one of the inputs, which are never overwritten")
    if outputs.average is not None and outputs.shard_size is not None:
        _check_set(outputs, inputs)
    return outputs


def _check_set(outputs: Outputs, inputs: Sequence[Path]) -> None:
    """How many files the set will have is not known yet, so any of its name is in the way."""
    assert outputs.average is not None
    for path in inputs:
        if belongs_to_set(path, outputs.average):
            raise OutputError(f"{path}: is one of the inputs, which are never overwritten")
    if outputs.report is not None and belongs_to_set(outputs.report, outputs.average):
        raise ConfigError(f"{outputs.report}: --report names a file of the sharded output")
    for path in _set_at(outputs.average):
        check_free(path, outputs.force)


def _set_at(output: Path) -> list[Path]:
    """Files of a sharded set of this name that are there already."""
    return [path for path in sorted(output.parent.iterdir()) if belongs_to_set(path, output)]


def check_apart(average: Path, report: Path) -> None:
    if report.resolve() == average.resolve():
        raise ConfigError(f"{report}: --report and --output name the same file")


def report_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}.report.json")


def write_results(averaged: Averaged | None, outputs: Outputs, make_report: Callable[[], R]) -> R:
    """The average and the report appear together: all is complete before anything gets its name."""
    with ExitStack() as stack:
        stages: list[Staged] = []
        if averaged is None:
            pass
        elif outputs.stdout is not None:
            averaged.write(outputs.stdout)
            outputs.stdout.flush()
        else:
            stages += _stage(averaged, outputs, stack)
        report = make_report()
        if averaged is not None and outputs.written_as(averaged) != outputs.named:
            report = _of_a_set(report, outputs.written_as(averaged), outputs.shard_size)
        if outputs.report is not None:
            stages.append(stack.enter_context(staged(outputs.report, outputs.force)))
            stages[-1].file.write(to_json(report).encode())
        _publish(stages, outputs)
    return report


def write_average(averaged: Averaged, outputs: Outputs) -> None:
    """The average alone, without a report."""
    if outputs.stdout is not None:
        averaged.write(outputs.stdout)
        outputs.stdout.flush()
        return
    with ExitStack() as stack:
        _publish(_stage(averaged, outputs, stack), outputs)


def _stage(averaged: Averaged, outputs: Outputs, stack: ExitStack) -> list[Staged]:
    """Write the average's files beside their final places."""
    output = outputs.average
    if output is None:
        return []
    shards = averaged.shards(outputs.shard_size)
    if len(shards) == 1:
        stage = stack.enter_context(staged(output, outputs.force))
        averaged.write(stage.file)
        return [stage]
    stages = []
    for number, names in enumerate(shards, 1):
        path = shard_path(output, number, len(shards))
        stages.append(stack.enter_context(staged(path, outputs.force)))
        averaged.write(stages[-1].file, names)
    # last, so that whoever looks for the index finds all that it names
    stages.append(stack.enter_context(staged(index_path(output), outputs.force)))
    stages[-1].file.write(index_of(output, shards, averaged.sizes()))
    return stages


def _publish(stages: Sequence[Staged], outputs: Outputs) -> None:
    publish_together(stages)
    output = outputs.average
    if output is not None and stages and all(stage.path != output for stage in stages):
        # only with --force is there one: loaders would take it for the set's newer self
        output.unlink(missing_ok=True)


def _of_a_set(report: R, index: str, shard_size: int | None) -> R:
    """What is known only now that all sizes are: that the average became a set, and which."""
    recipe = getattr(report, "recipe")  # noqa: B009
    update: dict[str, object] = {"recipe": recipe.model_copy(update={"shard_size": shard_size})}
    if "output" in type(report).model_fields:
        update["output"] = index
    return report.model_copy(update=update)


def run_apply(
    report: Rebuildable, read_from: Path, output: Path | IO[bytes], *, force: bool = False
) -> str:
    """Rebuild the averaged file of a report, or its set, byte for byte; returns its name."""
    shard_size = report.recipe.shard_size
    if not isinstance(output, Path):
        if shard_size is not None:
            raise ConfigError(
                f"{read_from}: is of a sharded set, which cannot go to standard output; name a file"
            )
        from_recipe(report.recipe, read_from.parent).write(output)
        return STDOUT
    outputs = check_outputs(Outputs(output, None, None, force, shard_size), [read_from])
    averaged = from_recipe(report.recipe, read_from.parent)
    check_outputs(outputs, [checkpoint.path for checkpoint in averaged.sources])
    write_average(averaged, outputs)
    return outputs.written_as(averaged)
