"""Decide where results go, refuse it before the work, and publish them after it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import IO, TypeVar

from pydantic import BaseModel

from sewa_cli import ranks
from sewa_cli.checkpoints import Checkpoint
from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.events import Events
from sewa_cli.files import open_regular, real
from sewa_cli.output.average import Average
from sewa_cli.output.layouts import (
    CARD,
    Form,
    check_beside,
    fill,
    folder_is_ours,
    form_of,
    inherited_shard_size,
)
from sewa_cli.output.mean import thread_count
from sewa_cli.output.place import as_output_error, check_free
from sewa_cli.output.safetensors import sha256_of
from sewa_cli.output.sources import REPORT
from sewa_cli.present.card import model_card, scores_of
from sewa_cli.publish import locked, publish, sync, temporary
from sewa_cli.report.part import to_json
from sewa_cli.report.recipe import OutputFile

R = TypeVar("R", bound=BaseModel | None)
DEFAULT_OUTPUT = "averaged.safetensors"


@dataclass(frozen=True)
class Outputs:
    """The places of results. None: not written."""

    average: Path | IO[bytes] | None  # a stream: standard output
    report: Path | None = None
    force: bool = False
    form: Form = "file"
    shard_size: int | None = None  # bytes; a folder's weights are split if they are larger
    command: str | None = None  # for the model card
    wanted: Path | None = None  # where nobody named one: the name to be had, or the next free one
    inputs: tuple[Path, ...] = ()  # never overwritten

    def shared(self) -> Outputs:
        """Return rank 0's form on every rank; the others write nothing."""
        here = ranks.here()
        form, shard_size = here.same((self.form, self.shard_size))
        return self if here.rank == 0 else Outputs(None, form=form, shard_size=shard_size)

    @property
    def named(self) -> str:
        return str(self.average) if isinstance(self.average, Path) else STDOUT

    @property
    def folder(self) -> Path | None:
        is_folder = self.form in ("folder", "dcp") and isinstance(self.average, Path)
        return Path(self.named) if is_folder else None

    @property
    def is_report_inside(self) -> bool:
        return self.folder is not None and self.report == self.folder / REPORT

    def check(self, inputs: Iterable[Path]) -> Outputs:
        """Refuse now what would fail in the end, and what would overwrite an input."""
        found = replace(self, inputs=tuple(inputs)).settled()
        found.refuse()
        return found

    def refuse(self) -> None:
        """Check the places as they are now; called again when the names are about to change."""
        taken = {real(path) for path in self.inputs}
        folders = {path for path in taken if path.is_dir()}
        for path in (self.average, None if self.is_report_inside else self.report):
            if not isinstance(path, Path):
                continue
            place, is_folder = real(path), path == self.folder
            check_free(path, self.force, folder_is_ours if is_folder else None)
            if place in taken or not folders.isdisjoint(place.parents):
                raise OutputError(f"{path}: is one of the inputs, which are never overwritten")
            if is_folder and any(place in one.parents for one in taken):
                raise OutputError(f"{path}: holds one of the inputs, which are never overwritten")
            if self.folder is not None and real(self.folder) in place.parents:
                raise ConfigError(
                    f"{path}: --report is in the folder {self.folder}; the report there has the "
                    f"name {REPORT}"
                )
        for path in () if self.force else self.outdated():
            raise OutputError(
                f"{path}: describes another average of this name; use --force to replace it"
            )

    def settled(self) -> Outputs:
        """Take a name that is free now, where nobody named one."""
        if self.wanted is None or self.force or not isinstance(self.average, Path):
            return self
        name, is_folder = free_name(self.wanted), self.folder is not None
        is_default = self.report == report_path(self.average, is_folder)
        report = report_path(name, is_folder) if is_default else self.report
        return replace(self, average=name, report=report)

    def outdated(self) -> list[Path]:
        """Return the reports that will not describe the output any more."""
        if not isinstance(self.average, Path):
            return []
        beside = report_path(self.average, is_folder=False)
        is_older = _is_report(beside) and real(beside) not in map(real, self.inputs)
        found = [None if self.is_report_inside else self.report, beside if is_older else None]
        return [path for path in found if path is not None and os.path.lexists(path)]


def _is_report(path: Path) -> bool:
    """Whether sewa wrote it, by how it begins: `to_json` writes the version first."""
    try:
        file = open_regular(path)
    except OSError:
        return False
    with file:
        return re.match(rb'\s*\{\s*"schema_version"', file.read(64)) is not None


def paths_of(checkpoints: Iterable[Checkpoint]) -> list[Path]:
    """Return all that must not be overwritten."""
    return [path for c in checkpoints for path in (c.path, *c.files)]


def outputs_at(
    config: Config,
    average: Path | IO[bytes] | None,
    report: Path | None,
    force: bool,
    like: Checkpoint,
    command: str | None = None,
    *,
    needs_report: bool = True,
) -> Outputs:
    """Decide the form by the output's name or else by `like`, a checkpoint."""
    form = config.output_format or form_of(average, like, config.shard_size)
    shard_size, is_adapter = config.shard_size, like.kind == "adapter"
    if form == "dcp" and not isinstance(average, Path | None):
        raise ConfigError("output_format=dcp: is a folder; name one with --output")
    if shard_size is not None and (form != "folder" or is_adapter):
        if form == "file":
            raise ConfigError(
                "--shard-size: writes a folder; name one with --output, without .safetensors"
            )
        what = "an adapter" if is_adapter else "a PyTorch file or distributed checkpoint"
        raise ConfigError(f"--shard-size: {what} is always one file; leave it out")
    if form == "folder":
        check_beside(like, config.output_dtype)
        shard_size = shard_size or inherited_shard_size(like)
    if isinstance(average, Path):
        is_folder = form in ("folder", "dcp")
        if report is None and needs_report:
            report = report_path(average, is_folder)
        elif report is not None and real(report) == real(average):
            raise ConfigError(f"{report}: --report and --output name the same file")
        elif report is not None and is_folder and real(report) == real(average / REPORT):
            report = average / REPORT
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
    """Follow the config; an output that it does not name gets a name that is free."""
    if str(config.report) == STDOUT:
        raise ConfigError("report: - is not a file; --json prints the report")
    if config.output == STDOUT:
        if stdout is None:
            raise ConfigError("output: - needs a standard output to write to")
        return outputs_at(config, stdout, config.report, force, like, command)
    average = Path(config.output or DEFAULT_OUTPUT)
    wanted = None
    if not config.output:  # nobody named it, so a name that is taken is no reason to stop
        form = config.output_format or form_of(None, like, config.shard_size)
        wanted = average if form == "file" else average.with_suffix("")
        average = wanted
    found = outputs_at(
        config, average, config.report, force, like, command, needs_report=always_report
    )
    return replace(found, wanted=wanted)


def free_name(wanted: Path) -> Path:
    """Return it, or name-2, name-3 …: the first where neither it nor its report is there."""
    path, n = wanted, 1
    while os.path.lexists(path) or os.path.lexists(report_path(path, is_folder=False)):
        n += 1
        path = wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}")
    return path


def report_path(output: Path, is_folder: bool) -> Path:
    if is_folder:
        return output / REPORT
    is_number = output.suffix[1:].isdigit()  # a folder called llama-0.5
    # not with_name: `.` and `/` have no name, and are refused in words
    return output.parent / (f"{output.name if is_number else output.stem}.report.json")


def report_of(output: Path) -> Path:
    """Return where the report of an output is: inside the folder, or next to the output."""
    inside = output / REPORT
    return inside if os.path.lexists(inside) else report_path(output, is_folder=False)


def write_results(
    average: Average | None,
    outputs: Outputs,
    make_report: Callable[[], R],
    events: Events | None = None,
) -> tuple[R, Outputs]:
    """Write the average, then its report; all is on the disk before the first name changes.

    `make_report` is called when the average is written, and may return None: no report. Returns it
    with the hashes of what was written, and under which names that was.
    """
    told, here = events or Events(), ranks.here()
    if here.rank > 0:  # the first writes; the others make their parts of it
        if average is not None:
            average.serve()
        return make_report(), outputs
    if average is None:
        outputs = replace(outputs, average=None)  # an older one stays
    with ExitStack() as stack:
        made: Path | None = None
        files: Sequence[OutputFile] = ()
        if average is not None:
            with told.stage("writing"):
                made = _write(average, outputs, stack)
            here.same([])  # the others have served
        report = make_report()
        if average is not None and made is not None:
            with as_output_error(outputs.named):
                if outputs.form == "folder":
                    (made / CARD).write_bytes(_card(average, report, outputs.command).encode())
                sync(made)
            if report is not None:
                with told.stage("hashing the output"):
                    files = _hashed(made)
        if average is not None:
            # after the report too, as its hashes are of the sources; of what went to standard
            # output already, at least the exit code tells
            average.check_sources()
        if made is None and (report is None or outputs.report is None):
            return report, outputs
        return _publish(made, files, report, outputs, stack)


def _write(average: Average, outputs: Outputs, stack: ExitStack) -> Path | None:
    """Write under a temporary name, or to standard output."""
    target = outputs.average
    if isinstance(target, Path):
        with as_output_error(target):
            made = stack.enter_context(temporary(target.parent, outputs.folder is not None))
            fill(made, average, outputs.form, outputs.shard_size)
        return made
    if target is not None:
        average.write(target)
        target.flush()
    return None


def _publish(
    made: Path | None, files: Sequence[OutputFile], report: R, outputs: Outputs, stack: ExitStack
) -> tuple[R, Outputs]:
    """Give the output its name, then its report; the report that was there goes first."""
    place = outputs.average if isinstance(outputs.average, Path) else outputs.report
    assert place is not None
    with as_output_error(place):
        stack.enter_context(locked(place.parent))
    outputs = outputs.settled()
    outputs.refuse()
    if report is not None and made is not None:
        name = Path(outputs.named).name
        files = [f.model_copy(update={"path": str(PurePath(name, f.path))}) for f in files]
        report = report.model_copy(update={"output": outputs.named, "files": files})
    text: Path | None = None
    if report is not None and outputs.report is not None:
        with as_output_error(outputs.report):
            if made is not None and outputs.is_report_inside:
                text = made / REPORT
            else:
                text = stack.enter_context(temporary(outputs.report.parent))
            text.write_bytes(to_json(report).encode())
            sync(text)
    with as_output_error(outputs.named):
        for path in outputs.outdated():
            path.unlink(missing_ok=True)  # the same one may have two names
        if made is not None:
            publish(made, Path(outputs.named), outputs.force)
    if text is not None and outputs.report is not None and not outputs.is_report_inside:
        with as_output_error(outputs.report):
            publish(text, outputs.report, outputs.force)
    return report, outputs


def _hashed(made: Path) -> list[OutputFile]:
    """Hash an output's files; their paths are relative to the output."""
    paths = sorted(made.iterdir()) if made.is_dir() else [made]
    with ThreadPoolExecutor(thread_count()) as pool:
        hashes = list(pool.map(lambda path: sha256_of([path], path), paths))
    return [
        OutputFile(path=str(path.relative_to(made)), size=path.stat().st_size, sha256=digest)
        for path, digest in zip(paths, hashes, strict=True)
    ]


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
