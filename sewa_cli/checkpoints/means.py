"""Interval means: checkpoints that are the mean of the weights over the steps since the last save.

They stand next to the snapshots, which have the weights at the saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Final, Literal

from sewa_cli.checkpoints.checkpoint import Checkpoint
from sewa_cli.checkpoints.pytorch import RunningMeans
from sewa_cli.errors import ConfigError

Source = Literal["snapshots", "means", "both"]
FROM: Final = "sewa_mean_from"  # metadata key: the first step that a mean is of
SUFFIX: Final = ".mean.safetensors"  # step-100.mean.safetensors stands next to step-100.safetensors
IN_FOLDER: Final = "mean.safetensors"  # in a folder that is a checkpoint


def short_name(path: PurePath) -> str:
    """Return a checkpoint's name, with its folder's if all in the run have the same."""
    return f"{path.parent.name}/{path.name}" if path.name == IN_FOLDER else path.name


def is_mean(path: Path) -> bool:
    return path.name == IN_FOLDER or path.name.endswith(SUFFIX)


def snapshot_of(mean: Path) -> Path:
    """Return where the snapshot of the same step is, by the names."""
    if mean.name == IN_FOLDER:
        return mean.parent
    return mean.with_name(mean.name.removesuffix(SUFFIX) + ".safetensors")


def means_of(snapshots: Sequence[Path]) -> list[Path]:
    """Return the files of means next to snapshots, and of snapshots that were removed."""
    known = set(snapshots)
    inside = [path / IN_FOLDER for path in snapshots if (path / IN_FOLDER).is_file()]
    folders = sorted({path.parent for path in snapshots if not path.is_dir()})
    beside = [mean for folder in folders for mean in sorted(folder.glob(f"*{SUFFIX}"))]
    beside = [m for m in beside if snapshot_of(m) in known or not snapshot_of(m).exists()]
    return inside + [mean for mean in beside if mean not in known]


def with_running(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Add the interval means that follow from icefall's running means.

    The first file's reaches back to step 0. It is no interval like the others if that is far: then
    older files were removed.
    """
    files = sorted((c for c in checkpoints if c.averaged), key=lambda c: c.averaged or 0)
    pairs = zip([None, *files], files, strict=False)
    found = [mean for pair in pairs if (mean := mean_since(*pair)) is not None]
    counts = [mean.mean_steps or 0 for mean in found]
    if len(counts) == 1 or (counts and counts[0] > 2 * counts[1]):
        found = found[1:]
    return [*checkpoints, *found]


def mean_since(before: Checkpoint | None, after: Checkpoint) -> Checkpoint | None:
    """Return the mean over the steps after `before`; None: there are none, or none are known."""
    pair = [after] if before is None else [after, before]
    if None in {c.averaged for c in pair} or len({c.path.parent for c in pair}) > 1:
        return None
    counts = [c.averaged or 0 for c in pair]
    if (steps := counts[0] - sum(counts[1:])) < 1:
        return None
    places = [(c.path, n) for c, n in zip(pair, counts, strict=True)]
    return replace(
        after,
        mean_steps=steps,
        files=tuple(c.path for c in pair),
        size=sum(c.size for c in pair),
        stamps={path: stamp for c in pair for path, stamp in c.stamps.items()},
        mapped=False,
        open=partial(RunningMeans, after.tensors, *places),
        _reader=None,
    )


def choose(
    checkpoints: Sequence[Checkpoint], source: Source | None, say: Callable[[str], None]
) -> tuple[list[Checkpoint], Source]:
    """Return the checkpoints of one source, and which that is.

    None: means if each save has one, else snapshots.
    """
    means = [c for c in checkpoints if c.mean_steps is not None]
    snapshots = [c for c in checkpoints if c.mean_steps is None]
    if not means:
        if source in ("means", "both"):
            raise ConfigError(
                f"--from {source}: there are no interval means; save them with means=True "
                "(docs/how-to/saving.md), or use --from snapshots"
            )
        return snapshots, "snapshots"
    steps = [c.step for c in means]
    # icefall's first file only begins an interval
    own = [c for c in snapshots if c.averaged is None or c.step != snapshots[0].step]
    lacking = [c for c in own if c.step not in steps]
    if source is None:
        source = "snapshots" if lacking else "means"
        counts = sorted({c.mean_steps or 0 for c in means})
        of = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        say(
            f"using {len(snapshots)} snapshots, as {lacking[0].path.name} has no interval mean; "
            "--from means leaves it out"
            if lacking
            else f"using {len(means)} interval means, of {of} steps each; --from snapshots uses "
            "the weights at the saves"
        )
    if source == "snapshots" and not snapshots:
        raise ConfigError("--from snapshots: there are only interval means; use --from means")
    return {"means": means, "snapshots": snapshots, "both": list(checkpoints)}[source], source


def counts_of(checkpoints: Sequence[Checkpoint]) -> list[int]:
    """Return the number of steps that each is the mean of; a snapshot counts as its mean."""
    counts = {c.step: c.mean_steps for c in checkpoints if c.mean_steps is not None}
    return [counts.get(c.step, max(counts.values(), default=1)) for c in checkpoints]
