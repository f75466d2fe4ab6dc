"""Decide where results go, refuse it before the work, and publish them after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel

from sewa_cli import mirrors, ranks
from sewa_cli.checkpoints import Checkpoint
from sewa_cli.checkpoints.checkpoint import MOST_JSON, REPORT
from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.events import Events
from sewa_cli.files import read_json, real
from sewa_cli.mirrors import named as name_of
from sewa_cli.mirrors import url_of
from sewa_cli.output import layouts
from sewa_cli.output.average import Average
from sewa_cli.output.layouts import Form
from sewa_cli.output.safetensors import hashes_of
from sewa_cli.publish import (
    as_output_error,
    check_free,
    locked,
    new_output,
    publish,
    sync,
    temporary,
)
from sewa_cli.remote.upload import place_output, upload
from sewa_cli.report.shared import to_json

R = TypeVar("R", bound=BaseModel | None)


def report_path(output: Path, is_folder: bool) -> Path:
    if is_folder:
        return output / REPORT
    is_number = output.suffix[1:].isdigit()  # a folder called llama-0.5
    # not with_name: `.` and `/` have no name, and are refused in words
    return output.parent / (f"{output.name if is_number else output.stem}.report.json")


def free_name(wanted: Path) -> Path:
    """Return it, or name-2, name-3 …: the first where neither it nor its report is there."""
    path, n = wanted, 1
    while os.path.lexists(path) or os.path.lexists(report_path(path, is_folder=False)):
        n += 1
        path = wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}")
    return path


def report_of(output: Path) -> Path:
    """Return where the report of an output is: inside the folder, or next to the output."""
    inside = output / REPORT
    return inside if os.path.lexists(inside) else report_path(output, is_folder=False)


@dataclass(frozen=True)
class Outputs:
    """The places of results. None: not written."""

    average: Path | IO[bytes] | None  # a stream: standard output
    named_report: Path | None = None
    has_report: bool = False  # in the usual place, where none is named
    force: bool = False
    form: Form = "file"
    shard_size: int | None = None  # bytes; a folder's weights are split if they are larger
    wanted: Path | None = None  # where nobody named one: the name to be had, or the next free one
    inputs: tuple[Path, ...] = ()  # never overwritten

    @property
    def named(self) -> str:
        return str(self.average) if isinstance(self.average, Path) else STDOUT

    @property
    def folder(self) -> Path | None:
        is_folder = self.form in ("folder", "dcp") and isinstance(self.average, Path)
        return Path(self.named) if is_folder else None

    @property
    def report(self) -> Path | None:
        if self.named_report is None and self.has_report and isinstance(self.average, Path):
            return report_path(self.average, self.folder is not None)
        return self.named_report

    @property
    def report_beside(self) -> Path | None:
        """The report, unless it is inside the folder."""
        inside = None if self.folder is None else self.folder / REPORT
        is_inside = inside is not None and self.report and real(self.report) == real(inside)
        return None if is_inside else self.report

    def check(self, inputs: Iterable[Path]) -> Outputs:
        """Take a free name where nobody named one, and refuse what could not be written there.

        Called before the work, and once more when the names are about to change.
        """
        found = replace(self, inputs=tuple(inputs))
        if self.wanted is not None and not self.force:
            found = replace(found, average=free_name(self.wanted))
        found._refuse()
        return found

    def _refuse(self) -> None:
        output, beside = self.average, self.report_beside
        if beside is not None and real(Path(self.named)) in (real(beside), *real(beside).parents):
            raise ConfigError(
                f"{beside}: --report and --output name the same file; the report in a folder has "
                f"the name {REPORT}"
            )
        inputs = {real(path) for path in self.inputs}
        for path in (output, beside):
            if not isinstance(path, Path):
                continue
            place, is_folder = real(path), path == self.folder
            is_unnamed = path == beside and self.named_report is None
            if is_unnamed and not self.force and os.path.lexists(path):
                raise OutputError(
                    f"{path}: exists; the report of {output} would replace it: use --report FILE, "
                    "another name, or --force"
                )
            check_free(path, self.force, layouts.folder_is_ours if is_folder else None)
            is_inside = any(one in place.parents and one.is_dir() for one in inputs)
            is_around = is_folder and any(place in one.parents for one in inputs)
            if place in inputs or is_inside or is_around:
                word = "holds" if is_around else "is"
                raise OutputError(
                    f"{path}: {word} one of the inputs, never overwritten; choose another name"
                )
        for path in () if self.force else self.outdated():
            raise OutputError(
                f"{path}: describes another average of this name; use --force to replace it"
            )

    def outdated(self) -> list[Path]:
        """Return the reports that will not describe the output any more."""
        found = [self.report_beside]
        if isinstance(self.average, Path) and self.folder is None:
            usual = report_path(self.average, is_folder=False)
            is_input = real(usual) in map(real, self.inputs)
            if os.path.lexists(usual) and not is_input and _describes(usual, self.average):
                found.append(usual)
        return [path for path in found if path is not None and os.path.lexists(path)]


def _describes(report: Path, output: Path) -> bool:
    """Return whether sewa wrote the file, and not for another output that is next to it."""
    try:
        found = read_json(report, MOST_JSON)
        other = report.with_name(Path(found["output"]).name)
        return "schema_version" in found and (other.name == output.name or not other.exists())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def decide_outputs(
    config: Config,
    force: bool,
    stdout: IO[bytes] | None,
    like: Checkpoint,
    *,
    always_report: bool = True,
) -> Outputs:
    """Follow the config, or else the form of `like`; an unnamed output gets a name that is free."""
    if config.report is not None and (url := url_of(config.report)):
        raise ConfigError(f"report: {url}: is next to the output there; leave out --report")
    if str(config.report) == STDOUT:
        raise ConfigError("report: - is not a file; --json prints the report")
    named: Path | IO[bytes] | None = Path(config.output) if config.output else None
    if config.output is not None and url_of(config.output):
        named = place_output(config)
    if config.output == STDOUT:
        named = stdout
        if stdout is None or config.output_format == "dcp":
            raise ConfigError(
                "output: - writes one file to standard output; name a file or folder here"
            )
    form = config.output_format or layouts.form_of(named, like, config.shard_size)
    shard_size = layouts.shard_size_of(config.shard_size, form, like)
    if form == "folder":
        layouts.check_beside(like, config.output_dtype)
    wanted = None
    if named is None:  # nobody named it, so a name that is taken is no reason to stop
        is_file = form in ("file", "archive")
        wanted = Path(f"averaged{layouts.default_suffix(like) if is_file else ''}")
    return Outputs(named or wanted, config.report, always_report, force, form, shard_size, wanted)


def settle_outputs(decide: Callable[[], Outputs], inputs: Iterable[Path]) -> Outputs:
    """Decide where results go, on rank 0 for all; the others write nothing."""
    here = ranks.here()
    outputs = decide().check(inputs) if here.rank == 0 else Outputs(None)
    form, shard_size = here.same((outputs.form, outputs.shard_size))
    return replace(outputs, form=form, shard_size=shard_size)


def write_results(
    average: Average | None,
    outputs: Outputs,
    make_report: Callable[[], R],
    make_card: Callable[[Average, R, str | None], str] | None = None,
    events: Events | None = None,
) -> tuple[R, Outputs]:
    """Write the average, then its report; all is on the disk before the first name changes.

    `make_report` is called when the average is written, and may return None: no report. Returns the
    report with the hashes of what was written, and the names that it was given.
    """
    told, here = events or Events(), ranks.here()
    if here.rank > 0:  # the first writes; the others make their parts of it
        if average is not None:
            average.serve()
        return make_report(), outputs
    with ExitStack() as stack:
        made = None
        if average is not None:
            with told.stage("writing"):
                made = _write(average, outputs, stack)
            here.same([])  # the others have served
        report = make_report()
        if made is not None:
            with as_output_error(outputs.named):
                if average is not None and make_card is not None and outputs.form == "folder":
                    card = make_card(average, report, told.command)
                    (made / layouts.CARD).write_bytes(card.encode())
                sync(made)
                stack.enter_context(locked(made.parent))
            outputs = outputs.check(outputs.inputs)
            if report is not None:
                name = name_of(outputs.named)
                with told.stage("hashing the output"):
                    files = hashes_of(made, outputs.named)
                report = report.model_copy(update={"output": name, "files": files})
        # whoever wrote to a source is found now: hashes were taken between opening and this
        for checkpoint in () if average is None else average.sources:
            checkpoint.check_unchanged()
        if made is not None:
            _publish(made, report, outputs)
        elif report is not None and outputs.named_report is not None:
            with new_output(outputs.named_report, outputs.force) as file:
                file.write(to_json(report).encode())
    return report, outputs


def _write(average: Average, outputs: Outputs, stack: ExitStack) -> Path | None:
    """Write under a temporary name, or to standard output."""
    target, made = outputs.average, None
    if isinstance(target, Path):
        with as_output_error(target):
            made = stack.enter_context(temporary(target.parent, outputs.folder is not None))
            layouts.fill(made, average, outputs.form, outputs.shard_size)
    elif target is not None:
        average.write(target)
        target.flush()
    return made


def _publish(made: Path, report: BaseModel | None, outputs: Outputs) -> None:
    """Give the output its name, then its report; the report that was there goes first."""
    beside, text = outputs.report_beside, made / REPORT
    with ExitStack() as stack:
        if report is not None and outputs.report is not None:
            with as_output_error(outputs.report):
                if beside is not None:
                    text = stack.enter_context(temporary(beside.parent))
                text.write_bytes(to_json(report).encode())
                sync(made if beside is None else text)
        with as_output_error(outputs.named):
            for path in outputs.outdated():
                path.unlink(missing_ok=True)  # the same one may have two names
            publish(made, Path(outputs.named), outputs.force)
        if report is not None and beside is not None:
            with as_output_error(beside):
                publish(text, beside, outputs.force)
    is_beside = report is not None and beside is not None
    if mirrors.OPEN:
        upload(Path(outputs.named), beside if is_beside else None, outputs.force)
