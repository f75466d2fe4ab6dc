"""Checkpoints made to run code, to crash or to exhaust the machine: one line, and nothing runs."""

import io
import os
import pickle
import tarfile
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from helpers.saved import save_distributed
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.checkpoints.state import _few
from sewa_cli.errors import CheckpointError

SURROGATE = "\ud800"
MODULE = "torch.distributed.checkpoint.metadata"


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "it-ran"


@pytest.fixture
def folder(tmp_path):
    """The first of two; the second is sound."""
    for step in (2, 1):
        content = {
            "w": torch.arange(12.0).reshape(4, 3) * step,
            "v": torch.ones(4, 3),
            "step": step,
        }
        where = save_distributed(content, tmp_path / "run" / f"step-{step}")
    return where


def check_refused(sewa, run, mark, words=""):
    for command in (["inspect", run], ["average", run, "-o", run.parent / "out.safetensors"]):
        ended = sewa(*command)
        assert not mark.exists()
        assert ended.code == 3, ended.err
        assert words in ended.error
        assert "Traceback" not in ended.err
        assert "a bug in sewa" not in ended.err
        assert len(ended.err.strip().splitlines()) == 1
    assert not (run.parent / "out.safetensors").exists()


def change(folder, edit):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def named(module, name):
    return f"c{module}\n{name}\n".encode()


# ---- .metadata -------------------------------------------------------------------------------

TARGETS = {"class": named(MODULE, "TensorStorageMetadata"), "dtype": named("torch", "float32")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("slots", [True, False])
def test_metadata_cannot_change_a_class_or_a_function(folder, sewa, mark, target, slots):
    before = {c: dict(vars(c)) for c in (TensorStorageMetadata, MetadataIndex)}
    values = b"}" + text("__new__") + named("collections", "OrderedDict") + b"s"
    values += text("__setstate__") + named("torch.serialization", "_get_layout") + b"s"
    state = b"N" + values + b"\x86" if slots else values
    sound = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(b"\x80\x04" + TARGETS[target] + state + b"b0" + sound)
    assert sewa("inspect", folder.parent).code in (0, 3)
    assert not mark.exists()
    assert {c: dict(vars(c)) for c in before} == before


@pytest.mark.parametrize(
    "wanted", ["posix.system", "builtins.eval", "torch.load", f"{MODULE}.os.system"]
)
def test_metadata_cannot_name_anything_else(folder, sewa, mark, wanted):
    module, _, name = wanted.rpartition(".")
    if "metadata.os" in wanted:  # a dotted name, which protocol 4 walks along
        module, name = MODULE, "os.system"
    call = text(module) + text(name) + b"\x93" + text(f"touch {mark}") + b"\x85R."
    (folder / ".metadata").write_bytes(b"\x80\x04" + call)
    check_refused(sewa, folder.parent, mark, f"needs {wanted} to be loaded, which could run code")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04]" + b"\x85" * 300_000 + b".",  # as deep as can be
        b"\x80\x04Nr\xff\xff\xff\xff.",  # a memo of 4 billion places
        b"\x80\x05\x96" + b"\xff" * 6 + b"\x00\x00.",  # a bytearray of 256 TB
        b"\x80\x04(]]e.",
        b"\x80\x04]q\x00h\x00a.",  # a list in itself
        b"\x80\x04" + named(MODULE, "Metadata") + b")\x81.",
        b"\x80\x04N.",
        b"(i" + MODULE.encode() + b"\nMetadata\n.",
    ],
)
def test_metadata_that_would_exhaust_or_crash_are_one_line(folder, sewa, mark, content):
    (folder / ".metadata").write_bytes(content)
    check_refused(sewa, folder.parent, mark, "step-1")


def places(metadata):
    return metadata.storage_data[MetadataIndex("w", (0, 0))]


def entry(metadata):
    return metadata.state_dict_metadata["w"]


def set_chunks(metadata, *boxes, size=(4, 3)):
    """Chunks of `w`, all of them at the place of the whole."""
    place = places(metadata)
    entry(metadata).size = torch.Size(size)
    entry(metadata).chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes]
    for offsets, _ in boxes:
        metadata.storage_data[MetadataIndex("w", offsets)] = place


FAULTS = {
    "negative offset": lambda m: setattr(places(m), "offset", -5),
    "beyond the end": lambda m: setattr(places(m), "offset", 2**40),
    "upwards": lambda m: setattr(places(m), "relative_path", "../step-2/__0_0.distcp"),
    "a link": lambda m: setattr(places(m), "relative_path", "link"),
    "a pipe": lambda m: setattr(places(m), "relative_path", "pipe"),
    "a huge chunk": lambda m: set_chunks(m, ((0, 0), (2**40, 2**20)), size=(2**40, 2**20)),
    "two of one name": lambda m: m.planner_data.update({"v": ("w",)}),
    "a name that is not UTF-8": lambda m: m.planner_data.update({"v": (SURROGATE,)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_with_impossible_values_are_one_line(folder, sewa, mark, fault):
    (folder / "link").symlink_to(folder.parent / "step-2" / "__0_0.distcp")
    os.mkfifo(folder / "pipe")
    change(folder, FAULTS[fault])
    check_refused(sewa, folder.parent, mark, "step-1")


# ---- .distcp ---------------------------------------------------------------------------------


def put(folder, data):
    """Other bytes where `w` was, long enough for all that is expected there."""

    def move(metadata):
        place = places(metadata)
        file = folder / place.relative_path
        place.offset, place.length = file.stat().st_size, len(data)
        file.write_bytes(file.read_bytes() + data)

    change(folder, move)


def saved(value, zipped=True):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


PAYLOADS = {
    "zip": lambda mark: saved(Evil(mark)),
    "legacy": lambda mark: saved(Evil(mark), zipped=False),
    "other shape": lambda _: saved(torch.ones(3, 4)),
    "no tensor": lambda _: saved([1, 2, 3]),
    "sparse": lambda _: saved(torch.ones(4, 3).to_sparse()),
    "zeros": lambda _: bytes(1000),
    "packed": lambda _: packed(saved(torch.ones(4, 3))),
}


def packed(data):
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


def two_lists(data):
    """PyTorch goes by the first list of members, Python by the second, where none is compressed."""
    end = data.rindex(b"PK\5\6")
    members = data[int.from_bytes(data[end + 16 : end + 20], "little") : end]
    return data[:end] + members.replace(b"\0\0\x08\0", b"\0\0\0\0") + data[end:]


def with_gap(data):
    """Python cannot find the list of members, PyTorch can."""
    end = data.rindex(b"PK\5\6")
    return data[:end] + bytes(64) + data[end:]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_bytes_of_a_tensor_can_only_be_that_tensor(folder, sewa, mark, payload):
    put(folder, PAYLOADS[payload](mark))
    ended = sewa("average", folder.parent, "-o", folder.parent.parent / "out.safetensors")
    assert not mark.exists()
    assert ended.code == 3, ended.err
    assert "step-1: w: cannot be read" in ended.error
    assert sewa("inspect", folder.parent).code in (0, 3)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["step", "w"])
def test_bytes_entries_are_not_unpickled(folder, sewa, mark, name, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)  # `average` writes into the working directory
    put(folder, saved(Evil(mark)))

    def to_bytes(metadata):
        place = metadata.storage_data.pop(MetadataIndex("w", (0, 0)))
        del metadata.state_dict_metadata["w"]
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = place

    change(folder, to_bytes)
    for command in ("inspect", "average"):
        sewa(command, folder)
        assert not mark.exists()
    assert list(open_checkpoint(folder, Reads()).tensors) == ["v"]


WHOLE = torch.arange(12.0).reshape(4, 3)


def split(folder, *boxes):
    """`w` is WHOLE, saved in these chunks."""

    def into_chunks(metadata):
        place = places(metadata)
        file = folder / place.relative_path
        entry(metadata).chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes]
        for (i, j), (rows, columns) in boxes:
            part = saved(WHOLE[i : i + rows, j : j + columns].clone())
            end = file.stat().st_size
            metadata.storage_data[MetadataIndex("w", (i, j))] = type(place)(
                place.relative_path, end, len(part)
            )
            file.write_bytes(file.read_bytes() + part)

    change(folder, into_chunks)


def test_chunks_are_put_together_and_mapped_if_they_are_whole_rows(folder):
    rows, columns = ((0, 0), (3, 3)), [((3, 0), (1, 1)), ((3, 1), (1, 2))]
    for boxes, starts in (([((3, 0), (1, 3)), rows], [0, 9]), ([rows, *columns], None)):
        split(folder, *boxes)
        found = open_checkpoint(folder, Reads())
        runs = found.runs("w")
        assert (runs and [start for start, _ in runs]) == starts
        if runs:
            assert torch.equal(torch.cat([view for _, view in runs]), WHOLE.reshape(-1))
        assert torch.equal(found.read("w"), WHOLE)
    split(folder, ((0, 0), (2, 3)), ((1, 0), (2, 3)))
    assert open_checkpoint(folder, Reads()).runs("w") is None
    with pytest.raises(CheckpointError, match="w: cannot be read: has chunks that overlap"):
        open_checkpoint(folder, Reads()).read("w")


# ---- .pt -------------------------------------------------------------------------------------


def archive(*members):
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as new:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in members:
            new.writestr(name, data)
    return file.getvalue()


def build(target, state):
    """A file of `{"w": …, "x": target after BUILD}`."""
    return archive(("a/data.pkl", b"\x80\x02}" + text("x") + target + state + b"bs."),
                   ("a/version", b"3\n"))  # fmt: skip


SLOTS = b"N}" + text("__setstate__") + named("collections", "OrderedDict") + b"s\x86"
FILES = {
    "class": lambda _: build(named("torch", "Tensor"), SLOTS),
    "stand-in": lambda _: build(named("argparse", "Namespace"), SLOTS),
    "function": lambda _: build(named("torch._utils", "_rebuild_tensor_v2"), SLOTS),
    "packed": lambda _: packed(saved({"w": torch.ones(1000)})),
    "packed, two lists": lambda _: two_lists(packed(saved({"w": torch.ones(1000)}))),
    "packed, a gap": lambda _: with_gap(packed(saved({"w": torch.ones(1000)}))),
    "a name that is not UTF-8": lambda _: saved({"w": torch.ones(3), SURROGATE: torch.ones(3)}),
    "encrypted": lambda _: archive(("a/data.pkl", b"x"), ("a/version", b"3\n")).replace(
        b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"
    ),
    "repeated": lambda _: saved({"w": torch.ones(1).expand(2**40)}),
    "deep stand-ins": lambda _: build(
        named("argparse", "Namespace") * 5_000 + b"N" + b"\x85R" * 5_000, b"N"
    ),
    "in a stand-in": lambda mark: saved({"w": torch.ones(3), "a": Namespace(b=[Evil(mark)])}),
    "load_from_bytes": lambda mark: archive(
        (
            "a/data.pkl",
            b"\x80\x02" + named("torch.storage", "_load_from_bytes") + text(f"{mark}") + b"\x85R.",
        ),
        ("a/version", b"3\n"),
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_pytorch_file_that_wants_more_is_one_line(tmp_path, sewa, mark, kind):
    run = tmp_path / "run"
    run.mkdir()
    torch.save({"w": torch.ones(3)}, run / "step-2.pt")
    (run / "step-1.pt").write_bytes(FILES[kind](mark))
    check_refused(sewa, run, mark, "step-1.pt: ")


def nemo(data, packed=True, **attributes):
    """An archive whose member of weights is these bytes, or says so."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz" if packed else "w:") as tar:
        entry = tarfile.TarInfo("model_weights.ckpt")
        entry.size = len(data)
        for name, value in attributes.items():
            setattr(entry, name, value)
        tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def overlapping(count, weights):
    """An archive that lists a member many times."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        new.writestr("policy.pth", weights)
        new.writestr("data", bytes(1000))
        new.filelist += [new.getinfo("data")] * count
    return file.getvalue()


ARCHIVES = {
    "malicious.nemo": lambda mark: nemo(saved(Evil(mark))),
    "malicious.zip": lambda mark: archive(("policy.pth", saved({"w": Evil(mark)}))),
    "bomb.nemo": lambda _: nemo(saved({"w": torch.zeros(10_000_000)})),
    "packed.zip": lambda _: packed(archive(("policy.pth", saved({"w": torch.zeros(9)})))),
    "link.nemo": lambda _: nemo(b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "cut.nemo": lambda _: nemo(saved({"w": torch.ones(3)}), packed=False)[:1500],
    "sparse.nemo": lambda _: (
        nemo(b"", packed=False, name="large", type=tarfile.GNUTYPE_SPARSE)[:512]
        + nemo(saved({"w": torch.ones(3)}), packed=False)
    ),
    "overlapping.zip": lambda _: overlapping(1000, saved({"w": torch.ones(3)})),
    "cut.zip": lambda _: archive(("policy.pth", saved({"w": torch.ones(3)})))[:-9],
    "none.nemo": lambda _: b"",
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_one_line_and_nothing_in_it_runs(tmp_path, sewa, mark, name):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_bytes(ARCHIVES[name](mark))
    check_refused(sewa, run, mark, name)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt"])
@pytest.mark.parametrize("way", ["zip", "legacy", "bare pickle"])
def test_a_malicious_pickle_is_refused_and_nothing_in_it_runs(
    tmp_path, monkeypatch, sewa, mark, suffix, way
):
    monkeypatch.chdir(tmp_path)
    content = {"state_dict": {"w": torch.ones(3)}, "extra": Evil(mark)}
    path = tmp_path / f"step-1.{suffix}"
    if way == "bare pickle":
        path.write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=way == "zip")
    torch.save({"w": torch.ones(3)}, tmp_path / f"step-2.{suffix}")
    ended = sewa("average", ".")
    assert ended.code == 3
    assert f"step-1.{suffix}: " in ended.error
    assert "could run code" in ended.error
    assert "system" in ended.error or way == "bare pickle"  # torch stops before it learns that
    assert "none of it was run" in ended.error
    assert not mark.exists()
    if way == "bare pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert mark.exists()  # it would have run


def test_a_key_that_stands_for_endlessly_many_is_shown_short():
    key = ()
    for _ in range(60):
        key = (key, key)
    assert len(_few([key])) < 100


def test_stand_ins_within_each_other_are_written_as_they_were(tmp_path, sewa):
    itself = Namespace()
    itself.me, itself.w = [itself] * 3, torch.ones(2)
    many = Namespace()
    for _ in range(60):
        many = Namespace(a=many, b=(many, many))
    torch.save({"model": {"w": torch.ones(3)}, "a": itself, "b": many}, tmp_path / "1.pt")
    ended = sewa("average", tmp_path, "-o", tmp_path / "out.pt")
    assert ended.code == 0, ended.err
    assert "1.pt: a: tensors in it are not averaged" in ended.err
    found = torch.load(tmp_path / "out.pt", weights_only=False)["a"]
    assert found.me[2] is found


def test_attributes_that_hide_methods_are_taken_off(tmp_path, sewa):
    """weights_only lets a pickle set attributes of its dicts and tensors."""
    for step in (1, 2):
        weight = torch.full((3,), float(step))
        weight.detach = weight.cpu = torch.device
        inner = OrderedDict(w=weight)
        content = OrderedDict(state_dict=inner, step=step)
        file = tmp_path / f"{step}.pt"
        for each in (inner, content):
            vars(each).update(dict.fromkeys(("get", "values", "copy"), torch.device))
        torch.save(content, file)
    ended = sewa("average", tmp_path, "-o", tmp_path / "out.pt")
    assert ended.code == 0, ended.err
    state = torch.load(tmp_path / "out.pt", weights_only=True)["state_dict"]
    assert torch.equal(state["w"], torch.full((3,), 1.5))
