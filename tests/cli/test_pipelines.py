"""The command in a real shell: pipes, closed pipes, too little memory, a terminal."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.shells import BIN, environment, shell
from helpers.tiny import TASK
from safetensors.torch import load

import sewa_cli.__main__

pytestmark = pytest.mark.usefixtures("run_dir")


def test_paths_from_a_pipe_go_in_and_come_out():
    ended = shell("ls ckpts/*.safetensors | sewa select - --K 3 | xargs ls")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.split()
    assert len(lines) == 3
    assert all(Path(line).is_file() for line in lines)


def test_the_averaged_file_can_be_streamed_while_the_users_code_prints(sewa):
    noisy = 'import atexit, os\nprint("hello from the task")\nos.write(1, b"raw hello\\n")\n'
    noisy += "atexit.register(lambda: print('good bye'))\n"
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
    assert b"good bye" in ended.stderr  # what prints at exit does not follow the checkpoint
    assert len(load(ended.stdout)) == 4
    assert sewa("apply", "r.json", "-o", "again").code == 0
    assert Path("again").read_bytes() == ended.stdout


@pytest.mark.parametrize(
    "script",
    [
        "sewa average ckpts/ -o - | head -c 1 | wc -c",
        "sewa schema | head -1",
        pytest.param("sewa select ckpts/ --K 4 | true", marks=pytest.mark.breadth),
        pytest.param("sewa --help | true", marks=pytest.mark.breadth),
    ],
)
def test_a_closed_pipe_is_not_an_error(script):
    ended = shell(script)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


def test_too_little_address_space_is_one_line():
    ended = shell("ulimit -v 120000; sewa average x.safetensors -o o.safetensors")
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.startswith("error: `ulimit -v` leaves 117.2 MiB of address space")
    assert len(ended.stderr.splitlines()) == 1


def test_out_of_memory_is_one_line(tmp_path, sewa, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("sewa_cli.commands.inspect.run_inspect", fail)
    ended = sewa("inspect", tmp_path)
    assert ended.code == 3
    assert ended.error.startswith("there is not enough memory")


def test_the_bare_command_shows_the_help_and_no_error(sewa):
    ended = sewa()
    assert ended.code == 2
    assert "select" in ended.out + ended.err
    assert "error" not in ended.err


@pytest.mark.skipif(not shutil.which("script"), reason="no `script` to make a terminal with")
def test_a_terminal_sees_the_loss_while_it_learns_and_no_paths():
    slowly = "--set gumbel.iterations=600 --set gumbel.patience=600"  # longer than a redraw
    ended = shell(f"script -qec 'sewa select {slowly}' /dev/null")
    assert ended.returncode == 0, ended.stdout
    assert "learning" in ended.stdout
    assert re.search(r"loss \d\.\d+", ended.stdout)
    assert "ckpts/" not in ended.stdout


@pytest.mark.breadth
def test_the_demos_next_command_runs_where_there_is_no_sewa_on_the_path(
    tmp_path, monkeypatch, sewa
):
    with monkeypatch.context() as here:  # python -m sewa_cli
        here.setenv("PATH", "")
        here.setattr(sys, "argv", [sewa_cli.__main__.__file__, "demo", "a folder"])
        ended = sewa("demo", "a folder")
    command = next(line for line in ended.err.splitlines() if " select ckpts/ " in line)
    assert " -m sewa_cli select " in command
    folder = next(line for line in ended.err.splitlines() if line.startswith("  cd "))
    again = shell(f"PATH=\n{folder} && {command} --dry-run")
    assert again.returncode == 0, again.stderr
    assert str(tmp_path) not in command
