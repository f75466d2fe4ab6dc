"""Where results go: decided and refused before the work, written together after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    publish_together,
    staged,
    staged_folder,
)
from sewa_cli.output.average import Average
from sewa_cli.output.layouts import (
    Form,
    fill_folder,
    folder_is_ours,
    form_of,
    inherited_shard_size,
    plan_files,
)
from sewa_cli.output.safetensors import belongs_to_set, index_path
from sewa_cli.present.card import model_card, scores_of
from sewa_cli.report.part import to_json

R = TypeVar("R", bound=BaseModel | None)
DEFAULT_OUTPUT = "averaged.safetensors"


@dataclass(frozen=True)
class Outputs:
    """Where results go. None: not written."""

    average: Path | IO[bytes] | None  # a stream: standard output
    report: Path | None = None
    force: bool = False
    form: Form = "file"
    shard_size: int | None = None  # bytes; an average larger than this becomes a set of files
    command: str | None = None  # for the model card

    @property
    def named(self) -> str:
        return str(self.average) if isinstance(self.average, Path) else STDOUT

    def written_as(self, average: Average) -> str:
        """What to open: the file, the folder, or of a sharded set its index."""
        return str(index_path(Path(self.named))) if self.is_set(average) else self.named

    def is_set(self, average: Average) -> bool:
        return self.form == "file" and len(average.shards(self.shard_size)) > 1

    def check(self, inputs: Iterable[Path]) -> Outputs:
        """Refuse now what would fail in the end, and what would overwrite an input."""
        inputs = list(inputs)
        taken = {path.resolve() for path in inputs}
        folders = {path for path in taken if path.is_dir()}
        is_folder = self.form == "folder"
        for path in (self.average, self.report):
            if not isinstance(path, Path):
                continue
            check_free(
                path, self.force, folder_is_ours if is_folder and path == self.average else None
            )
            place = path.resolve()
            if place in taken or not folders.isdisjoint(place.parents):
                raise _is_an_input(path)
            if is_folder and any(place in one.parents for one in taken):
                raise OutputError(f"{path}: holds one of the inputs, which are never overwritten")
        if isinstance(self.average, Path) and self.shard_size is not None and not is_folder:
            self._check_set(self.average, inputs)
        return self

    def _check_set(self, output: Path, inputs: Sequence[Path]) -> None:
        """How many files the set will have is not known yet, so any of its name is in the way."""
        for path in inputs:
            if belongs_to_set(path, output):
                raise _is_an_input(path)
        if self.report is not None and belongs_to_set(self.report, output):
            raise ConfigError(f"{self.report}: --report names a file of the sharded output")
        for path in _set_at(output):
            check_free(path, self.force)


def _is_an_input(path: Path) -> OutputError:
    return OutputError(f"{path}: is one of the inputs, which are never overwritten")


def paths_of(checkpoints: Iterable[Checkpoint]) -> list[Path]:
    """All that must not be overwritten."""
    return [path for c in checkpoints for path in (c.path, *c.files)]


def outputs_at(
    config: Config,
    average: Path | IO[bytes] | None,
    report: Path | None,
    force: bool,
    like: Checkpoint,
    command: str | None = None,
) -> Outputs:
    """In the form that the name asks for, or else in that of `like`, a checkpoint."""
    form = form_of(average, like)
    shard_size, is_adapter = config.shard_size, like.kind == "adapter"
    if shard_size is not None and (form == "torch" or (form == "folder" and is_adapter)):
        what = "an adapter" if is_adapter else "a PyTorch file"
        raise ConfigError(f"--shard-size: {what} is always one file; leave it out")
    if shard_size is None and form == "folder":
        shard_size = inherited_shard_size(like)
    return Outputs(average, report, force, form, shard_size, command)


def decide_outputs(
    config: Config,
    force: bool,
    stdout: IO[bytes] | None,
    like: Checkpoint,
    command: str | None = None,
    *,
    always_report: bool = True,
) -> Outputs:
    """As the config says; what it does not name gets a name that is free."""
    if str(config.report) == STDOUT:
        raise ConfigError("report: - is not a file; --json prints the report")
    if config.output == STDOUT:
        if stdout is None:
            raise ConfigError("output: - needs a standard output to write to")
        if config.shard_size is not None:
            raise ConfigError(
                "--shard-size: a set of files cannot go to standard output; name one with --output"
            )
        return outputs_at(config, stdout, config.report, force, like, command)
    average = Path(config.output or DEFAULT_OUTPUT)
    if not config.output:  # nobody named it, so a name that is taken is no reason to stop
        average = average.with_suffix("") if form_of(None, like) == "folder" else average
        average = average if force else free_name(average, config.shard_size is not None)
    report = config.report or (report_path(average) if always_report else None)
    if report is not None and report.resolve() == average.resolve():
        raise ConfigError(f"{report}: --report and --output name the same file")
    return outputs_at(config, average, report, force, like, command)


def free_name(wanted: Path, is_set: bool = False) -> Path:
    """Itself, or name-2, name-3 … of which neither it nor its report (nor its set) is there."""
    path, n = wanted, 1
    while path.exists() or report_path(path).exists() or (is_set and _set_at(path)):
        n += 1
        path = wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}")
    return path


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
        stages = [] if average is None else _stage(average, outputs, stack)
        report = make_report()
        for folder in stages:
            if isinstance(folder, StagedFolder) and average is not None:
                with folder.file("README.md") as card:  # last, as it has the losses
                    card.write(_card(average, report, outputs.command).encode())
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


def _stage(average: Average, outputs: Outputs, stack: ExitStack) -> list[Stage]:
    """Its files beside their final places; what goes to standard output is gone."""
    target, force = outputs.average, outputs.force
    stages: list[Stage] = []
    if isinstance(target, Path) and outputs.form == "folder":
        folder = stack.enter_context(staged_folder(target, force))
        fill_folder(folder, average, outputs.shard_size)
        stages.append(folder)
    elif isinstance(target, Path):
        for path, write in plan_files(average, target, outputs.form, outputs.shard_size):
            file = stack.enter_context(staged(path, force))
            write(file.file)
            stages.append(file)
    elif target is not None:
        average.write(target)
        target.flush()
    return stages


def _card(average: Average, report: BaseModel | None, command: str | None) -> str:
    return model_card(
        average.metadata,
        [str(checkpoint.path) for checkpoint in average.sources],
        dtype=average.dtype,
        lora=average.lora,
        is_adapter=average.sources[0].kind == "adapter",
        scores=scores_of(report),
        command=command,
    )
