"""The checkpoints that take part in a command. Imports no torch: `average` goes without."""

from __future__ import annotations

import json
from glob import has_magic
from pathlib import Path

from sewa_cli import checkpoints, mirrors
from sewa_cli.checkpoints import Checkpoint, Reads
from sewa_cli.checkpoints.means import choose, with_running
from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.report.shared import LeftOut
from sewa_cli.text import did_you_mean, is_utf8


def open_named(
    config: Config, events: Events, reads: Reads | None = None, keep_ours: bool = False
) -> list[Checkpoint]:
    """Open all checkpoints that the user named, in the order given; only headers are read."""
    if not config.checkpoints:
        raise ConfigError("no checkpoints named: give a folder, or `checkpoints:` in sewa.yaml")
    given = config.checkpoints
    if config.revisions is not None or any(map(mirrors.url_of, given)):
        from sewa_cli.remote.scratch import local_paths

        given = local_paths(config)
    for path in given:
        if str(path) != STDOUT:
            _check_there(path, config)
    found = checkpoints.open_all(
        given,
        reads or Reads(),
        state_key=config.state_key,
        keep_ours=keep_ours,
        exclude=config.exclude,
        warn=events.warn,
        note=events.note,
    )
    events.found([checkpoint.path for checkpoint in found])
    return found


def _check_there(path: Path, config: Config) -> None:
    try:
        path.lstat()
    except FileNotFoundError:
        if has_magic(str(path)):
            return  # a pattern
        others = map(str, path.parent.glob("*"))
        hint = did_you_mean(str(path), others) or "name the run's folder"
        file = config.checkpoints_from
        where = path if file is None else f"{path} (from checkpoints: in {file})"
        raise CheckpointError(f"{where}: no such file or folder; {hint}") from None
    except OSError:
        return  # reported when it is opened


def check_alike(candidates: list[Checkpoint]) -> list[Checkpoint]:
    """Refuse checkpoints of different models."""
    checkpoints.check_agreement(candidates)
    if candidates[0].kind == "adapter":
        checkpoints.check_same_product(candidates)
    return candidates


def open_candidates(
    config: Config, events: Events, reads: Reads | None = None
) -> tuple[list[Checkpoint], list[Checkpoint], Config]:
    """Return the checkpoints that take part, by step; and all that were found, inputs too.

    The config returned has the source that was used.
    """
    found = open_named(config, events, reads)
    ordered = checkpoints.in_order(with_running(found))
    span = config.last, config.every, config.from_step, config.to_step
    kept, source = choose(checkpoints.narrow(ordered, *span), config.source, events.say)
    if source != "snapshots":
        config = config.model_copy(update={"source": source})
    kept = check_alike(kept)
    if mirrors.OPEN:
        from sewa_cli.remote.streamed import settle

        kept = settle(kept)
    return kept, found, config


def open_newest(config: Config, as_given: bool = False) -> Checkpoint:
    """Open the newest checkpoint that will take part, or the last given, for a task made from it.

    Nothing is reported: whoever opens them all will do that.
    """
    if as_given:
        return open_named(config, Events(), keep_ours=True)[-1]
    return open_candidates(config, Events())[0][-1]


def warn_of_no_steps(candidates: list[Checkpoint], events: Events) -> None:
    if candidates[0].step is None:
        events.warn(
            "no checkpoint has a step in its metadata or name; they are taken in the order given"
        )


def leave_out(checkpoint: Checkpoint, broken: str, config: Config, events: Events) -> LeftOut:
    """Warn of a checkpoint with NaN or Inf in the tensor `broken`, or stop the run."""
    reason = f"{broken} holds NaN or Inf"
    if config.nonfinite == "error":
        raise CheckpointError(f"{checkpoint.name}: {reason}; --set nonfinite=skip leaves it out")
    events.warn(f"{checkpoint.name}: left out: {reason}")
    return LeftOut(path=checkpoint.name, step=checkpoint.step, reason=reason)


def check_names(config: Config, task: str | None = None) -> None:
    """Refuse now, not after all the work, what no report could hold."""
    try:
        here = str(Path.cwd())
    except OSError as error:
        raise CheckpointError(f"the working directory: {error.strerror}; go to another") from error
    if not is_utf8(here):
        raise CheckpointError(f"{here}: the working directory is not a UTF-8 name; rename it")
    if task is not None and not is_utf8(task):
        raise TaskError(f"{task}: is not a UTF-8 name; rename it")
    files = {"output", "report"}  # these are looked at where they are to be written
    for key, value in config.model_dump(mode="json", exclude=files).items():
        if not is_utf8(json.dumps(value, ensure_ascii=False)):
            raise ConfigError(f"{key}: {value}: is not UTF-8, as all in a report is; rename it")
