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
    StagedFolder,
    check_free,
    first_free,
    publish_together,
    staged,
)
from sewa_cli.output.average import Average
from sewa_cli.output.layouts import Form, folder_is_ours, form_of, inherited_shard_size, stage
from sewa_cli.output.safetensors import belongs_to_set, index_path
from sewa_cli.present.card import model_card, scores_of
from sewa_cli.report.part import to_json

R = TypeVar("R", bound=BaseModel | None)
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

    def written_as(self, average: Average) -> str:
        """What to open: the file, the folder, or of a sharded set its index."""
        return str(index_path(Path(self.named))) if self.is_set(average) else self.named

    def is_set(self, average: Average) -> bool:
        return self.form == "file" and self.is_sharded(average)

    def is_sharded(self, average: Average) -> bool:
        return self.average is not None and len(average.shards(self.shard_size)) > 1


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
        outputs = Outputs(None, config.report, stdout, force)
    else:
        average = Path(config.output) if config.output else _unnamed(config, force, form)
        report = config.report or (report_path(average) if always_report else None)
        if report is not None and report.resolve() == average.resolve():
            raise ConfigError(f"{report}: --report and --output name the same file")
        shard_size = _shard_size(config, form, like)
        outputs = Outputs(average, report, None, force, shard_size, form, command)
    return check_outputs(outputs, inputs)


def _unnamed(config: Config, force: bool, form: Form) -> Path:
    """Nobody named a file, so a name that is taken is no reason to stop."""
    path = Path(DEFAULT_OUTPUT)
    path = path.with_suffix("") if form == "folder" else path
    sharded = config.shard_size is not None
    others = lambda path: [report_path(path), *(_set_at(path) if sharded else [])]  # noqa: E731
    return path if force else first_free(path, others)


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
    if config.shard_size is None and form == "folder" and like is not None:
        return inherited_shard_size(like)
    return config.shard_size


def check_form_free(path: Path, force: bool, form: Form) -> None:
    check_free(path, force, folder_is_ours if form == "folder" else None)


def check_outputs(outputs: Outputs, inputs: Sequence[Path]) -> Outputs:
    """Refuse now what would fail in the end, and what would overwrite an input."""
    taken = {path.resolve() for path in inputs}
    folders = {path for path in taken if path.is_dir()}
    is_folder = outputs.form == "folder"
    for path in (outputs.average, outputs.report):
        if path is None:
            continue
        check_form_free(path, outputs.force, outputs.form if path == outputs.average else "file")
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


def report_path(output: Path) -> Path:
    is_number = output.suffix[1:].isdigit()  # a folder called llama-0.5
    # not with_name: `.` and `/` have no name, and are refused in words
    return output.parent / (f"{output.name if is_number else output.stem}.report.json")


def write_results(average: Average | None, outputs: Outputs, make_report: Callable[[], R]) -> R:
    """The average and the report appear together: all is complete before anything gets its name.

    `make_report` is called when the average is written, and may return None: no report.
    """
    with ExitStack() as stack:
        stages: list[Stage] = []
        if average is not None and outputs.stdout is not None:
            average.write(outputs.stdout)
            outputs.stdout.flush()
        elif average is not None and outputs.average is not None:
            form, force = outputs.form, outputs.force
            stages += stage(average, outputs.average, form, outputs.shard_size, force, stack)
        report = make_report()
        if average is not None:
            report = _with_set(report, average, outputs)
            _add_card(stages, average, report, outputs.command)
        if report is not None and outputs.report is not None:
            file = stack.enter_context(staged(outputs.report, outputs.force))
            file.file.write(to_json(report).encode())
            stages.append(file)
        if average is not None:
            # after the report too, as its hashes are of the sources; of what went to standard
            # output already, at least the exit code tells
            average.check_sources()
        publish_together(stages)
        if average is not None and outputs.is_set(average):
            # with --force there may be a file of that name, which loaders would prefer to the set
            Path(outputs.named).unlink(missing_ok=True)
    return report


def write_average(average: Average, outputs: Outputs) -> None:
    """The average alone, without a report."""
    write_results(average, outputs, lambda: None)


def _with_set(report: R, average: Average, outputs: Outputs) -> R:
    """What is known only now that all sizes are: that the average became a set, and which."""
    recipe = getattr(report, "recipe", None)
    if report is None or recipe is None or not outputs.is_sharded(average):
        return report
    recipe = recipe.model_copy(update={"shard_size": outputs.shard_size})
    return report.model_copy(update={"recipe": recipe, "output": outputs.written_as(average)})


def _add_card(
    stages: Sequence[Stage], average: Average, report: BaseModel | None, command: str | None
) -> None:
    """Into a folder, last, as it has the losses."""
    for folder in stages:
        if isinstance(folder, StagedFolder):
            card = model_card(
                average.metadata,
                [str(checkpoint.path) for checkpoint in average.sources],
                dtype=average.dtype,
                lora=average.lora,
                is_adapter=average.sources[0].kind == "adapter",
                scores=scores_of(report),
                command=command,
            )
            with folder.file("README.md") as file:
                file.write(card.encode())
