"""The exception tree. Each class carries the exit code that the command line ends with.

    SewaError                1   our own bug, if it ever reaches the user bare
    ├── ConfigError          2   usage, flags, sewa.yaml
    ├── CheckpointError      3   the input files
    │   └── Unfinished       3   a half-written one; the newest of a folder is left out
    ├── OutputError          3   the files we write
    ├── TaskError            4   the user's module
    │   ├── UserCodeError    4   an exception raised inside it; carries the user's frames
    │   └── RankLost         4   another rank of torchrun has ended
    └── BaselineWins         5   --strict, and a baseline did better

Raised where the fault is found; only `cli` turns them into a line and an exit code.
"""

from sewa_cli.mirrors import named


class SewaError(Exception):
    """One or more faults, each shown on its own line."""

    exit_code = 1

    def __init__(self, *faults: str) -> None:
        self.faults = tuple(map(named, faults))
        super().__init__("\n".join(self.faults))


class ConfigError(SewaError):
    exit_code = 2


class CheckpointError(SewaError):
    exit_code = 3


class Unfinished(CheckpointError):
    """A checkpoint that is cut short or lacks files, as while it is being written."""


class OutputError(SewaError):
    exit_code = 3


class TaskError(SewaError):
    exit_code = 4


class UserCodeError(TaskError):
    """An exception inside the user's module. `frames`: the traceback, the user's files only."""

    def __init__(self, message: str, frames: str = "") -> None:  # unpickling gives one
        super().__init__(message)
        self.frames = frames


class RankLost(TaskError): ...


class BaselineWins(SewaError):
    exit_code = 5
