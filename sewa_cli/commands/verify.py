"""`sewa verify`: are an output, and the checkpoints it was made from, what their report says?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath

from sewa_cli.checkpoints import SUFFIX, Reads, files_of, open_checkpoint, pytorch
from sewa_cli.checkpoints.adapters import CONFIG
from sewa_cli.checkpoints.checkpoint import REPORT, reading
from sewa_cli.checkpoints.safetensors import INDEX
from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import CheckpointError
from sewa_cli.events import Events
from sewa_cli.files import check_regular, open_regular, real
from sewa_cli.output.average import unpack
from sewa_cli.output.destination import report_of
from sewa_cli.output.mean import thread_count
from sewa_cli.output.sources import (
    Places,
    check_content,
    check_inside,
    check_source,
    described_folder,
    is_there,
)
from sewa_cli.remote.scratch import local_path
from sewa_cli.report.kinds import Checked, Role, Verification
from sewa_cli.report.recipe import OutputFile, RecipeSource, read_report
from sewa_cli.report.shared import heading
from sewa_cli.text import few

# what loaders look for in a folder, by how its name ends
_LOADED = (SUFFIX, *pytorch.SUFFIXES, INDEX, ".distcp", ".metadata", ".pkl", ".py", CONFIG)


def run_verify(
    target: Path,
    *,
    root: Path | None = None,
    output_only: bool = False,
    events: Events | None = None,
) -> Verification:
    """Hold a report's files against it.

    target: the report, or an output that has its report inside or next to it. root: the one folder
    to look for the files in. Faults of files are in what is returned; those of the report are
    raised.
    """
    events, target = events or Events(), local_path(target, beside=True)
    named = None if _is_report(target) else _named(target)
    path = target if named is None else _report_of(named)
    report = read_report(path)
    folder = described_folder(report, path)
    was_streamed = report.output is None or report.output == STDOUT
    if named is not None and was_streamed:
        raise CheckpointError(
            f"{named}: went to standard output, so that {path.name} does not have its hash; name "
            "the report to check the checkpoints alone"
        )
    unpack(report.recipe)
    places = Places.of(report, path, root)
    sources = [] if output_only else report.recipe.sources
    unchecked = ["the checkpoints (--output-only)"] if output_only else []
    rows: list[Checked] = []
    with ThreadPoolExecutor(thread_count()) as pool:
        beside = pool.map(partial(_check_source, places=places), sources)  # begins at once
        if report.output is None or was_streamed:
            unchecked.append("the output, which went to standard output")
        else:
            try:
                output = _find_output(report.output, places, path.parent, named or folder)
            except CheckpointError as error:
                rows.append(_fault("output", report.output, error))
            else:
                check = partial(_check_file, output=output, recorded=PurePath(report.output).name)
                rows += pool.map(check, report.files or ())
                known = set() if folder is None else {str(output / REPORT)}
                has_hashes = report.files is not None
                rows += [*_check_whole(output, rows, known, has_hashes, unchecked)]
        for done, row in enumerate(beside, 1):
            rows.append(row)
            events.progress("checking", done, len(sources))
    if not rows:
        raise CheckpointError(
            f"{path}: has no hash of its output; write the output again with --report"
        )
    return Verification(
        **heading(Config(), events), report=str(path), files=rows, unchecked=unchecked
    )


def _is_report(target: Path) -> bool:
    """Go by the name or, as a report may have any, by how the file begins."""
    if target.suffix == ".json":
        return True
    try:
        with open_regular(target) as file:
            return file.read(64).lstrip().startswith(b"{")
    except OSError:
        return False


def _named(target: Path) -> Path:
    """Give an output its own name: `.` and `..` have one too, but not the root of all folders."""
    named = real(target) if target.name in ("", "..") else target
    if not named.name:
        raise CheckpointError(f"{target}: is not an output of sewa; name a report")
    return named


def _report_of(output: Path) -> Path:
    report = report_of(output)
    if not is_there(report):
        where = f"{REPORT} inside" if output.is_dir() else f"{report.name} next to it"
        raise CheckpointError(f"{output}: has no report {where}; name its report")
    return report


def _find_output(recorded: str, places: Places, beside: Path, named: Path | None) -> Path:
    if named is not None:
        return named
    near = beside / PurePath(recorded).name
    return near if places.root is None and is_there(near) else places.find(recorded)


def _check_source(source: RecipeSource, places: Places) -> Checked:
    try:
        path = places.find(source.path)
    except CheckpointError as error:
        return _fault("source", source.path, error)
    return _checked("source", path, lambda: check_source(path, source, places))


def _check_file(file: OutputFile, output: Path, recorded: str) -> Checked:
    """A file of the output, which may have another name now than was recorded."""
    first, *rest = PurePath(file.path).parts or [".."]
    if first == ".." or ".." in rest or PurePath(file.path).is_absolute():
        fault = "is not in the output's folder; the report may be corrupted"
        return Checked(path=file.path, role="output", ok=False, fault=fault)
    path = output.parent.joinpath(output.name if first == recorded else first, *rest)

    def check() -> None:
        if not is_there(path):
            raise CheckpointError(f"{path}: is missing; restore it, or write the output again")
        check_inside(path, output if output.is_dir() else output.parent)
        check_content(path, [path], file.size, file.sha256)

    return _checked("output", path, check)


def _check_whole(
    output: Path, rows: list[Checked], known: set[str], has_hashes: bool, unchecked: list[str]
) -> Iterator[Checked]:
    """Faults: others among its files or, if all files are as they were, that it does not load."""
    known = known | {row.path for row in rows}
    strangers = []
    if has_hashes and output.is_dir():
        strangers = [_unknown(path) for path in _strangers(output, known, unchecked)]
        yield from strangers
    if not has_hashes:
        unchecked.append("the output's sizes and hashes, which this report does not have")
    if output.suffix in pytorch.SUFFIXES:
        unchecked.append(f"whether {output} loads: it is a PyTorch file")
    if all(row.ok for row in rows) and not strangers:
        loads = _checked("output", output, lambda: _load(output))
        if not loads.ok:
            yield loads
        elif has_hashes:
            yield from (_unknown(path) for path in files_of(output) if str(path) not in known)


def _strangers(folder: Path, known: set[str], unchecked: list[str]) -> Iterator[Path]:
    """Yield what a loader might take for the folder's weights or code, or together with them."""
    with reading(folder):
        others = [path for path in sorted(folder.iterdir()) if str(path) not in known]
    loaded = [path for path in others if path.name.endswith(_LOADED)]
    if harmless := [path.name for path in others if path not in loaded]:
        unchecked.append(f"what the report does not know in {folder}: {few(harmless)}")
    yield from loaded


def _unknown(path: Path) -> Checked:
    return Checked(path=str(path), role="output", ok=False, fault="is not in the report")


def _load(output: Path) -> None:
    if not output.is_dir():
        with reading(output):
            check_regular(output)
    if output.suffix not in pytorch.SUFFIXES:
        open_checkpoint(output, Reads())


def _checked(role: Role, path: Path, check: Callable[[], object]) -> Checked:
    try:
        check()
    except CheckpointError as error:
        return _fault(role, str(path), error)
    return Checked(path=str(path), role=role, ok=True)


def _fault(role: Role, path: str, error: CheckpointError) -> Checked:
    return Checked(path=path, role=role, ok=False, fault=str(error).removeprefix(f"{path}: "))
