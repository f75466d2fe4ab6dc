"""Where results go: decided and refused before the work, written together after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.output.atomic import (
    Stage,
    belongs_to_set,
    check_free,
    first_free,
    index_of,
    index_path,
    publish_together,
    shard_path,
    staged,
)
from sewa_cli.output.average import Averaged, from_recipe
from sewa_cli.output.folders import StagedFolder, check_free_folder, staged_folder
from sewa_cli.output.layouts import (
    Form,
    as_written,
    fill_folder,
    folder_is_ours,
    form_of,
    inherited_shard_size,
    write_torch,
)
from sewa_cli.output.lora import average_factors
from sewa_cli.report.part import to_json
from sewa_cli.report.recipe import Rebuildable

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
    form: Form = "file"
    command: str | None = None  # for the model card

    @property
    def named(self) -> str:
        return str(self.average) if self.average is not None else STDOUT

    def written_as(self, averaged: Averaged) -> str:
        """What to open: the file, the folder, or of a sharded set its index."""
        is_set = self.form == "file" and self.is_sharded(averaged)
        return str(index_path(Path(self.named))) if is_set else self.named

    def is_sharded(self, averaged: Averaged) -> bool:
        return self.average is not None and len(averaged.shards(self.shard_size)) > 1


def decide_outputs(
    config: Config,
    inputs: Sequence[Path],
    force: bool,
    stdout: IO[bytes] | None,
    always_report: bool = True,
    *,
    like: Checkpoint | None = None,
    command: str | None = None,
) -> Outputs:
    """Decide where results go, and refuse now what would fail in the end.

    `like`: a checkpoint whose layout the output takes, unless its name asks for another.
    """
    form = form_of(config.output, like)
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
            _check_free(average, force, form)
        else:  # nobody named a file, so a name that is taken is no reason to stop
            average = Path(DEFAULT_OUTPUT)
            average = average.with_suffix("") if form == "folder" else average
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
    shard_size = _shard_size(config, form, like)
    outputs = Outputs(average, report, to_stdout, force, shard_size, form, command)
    return check_outputs(outputs, inputs)


def outputs_at(
    config: Config,
    average: Path | None,
    report: Path | None,
    force: bool,
    like: Checkpoint,
    command: str | None = None,
) -> Outputs:
    """Where `compare` puts its best, if it was asked for; nothing is checked yet."""
    form = form_of(None if average is None else str(average), like)
    shard_size = _shard_size(config, form, like)
    return Outputs(average, report, None, force, shard_size, form, command)


def _shard_size(config: Config, form: Form, like: Checkpoint | None) -> int | None:
    is_adapter = like is not None and like.kind == "adapter"
    if config.shard_size is not None and (form == "torch" or (form == "folder" and is_adapter)):
        what = "an adapter" if is_adapter else "a PyTorch file"
        raise ConfigError(f"--shard-size: {what} is always one file; leave it out")
    inherits = config.shard_size is None and form == "folder" and like is not None
    return inherited_shard_size(like) if inherits and like is not None else config.shard_size


def _check_free(path: Path, force: bool, form: Form) -> None:
    if form == "folder":
        check_free_folder(path, force, folder_is_ours)
    else:
        check_free(path, force)


def check_outputs(outputs: Outputs, inputs: Sequence[Path]) -> Outputs:
    """Refuse now what would fail in the end, and what would overwrite an input."""
    taken = {path.resolve() for path in inputs}
    folders = {path for path in taken if path.is_dir()}
    is_folder = outputs.form == "folder"
    for path in (outputs.average, outputs.report):
        if path is None:
            continue
        _check_free(path, outputs.force, outputs.form if path == outputs.average else "file")
        place = path.resolve()
        if place in taken or not folders.isdisjoint(place.parents):
            raise OutputError(f"{path}: is one of the inputs, which are never overwritten")
        if is_folder and any(place in one.parents for one in taken):
            raise OutputError(f"{path}: holds one of the inputs, which are never overwritten")
    if outputs.average is not None and outputs.shard_size is not None and not is_folder:
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
    is_number = output.suffix[1:].isdigit()  # a folder called llama-0.5
    return output.with_name(f"{output.name if is_number else output.stem}.report.json")


def write_results(averaged: Averaged | None, outputs: Outputs, make_report: Callable[[], R]) -> R:
    """The average and the report appear together: all is complete before anything gets its name."""
    with ExitStack() as stack:
        stages: list[Stage] = []
        if averaged is None:
            pass
        elif outputs.stdout is not None:
            averaged.write(outputs.stdout)
            outputs.stdout.flush()
        else:
            stages += _stage(averaged, outputs, stack)
        report = make_report()
        if averaged is not None and outputs.is_sharded(averaged):
            report = _of_a_set(report, outputs.written_as(averaged), outputs.shard_size)
        if averaged is not None:
            _add_card(stages, averaged, report, outputs)
        if outputs.report is not None:
            stage = stack.enter_context(staged(outputs.report, outputs.force))
            stage.file.write(to_json(report).encode())
            stages.append(stage)
        if averaged is not None:
            averaged.check_sources()  # after the report too, as its hashes are of the sources
        _publish(stages, outputs)
    return report


def write_average(averaged: Averaged, outputs: Outputs) -> None:
    """The average alone, without a report."""
    if outputs.stdout is not None:
        averaged.write(outputs.stdout)
        outputs.stdout.flush()
        averaged.check_sources()  # what is out is out, but the exit code tells
        return
    with ExitStack() as stack:
        stages = _stage(averaged, outputs, stack)
        _add_card(stages, averaged, None, outputs)
        averaged.check_sources()
        _publish(stages, outputs)


def _add_card(
    stages: Sequence[Stage], averaged: Averaged, report: BaseModel | None, outputs: Outputs
) -> None:
    """Into a folder, last, as it has the losses."""
    for stage in stages:
        if isinstance(stage, StagedFolder):
            from sewa_cli.present.card import model_card

            with stage.file("README.md") as file:
                file.write(model_card(averaged, report, outputs.command).encode())


def _stage(averaged: Averaged, outputs: Outputs, stack: ExitStack) -> list[Stage]:
    """Write the average's files beside their final places."""
    output = outputs.average
    if output is None:
        return []
    if outputs.form == "folder":
        folder = stack.enter_context(staged_folder(output, outputs.force))
        fill_folder(averaged, folder, outputs.shard_size)
        return [folder]
    if outputs.form == "torch":
        stage = stack.enter_context(staged(output, outputs.force))
        write_torch(averaged, stage.file)
        return [stage]
    shards = averaged.shards(outputs.shard_size)
    if len(shards) == 1:
        stage = stack.enter_context(staged(output, outputs.force))
        averaged.write(stage.file)
        return [stage]
    stages: list[Stage] = []
    for number, names in enumerate(shards, 1):
        path = shard_path(output, number, len(shards))
        stage = stack.enter_context(staged(path, outputs.force))
        averaged.write(stage.file, names)
        stages.append(stage)
    # last, so that whoever looks for the index finds all that it names
    stage = stack.enter_context(staged(index_path(output), outputs.force))
    stage.file.write(index_of(output, shards, averaged.sizes()))
    return [*stages, stage]


def _publish(stages: Sequence[Stage], outputs: Outputs) -> None:
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
        write_average(_rebuilt(report, read_from), Outputs(None, None, output, force))
        return STDOUT
    # before the sources are hashed, which takes long
    _check_free(output, force, "folder" if output.is_dir() else "file")
    averaged = _rebuilt(report, read_from)
    form = form_of(str(output), averaged.sources[-1])
    averaged = as_written(averaged, form)
    inputs = [path for c in averaged.sources for path in (c.path, *c.files)]
    outputs = Outputs(output, None, None, force, shard_size, form)
    check_outputs(outputs, [read_from, *inputs])
    write_average(averaged, outputs)
    return outputs.written_as(averaged)


def _rebuilt(report: Rebuildable, read_from: Path) -> Averaged:
    averaged = from_recipe(report.recipe, read_from.parent)
    if averaged.lora is not None:
        average_factors(averaged, averaged.lora)
    return averaged
