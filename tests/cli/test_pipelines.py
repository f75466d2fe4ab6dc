"""The command in a real shell: pipes, closed pipes, interrupts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.shells import BIN, SLOW_WRITE, environment, shell, wait_for
from helpers.tiny import TASK, Sewa
from safetensors.torch import load

import sewa_cli.__main__


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
    again = subprocess.run(
        [BIN / "sewa", "apply", "r.json", "-o", "-"], capture_output=True, check=True
    )
    assert again.stdout == ended.stdout


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    "script",
    [
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


@pytest.mark.usefixtures("run_dir")
def test_an_interrupt_in_the_middle_of_writing_leaves_no_file() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITE], stderr=subprocess.PIPE, env=environment()
    )
    wait_for(Path("started"))
    assert not list(Path().glob("*averaged*"))  # it is being written, without a name
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(Path().glob("*averaged*"))
    assert not list(Path().glob(".sewa*"))


ALL = pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
SAID = "interrupted; nothing half-written is left\n"


def instead_of(module: str, text: str) -> str:
    """A shell's assignment: the command finds this module of ours in the place of another."""
    folder = Path("modules").resolve()
    folder.mkdir()
    (folder / f"{module}.py").write_text(text)
    return f"PYTHONPATH={folder}{os.pathsep}$PYTHONPATH"


@pytest.mark.usefixtures("run_dir")
@ALL
def test_an_interrupt_that_an_import_turns_into_its_own_error_is_an_interrupt(name: str) -> None:
    """As numpy's C code does: it prints what it has caught and raises an ImportError."""
    here = instead_of(
        "numpy",
        "import os, signal, sys\n"
        "try:\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "    raise SystemExit('no signal came')\n"
        "except KeyboardInterrupt:\n"
        "    sys.excepthook(*sys.exc_info())\n"
        "    raise ImportError('numpy._core.umath failed to import')\n",
    )
    ended = shell(f"{here} sewa average ckpts/ -o out.safetensors")
    assert (ended.returncode, ended.stderr) == (130, SAID)
    assert not Path("out.safetensors").exists()


@ALL
@pytest.mark.usefixtures("run_dir")
def test_an_interrupt_while_the_commands_are_imported_is_told_in_a_line(name: str) -> None:
    here = instead_of("typer", f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    ended = shell(f"{here} sewa --help")
    assert (ended.returncode, ended.stderr) == (130, SAID)


@pytest.mark.usefixtures("run_dir")
@ALL
def test_an_interrupt_that_the_users_code_swallows_still_ends_the_run(name: str) -> None:
    swallow = (
        "import os, signal\n"
        f"try:\n    os.kill(os.getpid(), signal.{name})\n"
        "except BaseException:\n    pass\n"
    )
    Path("task.py").write_text(swallow + TASK)
    ended = shell("sewa select -o out.safetensors")
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.endswith(SAID)
    assert not Path("out.safetensors").exists()


@pytest.mark.usefixtures("run_dir")
def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """By `nohup`, or by a shell in a script for what runs in the background."""
    kill = "import os, signal\nfor number in (signal.SIGINT, signal.SIGHUP):\n"
    kill += "    os.kill(os.getpid(), number)\n"
    Path("task.py").write_text(kill + TASK)
    ended = shell("trap '' INT HUP; sewa select -o out.safetensors")
    assert ended.returncode == 0, ended.stderr
    assert Path("out.safetensors").is_file()


def test_the_bare_command_shows_the_help_and_no_error() -> None:
    ended = shell("sewa")
    assert ended.returncode == 2
    assert "select" in ended.stdout + ended.stderr
    assert "error" not in ended.stderr


@pytest.mark.usefixtures("run_dir")
def test_a_terminal_sees_the_loss_while_it_learns() -> None:
    if not shutil.which("script"):
        pytest.skip("no `script` to make a terminal with")
    ended = shell("script -qec 'sewa select --set gumbel.iterations=150' /dev/null")
    assert ended.returncode == 0, ended.stdout
    assert "learning" in ended.stdout
    assert re.search(r"loss \d\.\d+", ended.stdout)


@pytest.mark.usefixtures("run_dir")
def test_a_dry_run_in_json_does_not_mind_where_the_average_would_go(sewa: Sewa) -> None:
    ended = sewa("select", "--dry-run", "--json", "-o", "-")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)
    assert sewa("select", "--json", "-o", "-").code == 2  # but there both want it


@pytest.mark.usefixtures("run_dir")
def test_the_demos_next_command_runs_where_there_is_no_sewa_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
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
