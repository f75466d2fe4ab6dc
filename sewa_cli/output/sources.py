"""Find the files of a report, and check that they are still what the report says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from sewa_cli.checkpoints import files_of, stamp_of
from sewa_cli.checkpoints.checkpoint import REPORT, Stamp, reading
from sewa_cli.errors import CheckpointError
from sewa_cli.files import check_regular, real
from sewa_cli.mirrors import url_of
from sewa_cli.output.safetensors import sha256_of
from sewa_cli.remote.scratch import local_path
from sewa_cli.report.recipe import Rebuildable, RecipeSource


@dataclass(frozen=True)
class Places:
    """The folders where a report's files are looked for or, if it is given, the one root.

    Never elsewhere: a report may come from a stranger.
    """

    folders: tuple[Path, ...]
    root: Path | None = None

    @classmethod
    def of(cls, report: Rebuildable, read_from: Path, root: Path | None = None) -> Places:
        """Look next to the report; where its run is, if both were moved; where the report says."""
        if root is not None and not (is_there(root) and root.is_dir()):
            raise CheckpointError(f"--root: {root}: no such folder")
        folder = described_folder(report, read_from)
        beside = read_from.parent if folder is None else folder.parent
        working = Path(report.recipe.working_directory)
        return cls((beside, *_moved(working, report.output, beside), working), root)

    def find(self, recorded: str) -> Path:
        """The first that is there; under a root, by as many of its last components as are there."""
        if self.root is None and url_of(recorded) is not None:
            return local_path(Path(recorded))
        if self.root is None:  # an absolute path stays itself
            places = [folder / recorded for folder in self.folders]
            hint = "next to the report or where it says; name its folder with --root DIR"
        else:
            path = PurePath(recorded)
            parts = path.relative_to(path.anchor).parts
            ups = [i for i, part in enumerate(parts) if part == ".."]
            first = ups[-1] + 1 if ups else 0
            places = [self.root.joinpath(*parts[i:]) for i in range(first, len(parts))]
            hint = f"under {self.root}"
        found = next((place for place in places if is_there(place)), None)
        if found is None:
            raise CheckpointError(f"{recorded}: not found {hint}")
        self.check_inside(found)
        return found

    def check_inside(self, path: Path) -> None:
        if self.root is not None:
            check_inside(path, self.root)


def described_folder(report: Rebuildable, read_from: Path) -> Path | None:
    """Return the folder that a report describes from inside."""
    in_folder = any(PurePath(file.path).parts[1:] for file in report.files or ())
    if read_from.name != REPORT or not in_folder:
        return None
    return read_from.parent if read_from.parent.name else real(read_from.parent)


def _moved(working: Path, output: str | None, beside: Path) -> tuple[Path, ...]:
    """Find what was the working directory, as far above the report as it was above the output."""
    try:
        depth = len((working / (output or "")).relative_to(working).parts) - 1
    except ValueError:
        return ()
    above = real(beside).parents
    return (above[depth - 1],) if 0 < depth <= len(above) else ()


def is_there(path: Path) -> bool:
    """Unlike `Path.exists`, also for what no file can be called."""
    return os.path.exists(path)  # noqa: PTH110


def check_inside(path: Path, folder: Path) -> None:
    """Refuse what is a link out of a folder, or stands behind one."""
    if not real(path).is_relative_to(real(folder)):
        raise CheckpointError(f"{path}: leads out of {folder}; put the file itself there")


def check_source(path: Path, source: RecipeSource, places: Places) -> dict[Path, Stamp]:
    """Refuse a checkpoint that is not what it was; returns the stamps of the files it is made of.

    They are from before the hash, so that what is read later can be shown to be what was hashed.
    """
    if not path.is_dir():
        with reading(path):
            check_regular(path)
    files = files_of(path)
    if files == (path,) and path.is_dir():
        raise CheckpointError(f"{path}: has changed since the report: its weights are missing")
    if source.since is not None:
        earlier = path.parent / PurePath(source.since).name
        if not is_there(earlier):
            raise CheckpointError(
                f"{earlier}: is missing; {path.name} has no interval mean without it"
            )
        files = (path, earlier)
    for file in files:
        places.check_inside(file)
    return check_content(path, files, source.size, source.sha256)


def check_content(path: Path, files: Sequence[Path], size: int, sha256: str) -> dict[Path, Stamp]:
    stamps = {file: stamp_of(file) for file in files}
    changed = f"{path}: has changed since the report: expected"
    if (found := sum(stamp.size for stamp in stamps.values())) != size:
        raise CheckpointError(f"{changed} {size} bytes, found {found}")
    if (digest := sha256_of(files, path)) != sha256:
        raise CheckpointError(f"{changed} SHA-256 {sha256[:12]}…, found {digest[:12]}…")
    return stamps
