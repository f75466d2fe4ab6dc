"""The checkpoints that take part, from their headers alone."""

from __future__ import annotations

from pathlib import Path

from sewa_cli import checkpoints as library
from sewa_cli.checkpoints import Checkpoint, Reads
from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.events import Events


def open_candidates(
    config: Config, reads: Reads, events: Events | None = None
) -> tuple[list[Checkpoint], list[Path]]:
    """Find, order, narrow down and cross-check the checkpoints, from their headers alone.

    Also returns the paths of all that were found: inputs, even if they take no part.
    """
    events = events or Events()
    if not config.checkpoints:
        raise ConfigError("no checkpoints named: give a folder, or `checkpoints:` in sewa.yaml")
    found = library.open_all(
        config.checkpoints,
        reads,
        state_key=config.state_key,
        warn=events.warn,
        note=events.note,
    )
    if not found:
        where = ", ".join(str(path) for path in config.checkpoints)
        raise CheckpointError(f"{where}: holds no checkpoints")
    candidates = library.narrow(
        library.in_order(found), config.last, config.every, config.from_step, config.to_step
    )
    library.check_agreement(candidates)
    library.check_same_product(candidates)
    return candidates, [path for c in found for path in (c.path, *c.files)]
