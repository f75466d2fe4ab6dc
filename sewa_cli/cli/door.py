"""`main`: runs a command, and turns whatever comes out of it into one line and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, TextIO

from sewa_cli.errors import ConfigError, OutputError, SewaError, UserCodeError

INTERRUPTED = 130
typed: list[str] = []  # the arguments of the command that runs


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    from sewa_cli.cli.app import app

    arguments = sys.argv[1:] if arguments is None else list(arguments)
    typed[:] = arguments
    _fill_gaps()
    # OpenMP's threads spin while they wait; on a busy machine that makes a small run many times
    # slower. Only takes effect before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    verbose = "-v" in arguments or "--verbose" in arguments
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        if number := getattr(signal, name, None):
            signal.signal(number, _end_as_if_interrupted)
    try:
        code = app(arguments, prog_name="sewa", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except SewaError as error:
        if isinstance(error, UserCodeError):
            _say(_all_frames(error) if verbose else error.frames)
        elif verbose:
            _say(traceback.format_exc())
        faults = error.faults if isinstance(error, ConfigError) else str(error).splitlines()
        for fault in faults:
            _say(f"error: {fault}")
        return error.exit_code
    except BrokenPipeError:
        return _pipe_closed()
    except SystemExit as error:
        # typer's answer to a closed pipe is exit code 1
        if isinstance(error.__context__, BrokenPipeError):
            return _pipe_closed()
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        # a usage error of typer's; without a message where it has shown the help instead
        if callable(format_message := getattr(error, "format_message", None)):
            if message := format_message().rstrip("."):
                _say(f"error: {message}. See `sewa --help`")
            return 2
        if verbose:
            _say(traceback.format_exc())
        what = " ".join(str(error).split())
        where = "-v shows where, please report it"
        _say(f"error: a bug in sewa: {type(error).__name__}: {what}; {where}")
        return 1
    if code == INTERRUPTED:
        _say("interrupted; nothing half-written is left")
    return code if isinstance(code, int) else 0


@contextmanager
def stdout_for_data() -> Iterator[IO[bytes]]:
    """Yields the real standard output; from now on everything else that prints goes to stderr.

    At the level of file descriptors, so that prints of C libraries and of worker processes in the
    user's code do not end up in the middle of a piped checkpoint either. It stays so to the end of
    the process: what prints at exit shall not follow the checkpoint.
    """
    if sys.stdout is None:  # started with `>&-`
        raise OutputError("standard output: is closed")
    sys.stdout.flush()
    data = io.BufferedWriter(_Stdout(os.dup(1), "wb"))
    os.dup2(2, 1)
    sys.stdout = _Aside(sys.stderr)
    try:
        yield data
        data.flush()
    finally:
        with suppress(OSError, OutputError):  # told already by the flush above
            data.close()


def without_blas() -> None:
    """For commands that only add: NumPy's BLAS would start a thread for each core, which spin."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class _Aside(io.TextIOBase):
    """Prints of the user's code: to stderr, and into the void when nobody reads that any more."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr

    def write(self, text: str) -> int:
        with suppress(BrokenPipeError):
            self._stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            self._stderr.flush()

    def fileno(self) -> int:
        return self._stderr.fileno()

    def isatty(self) -> bool:
        return self._stderr.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stderr.encoding

    def writable(self) -> bool:
        return True


class _Stdout(io.FileIO):
    """Standard output whose faults (a full disk behind `>`) are told like those of any output."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output: cannot be written: {error.strerror}") from error


def _fill_gaps() -> None:
    """Where standard input, output or error is closed, the void is opened in its place.

    Else the next file would get that number: a checkpoint, with what others print in its middle.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - to the end of the process


def _end_as_if_interrupted(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _pipe_closed() -> int:
    """The reader has had enough: not an error. Python must not try to flush again at exit."""
    hush(sys.stdout, sys.stderr)
    return 0


def hush(*streams: TextIO) -> None:
    """What still goes to these, or to stderr, goes nowhere."""
    for stream in streams or (sys.stderr,):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    if text:
        with suppress(BrokenPipeError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def _all_frames(error: UserCodeError) -> str:
    return "".join(traceback.format_exception(error.__cause__ or error)).rstrip()
