"""Where results go: decided and refused before the work, written together after it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel

from sewa_cli import ranks
from sewa_cli.checkpoints import SUFFIX, WRITTEN_BY, Checkpoint
from sewa_cli.checkpoints.safetensors import is_ours
from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.events import Events
from sewa_cli.files import open_regular, real
from sewa_cli.output.average import Average
from sewa_cli.output.journal import recover
from sewa_cli.output.layouts import (
    CARD,
    Form,
    Write,
    check_beside,
    fill_distributed,
    fill_folder,
    folder_is_ours,
    form_of,
    inherited_shard_size,
    plan_files,
)
from sewa_cli.output.mean import thread_count
from sewa_cli.output.place import as_output_error, check_free
from sewa_cli.output.publication import (
    Digest,
    Publication,
    Stage,
    StagedFile,
    StagedFolder,
)
from sewa_cli.output.safetensors import belongs_to_set, index_path, shard_path
from sewa_cli.present.card import model_card, scores_of
from sewa_cli.report.part import to_json
from sewa_cli.report.recipe import OutputFile

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
    wanted: Path | None = None  # where nobody named one: the name to be had, or the next free one
    inputs: tuple[Path, ...] = ()  # never overwritten

    def shared(self) -> Outputs:
        """Rank 0's form on every rank, where the others write nothing."""
        here = ranks.here()
        form, shard_size = here.same((self.form, self.shard_size))
        return self if here.rank == 0 else Outputs(None, form=form, shard_size=shard_size)

    @property
    def named(self) -> str:
        return str(self.average) if isinstance(self.average, Path) else STDOUT

    def written_as(self, average: Average) -> str:
        """What to open: the file, the folder, or of a sharded set its index."""
        return str(index_path(Path(self.named))) if self.is_set(average) else self.named

    def is_set(self, average: Average) -> bool:
        return self.form == "file" and len(average.shards(self.shard_size)) > 1

    def check(self, inputs: Iterable[Path], tell: Callable[[str], None] | None = None) -> Outputs:
        """Refuse now what would fail in the end, and what would overwrite an input."""
        inputs = tuple(inputs)
        found = replace(self, inputs=inputs)
        for path in (self.average, self.report):
            if isinstance(path, Path):
                recover(path.parent, tell)
        try:
            found.refuse()
        except OutputError:
            if (other := found.settled()) == found:
                raise
            return other.check(inputs, tell)  # another run has taken the name just now
        return found

    def refuse(self) -> None:
        """As things are now; once more when the names are about to change."""
        taken = {real(path) for path in self.inputs}
        folders = {path for path in taken if path.is_dir()}
        is_folder = self.form in ("folder", "dcp")
        for path in (self.average, self.report):
            if not isinstance(path, Path):
                continue
            check_free(
                path, self.force, folder_is_ours if is_folder and path == self.average else None
            )
            place = real(path)
            if place in taken or not folders.isdisjoint(place.parents):
                raise _is_an_input(path)
            if is_folder and any(place in one.parents for one in taken):
                raise OutputError(f"{path}: holds one of the inputs, which are never overwritten")
            if is_folder and self.report is not None and place in real(self.report).parents:
                raise ConfigError(f"{self.report}: --report is in the folder {path}; put it beside")
        if isinstance(self.average, Path) and self.form == "file":
            self._check_set(self.average)
        for path in self._stale():
            if not self.force:
                raise OutputError(
                    f"{path}: describes another average of this name; use --force to replace it"
                )

    def _check_set(self, output: Path) -> None:
        """How many files a set will have is not known yet, so any of its name is in the way."""
        for path in self.inputs:
            if belongs_to_set(path, output):
                raise _is_an_input(path)
        for path in _set_at(output):
            check_free(path, self.force)
            if self.shard_size is None and _is_foreign(path):
                raise OutputError(
                    f"{path}: belongs to a set that sewa did not write; choose another name"
                )
        if self.shard_size is None:
            return
        for path in (index_path(output), shard_path(output, 1, 1)):
            check_free(path, self.force)  # its name may be too long
        if self.report is not None and belongs_to_set(self.report, output):
            raise ConfigError(f"{self.report}: --report names a file of the sharded output")

    def settled(self) -> Outputs:
        """With a name that is free now, where nobody named one."""
        if self.wanted is None or self.force or not isinstance(self.average, Path):
            return self
        name = free_name(self.wanted)
        is_beside = self.report == report_path(self.average)
        return replace(self, average=name, report=report_path(name) if is_beside else self.report)

    def replaced(self, new: Iterable[Path]) -> list[Path]:
        """What has to go before the new ones appear: first what describes, then what it describes.

        The old report; the index of an older set, its shards; a file in the place of a set.
        """
        if not isinstance(self.average, Path) or not self.force:
            return []
        output, staying = self.average, set(new)
        gone = [*([] if self.report is None else [self.report]), *self._stale()]
        older: list[Path] = []
        if self.form == "file":
            index, older = index_path(output), _set_at(output)
            is_kept = any(map(_is_foreign, older)) and index not in staying
            gone += [index] if not is_kept else []
            gone += [p for p in (output, *older) if p not in (index, *staying)]
        return [p for p in gone if os.path.lexists(p) and not (p in older and _is_foreign(p))]

    def _stale(self) -> list[Path]:
        """A report beside the output that will not describe it any more."""
        if not isinstance(self.average, Path):
            return []
        beside = report_path(self.average)
        if real(beside) in map(real, self.inputs) or not _is_report(beside):
            return []
        # --report may be a link to it, which is then replaced, and it is not
        new = None if self.report is None else real(self.report.parent) / self.report.name
        return [] if real(beside.parent) / beside.name == new else [beside]


def _is_foreign(path: Path) -> bool:
    """A shard that we did not write; an index cannot tell."""
    return path.suffix == SUFFIX and not is_ours(path, WRITTEN_BY)


def _is_report(path: Path) -> bool:
    """One of ours, by how it begins: `to_json` writes the version first."""
    try:
        file = open_regular(path)
    except OSError:
        return False
    with file:
        return re.match(rb'\s*\{\s*"schema_version"', file.read(64)) is not None


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
    form = config.output_format or form_of(average, like)
    shard_size, is_adapter = config.shard_size, like.kind == "adapter"
    if form == "dcp" and not isinstance(average, Path | None):
        raise ConfigError("output_format=dcp: is a folder; name one with --output")
    if shard_size is not None and (form != "file" and (form != "folder" or is_adapter)):
        what = "an adapter" if is_adapter else "a PyTorch file or distributed checkpoint"
        raise ConfigError(f"--shard-size: {what} is always one file; leave it out")
    if form == "folder":
        check_beside(like, config.output_dtype)
        shard_size = shard_size or inherited_shard_size(like)
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
    wanted = None
    if not config.output:  # nobody named it, so a name that is taken is no reason to stop
        is_folder = config.output_format == "dcp" or form_of(None, like) == "folder"
        wanted = average.with_suffix("") if is_folder else average
        recover(wanted.parent)
        average = wanted if force else free_name(wanted)
    report = config.report or (report_path(average) if always_report else None)
    if report is not None and real(report) == real(average):
        raise ConfigError(f"{report}: --report and --output name the same file")
    return replace(outputs_at(config, average, report, force, like, command), wanted=wanted)


def free_name(wanted: Path) -> Path:
    """Itself, or name-2, name-3 … of which neither it, nor its report, nor a set of it is there."""
    path, n = wanted, 1
    while os.path.lexists(path) or os.path.lexists(report_path(path)) or _set_at(path):
        n += 1
        path = wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}")
    return path


def _set_at(output: Path) -> list[Path]:
    """Files of a sharded set of this name that are there already."""
    try:
        inside = sorted(output.parent.iterdir())
    except OSError:  # a folder that may be written, but not read
        return []
    return [path for path in inside if belongs_to_set(path, output)]


def report_path(output: Path) -> Path:
    is_number = output.suffix[1:].isdigit()  # a folder called llama-0.5
    # not with_name: `.` and `/` have no name, and are refused in words
    return output.parent / (f"{output.name if is_number else output.stem}.report.json")


def write_results(
    average: Average | None,
    outputs: Outputs,
    make_report: Callable[[], R],
    events: Events | None = None,
) -> tuple[R, Outputs]:
    """The average and the report appear together: all is complete before anything gets its name.

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
    with Publication(outputs.force, events.show_warning if events else None) as publication:
        with told.stage("writing"):
            stages = [] if average is None else _stage(average, outputs, publication)
        if average is not None:
            here.same([])  # the others have served
        report = make_report()
        for stage in stages:
            if isinstance(stage, StagedFolder) and average is not None:
                with stage.file(CARD) as card:  # last, as it has the losses
                    card.write(_card(average, report, outputs.command).encode())
        with told.stage("hashing the output"):
            digests = [] if report is None else _digests(stages)
        if average is not None:
            # after the report too, as its hashes are of the sources; of what went to standard
            # output already, at least the exit code tells
            average.check_sources()
        paths = [p for p in (outputs.average, outputs.report) if isinstance(p, Path)]
        if not stages and (report is None or outputs.report is None):
            return report, outputs
        with publication.locked(*paths):
            outputs = outputs.settled()
            outputs.refuse()
            then: list[Stage] = []
            if average is not None and isinstance(outputs.average, Path):
                for stage in _name(stages, average, outputs, publication):
                    digests += [] if report is None else _digests([stage])
                if report is not None:
                    files = _listed(stages, digests)
                    about = {"output": outputs.written_as(average), "files": files}
                    report = report.model_copy(update=about)
            if report is not None and outputs.report is not None:
                text = to_json(report).encode()
                then = [_written(publication, outputs.report, lambda file: file.write(text))]
            gone = outputs.replaced(stage.path for stage in stages)
            publication.publish(stages or then, then if stages else (), gone)
    return report, outputs


def _stage(average: Average, outputs: Outputs, publication: Publication) -> list[Stage]:
    """Its files, all but the index of a set; what goes to standard output is gone."""
    target = outputs.average
    if isinstance(target, Path) and outputs.form in ("folder", "dcp"):
        folder = publication.folder(target)
        if outputs.form == "dcp":
            fill_distributed(folder, average)
        else:
            fill_folder(folder, average, outputs.shard_size)
        return [folder]
    if isinstance(target, Path):
        planned = plan_files(average, target, outputs.form, outputs.shard_size)
        tensors = islice(planned, len(average.shards(outputs.shard_size)))
        return [_written(publication, path, write) for path, write in tensors]
    if target is not None:
        average.write(target)
        target.flush()
    return []


def _written(publication: Publication, path: Path, write: Write) -> StagedFile:
    stage = publication.file(path)
    with as_output_error(path):
        write(stage.file)
        stage.seal()
    return stage


def _name(
    stages: list[Stage], average: Average, outputs: Outputs, publication: Publication
) -> list[Stage]:
    """The final names; returns what is added to the stages, the index of a set, which has them."""
    assert isinstance(outputs.average, Path)
    if outputs.form in ("folder", "dcp"):
        stages[0].path = outputs.average
        return []
    planned = list(plan_files(average, outputs.average, outputs.form, outputs.shard_size))
    for stage, (path, _) in zip(stages, planned, strict=False):
        stage.path = path
    added: list[Stage] = [_written(publication, *file) for file in planned[len(stages) :]]
    stages += added
    return added


def _digests(stages: Sequence[Stage]) -> list[list[Digest]]:
    with ThreadPoolExecutor(thread_count()) as pool:
        return list(pool.map(lambda stage: stage.digests(), stages))


def _listed(stages: Sequence[Stage], digests: Sequence[Sequence[Digest]]) -> list[OutputFile]:
    return [
        OutputFile(path=str(Path(stage.path.name, d.name)), size=d.size, sha256=d.sha256)
        for stage, found in zip(stages, digests, strict=True)
        for d in found
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
