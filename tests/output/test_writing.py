"""Packing: the streamed file is what safetensors would have written, whole or not there at all."""

import io
import json
import os
import stat
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers.tensors import WORDS, some_tensor
from hypothesis import given
from hypothesis import strategies as st

from sewa_cli.dtypes import as_array
from sewa_cli.errors import OutputError
from sewa_cli.output.average import Average
from sewa_cli.output.destination import free_name
from sewa_cli.output.safetensors import write_safetensors
from sewa_cli.publish import check_free


def streamed(tensors, metadata=None):
    entries = {
        name: (WORDS[t.dtype], tuple(t.shape), t.numel() * t.itemsize)
        for name, t in tensors.items()
    }
    file = io.BytesIO()
    write_safetensors(file, entries, whole(tensors.__getitem__), metadata or {})
    return file.getvalue()


def whole(tensor):
    """Every tensor in one piece."""
    return lambda names: ((name, as_array(tensor(name))) for name in names)


def raw(tensor):
    """Compared as bytes, since a NaN does not equal itself."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors_by_name = st.dictionaries(
    names,
    st.builds(some_tensor, st.sampled_from(list(WORDS)), shapes, st.integers(0, 2**31)),
    min_size=1,  # the library cannot read its own empty file
    max_size=6,
)


@given(tensors=tensors_by_name, metadata=st.dictionaries(names, names, max_size=3))
def test_the_library_reads_what_we_stream_as_it_reads_its_own(tensors, metadata):
    ours = safetensors.torch.load(streamed(tensors, metadata))
    theirs = safetensors.torch.load(safetensors.torch.save(tensors, metadata))
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype
        assert ours[name].shape == expected.shape
        assert raw(ours[name]) == raw(expected) == raw(tensors[name])


@given(tensors=tensors_by_name)
def test_every_tensor_is_aligned_to_its_elements(tensors):
    header, start = header_of(streamed(tensors))
    for name, tensor in tensors.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.itemsize == 0, name


def test_the_same_tensors_give_the_same_bytes_whatever_their_order():
    one = {"b": torch.ones(2), "a": torch.zeros(2).bfloat16(), "c": torch.tensor(3)}
    two = dict(reversed(one.items()))
    assert streamed(one, {"x": "1", "y": "2"}) == streamed(two, {"y": "2", "x": "1"})


def node(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
        return
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except OSError:
        pytest.skip("only root makes devices")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("option", ["-o", "--report"])
def test_force_replaces_no_device_and_no_pipe(run_dir, sewa, monkeypatch, kind, option):
    monkeypatch.setattr(Average, "write", None)  # calling it would be an error: too late
    node(run_dir / "special", kind)
    mode = (run_dir / "special").stat().st_mode
    for command in (["average", "ckpts"], ["select"]):
        for force in ([], ["--force"]):
            ended = sewa(*command, option, "special", *force)
            assert ended.code == 3, ended.err
            assert "special: is not a regular file; " in ended.error
            assert "--force" not in ended.error
            assert (run_dir / "special").stat().st_mode == mode


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no /dev")
@pytest.mark.parametrize("name", ["/dev/null", "/dev/stdout", "/dev/out", "/dev/fd/1"])
@pytest.mark.parametrize("force", [False, True])
def test_nothing_in_dev_is_replaced_even_if_it_leads_to_a_file(name, force):
    """Under pytest standard output is a file, and so is what /dev/stdout leads to."""
    with pytest.raises(OutputError, match=f"{name}: is not a regular file; .*use -o - for"):
        check_free(Path(name), force)


@pytest.mark.parametrize(
    ("taken", "free"),
    [
        (["averaged.report.json"], "averaged-2.safetensors"),
        (["averaged.safetensors", "averaged-2.report.json"], "averaged-3.safetensors"),
    ],
)
def test_the_first_free_name_has_a_free_report_too(tmp_path, taken, free):
    for name in taken:
        (tmp_path / name).touch()
    assert free_name(tmp_path / "averaged.safetensors") == tmp_path / free


def test_a_second_run_without_a_named_output_takes_the_next_name(run_dir, sewa):
    assert sewa("select").code == 0
    first = (run_dir / "averaged.safetensors").read_bytes()
    ended = sewa("select", "--seed", 5)
    assert ended.code == 0
    assert "wrote averaged-2.safetensors" in ended.err
    assert (run_dir / "averaged-2.report.json").is_file()
    assert (run_dir / "averaged.safetensors").read_bytes() == first
    assert sewa("select", "--force").code == 0
    assert not (run_dir / "averaged-3.safetensors").exists()
