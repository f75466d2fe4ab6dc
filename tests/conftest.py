"""The two sizes of the suite, tiny real runs, and the command line called in this process.

`pytest` runs what `make test` runs: one fast witness for each promise, few examples of each
property. `pytest --breadth` is `make test-all`: everything, and many examples.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import hypothesis
import pytest
import torch
import typer.main
from helpers.batchnorm import BATCHNORM_TASK, train_batchnorm
from helpers.frozen import Frozen, work_on
from helpers.once import Demo, MadeOnce, demo_in, made_once, run_demo
from helpers.tiny import TASK, Ended, Sewa, train_tiny

from sewa_cli.cli import main

torch.set_num_threads(1)
# a shared machine: how long one example takes says nothing
hypothesis.settings.register_profile(
    "few", max_examples=12, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile("many", max_examples=200, deadline=None)

BREADTH = pytest.mark.breadth
# folders and modules that `make test` leaves out whole
ALL_BREADTH = (
    "samples/test_generation.py",
    "samples/test_language_model.py",
    "samples/test_setting_",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--breadth",
        action="store_true",
        help="also run what only `make test-all` runs, and many examples of each property",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile before any test module is imported, which reads it."""
    hypothesis.settings.load_profile("many" if config.getoption("--breadth") else "few")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = config.getoption("--breadth")
    kept, left_out = [], []
    for item in items:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        is_breadth = place.startswith(ALL_BREADTH) or any(
            item.get_closest_marker(name) for name in ("breadth", "browser")
        )
        if is_breadth:
            item.add_marker(BREADTH)  # for -m
        (kept if everything or not is_breadth else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


# what nohup or a background job ignores, the commands that tests start would ignore too
for _name, _default in (
    ("SIGINT", signal.default_int_handler),
    ("SIGTERM", signal.SIG_DFL),
    ("SIGHUP", signal.SIG_DFL),
):
    _number = getattr(signal, _name, None)
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.fixture(scope="session", autouse=True)
def _session() -> Iterator[None]:
    """Settings of all tests, made after collection, which keeps the compiled test modules."""
    with pytest.MonkeyPatch.context() as session:
        # a task that a test writes twice in a second, as long as before, must not be cached
        session.setattr(sys, "dont_write_bytecode", True)
        session.setenv("PYTHONDONTWRITEBYTECODE", "1")
        # typer reads all flags of all commands for each call; a process has one, a session many
        session.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """once("name", make) → the folder that make(folder) filled, for all workers."""
    return partial(made_once, tmp_path_factory)


@pytest.fixture(scope="session")
def demo(once: MadeOnce) -> Demo:
    """`sewa demo`, run once for all tests that want a large real run; copy it to write into it."""
    return demo_in(once("demo", run_demo))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user: sewa.yaml, task.py and twelve checkpoints in ckpts/."""
    train_tiny(tmp_path / "ckpts")
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "sewa.yaml").write_text(
        textwrap.dedent("""\
            task: ./task.py
            checkpoints: ckpts/
            K: 4
            device: cpu
            gumbel: {iterations: 8}
        """)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_registry() -> Iterator[None]:
    """Methods that a test registers are forgotten."""
    from sewa_cli.methods import REGISTRY

    kept = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(kept)


@pytest.fixture
def bn_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a BatchNorm task and eight checkpoints that it was really trained to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(BATCHNORM_TASK)
    (tmp_path / "sewa.yaml").write_text(
        "task: ./task.py\ncheckpoints: ckpts\nK: 3\ndevice: cpu\ngumbel: {iterations: 6}\n"
    )
    train_batchnorm(tmp_path / "ckpts")
    return tmp_path


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Frozen:
    """frozen("lightning") → a copy of that run, as the working directory."""
    return lambda name: work_on(name, tmp_path / "work", monkeypatch)


@pytest.fixture
def sewa(capfd: pytest.CaptureFixture[str]) -> Sewa:
    """sewa("select", "ckpts/", "--K", "4") → exit code, stdout, stderr."""

    def call(*arguments: object) -> Ended:
        capfd.readouterr()
        # the command keeps standard output to itself until its process ends; ours goes on
        stdout, kept = sys.stdout, os.dup(1)
        try:
            code = main([str(argument) for argument in arguments])
        finally:
            sys.stdout = stdout
            os.dup2(kept, 1)
            os.close(kept)
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return call
