"""`--ranks 4`: several ranks of this host, started as one command by torch's own launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sewa_cli import interrupts, ranks
from sewa_cli.cli import together
from sewa_cli.cli.main import typed
from sewa_cli.errors import ConfigError, UserCodeError

STDIN = STDOUT = "-"
SPOKEN = 5  # exit codes up to this are ours, and said with a line


def begin(given: dict[str, Any]) -> bool:
    """Be one of several ranks, or start them and wait: then all is done."""
    wanted = given["ranks"] if given.get("dry_run") else given.pop("ranks")
    if wanted is not None and not (wanted.isascii() and wanted.isdecimal() and int(wanted) > 0):
        raise ConfigError(f"--ranks: must be a number of processes, found {wanted!r}")
    if wanted is not None and int(wanted) == 1:
        ranks.be_alone()
    if given.get("dry_run"):
        if ranks.are_several():
            given["ranks"] = wanted or os.environ["WORLD_SIZE"]
        return not ranks.are_several() or os.environ["RANK"] == "0"
    if not ranks.are_several() and (wanted is None or int(wanted) == 1):
        return True
    if STDIN in (given["ckpts"] or []):
        raise ConfigError("-: paths on standard input reach one rank only; name them")
    if not ranks.are_several():
        if int(wanted) > (most := most_here()):
            raise ConfigError(f"--ranks: {wanted} on this host, whose cores carry {most} at most")
        _refuse(dict(given))
        if code := launch(int(wanted), typed.arguments):
            from typer import Exit

            raise Exit(code)
        return False
    if wanted is not None and int(wanted) != int(os.environ["WORLD_SIZE"]):
        raise ConfigError(f"--ranks {wanted}, but torchrun has started {os.environ['WORLD_SIZE']}")
    together.join(given["verbose"])
    return True


def _refuse(given: dict[str, Any]) -> None:
    """What is wrong with flags, config and outputs is told before anybody is started.

    Checkpoints are looked at, and not read.
    """
    from sewa_cli.cli.options import Request
    from sewa_cli.output.destination import decide_outputs
    from sewa_cli.output.place import check_free
    from sewa_cli.session import open_newest

    has_output, best = "output" in given, given.get("output_best")
    request = Request(given, sys.stdout.buffer)
    if has_output:
        stdout, config = request.stdout, request.config
        decide_outputs(config, request.force, stdout, open_newest(config)).check(request.inputs)
    if best is not None and str(best) != STDOUT:
        check_free(best, request.force)


def launch(count: int, arguments: Sequence[str]) -> int:
    """The command on so many ranks of this host, by torch's own launcher. Returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # what it says of a rank that fails, we say in one line
    with TemporaryDirectory() as logs:  # which torch would leave behind
        os.environ[interrupts.LAUNCHED] = logs
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            shutdown_timeout=10,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "sewa_cli", *arguments)
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            return _explain({r: f.exitcode for r, f in error.failures.items()}, Path(logs))
    return 0


def most_here() -> int:
    """Processes that this host can well be asked to run at once."""
    return max(16, 4 * (os.cpu_count() or 1))


def _explain(codes: dict[int, int], logs: Path) -> int:
    """Names the rank that was the cause, if nobody has; the others were told to end."""
    told_to_end = (-signal.SIGTERM, -signal.SIGINT, interrupts.CODE)
    try:
        found = json.loads((logs / together.FAULT).read_text())
    except (OSError, ValueError):  # nobody was left who could post it
        found = None
    if found is not None and found["said"]:
        return int(found["code"])
    rank = min(codes, key=lambda r: codes[r] in told_to_end) if found is None else found["rank"]
    code = codes.get(rank, 0)
    if found is None and 0 < code <= SPOKEN and not (logs / together.MET).exists():
        return code
    what, ends = f"has ended by itself, with exit code {code}", UserCodeError.exit_code
    if code in told_to_end:
        what, ends = "was told to end", interrupts.CODE
    elif code < 0:
        why = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        what, ends = f"was killed ({signal.Signals(-code).name}{why})", 128 - code
    together.say(f"error: rank {rank} {what}; nothing was written")
    return ends
