"""`sewa inspect`: what is in a folder of checkpoints, and how the run moved. No task is needed.

Every tensor is read twice: once by checkpoint for NaN, Inf and a hash, as a checkpoint with either
takes no part in the mean; once by tensor for the geometry, in blocks of columns.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Final

import torch

from sewa_cli.candidates import open_candidates, warn_of_no_steps
from sewa_cli.checkpoints import Checkpoint, Reads, paths_of
from sewa_cli.config import Config
from sewa_cli.errors import OutputError
from sewa_cli.events import Events
from sewa_cli.files import real
from sewa_cli.report.kinds import Gap, InspectedFile, Inspection
from sewa_cli.report.shared import heading
from sewa_cli.text import few
from sewa_cli.trajectory.geometry import Geometry, Shape, explain, is_finite, motion_of, times_of

BLOCK_BYTES: Final = 2**25  # of all checkpoints' columns together, as float64


def run_inspect(
    config: Config, events: Events | None = None, picture: Path | None = None
) -> Inspection:
    """Look at the checkpoints that `config` names. `picture`: where the caller will draw it."""
    events = events or Events()
    reads = Reads()
    candidates, found, config = open_candidates(config, events, reads)
    inputs = {real(path) for path in paths_of(found)}
    if picture is not None and real(picture) in inputs:
        raise OutputError(
            f"{picture}: is one of the inputs, never overwritten; choose another name"
        )
    warn_of_no_steps(candidates, events)
    scans = []
    for done, checkpoint in enumerate(candidates, 1):
        scans.append(_scan(checkpoint))
        events.progress("reading", done, len(candidates))
    finite = [i for i, (_, broken) in enumerate(scans) if not broken]
    for i, (_, broken) in enumerate(scans):
        if broken:
            reason = f"{few(broken, 2)} {'holds' if len(broken) == 1 else 'hold'} NaN or Inf"
            events.warn(f"{candidates[i].path}: takes no part in distances: {reason}")

    tensors = candidates[0].tensors
    dtypes: Counter[str] = Counter()
    for info in tensors.values():
        dtypes[info.dtype] += prod(info.shape)
    parameters = sum(prod(info.shape) for info in tensors.values() if info.is_float)
    motion, word, shape = None, "unknown", None
    explanation = "no verdict: there are no floating-point tensors"
    if finite and parameters:
        used = [candidates[i] for i in finite]
        shape = _measure(used, events)
        motion, word, explanation = motion_of(shape), shape.verdict, explain(shape)
    elif parameters:
        explanation = "no verdict: every checkpoint holds NaN or Inf"
    spacing, gaps = _gaps(sorted({c.step for c in candidates if c.step is not None}))
    return Inspection(
        **heading(config, events),
        checkpoints=_rows(candidates, scans, finite, shape),
        spacing=spacing,
        gaps=gaps,
        tensors=len(tensors),
        parameters=parameters,
        dtypes=dict(sorted(dtypes.items())),
        motion=motion,
        verdict=word,
        explanation=explanation,
        bytes_read=reads.bytes,
    )


def _scan(checkpoint: Checkpoint) -> tuple[bytes, list[str]]:
    """A hash of all tensors' bytes, and the names of those that hold NaN or Inf."""
    content = hashlib.sha256()
    broken = []
    for name, info in sorted(checkpoint.tensors.items()):
        tensor = checkpoint.read(name)
        content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if info.is_float and not is_finite(tensor):
            broken.append(name)
    checkpoint.close()
    return content.digest(), broken


def _measure(used: Sequence[Checkpoint], events: Events) -> Shape:
    """Tensor by tensor; of each, all checkpoints' columns a to b, for as many as fit a block.

    `read` gives views of memory-mapped files, so only the block is ever copied.
    """
    geometry = Geometry(times_of([checkpoint.step for checkpoint in used]))
    columns = max(1, BLOCK_BYTES // (8 * len(used)))
    names = [name for name, info in used[0].tensors.items() if info.is_float]
    for done, name in enumerate(names, 1):
        views = [checkpoint.read(name).reshape(-1) for checkpoint in used]
        size = views[0].numel()
        for start in range(0, size, columns):
            block = torch.empty(len(used), min(columns, size - start), dtype=torch.float64)
            for row, view in zip(block, views, strict=True):
                row.copy_(view[start : start + columns])
            geometry.add(block)
        events.progress("measuring", done, len(names))
    for checkpoint in used:
        checkpoint.close()
    return geometry.measure()


def _gaps(steps: Sequence[int]) -> tuple[int | None, list[Gap]]:
    """The spacing that more than half of the neighbours have, and where it is another one."""
    waits = [after - before for before, after in pairwise(steps)]
    if not waits:
        return None, []
    usual, count = Counter(waits).most_common(1)[0]
    if 2 * count <= len(waits):
        return None, []
    return usual, [
        Gap(
            after=before,
            before=after,
            missing=None if (after - before) % usual else (after - before) // usual - 1,
        )
        for before, after in pairwise(steps)
        if after - before != usual
    ]


def _rows(
    candidates: Sequence[Checkpoint],
    scans: Sequence[tuple[bytes, list[str]]],
    finite: Sequence[int],
    shape: Shape | None,
) -> list[InspectedFile]:
    first: dict[bytes, int] = {}
    places = {index: place for place, index in enumerate(finite)} if shape else {}
    rows = []
    for i, (checkpoint, (content, broken)) in enumerate(zip(candidates, scans, strict=True)):
        earliest = first.setdefault(content, i)
        lengths: dict[str, float | None] = {}
        if shape and (place := places.get(i)) is not None:
            lengths = {
                "to_last": shape.to_last[place],
                "to_mean": shape.to_mean[place],
                "length": shape.lengths[place - 1] if place else None,
                "cosine": shape.cosines[place - 1] if 0 < place < len(finite) - 1 else None,
            }
        rows.append(
            InspectedFile(
                path=checkpoint.name,
                step=checkpoint.step,
                size=checkpoint.size,
                logged=checkpoint.metrics,
                nonfinite=broken,
                same_as=earliest if earliest != i else None,
                **lengths,
            )
        )
    return rows
