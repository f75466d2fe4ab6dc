"""The image setting: CIFAR's four formats, the paper's network, a whole run on tiny data."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pickle
import runpy
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers.tiny import Sewa
from safetensors import safe_open
from safetensors.torch import load_file

from sewa_cli.errors import TaskError

FOLDER = Path(__file__).parents[2] / "sample_configs" / "image_classification"
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "cifar", raising=False)  # another test's copy of it
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("cifar")


@pytest.fixture
def task(cifar: ModuleType) -> ModuleType:
    found = importlib.util.spec_from_file_location("image_task", FOLDER / "task.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.load is cifar.load
    return module


# the formats, byte by byte


def pixels(number: int) -> bytes:
    """Red, green and blue planes of 32 rows of 32, all different from the next image's."""
    return bytes((number * 7 + plane * 50 + at) % 256 for plane in range(3) for at in range(1024))


def write_binary(path: Path, labels: list[tuple[int, ...]], first: int = 0) -> None:
    records = [bytes(label) + pixels(first + n) for n, label in enumerate(labels)]
    path.write_bytes(b"".join(records))


def text(value: bytes) -> bytes:
    """A `str` of Python 2: U and a byte for the length, or T and four."""
    if len(value) < 256:
        return b"U" + struct.pack("<B", len(value)) + value
    return b"T" + struct.pack("<i", len(value)) + value


def whole(value: int) -> bytes:
    return b"K" + struct.pack("<B", value) if value < 256 else b"M" + struct.pack("<H", value)


def array(rows: int, columns: int, content: bytes, kind: bytes = b"u1") -> bytes:
    """numpy 1 under Python 2: _reconstruct(ndarray, (0,), 'b'), then shape, dtype and bytes."""
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01" + whole(rows) + whole(columns) + b"\x86"
        + b"cnumpy\ndtype\n" + text(kind) + b"K\x00K\x01\x87R"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89" + text(content) + b"tb"
    )  # fmt: skip


def python2_pickle(entries: dict[bytes, bytes]) -> bytes:
    """Protocol 2, as cPickle wrote it: a dictionary with keys of `str`."""
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u."


def numbers(values: list[int]) -> bytes:
    return b"](" + b"".join(whole(value) for value in values) + b"e"


def write_pickle(path: Path, key: bytes, labels: list[int], first: int = 0) -> None:
    content = b"".join(pixels(first + n) for n in range(len(labels)))
    path.write_bytes(
        python2_pickle(
            {
                b"batch_label": text(b"one of five"),
                key: numbers(labels),
                b"data": array(len(labels), 3072, content),
            }
        )
    )


def make(folder: Path, kind: str, each: int = 2) -> list[int]:
    """A folder with `each` images in each file; returns the training labels in order."""
    folder.mkdir()
    labels = [(3 * n) % 10 for n in range(5 * each)]
    if kind.startswith("cifar-10-"):
        for number, name in enumerate([*BATCHES, "test_batch"]):
            first = number * each
            here = labels[first : first + each] or labels[:each]
            if kind.endswith("bin"):
                write_binary(folder / f"{name}.bin", [(n,) for n in here], first)
            else:
                write_pickle(folder / name, b"labels", here, first)
        return labels
    labels = [90 + n for n in labels]
    for name, here in (("train", labels), ("test", labels[:each])):
        if kind.endswith("bin"):
            write_binary(folder / f"{name}.bin", [(19, n) for n in here])
        else:
            write_pickle(folder / name, b"fine_labels", here)
    return labels


KINDS = ["cifar-10-bin", "cifar-10-py", "cifar-100-bin", "cifar-100-py"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_gives_its_images_and_labels(
    cifar: ModuleType, tmp_path: Path, kind: str
) -> None:
    labels = make(tmp_path / kind, kind)
    part = cifar.load(tmp_path / kind, "training")
    assert len(part) == 10
    images, found = part.take(0, 10)
    assert images.dtype == np.uint8
    assert images.shape == (10, 3, 32, 32)
    assert images.tobytes() == b"".join(pixels(n) for n in range(10))
    assert images[3, 2, 1, 5] == (3 * 7 + 2 * 50 + 32 + 5) % 256  # image, blue, row, column
    assert found.dtype == np.int64
    assert found.tolist() == labels
    assert len(cifar.load(tmp_path / kind, "test")) == 2
    assert cifar.count_classes(tmp_path / kind) == (10 if "-10-" in kind else 100)


def test_images_taken_across_files_are_those_of_the_whole(
    cifar: ModuleType, tmp_path: Path
) -> None:
    make(tmp_path / "c", "cifar-10-bin", each=3)
    part = cifar.load(tmp_path / "c", "training")
    images, labels = part.take(0, 15)
    for first in range(16):
        for last in range(first, 16):
            some, few = part.take(first, last)
            assert (some == images[first:last]).all()
            assert (few == labels[first:last]).all()


def test_a_pickle_as_numpy_made_it_in_python_2_is_what_the_test_writes() -> None:
    """Against Python's own reader, which needs no list of what is admitted."""
    written = array(2, 3, b"abcdef")
    found = pickle.loads(python2_pickle({b"data": written}), encoding="bytes")
    assert found[b"data"].tolist() == [[97, 98, 99], [100, 101, 102]]


# what is not CIFAR


def fault(cifar: ModuleType, folder: Path) -> str:
    """The message of the error that reading all training images gives: one line."""

    def read() -> None:
        part = cifar.load(folder, "training")
        part.take(0, len(part))

    with pytest.raises(TaskError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_folder_is_told_with_make_data(cifar: ModuleType, tmp_path: Path) -> None:
    assert "`make data`" in fault(cifar, tmp_path / "none")
    with pytest.raises(TaskError, match="sample_configs/data/no-such: no such folder"):
        cifar.load("no-such", "training")


def test_a_folder_without_cifar_is_told(cifar: ModuleType, tmp_path: Path) -> None:
    assert "neither CIFAR-10" in fault(cifar, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_named(cifar: ModuleType, tmp_path: Path, kind: str) -> None:
    make(tmp_path / kind, kind)
    gone = sorted((tmp_path / kind).iterdir())[-1]
    gone.unlink()
    assert gone.name in fault(cifar, tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [0, 1, -1])
def test_a_file_that_was_cut_short_is_named(
    cifar: ModuleType, tmp_path: Path, kind: str, left: int
) -> None:
    make(tmp_path / kind, kind)
    cut = next(path for path in sorted((tmp_path / kind).iterdir()) if "test" not in path.name)
    cut.write_bytes(cut.read_bytes()[:left])
    assert str(cut) in fault(cifar, tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_that_there_is_not_is_told(cifar: ModuleType, tmp_path: Path, kind: str) -> None:
    make(tmp_path / kind, kind)
    folder = tmp_path / kind
    write_binary(folder / "data_batch_3.bin", [(10,)])
    write_pickle(folder / "data_batch_3", b"labels", [10])
    write_binary(folder / "train.bin", [(1, 100)])
    write_pickle(folder / "train", b"fine_labels", [100])
    for path in folder.iterdir():  # only the format in question
        binary = path.suffix == ".bin"
        ten = "batch" in path.name
        if binary != kind.endswith("bin") or ten != ("-10-" in kind):
            path.unlink()
    assert "has a label that is not 0 to" in fault(cifar, folder)


def test_cifar_100_under_the_names_of_cifar_10_is_refused(
    cifar: ModuleType, tmp_path: Path
) -> None:
    make(tmp_path / "c", "cifar-10-bin")
    write_binary(tmp_path / "c" / "data_batch_2.bin", [(19, 99), (19, 98)])
    assert "data_batch_2.bin: 6148 bytes are not whole records of 3073" in fault(
        cifar, tmp_path / "c"
    )


@pytest.mark.parametrize(
    "entries",
    [
        {b"data": array(1, 3072, pixels(0))},  # no labels
        {b"labels": numbers([1])},
        {b"labels": numbers([1]), b"data": array(1, 3071, pixels(0)[:-1])},
        {b"labels": numbers([1]), b"data": array(1, 1536, pixels(0), b"u2")},
        {b"labels": numbers([1]), b"data": text(pixels(0))},
        {b"labels": numbers([1, 2]), b"data": array(1, 3072, pixels(0))},
        {b"labels": b"](" + text(b"cat") + b"e", b"data": array(1, 3072, pixels(0))},
    ],
)
def test_a_pickle_of_something_else_is_told(
    cifar: ModuleType, tmp_path: Path, entries: dict[bytes, bytes]
) -> None:
    make(tmp_path / "c", "cifar-10-py")
    (tmp_path / "c" / "data_batch_1").write_bytes(python2_pickle(entries))
    assert "data_batch_1: " in fault(cifar, tmp_path / "c")


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("posix", "system"), ("builtins", "eval"), ("numpy", "load"),
     ("numpy.testing._private.utils", "runstring"), ("__builtin__", "eval")],
)  # fmt: skip
def test_a_pickle_that_would_run_code_is_refused_before_it_runs(
    cifar: ModuleType, tmp_path: Path, module: str, name: str
) -> None:
    make(tmp_path / "c", "cifar-10-py")
    mark = tmp_path / "ran"
    command = f"open({str(mark)!r}, 'w')" if "eval" in name else f"touch {mark}"
    call = f"c{module}\n{name}\n".encode() + text(command.encode()) + b"\x85R"
    (tmp_path / "c" / "data_batch_1").write_bytes(python2_pickle({b"labels": call}))
    assert f"it asks for {module}.{name}" in fault(cifar, tmp_path / "c")
    assert not mark.exists()


# the network


@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_the_network_has_the_papers_shape(task: ModuleType, tmp_path: Path, blocks: int) -> None:
    make(tmp_path / "c", "cifar-100-bin")
    model = task.build_model(tmp_path / "c", blocks=blocks)
    kinds = [type(part) for part in model.modules()]
    assert kinds.count(task.Block) == blocks
    for block in model.blocks:
        main = [part for name, part in block.named_modules() if not name.startswith("shortcut")]
        sizes = [part.kernel_size for part in main if isinstance(part, torch.nn.Conv2d)]
        assert sizes == [(3, 3), (3, 3)]
        assert sum(isinstance(part, torch.nn.BatchNorm2d) for part in main) == 2
    assert kinds.count(torch.nn.Linear) == 1
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_a_block_without_its_convolutions_is_its_shortcut(
    task: ModuleType,
) -> None:
    block = task.Block(4, 4, 1).eval()
    torch.nn.init.zeros_(block.second[0].weight)
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(x), x)


# the parts


def test_the_parts_have_no_image_in_common_unless_asked_to(
    task: ModuleType, tmp_path: Path
) -> None:
    make(tmp_path / "c", "cifar-10-bin", each=4)
    data = tmp_path / "c"

    def names(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> set[bytes]:
        return {row.numpy().tobytes() for images, _ in batches for row in images}

    training = names(task.training_data(data, statistics=16))
    fresh = names(task.selection_data(data, selection=4))
    heldout = names(task.heldout_data(data, heldout=4))
    assert [len(training), len(fresh), len(heldout)] == [16, 4, 4]
    assert not training & fresh
    assert not (training | fresh) & heldout
    assert names(task.selection_data(data, selection=5, selection_from="training")) < training
    halves = [names(task.selection_data(data, 2, selection_skip=skip)) for skip in (0, 2)]
    assert not halves[0] & halves[1]
    assert halves[0] | halves[1] == fresh
    with pytest.raises(TaskError, match=r"selection_skip: must be 0 or more images, found -1"):
        task.selection_data(data, 2, selection_skip=-1)


def test_inputs_are_the_bytes_around_zero(task: ModuleType, tmp_path: Path) -> None:
    make(tmp_path / "c", "cifar-10-bin")
    ((images, labels),) = task.heldout_data(tmp_path / "c", heldout=2)
    twin = [[byte / 64 - 2 for byte in pixels(10 + n)] for n in range(2)]
    assert torch.equal(images.reshape(2, -1), torch.tensor(twin))
    assert labels.tolist() == [0, 3]


def test_more_images_than_there_are_is_an_error(task: ModuleType, tmp_path: Path) -> None:
    make(tmp_path / "c", "cifar-10-bin")
    with pytest.raises(TaskError, match="selection: must be 1 to 2 images, found 3"):
        task.selection_data(tmp_path / "c", selection=3)
    with pytest.raises(TaskError, match="statistics: must be 1 to 8"):
        task.training_data(tmp_path / "c", statistics=9)
    with pytest.raises(TaskError, match="heldout: must be 1 to 2"):
        task.heldout_data(tmp_path / "c", heldout=0)
    with pytest.raises(TaskError, match="fresh or training, found 'test'"):
        task.selection_data(tmp_path / "c", 1, "test")


def test_accuracy_is_counted_over_the_held_out_images(task: ModuleType, tmp_path: Path) -> None:
    make(tmp_path / "c", "cifar-10-bin", each=6)
    model = task.build_model(tmp_path / "c", blocks=1, heldout=6).eval()
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.copy_(torch.arange(10) == 3)  # says 3, always
    assert task.metrics(model) == {"accuracy": pytest.approx(1 / 6)}  # of 0 3 6 9 2 5


# a whole run


def train(*options: object) -> tuple[int, str]:
    """`python train.py OPTIONS` of the working directory in this process: exit code, last line."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setattr(sys, "argv", ["train.py", *map(str, options)])
        try:
            runpy.run_path("train.py", run_name="__main__")
        except SystemExit as ended:
            return 1, str(ended)
    return 0, told.getvalue().splitlines()[-1]


TINY = ("--checkpoints", 4, "--every", 1, "--warmup", 3, "--blocks", 1, "--width", 4,
        "--batch", 8)  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample in a folder of its own, with tiny data beside it as `make data` leaves them."""
    made = shutil.ignore_patterns("ckpts*", "averaged*", "__pycache__")
    shutil.copytree(FOLDER, tmp_path / "image_classification", ignore=made)
    (tmp_path / "data").mkdir()
    make(tmp_path / "data" / "cifar-10-batches-bin", "cifar-10-bin", each=10)
    make(tmp_path / "data" / "cifar-100-python", "cifar-100-py", each=10)
    for module in ("cifar", "task"):  # those of other tests
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "image_classification")
    monkeypatch.chdir(tmp_path / "image_classification")
    return tmp_path / "image_classification"


SMALLER = ("--set", "args.selection=10", "--set", "args.heldout=10", "--set", "args.statistics=20",
           "--set", "args.blocks=1", "--set", "args.width=4", "--K", 2,
           "--set", "gumbel.iterations=3")  # fmt: skip


@pytest.mark.breadth
@pytest.mark.parametrize("data", ["cifar-10-batches-bin", "cifar-100-python"])
def test_the_setting_trains_selects_and_compares(copied: Path, sewa: Sewa, data: str) -> None:
    path = str(copied.parent / "data" / data)
    code, told = train(*TINY, "--data", path)
    assert code == 0, told
    assert told.startswith("4 checkpoints in ")
    here = (*SMALLER, "--set", f"args.data={path}")
    ended = sewa("select", *here, "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert (report["k"], report["K"]) == (4, 2)
    assert report["batchnorm"]["data"] == "training_data"
    assert 0 <= report["average"]["metrics"]["accuracy"] <= 1
    ended = sewa("compare", *here, "--methods", "lawa,swa,ema,random,sewa", "--format", "json")
    assert ended.code == 0, ended.err
    methods = {row["method"] for row in json.loads(ended.out)["rows"]}
    assert {"lawa", "swa", "ema", "random", "sewa"} <= methods


def test_a_seed_gives_the_same_checkpoints_and_another_seed_others(copied: Path) -> None:
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(*TINY, "--seed", seed, "--out", out)[0] == 0
    steps = [f"step-{step}.safetensors" for step in range(4, 8)]
    assert sorted(path.name for path in (copied / "a").iterdir()) == sorted(steps)
    for step in steps:
        first, again, other = (load_file(copied / out / step) for out in ("a", "b", "c"))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["linear.weight"], other["linear.weight"])
    with safe_open(copied / "a" / "step-7.safetensors", "pt") as file:
        assert file.metadata()["step"] == "7"


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(copied: Path) -> None:
    assert train(*TINY)[0] == 0
    before = [(path, path.stat().st_mtime_ns) for path in sorted((copied / "ckpts").iterdir())]
    code, told = train(*TINY, "--seed", 1, "--every", 3)
    assert code == 1
    assert told.startswith("error: ")
    assert "\n" not in told
    assert "holds checkpoints of an earlier run" in told
    after = [(path, path.stat().st_mtime_ns) for path in sorted((copied / "ckpts").iterdir())]
    assert before == after


def test_without_data_both_commands_say_make_data_in_one_line(copied: Path, sewa: Sewa) -> None:
    assert train(*TINY)[0] == 0
    shutil.rmtree(copied.parent / "data")
    code, told = train(*TINY, "--out", "other")
    assert code == 1
    assert "\n" not in told
    assert "`make data`" in told
    ended = sewa("select", *SMALLER)
    assert ended.code == 4
    assert "`make data`" in ended.error
    assert len(ended.err.splitlines()) <= 2  # the task's name, and the error
