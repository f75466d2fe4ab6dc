"""What is kept under --cache: found again where it may be, and nowhere else."""

from __future__ import annotations

import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import train_tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sewa_cli.config import Config
from sewa_cli.events import Events
from sewa_cli.objective.memo import Memo, have
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.rng import put_back, seeded, states
from sewa_cli.session.code import Unknown
from sewa_cli.session.fingerprint import digest, fingerprint, of_data
from sewa_cli.session.memo import open_memo
from sewa_cli.store import Store, clear, groups
from sewa_cli.task import Batches, Task, load_task, make_task

TASK = """
    import torch
    from torch import nn
    import neighbour

    def build_model():
        return nn.Linear(3, 2)

    def selection_data():
        return [(torch.ones(4, 3), torch.zeros(4).long())]

    def loss(outputs, batch):
        import late
        return nn.functional.cross_entropy(outputs, batch[1])
"""


def objective_of(task: Task) -> Objective:
    with seeded(0):
        model = FlatModel(task.build_model(), torch.device("cpu"))
    return Objective(model, task.predict, task.loss, task.backward, task.selection_data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.py").write_text(textwrap.dedent(TASK))
    (tmp_path / "neighbour.py").write_text("from inner import deep\n")
    (tmp_path / "late.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").write_text("")
    (tmp_path / "inner" / "deep.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def name_of(folder: Path, **settings: Any) -> str:
    task = load_task(str(folder / "task.py"), {})
    return fingerprint(Config(**settings), task, objective_of(task))[0]


@pytest.mark.parametrize("changed", ["task.py", "neighbour.py", "late.py", "inner/deep.py"])
def test_a_change_of_any_module_that_the_task_imports_is_noticed(
    folder: Path, changed: str
) -> None:
    before = name_of(folder)
    (folder / "train.py").write_text("x = 2\n")  # which it does not import
    assert name_of(folder) == before
    with (folder / changed).open("a") as file:
        file.write("\ny = 2\n")
    assert name_of(folder) != before


def write_task(folder: Path, old: str, new: str, head: str = "") -> None:
    text = textwrap.dedent(TASK)
    assert old in text
    (folder / "task.py").write_text(head + text.replace(old, new))


@pytest.fixture
def forgets() -> Iterator[Callable[[], None]]:
    """As in a process of its own: modules that came meanwhile are gone."""
    before = {*sys.modules}

    def forget() -> None:
        for name in {*sys.modules} - before:
            if name.startswith(("lossmod", "hooked", "net", "transformers_modules")):
                del sys.modules[name]

    yield forget
    forget()


def test_a_module_that_is_imported_by_a_name_put_together_is_noticed(
    folder: Path, forgets: Callable[[], None]
) -> None:
    head = "import importlib\nlossmod = importlib.import_module('loss' + 'mod')\n"
    write_task(folder, "import neighbour", "", head)
    (folder / "lossmod.py").write_text("scale = 1\n")
    before = name_of(folder)
    forgets()
    assert name_of(folder) == before
    forgets()
    (folder / "lossmod.py").write_text("scale = 2\n")
    assert name_of(folder) != before


def test_a_package_behind_an_import_hook_is_noticed_with_what_it_imports_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch, forgets: Callable[[], None]
) -> None:
    package = folder / "elsewhere" / "hooked"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def f():\n    from hooked import deep\n")
    (package / "deep.py").write_text("x = 1\n")

    class Hook:  # as of an editable install
        def find_spec(self, name: str, *_: Any) -> Any:
            init = package / "__init__.py"
            return spec_from_file_location(name, init) if name == "hooked" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook()])
    write_task(folder, "import neighbour", "import hooked")
    names = [name_of(folder)]
    for file in ("__init__.py", "deep.py"):
        forgets()
        with (package / file).open("a") as more:
            more.write("y = 2\n")
        names.append(name_of(folder))
    assert len({*names}) == 3


HOLDERS = {
    "number": "model.temp = given",
    "dict": "model.temp = {'a': [given, None]}",
    "set": "model.temp = {'a', given}",
    "dataclass": "model.temp = Settings(given)",
    "own": "model.temp = Own(given)",
    "namespace": "model.temp = argparse.Namespace(t=given)",
    "tensor": "model.temp = torch.tensor(given)",
    "function": "model.temp = lambda x: x * given",
    "hidden": "model.temp = [nn.Dropout(given)]",
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_build_model_reads_into_an_attribute_is_noticed(folder: Path, holder: str) -> None:
    head = """\
        import argparse, json
        from pathlib import Path
        from dataclasses import dataclass

        @dataclass
        class Settings:
            t: float

        class Own:
            def __init__(self, t):
                self.t = t
    """
    lines = [
        "given = json.loads(Path('temp.json').read_text())",
        "model = nn.Linear(3, 2)",
        HOLDERS[holder],
    ]
    body = "\n    ".join(lines)
    write_task(folder, "return nn.Linear(3, 2)", f"{body}\n    return model", textwrap.dedent(head))
    (folder / "temp.json").write_text("0.5")
    before = name_of(folder)
    assert name_of(folder) == before
    (folder / "temp.json").write_text("0.25")
    assert name_of(folder) != before


def test_a_class_in_no_file_cannot_be_known(folder: Path) -> None:
    write_task(folder, "return nn.Linear(3, 2)", "return type('A', (nn.Linear,), made)(3, 2)")
    with (folder / "task.py").open("a") as file:
        file.write("\nmade = {'__module__': 'nowhere'}\n")
    with pytest.raises(Unknown, match="the class A, which is in no file"):
        name_of(folder)


def test_the_file_of_a_ready_made_tasks_model_is_noticed(
    folder: Path, forgets: Callable[[], None]
) -> None:
    net = """
        import torch
        from torch import nn

        class Net(nn.Linear):
            def forward(self, x):
                return torch.relu(super().forward(x))

        def make_net():
            return Net(3, 2)
    """
    for part in ("dev", "test"):
        np.savez(folder / f"{part}.npz", x=np.ones((4, 3), np.float32), y=np.zeros(4, np.int64))

    def name() -> str:
        forgets()
        args = {"model": "net.py:make_net", "selection": "dev.npz", "heldout": "test.npz"}
        task = load_task("classification", args)
        return fingerprint(Config(args=args), task, objective_of(task))[0]

    (folder / "net.py").write_text(textwrap.dedent(net))
    before = name()
    assert name() == before
    (folder / "net.py").write_text(textwrap.dedent(net).replace("relu", "sigmoid"))
    assert name() != before


def test_data_seed_and_arguments_are_part_of_what_a_result_depends_on(folder: Path) -> None:
    before = name_of(folder)
    assert name_of(folder, seed=1) != before
    assert name_of(folder, args={"a": 1}) != before
    text = (folder / "task.py").read_text()
    (folder / "task.py").write_text(text.replace("torch.ones(4, 3)", "torch.load('data.pt')"))
    torch.save(torch.ones(4, 3), "data.pt")
    loaded = name_of(folder)
    torch.save(torch.eye(4, 3), "data.pt")
    assert name_of(folder) != loaded


def test_what_is_in_no_python_file_cannot_be_known() -> None:
    functions = {
        "build_model": lambda: nn.Linear(1, 1),
        "selection_data": list,
        "loss": lambda out, _: out.mean(),
    }
    task = make_task(functions, "sewa_cli.select", {})
    with pytest.raises(Unknown, match="not in a Python file"):
        fingerprint(Config(), task, objective_of(task))


class Shuffled:
    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(50, generator=self._generator).float().view(5, 10))


def test_data_that_shuffle_by_the_seed_are_known_and_by_a_generator_of_their_own_are_not() -> None:
    assert of_data(Batches(lambda: seeded_loader, "data"), 0)
    own = Shuffled(torch.Generator().manual_seed(0))
    with pytest.raises(Unknown, match="other batches each time"):
        of_data(Batches(lambda: own, "data"), 0)


seeded_loader = Shuffled(None)


def test_naming_the_data_leaves_no_trace_in_them() -> None:
    """A loader with a generator of its own begins where it would have."""
    made: list[Shuffled] = []

    def selection() -> Shuffled:
        made.append(Shuffled(torch.Generator().manual_seed(3)))
        return made[-1]

    functions = {
        "build_model": lambda: nn.Linear(1, 1),
        "selection_data": selection,
        "loss": lambda out, _: out.mean(),
    }
    data = make_task(functions, "task.py", {}).selection_data
    before = states()
    with pytest.raises(Unknown):
        of_data(data, 0)
    assert all(torch.equal(x, before[name]) for name, x in states().items())
    first = torch.cat(list(data))
    assert torch.equal(
        first, torch.randperm(50, generator=torch.Generator().manual_seed(3)).float()
    )
    assert len(made) == 2


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary(max_size=3)
)
nests = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@given(nests, nests)
def test_two_nests_have_one_digest_only_if_they_are_the_same(one: Any, two: Any) -> None:
    assert (digest(one) == digest(two)) == (repr(one) == repr(two))


def test_tensors_count_by_all_that_they_hold() -> None:
    x = torch.arange(6.0)
    others = [x.double(), x.view(2, 3), x.view(3, 2), -x, x.bfloat16(), x.numpy(), x.tolist()]
    assert len({digest(other) for other in [x, *others]}) == len(others) + 1
    assert digest(x.view(2, 3).T) == digest(x.view(2, 3).T.contiguous())


# ---- recall ------------------------------------------------------------------------------------


class Counting:
    """Work that draws random numbers of all kinds."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Tensor:
        self.count += 1
        drawn = [random.random(), float(np.random.rand()), random.gauss(0, 1)]
        return torch.tensor([*drawn, float(torch.rand(()))])


@pytest.fixture
def opened(folder: Path) -> Callable[..., tuple[Memo, Events]]:
    def memo(**settings: Any) -> tuple[Memo, Events]:
        task, events = load_task(str(folder / "task.py"), {}), Events()
        given = Config(cache=folder / "kept", **settings)
        return open_memo(given, task, objective_of(task), events), events

    return memo


Opened = Callable[..., tuple[Memo, Events]]


def test_without_a_cache_nothing_is_kept(folder: Path) -> None:
    task, work = load_task(str(folder / "task.py"), {}), Counting()
    memo = open_memo(Config(), task, objective_of(task), Events())
    memo.recall(("a",), work)
    memo.recall(("a",), work)
    assert (work.count, memo.recalled) == (2, None)


def test_what_is_recalled_leaves_the_random_numbers_as_the_work_left_them(opened: Opened) -> None:
    work = Counting()

    def once(memo: Memo) -> tuple[list[float], float, float, float]:
        with seeded(5):
            first = memo.recall(("a",), work)
            rest = (random.random(), float(np.random.rand()), float(torch.rand(())))
            return first.tolist(), *rest

    made = once(opened()[0])
    assert once(opened()[0]) == made
    assert work.count == 1
    with seeded(6):  # other random numbers would have been drawn
        opened()[0].recall(("a",), work)
    assert work.count == 2


def test_keys_count_by_content_and_scopes_are_apart(opened: Opened) -> None:
    work = Counting()
    with seeded(0):
        kept = states()

    def ask(memo: Memo, *key: Any) -> int:
        put_back(kept)
        memo.recall(key, work)
        return work.count

    memo = opened()[0]
    assert ask(memo, "a", torch.ones(3)) == 1
    assert ask(memo, "a", torch.ones(3)) == 1
    assert ask(memo, "a", torch.zeros(3)) == 2
    assert ask(memo.within(lambda: ("W",)), "a", torch.ones(3)) == 3
    assert ask(memo.within(lambda: ("V",)), "a", torch.ones(3)) == 4
    assert ask(opened(seed=1)[0], "a", torch.ones(3)) == 5
    assert ask(opened()[0].within(lambda: ("W",)), "a", torch.ones(3)) == 5


def test_work_that_imports_what_nobody_could_foresee_is_not_kept(
    folder: Path, opened: Opened, forgets: Callable[[], None]
) -> None:
    (folder / "lossmod.py").write_text("x = 1\n")
    work = Counting()

    def imports() -> Tensor:
        import_module("lossmod")
        return work()

    for _ in range(2):
        memo, events = opened()
        with seeded(0):
            memo.recall(("a",), imports)
        assert [str(folder / "lossmod.py") in warning for warning in events.warnings] == [True]
        forgets()
    assert work.count == 2


def test_names_orders_and_dtypes_come_back(opened: Opened) -> None:
    made = {
        "z": torch.tensor(1.5, dtype=torch.float64),
        "__metadata__": torch.tensor([1, 2]),
        "a b": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    memo = opened()[0]
    fits = have(**{name: (*x.shape,) for name, x in made.items()})
    memo.recall_all(("a",), lambda: made, fits)
    found = opened()[0].recall_all(("a",), dict, fits)
    assert [*found] == [*made]
    assert all(
        torch.equal(x, made[name]) and x.dtype == made[name].dtype for name, x in found.items()
    )


def test_a_key_of_which_nobody_can_tell_what_it_holds_is_never_recalled(opened: Opened) -> None:
    work = Counting()
    memo = opened()[0]
    for _ in range(2):
        with seeded(0):
            memo.recall(("a", lambda: 1), work)
    assert work.count == 2
    assert memo.digest(lambda: 1) != memo.digest(lambda: 1)


def entry_of(folder: Path) -> Path:
    [path] = (path for path in folder.glob("kept/*/*.entry") if path.parent.name != "files")
    return path


def forge(path: Path, body: bytes) -> None:
    """An entry with a right hash, as somebody who knows the format would write it."""
    store = Store(path.parents[1], 2**30, lambda _: None)
    path.unlink()
    store.write(path.parent.name, path.stem, body)


def forged() -> dict[str, bytes]:
    from safetensors.torch import save

    good = torch.zeros(4)
    return {
        "shape": save({"value 0 ": torch.zeros(5)}),
        "nan": save({"value 0 ": good / 0}),
        "name": save({"else": good}),
        "number": save({"value x ": good}),
        "nothing": save({}),
        "two": save({"value 0 ": good, "value 1 b": good + 1}),
        "text": b"not safetensors at all",
        "pickle": b"\x80\x04K\x01.",
        "drawn": save({"value 0 ": good, "drawn 0 torch": torch.zeros(3)}),
        "numpy": save({"value 0 ": good, "drawn 0 numpy": torch.zeros(3)}),
        "out of numpy": save({"value 0 ": good, "drawn 0 numpy": torch.full((627,), 1e30)}),
        "place": save({"value 0 ": good, "drawn 0 numpy": torch.full((627,), 1e6)}),
        "python": save({"value 0 ": good, "drawn 0 python": torch.full((628,), 1e30)}),
        "cuda": save({"value 0 ": good, "drawn 0 cuda:77": torch.zeros(3)}),
    }


@pytest.mark.parametrize("what", [*forged(), "cut", "empty", "bit", "folder", "huge"])
def test_a_damaged_or_forged_entry_is_as_good_as_none(
    folder: Path, opened: Opened, what: str
) -> None:
    work = Counting()

    def ask() -> tuple[list[float], float, Events]:
        memo, events = opened(cache_size="1MiB")
        with seeded(0):
            return memo.recall(("a",), work, (4,)).tolist(), float(torch.rand(())), events

    made = ask()[:2]
    path = entry_of(folder)
    whole = path.read_bytes()
    if what in forged():
        forge(path, forged()[what])
    elif what == "cut":
        path.write_bytes(whole[:-1])
    elif what == "bit":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif what == "folder":
        path.unlink()
        path.mkdir()
    elif what == "huge":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.write_bytes(b"")
    *found, events = ask()
    assert tuple(found) == made
    assert work.count == 2
    assert "is damaged" in events.warnings[0]
    assert len(events.warnings) == 1 + (what == "folder")  # which cannot be written, either


def test_what_is_known_is_finite_and_of_its_shape(folder: Path, opened: Opened) -> None:
    memo, events = opened()
    memo.keep(("a",), torch.ones(3))
    assert torch.equal(memo.known(("a",), (3,), torch.float32), torch.ones(3))  # type: ignore[arg-type]
    assert memo.known(("b",), (3,), torch.float32) is None
    assert events.warnings == []
    assert memo.known(("a",), (3,), torch.bfloat16) is None
    assert memo.known(("a",), (2,), torch.float32) is None
    from safetensors.torch import save

    forge(entry_of(folder), save({"value 0 ": torch.full((3,), torch.inf)}))
    assert memo.known(("a",), (3,), torch.float32) is None
    assert len(events.warnings) == 1


# ---- the folder --------------------------------------------------------------------------------

GROUP = "0123456789abcdef"


def keys(count: int) -> list[str]:
    return [f"{i:064x}" for i in range(count)]


def test_the_oldest_used_go_first_and_the_size_is_kept_to(tmp_path: Path) -> None:
    import os

    warned: list[str] = []
    store = Store(tmp_path / "kept", 10_000, warned.append)
    for age, key in enumerate(keys(8)):
        store.write(GROUP, key, bytes(1000))
        os.utime(tmp_path / "kept" / GROUP / f"{key}.entry", (age, age))
    later = Store(tmp_path / "kept", 10_000, warned.append)
    assert later.read(GROUP, keys(1)[0]) == bytes(1000)  # and so it was used just now
    for key in keys(12)[8:]:
        later.write(GROUP, key, bytes(1000))
    left = [key for key in keys(12) if later.read(GROUP, key) is not None]
    assert keys(1)[0] in left
    assert keys(2)[1] not in left
    assert keys(12)[8:] == left[-4:]
    assert sum(group.bytes for group in groups(tmp_path / "kept")) <= 10_000
    assert warned == []
    for key in keys(40)[12:]:
        later.write(GROUP, key, bytes(1000))
    assert len(set(warned)) == 1
    assert "too little for this run" in warned[0]
    later.write(GROUP, keys(1)[0], bytes(20_000))
    assert "is more than cache_size" in warned[-1]


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    warned: list[str] = []
    store = Store(tmp_path / "kept", 10_000, warned.append)
    store.write(GROUP, keys(1)[0], b"x")
    store.write(GROUP, keys(1)[0], b"x")
    store.describe(GROUP, {})
    assert len(warned) == 1
    assert "cannot be written" in warned[0]


def test_a_link_in_place_of_a_group_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{keys(1)[0]}.entry").write_text("precious")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / GROUP).symlink_to(elsewhere)
    warned: list[str] = []
    Store(kept, 10_000, warned.append).write(GROUP, keys(2)[1], b"x")
    assert "is a link" in warned[0]
    assert groups(kept) == []
    clear(kept)
    assert [path.read_text() for path in elsewhere.iterdir()] == ["precious"]


def test_clearing_takes_what_is_ours_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000, pytest.fail)
    store.describe(GROUP, {"task": "task.py"})
    store.write(GROUP, keys(1)[0], b"x")
    store.write("files", keys(1)[0], b"x")
    others = ["notes.txt", f"{GROUP}/notes.txt", "fedcba9876543210", "files.txt"]
    for name in others:
        (tmp_path / name).write_text("mine")
    [run, _] = sorted(groups(tmp_path), key=lambda group: group.name)
    assert (run.entries, run.about) == (1, {"task": "task.py"})
    clear(tmp_path)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path)) for path in left) == sorted(others)
    assert groups(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", "{", '{"task": 3}', "\x00", "[" * 5000])
def test_what_is_said_about_a_group_may_be_anything(tmp_path: Path, text: str) -> None:
    Store(tmp_path, 10_000, pytest.fail).write(GROUP, keys(1)[0], b"x")
    (tmp_path / GROUP / "about.json").write_text(text)
    assert [group.about for group in groups(tmp_path)] == [{}]


def test_trained_runs_have_a_hash_for_each_file(tmp_path: Path) -> None:
    """Known again by what stat says, and not after any change."""
    import os
    import time

    from sewa_cli.session import memo as module

    [path] = train_tiny(tmp_path, 1)
    store = Store(tmp_path / "kept", 10_000, pytest.fail)
    first = module._file_hash(store, path)
    assert groups(tmp_path / "kept") == [] if (tmp_path / "kept").exists() else True  # just written
    old = time.time() - 100
    os.utime(path, (old, old))
    time.sleep(module.RACY / 1e9 + 0.1)  # ctime cannot be set
    assert module._file_hash(store, path) == first
    assert len(groups(tmp_path / "kept")) == 1
    about, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # as if nothing had happened
    assert module._file_hash(store, path) != first
