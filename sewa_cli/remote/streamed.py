"""Read safetensors files that do not fit into the scratch folder together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sewa_cli import mirrors
from sewa_cli.checkpoints.checkpoint import Checkpoint, Reader, TensorInfo
from sewa_cli.checkpoints.safetensors import SUFFIX
from sewa_cli.dtypes import DTYPES, RESERVED, Array, as_tensor
from sewa_cli.errors import CheckpointError
from sewa_cli.files import parse_json
from sewa_cli.remote.scratch import ScratchFolder
from sewa_cli.text import size

if TYPE_CHECKING:
    from torch import Tensor


class _Streamed(Reader):
    """Copies what is asked for out of blocks of the files."""

    def __init__(
        self, scratch: ScratchFolder, files: Sequence[Path], tensors: dict[str, TensorInfo]
    ):
        self._scratch, self._tensors = scratch, tensors
        self._starts: dict[str, tuple[Path, int]] = {}
        for file in files:
            with file.open("rb") as opened:  # its header is there
                (length,) = struct.unpack("<Q", opened.read(8))
                header = parse_json(opened.read(length))
            for name in header.keys() - {RESERVED}:
                self._starts[name] = file, 8 + length + header[name]["data_offsets"][0]

    def read(self, name: str) -> Tensor:
        return as_tensor(self.read_array(name))

    def read_array(self, name: str) -> Array:
        shape = self._tensors[name].shape
        return self._numbers(name, slice(0, int(np.prod(shape)))).reshape(shape)

    def runs(self, name: str, part: slice | None) -> list[tuple[int, Tensor]] | None:
        return None if part is None else [(part.start, as_tensor(self._numbers(name, part)))]

    def begin(self, name: str, part: slice) -> None:
        self._scratch.begin(*self._bytes(name, part))

    def _bytes(self, name: str, part: slice) -> tuple[Path, int, int]:
        file, start = self._starts[name]
        width = DTYPES[self._tensors[name].dtype].itemsize
        return file, start + part.start * width, start + part.stop * width

    def _numbers(self, name: str, part: slice) -> Array:
        parts = list(self._scratch.read(*self._bytes(name, part)))
        whole = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
        return whole.view(DTYPES[self._tensors[name].dtype])


def settle(checkpoints: list[Checkpoint], once: bool = False) -> list[Checkpoint]:
    """Return the checkpoints so that they can be read one by one or together, within the scratch.

    Where their files fit, they will be fetched whole. Else they are streamed, which only
    safetensors files can be; so too where they are read `once`, as that begins before all are here.
    """
    for scratch in mirrors.OPEN.values():
        if isinstance(scratch, ScratchFolder):
            checkpoints = _settle(checkpoints, scratch, once)
    return checkpoints


def _settle(checkpoints: list[Checkpoint], scratch: ScratchFolder, once: bool) -> list[Checkpoint]:
    own = [c for c in checkpoints if mirrors.mirror_of(c.path) is scratch]
    files = [f for f in dict.fromkeys(f for c in own for f in c.files) if scratch.holds(f)]
    whole = [file for file in files if not scratch.can_stream(file)]
    if whole == files or (scratch.fits(files) and not once):
        whole = files
    if not scratch.fits(whole):
        raise CheckpointError(
            f"--scratch-size: {size(scratch.most)} is too little for {mirrors.named(whole[0])} and "
            f"{len(whole) - 1} more, which are read whole; allow more, or name fewer checkpoints"
        )
    scratch.expect(whole)
    if whole == files:
        return checkpoints
    window = scratch.divide(len(files))
    return [
        replace(
            c,
            open=partial(_Streamed, scratch, _weights(c), c.tensors),
            mapped=False,
            window=window,
            _reader=None,
        )
        if c in own and any(map(scratch.can_stream, _weights(c)))
        else c
        for c in checkpoints
    ]


def _weights(checkpoint: Checkpoint) -> list[Path]:
    return [file for file in checkpoint.files if file.suffix == SUFFIX]
