"""An interrupt, whenever it comes from our first line on: one line, exit code 130, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.shells import environment, shell, wait_for
from helpers.tiny import TASK, Sewa

from sewa_cli import interrupts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAID = f"{interrupts.LINE}\n"
# what the `sewa` script does; it tells when the first line of `run` is done
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


def swept(points: int, *arguments: str) -> Counter[tuple[int, str]]:
    """Exit codes and words of runs that are interrupted at points spread over their whole life."""

    def begun() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        process.stdout.read(1)
        return process

    def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
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
@pytest.mark.usefixtures("run_dir")
def test_an_interrupt_at_any_moment_is_told_in_a_line() -> None:
    found = swept(40, "average", "ckpts", "-o", "o.safetensors", "--force")
    assert found.keys() == {(130, SAID), (0, "wrote o.safetensors\n")}, found
    assert found[130, SAID] >= 10


@pytest.mark.breadth
@pytest.mark.usefixtures("run_dir")
def test_an_interrupt_at_any_moment_is_told_in_a_line_with_torch() -> None:
    found = swept(120, "select", "-o", "o.safetensors", "--force", "--quiet")
    assert found.keys() == {(130, SAID), (0, "")}, found
    assert found[130, SAID] >= 60


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    "late",
    [
        "import atexit; atexit.register(stop)",
        "class Last:\n    def __del__(self, stop=stop): stop()\nlast = Last()",
    ],
    ids=["while others clear up", "while Python clears up"],
)
def test_an_interrupt_when_all_is_done_changes_nothing(late: str) -> None:
    stop = "import os\ndef stop(kill=os.kill, me=os.getpid()):\n"
    stop += f"    for number in {[*map(int, SIGNALS)]}: kill(me, number)\n"
    Path("task.py").write_text(f"{TASK}\n{stop}{late}\n")
    ended = shell("sewa evaluate --quiet ckpts/step-10.safetensors")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "step-10" in ended.stdout


@pytest.mark.usefixtures("run_dir")
def test_a_thread_that_does_not_end_cannot_hold_us() -> None:
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


def test_a_caller_gets_its_handlers_back(sewa: Sewa) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    assert sewa("--version").code == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_handler_may_be_called_later_than_the_signal_came() -> None:
    """As by whoever holds signals off for a while: what decides is where it is called."""
    handlers = interrupts.catch()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert callable(handler)
        with pytest.raises(KeyboardInterrupt):
            interrupts.work(lambda: handler(signal.SIGTERM, None))
    finally:
        sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
        interrupts.catch()
        interrupts.give_back(handlers)


def test_nothing_slow_is_imported_before_signals_are_caught() -> None:
    code = (
        "import atexit, gc, os, signal, sys; old = set(sys.modules); import sewa_cli.__main__; "
        "print(*sorted(set(sys.modules) - old))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    own = {"sewa_cli", "sewa_cli.__main__", "sewa_cli.interrupts"}
    assert set(ended.stdout.split()) - {"__future__"} == own
