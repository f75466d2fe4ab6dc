"""Views of mapped files: what the library reads, bit for bit; any other bytes are refused."""

import json
import os
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.tensors import WORDS, some_tensor
from hypothesis import given
from hypothesis import strategies as st

from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.checkpoints.safetensors import views
from sewa_cli.dtypes import as_array, as_tensor
from sewa_cli.errors import CheckpointError


def of_every_dtype():
    shapes = [(), (0,), (3, 0, 2), (1,), (3, 5)]
    return {
        f"{word} {shape}": some_tensor(dtype, shape, seed=n)
        for n, (dtype, word) in enumerate(WORDS.items())
        for shape in shapes
    }


def test_a_checkpoint_gives_the_same_bytes_to_numpy_and_to_torch(tmp_path):
    tensors, path = of_every_dtype(), tmp_path / "all.safetensors"
    safetensors.torch.save_file(tensors, path)
    reads = Reads()
    checkpoint = open_checkpoint(path, reads)
    for name, tensor in tensors.items():
        before = reads.bytes
        array = checkpoint.read_array(name)
        assert reads.bytes - before == tensor.numel() * tensor.element_size() == array.nbytes
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == as_array(checkpoint.read(name)).tobytes()
        assert as_tensor(array.copy()).dtype == tensor.dtype
        assert not array.flags.writeable


def file_of(header, body):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_a_tensor_at_an_odd_address_is_read_all_the_same():
    numbers = np.arange(3, dtype=np.float32)
    header = {"w": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]}, "__metadata__": {}}
    for extra in range(4):
        header["__metadata__"] = {"x": "x" * extra}
        found = views(file_of(header, b"x" + numbers.tobytes()))
        assert list(found) == ["w"]
        assert np.add(found["w"], found["w"]).tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        file_of([], b""),
        file_of({"w": 1}, b""),
        file_of({"w": {"dtype": "F32", "shape": [1]}}, b"1234"),
        file_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}, b"1234"),
        file_of({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        file_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"),
        file_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"1234"),
        file_of({"w": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        file_of({"w": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, b"1234"),
        file_of({"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        views(data)


@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_damaged_bytes_are_read_or_refused_and_nothing_else(at, damage):
    whole = safetensors.torch.save({"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16()})
    try:
        found = views(whole[:at] + damage + whole[at + len(damage) :])
    except ValueError:
        return
    assert sum(array.nbytes for array in found.values()) <= len(whole)


def test_a_file_that_changes_between_opening_and_reading_is_told(tmp_path):
    path, other = tmp_path / "one.safetensors", tmp_path / "other"
    safetensors.torch.save_file({"w": torch.ones(3)}, path)
    for tensors in ({"v": torch.ones(3)}, {"w": torch.ones(4)}, {"w": torch.ones(3).half()}):
        checkpoint = open_checkpoint(path, Reads())
        safetensors.torch.save_file(tensors, other)
        kept = path.read_bytes()
        os.replace(other, path)
        with pytest.raises(CheckpointError, match=r"one\.safetensors: w: has changed since"):
            checkpoint.read_array("w")
        path.write_bytes(kept)
    checkpoint = open_checkpoint(path, Reads())
    path.write_bytes(b"no longer")
    with pytest.raises(CheckpointError, match=r"one\.safetensors: has changed since it was opened"):
        checkpoint.read_array("w")
