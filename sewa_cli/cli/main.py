"""`main` runs a command and turns every exception into one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO, cast

from sewa_cli import interrupts, ranks
from sewa_cli.errors import CheckpointError, OutputError, SewaError, UserCodeError
from sewa_cli.text import one_line, shown, shown_lines, size

LONGEST = 2_000  # characters of an error's line
ON_RANKS = ("select", "compare", "evaluate")  # commands whose work torchrun's ranks share


@dataclass
class Typed:
    """The command that runs, as it was typed."""

    arguments: list[str]
    verbose: bool = False  # known when the arguments are parsed


typed = Typed([])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    typed.arguments, typed.verbose = arguments, False
    handlers = interrupts.catch()
    try:
        code = interrupts.work(lambda: _run(arguments))
    except BaseException as error:
        code = _fail(error)
    interrupts.decide(code)
    if code == interrupts.CODE:
        _say(interrupts.LINE)
    if ranks.here().several:
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(code)  # torch would wait for others that do not come, or abort in its threads
    interrupts.give_back(handlers)
    return code


def _fail(error: BaseException) -> int:
    """Report what ended the command, or let another rank do it; return the exit code."""
    here = ranks.here()
    interrupted = interrupts.came() or isinstance(error, KeyboardInterrupt)
    if here.several:
        interrupts.ignore()  # torchrun tells the others to end as soon as one has
    cause = here.cause_of(error, interrupted)
    if cause is None:
        _hush(sys.stderr)
    elif here.rank > 0:
        _speak_as(here.rank if cause is error else None)
    if interrupted and cause in (error, None):
        return interrupts.CODE
    return _tell(error if cause is None else cause, typed.verbose)


_stderr = 2  # kept by a rank that was made silent
_rank = ""  # begins the lines of a rank that reports its own error


def _join_ranks() -> None:
    """Join torchrun's ranks, if it has started us; all but rank 0 fall silent."""
    global _stderr
    if not ranks.are_several():
        return
    if os.environ["RANK"] != "0":
        _stderr, void = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, 1)
        os.dup2(void, 2)
    ranks.join()
    import torch.distributed.fsdp  # noqa: F401  # seconds, before any clock is started


def _speak_as(rank: int | None) -> None:
    global _rank
    os.dup2(_stderr, 2)
    _rank = "" if rank is None else f"rank {rank}: "


def _run(arguments: list[str]) -> int:
    _open_closed_streams()
    # OpenMP's threads spin while they wait; on a busy machine that makes a small run many times
    # slower. Only takes effect before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if arguments[:1] and arguments[0] in ON_RANKS:
        _join_ranks()
    from sewa_cli.cli.app import app

    code = app(arguments, prog_name="sewa", standalone_mode=False)
    if sys.stdout is not None:
        sys.stdout.flush()
    ranks.leave()
    return code if isinstance(code, int) else 0


def _tell(error: BaseException, verbose: bool) -> int:
    if isinstance(error, SewaError):
        if verbose:
            _say_traceback(error.__cause__ or error if isinstance(error, UserCodeError) else error)
        elif isinstance(error, UserCodeError):
            _say(shown_lines(error.frames))
        for fault in error.faults:
            _say_error(fault)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return _pipe_closed()
    if isinstance(error, SystemExit):
        # typer answers a closed pipe with exit code 1
        if isinstance(error.__context__, BrokenPipeError):
            return _pipe_closed()
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        _hush(sys.stdout)  # typer's own prints; data go through `_Stdout`
        _say_error(f"standard output: cannot be written: {error.strerror}")
        return OutputError.exit_code
    # a usage error of typer; it has no message where the help was shown
    if callable(format_message := getattr(error, "format_message", None)):
        if message := format_message().rstrip("."):
            command = getattr(getattr(error, "ctx", None), "command_path", "sewa")
            _say_error(f"{message}{'' if message.endswith('?') else '.'} See `{command} --help`")
        return 2
    if verbose:
        _say_traceback(error)
    if isinstance(error, MemoryError) or "failed to map segment" in str(error):  # of a library
        _say_error("there is not enough memory; free some, or raise `ulimit -v`")
        return CheckpointError.exit_code
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        _say_error("too many files are open; raise `ulimit -n`")
        return CheckpointError.exit_code
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        _say_error(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return CheckpointError.exit_code
    where = "-v shows where, please report it"
    _say_error(f"a bug in sewa: {type(error).__name__}: {one_line(error)}; {where}")
    return 1


def called_from(folder: Path) -> str:
    """Return the words that call this `sewa` again from that folder."""
    from shutil import which

    if which("sewa"):
        return "sewa"
    # a virtual environment that is not activated
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{_shorter(sys.executable, folder)} -m sewa_cli"
    return _shorter(sys.argv[0], folder)


def _shorter(program: str, folder: Path) -> str:
    from shlex import quote

    # the last part is not resolved: an environment's python is a link to another
    full = Path(program).parent.resolve() / Path(program).name
    return quote(min(os.path.relpath(full, folder.resolve()), str(full), key=len))


@contextmanager
def stdout_for_data() -> Iterator[IO[bytes]]:
    """Yield the real standard output; everything else that prints goes to stderr.

    File descriptors are changed, so that prints of C libraries and worker processes do not end up
    in a piped checkpoint. They stay changed: what prints at exit must not follow the checkpoint.
    """
    if sys.stdout is None:  # started with `>&-`
        raise OutputError("standard output: is closed; redirect it to a file")
    sys.stdout.flush()
    data = io.BufferedWriter(_Stdout(os.dup(1), "wb"))
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield data
        data.flush()
    finally:
        with suppress(OSError, OutputError):  # the flush above has raised it
            data.close()


def keep_memory() -> None:
    """Keep memory that a pass, or FSDP, frees again and again, for the next one.

    glibc would give it back to the system, and fresh pages cost more than a ReLU on them does
    (docs/development/performance.md). Larger blocks still go back.
    """
    from ctypes import CDLL

    with suppress(OSError, AttributeError):  # no glibc
        CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; the largest that it takes
        CDLL(None).mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def check_address_space(least: int) -> None:
    """Refuse a `ulimit -v` under which imports would fail halfway, and some of them abort."""
    with suppress(ImportError):  # Windows has no such module
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY and limit < least:
            raise CheckpointError(
                f"`ulimit -v` leaves {size(limit)} of address space, and this takes {size(least)}; "
                "raise it"
            )


def without_blas() -> None:
    """Keep NumPy's BLAS from starting a thread for each core, for commands that only add."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class _Stderr:
    """Standard error; once it cannot be written (closed, a full disk), output is dropped.

    A message that cannot be shown is no reason to stop the work.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _hush(self._stream)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _hush(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stdout(io.FileIO):
    """Standard output; a failing write (a full disk behind `>`) is an OutputError."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output: cannot be written: {error.strerror}") from error


def _open_closed_streams() -> None:
    """Open the null device in the place of a closed standard input, output or error.

    Otherwise the next file, a checkpoint perhaps, would get that number and be printed into.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if not isinstance(sys.stderr, _Stderr):
        sys.stderr = cast(TextIO, _Stderr(sys.stderr))


def _pipe_closed() -> int:
    """Return 0: the reader has had enough, which is no error."""
    _hush(sys.stdout)
    _hush(sys.stderr)
    return 0


def _hush(stream: TextIO) -> None:
    """Drop what is still written there; Python flushes once more at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say_error(fault: str) -> None:
    _say(f"error: {_rank}{shown(fault, LONGEST)}")


def _say_traceback(error: BaseException) -> None:
    """Write the traceback indented, so that none of its lines looks like one of ours."""
    for line in "".join(traceback.format_exception(error)).rstrip().split("\n"):
        _say(f"  {shown(line)}")


def _say(text: str) -> None:
    if text:
        sys.stderr.write(text + "\n")
        if sys.stderr is not None:
            sys.stderr.flush()
