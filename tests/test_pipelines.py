"""The command in a real shell: pipes, closed pipes, interrupts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TASK
from safetensors.torch import load

BIN = Path(sys.executable).parent


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run under bash with pipefail, the venv's commands first on the PATH, one torch thread."""
    return subprocess.run(
        ["bash", "-c", "set -o pipefail\n" + script],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def environment() -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.usefixtures("run_dir")
def test_paths_from_a_pipe_go_in_and_come_out() -> None:
    ended = shell("ls ckpts/*.safetensors | sewa select - --K 3 | xargs ls")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.split()
    assert len(lines) == 3
    assert all(Path(line).is_file() for line in lines)


@pytest.mark.usefixtures("run_dir")
def test_json_can_be_piped_into_a_json_reader() -> None:
    reader = "python -c 'import json, sys; print(len(json.load(sys.stdin)[\"selected\"]))'"
    ended = shell(f"python -m sewa_cli select ckpts/ --K 5 --json | {reader}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "5"


@pytest.mark.usefixtures("run_dir")
def test_the_averaged_file_can_be_streamed_while_the_users_code_prints() -> None:
    noisy = 'import os\nprint("hello from the task")\nos.write(1, b"raw hello\\n")\n'
    Path("task.py").write_text(noisy + TASK)
    ended = subprocess.run(
        [BIN / "sewa", "select", "-o", "-", "--report", "r.json"],
        capture_output=True,
        env=environment(),
        check=True,
    )
    assert b"hello" not in ended.stdout
    assert b"hello from the task" in ended.stderr
    assert b"raw hello" in ended.stderr
    assert len(load(ended.stdout)) == 4
    again = subprocess.run(
        [BIN / "sewa", "apply", "r.json", "-o", "-"], capture_output=True, check=True
    )
    assert again.stdout == ended.stdout


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    "script",
    [
        "sewa select ckpts/ --K 4 | head -1",
        "sewa select ckpts/ --K 4 | true",
        "sewa select ckpts/ --K 4 -o - | head -c 1",
        "sewa --help | true",
        "sewa schema | head -1",
    ],
)
def test_a_closed_pipe_is_not_an_error(script: str) -> None:
    ended = shell(script)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


SLOW_LOSS = TASK.replace(
    "return F.cross_entropy",
    "import time, pathlib; pathlib.Path('started').touch(); time.sleep(0.2)\n"
    "    return F.cross_entropy",
)


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_learning_exits_130_and_leaves_nothing(number: int) -> None:
    Path("task.py").write_text(SLOW_LOSS)
    before = {str(path) for path in Path().rglob("*")}
    process = subprocess.Popen([BIN / "sewa", "select"], stderr=subprocess.PIPE, env=environment())
    wait_for(Path("started"))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"interrupted" in err
    left = {str(path) for path in Path().rglob("*")} - before
    assert {path for path in left if "__pycache__" not in path} == {"started"}


SLOW_WRITE = """
import pathlib, sys, time
from sewa_cli import write
original = write._bytes
def slow(tensor):
    pathlib.Path("started").touch()
    time.sleep(0.5)
    return original(tensor)
write._bytes = slow
from sewa_cli.cli import main
sys.exit(main(["select"]))
"""


@pytest.mark.usefixtures("run_dir")
def test_an_interrupt_in_the_middle_of_writing_leaves_no_file() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITE], stderr=subprocess.PIPE, env=environment()
    )
    wait_for(Path("started"))
    assert list(Path().glob(".averaged*.tmp"))  # it is being written
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(Path().glob("*averaged*"))
    assert not list(Path().glob(".averaged*"))


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_bare_command_shows_the_help_and_no_error() -> None:
    ended = shell("sewa")
    assert ended.returncode == 2
    assert "select" in ended.stdout + ended.stderr
    assert "error" not in ended.stderr


@pytest.mark.usefixtures("run_dir")
def test_a_terminal_sees_the_loss_while_it_learns() -> None:
    if not shutil.which("script"):
        pytest.skip("no `script` to make a terminal with")
    ended = shell("script -qec 'sewa select --iterations 150' /dev/null")
    assert ended.returncode == 0, ended.stdout
    assert "learning" in ended.stdout
    assert re.search(r"loss \d\.\d+", ended.stdout)
