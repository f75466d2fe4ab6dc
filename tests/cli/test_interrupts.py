"""An interrupt, whenever it comes: one line, exit code 130, no traceback, nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.shells import BIN, environment, shell, wait_for
from helpers.tiny import TASK

from sewa_cli import interrupts

pytestmark = pytest.mark.usefixtures("run_dir")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAID = f"{interrupts.LINE}\n"
ALL = pytest.mark.parametrize(
    "name",
    ["SIGTERM", *(pytest.param(one, marks=pytest.mark.breadth) for one in ("SIGINT", "SIGHUP"))],
)
# what the `sewa` script does; it prints a byte when the first line of `run` is done
ENTRY = """
import sys
from sewa_cli import interrupts
catch = interrupts.catch
def tell():
    handlers = catch()
    interrupts.catch = catch
    sys.stdout.buffer.write(b"\\0")
    sys.stdout.flush()
    return handlers
interrupts.catch = tell
from sewa_cli.__main__ import run
sys.exit(run())
"""
SLOW_LOSS = TASK.replace(
    "return F.cross_entropy",
    "import time, pathlib; pathlib.Path('started').touch(); time.sleep(0.2)\n"
    "    return F.cross_entropy",
)


def swept(points, *arguments):
    """Count exit codes and words of runs that are interrupted at points over their whole life."""

    def begun():
        process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        process.stdout.read(1)
        return process

    def ended(process):
        _, err = process.communicate(timeout=60)
        return process.returncode, err.decode()

    start = time.monotonic()
    found = Counter([ended(begun())])
    whole = time.monotonic() - start
    for i in range(points):
        process = begun()
        time.sleep(whole * i / points)
        process.send_signal(SIGNALS[i % len(SIGNALS)])
        found[ended(process)] += 1
    return found


@pytest.mark.breadth
@pytest.mark.parametrize(("points", "command"), [(40, ["average", "ckpts"]), (120, ["select"])])
def test_an_interrupt_at_any_moment_is_one_line(points, command):
    found = swept(points, *command, "-o", "o.safetensors", "--force", "--quiet")
    assert found.keys() == {(130, SAID), (0, "")}, found
    assert found[130, SAID] >= points // 4


@ALL
def test_an_interrupt_while_learning_exits_130_and_leaves_nothing(name):
    Path("task.py").write_text(SLOW_LOSS)
    before = {str(path) for path in Path().rglob("*")}
    process = subprocess.Popen([BIN / "sewa", "select"], stderr=subprocess.PIPE, env=environment())
    wait_for(Path("started"))
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert err.endswith(SAID.encode())
    left = {str(path) for path in Path().rglob("*")} - before
    assert {path for path in left if "__pycache__" not in path} == {"started"}


def instead_of(module, text):
    """Return a shell's assignment with which the command imports this text as `module`."""
    folder = Path("modules").resolve()
    folder.mkdir()
    (folder / f"{module}.py").write_text(text)
    return f"PYTHONPATH={folder}{os.pathsep}$PYTHONPATH"


@ALL
def test_an_interrupt_that_an_import_turns_into_its_own_error_is_an_interrupt(name):
    """numpy's C code prints what it has caught and raises an ImportError."""
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


def test_an_interrupt_while_torch_is_imported_waits_for_its_end():
    """An exception in the midst of it would be raised through C++, which aborts."""
    Path("torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\nwhole = 1\n"
    )
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from sewa_cli import interrupts\n"
        "interrupts.catch()\n"
        "def work():\n"
        "    import torch, time\n"
        "    for _ in range(500): time.sleep(0.01)\n"
        "try:\n    interrupts.work(work)\n"
        "except KeyboardInterrupt:\n    print(sys.modules['torch'].whole)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("1\n", "")


@ALL
def test_an_interrupt_that_the_users_code_swallows_still_ends_the_run(name):
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


def test_a_signal_that_is_ignored_stays_ignored():
    """`nohup` ignores it, and a shell for what runs in the background."""
    kill = "import os, signal\nfor number in (signal.SIGINT, signal.SIGHUP):\n"
    kill += "    os.kill(os.getpid(), number)\n"
    Path("task.py").write_text(kill + TASK)
    ended = shell("trap '' INT HUP; sewa select -o out.safetensors")
    assert ended.returncode == 0, ended.stderr
    assert Path("out.safetensors").is_file()


@pytest.mark.breadth
@pytest.mark.parametrize(
    "late",
    [
        "import atexit; atexit.register(stop)",
        "class Last:\n    def __del__(self, stop=stop): stop()\nlast = Last()",
    ],
    ids=["while others clear up", "while Python clears up"],
)
def test_an_interrupt_when_all_is_done_changes_nothing(late):
    stop = "import os\ndef stop(kill=os.kill, me=os.getpid()):\n"
    stop += f"    for number in {[*map(int, SIGNALS)]}: kill(me, number)\n"
    Path("task.py").write_text(f"{TASK}\n{stop}{late}\n")
    ended = shell("sewa evaluate --quiet ckpts/step-10.safetensors")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "step-10" in ended.stdout


@pytest.mark.breadth
def test_a_thread_that_does_not_end_cannot_hold_us():
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\n"
    Path("task.py").write_text(threads + TASK)
    process = subprocess.Popen(
        [sys.executable, "-m", "sewa_cli", "select", "-o", "o.safetensors", "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    wait_for(Path("o.report.json"))
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert len(out.splitlines()) == 4


def test_a_caller_gets_its_handlers_back(sewa):
    before = [signal.getsignal(number) for number in SIGNALS]
    assert sewa("--version").code == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nothing_slow_is_imported_before_signals_are_caught():
    code = (
        "import atexit, gc, os, signal, sys; old = set(sys.modules); import sewa_cli.__main__; "
        "print(*sorted(set(sys.modules) - old))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    own = {"sewa_cli", "sewa_cli.__main__", "sewa_cli.interrupts"}
    assert set(ended.stdout.split()) - {"__future__"} == own
