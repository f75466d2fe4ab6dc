"""The parts that a metric is scored on: those to choose by, and held-out ones.

Parts are known by their place in the task's list, so that a part may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.rng import seeded
from sewa_cli.session.cache import digest
from sewa_cli.solvers.contest import FEWEST_TO_CONFIRM
from sewa_cli.task import Task

Kind = Literal["selection", "heldout"]
KINDS: tuple[Kind, ...] = ("selection", "heldout")
HELD_BACK = 0.5  # share of the parts, where a task has no held-out ones
FEWEST = 4  # parts; with fewer, none are held back
PLAIN = Tensor | bool | int | float | str | bytes | None


class Places(NamedTuple):
    """The places of parts in one of the task's two lists."""

    of: Kind
    at: Sequence[int]


def list_parts(task: Task, of: Kind, seed: int) -> list[Any]:
    """Return the task's own list of parts, else the batches of its data."""
    scoring = task.scoring
    assert scoring is not None
    with seeded(seed):  # seeds may be drawn, a loader may shuffle
        if scoring.parts is None:
            data = task.selection_data if of == "selection" else task.heldout_data
            return [] if data is None else list(data)
        listed = scoring.parts if of == "selection" else scoring.heldout
        return [] if listed is None else listed.list()


def name_parts(parts: Sequence[Any]) -> str | None:
    """Return a hash of just these parts in this order; None: some cannot be hashed by content."""
    return digest(*parts) if all(map(_is_plain, parts)) else None


def _is_plain(part: Any) -> bool:
    """Return whether it reads the same in every process; a pickle of a set, say, does not."""
    if isinstance(part, Mapping):
        return all(map(_is_plain, (*part.keys(), *part.values())))
    if isinstance(part, list | tuple):
        return all(map(_is_plain, part))
    if isinstance(part, np.ndarray):
        return not part.dtype.hasobject
    return isinstance(part, PLAIN)


def divide_parts(
    lists: Mapping[Kind, Sequence[Any]], config: Config, events: Events, *, listed: bool
) -> dict[Kind, Places]:
    """Use the task's own held-out parts, or hold some of those to choose by back.

    `listed`: the parts are the task's own list, not batches. Copies of a part then count once.
    """
    every = {of: [*range(len(found))] for of, found in lists.items()}
    if listed:
        every = _without_copies(lists, events)
    count = len(every["selection"])
    if not count:
        raise TaskError("there are no parts to choose by: score_parts(), or selection_data()")
    if every["heldout"]:
        if config.guard is not None:
            raise ConfigError("--guard: the task has held-out parts already; drop one of them")
        return {of: Places(of, tuple(at)) for of, at in every.items()}
    if count < FEWEST:
        for name in ("strict", "guard"):
            if getattr(config, name):
                raise ConfigError(
                    f"--{name} needs held-out parts: list them in heldout_parts(), or {FEWEST} or "
                    f"more to choose by; there are {count}"
                )
        return {"selection": Places("selection", tuple(every["selection"]))}
    kept = _count_held_back(count, config.guard)
    events.warn(
        f"no held-out {'parts' if listed else 'batches'}: {kept} of the {count} to choose by are "
        "kept aside, to report by; nothing is chosen by these, by the loss neither"
    )
    generator = torch.Generator().manual_seed(config.seed)
    order = [every["selection"][i] for i in torch.randperm(count, generator=generator).tolist()]
    return {
        "selection": Places("selection", tuple(sorted(order[kept:]))),
        "heldout": Places("selection", tuple(sorted(order[:kept]))),
    }


def _count_held_back(count: int, guard: float | None) -> int:
    """Return half of the parts, or fewer, to leave as many as can confirm a lead."""
    kept = min(max(1, round((HELD_BACK if guard is None else guard) * count)), count - 1)
    most = count - FEWEST_TO_CONFIRM
    return min(kept, most) if guard is None and most >= FEWEST else kept


def _without_copies(lists: Mapping[Kind, Sequence[Any]], events: Events) -> dict[Kind, list[int]]:
    """Return the place of the first copy of each part, as far as parts can be compared."""
    names = {
        of: [name_parts([part]) or f"{of} {place}" for place, part in enumerate(parts)]
        for of, parts in lists.items()
    }
    first = {of: {name: i for i, name in reversed([*enumerate(n)])} for of, n in names.items()}
    for of, found in names.items():
        if more := len(found) - len(first[of]):
            what = "parts to choose by" if of == "selection" else "held-out parts"
            events.warn(
                f"{more} of the {len(found)} {what} are listed before, and count once: the same "
                "part once more is no further evidence"
            )
    if both := len(first["selection"].keys() & first["heldout"].keys()):
        events.warn(
            f"{both} held-out parts are among those to choose by: the held-out score is too good"
        )
    return {of: sorted(places.values()) for of, places in first.items()}
