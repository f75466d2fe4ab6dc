"""Handle Ctrl-C, SIGTERM and a terminal that closes: one line and exit code 130.

Imports next to nothing, so that `__main__` can be ready for them before all else. What comes while
Python itself starts, before the first line of ours, is Python's to answer.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, TypeVar

    T = TypeVar("T")

CODE = 130
LINE = "interrupted; nothing half-written is left"
NUMBERS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    if hasattr(signal, name)
]
SOON = 0.05  # seconds
_came = False
_number = 0  # of the signal
_hooks = sys.excepthook, sys.unraisablehook  # before it came
_decided: int | None = None  # the exit code, once there is nothing left to interrupt


def catch() -> list[tuple[int, Any]]:
    """Catch signals; return the previous handlers, for `give_back`.

    A signal that is ignored (by nohup, by a shell for its background jobs) stays ignored.
    """
    global _came, _decided
    _came, _decided = False, None
    found = [(number, signal.getsignal(number)) for number in NUMBERS]
    caught = [(n, h) for n, h in found if h in (signal.SIG_DFL, signal.default_int_handler)]
    for number, _ in caught:
        signal.signal(number, _end)
    return caught


def give_back(handlers: list[tuple[int, Any]]) -> None:
    for number, handler in handlers:
        signal.signal(number, handler)


def ignore() -> None:
    """Ignore signals from here on: at exit Python restores handlers that would end it at once."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def work(function: Callable[[], T]) -> T:
    """Calls it. Only in here is an interrupt an exception, so whoever calls this can catch it."""
    return function()


def _end(number: int, _frame: FrameType | None) -> None:
    """Raises inside `work`, where there may be something to clear up; elsewhere ends at once."""
    global _came, _number, _hooks
    if not _came:
        _hooks = sys.excepthook, sys.unraisablehook
    _came, _number = True, number
    # C code may catch it, print it and raise another in its place: numpy does, while imported
    sys.excepthook = sys.unraisablehook = _say_nothing
    frame: FrameType | None = sys._getframe()  # it may be called later than the signal came
    while frame is not None:
        if frame.f_code is work.__code__:
            if _is_importing_torch():  # whose C++ aborts where Python raises
                _thread.start_new_thread(_send_again, (number,))
                return
            raise KeyboardInterrupt
        frame = frame.f_back
    try:
        if _decided is None:
            os.write(2, f"{LINE}\n".encode())
    finally:  # whether anybody hears it or not
        os._exit(CODE if _decided is None else _decided)


def _is_importing_torch() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _send_again(number: int) -> None:
    time.sleep(SOON)
    _thread.interrupt_main(signal.Signals(number))


def _say_nothing(*_: object) -> None: ...


def came() -> bool:
    return _came


def resume() -> bool:
    """Ctrl-C was meant for what was under way, and is dealt with: the rest goes on.

    Not so what asks the process to end, nor what nobody here has caught.
    """
    global _came
    if not _came or _number != signal.SIGINT:
        return False
    _came = False
    sys.excepthook, sys.unraisablehook = _hooks
    return True


def decide(code: int) -> None:
    """Set the exit code of an interrupt from now on: the work is done."""
    global _decided
    _decided = code


def stop_if_interrupted() -> None:
    """Raise an interrupt that some `except:` has swallowed; called between two steps."""
    if _came:
        raise KeyboardInterrupt
