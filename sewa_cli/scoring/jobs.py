"""A job: some weights, scored on some parts. The numbers are the same in every process.

What the task's code draws depends on the seed and the part alone, and there is one thread: sums
that are split among several would differ in their last bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sewa_cli.cache import digest
from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError, UserCodeError
from sewa_cli.events import Events
from sewa_cli.objective.model import FlatModel, find_device
from sewa_cli.objective.tree import to_device, unchanged
from sewa_cli.opening import build_model
from sewa_cli.rng import seed_of, seeded
from sewa_cli.solvers.board import Failed
from sewa_cli.solvers.contest import FEWEST_TO_CONFIRM
from sewa_cli.task import Task, load_task
from sewa_cli.task.scoring import Score, totals

Kind = Literal["selection", "heldout"]
KINDS: tuple[Kind, ...] = ("selection", "heldout")
HELD_BACK = 0.5  # share of the parts, where a task has no held-out ones
FEWEST = 4  # parts; with fewer, none are held back
PLAIN = Tensor | bool | int | float | str | bytes | None


class PartPlaces(NamedTuple):
    """The places of parts in one of the task's two lists."""

    of: Kind
    at: Sequence[int]


def list_parts(task: Task, of: Kind, seed: int) -> list[Any]:
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
) -> dict[Kind, PartPlaces]:
    """Use the task's own held-out parts, or hold some of those to choose by back.

    `listed`: the parts are the task's own list, not batches. Copies of a part then count once.
    """
    every = {of: [*range(len(found))] for of, found in lists.items()}
    if listed:
        every = _without_copies(lists, events)
    count = len(every["selection"])
    if not count:
        raise TaskError("there are no parts to choose by; define score_parts() or selection_data()")
    if every["heldout"]:
        if config.guard is not None:
            raise ConfigError("--guard: the task has held-out parts already; drop one of them")
        return {of: PartPlaces(of, tuple(at)) for of, at in every.items()}
    if count < FEWEST:
        for name in ("strict", "guard"):
            if getattr(config, name):
                raise ConfigError(
                    f"--{name} needs held-out parts: list them in heldout_parts(), or {FEWEST} or "
                    f"more to choose by; there are {count}"
                )
        return {"selection": PartPlaces("selection", tuple(every["selection"]))}
    chosen_by, kept = hold_back(every["selection"], config)
    events.warn(
        f"no held-out {'parts' if listed else 'batches'}: {len(kept)} of the {count} to choose by "
        "are kept aside for the report, and take no part in any choice"
    )
    return {
        "selection": PartPlaces("selection", chosen_by),
        "heldout": PartPlaces("selection", kept),
    }


def hold_back(every: Sequence[int], config: Config) -> tuple[Sequence[int], Sequence[int]]:
    """Divide units at random into those to choose by and those to report by."""
    kept = _count_held_back(len(every), config.guard)
    generator = torch.Generator().manual_seed(config.seed)
    order = [every[i] for i in torch.randperm(len(every), generator=generator).tolist()]
    return tuple(sorted(order[kept:])), tuple(sorted(order[:kept]))


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
                f"{more} of the {len(found)} {what} are listed more than once; each counts once"
            )
    if both := len(first["selection"].keys() & first["heldout"].keys()):
        events.warn(
            f"{both} held-out parts are also parts to choose by, so the held-out score is biased"
        )
    return {of: sorted(places.values()) for of, places in first.items()}


class Job(NamedTuple):
    """weights  [P] in float32, or a file of them
    parts    by their places in `Places.at`
    """

    weights: Tensor | Path
    kind: Kind
    parts: tuple[int, ...]


Result = list[Score] | Failed  # a score for each part


@dataclass(frozen=True)
class PartScorer:
    """Scores weights by the task's parts, in this process."""

    task: Task
    model: FlatModel
    seed: int
    places: Mapping[Kind, PartPlaces]
    lists: Mapping[Kind, Sequence[Any]]  # as `list_parts` gives them

    def score(self, job: Job) -> list[Score]:
        scoring = self.task.scoring
        assert scoring is not None
        of, places = self.places[job.kind]
        at = [places[part] for part in job.parts]
        self.model.set(self._weights(job))
        self.model.module.eval()
        scores: list[Score] = []
        for some in [at] if scoring.at_once else [[place] for place in at]:
            parts = to_device([self.lists[of][place] for place in some], self.model.device)
            own = seed_of(self.seed, KINDS.index(of), some[0])
            with seeded(own), unchanged(parts, "score()"), torch.no_grad(), _one_thread():
                scores += scoring.score(self.model.module, parts)
            self.model.check_untouched("score()")
        return scores

    def _weights(self, job: Job) -> Tensor:
        if isinstance(job.weights, Tensor):
            return job.weights
        size = self.model.layout.size
        return torch.from_file(str(job.weights), shared=False, size=size, dtype=torch.float32)

    def try_score(self, job: Job) -> Result:
        """Return a failure where the user's code fails."""
        try:
            return self.score(job)
        except UserCodeError as error:
            return Failed("; ".join(error.faults) + _place(error.frames))
        except TaskError as error:
            return Failed("; ".join(error.faults), is_final=True)


def _place(frames: str) -> str:
    found = re.findall(r'^  File "(.*)", line (\d+)', frames, re.MULTILINE)
    return f" ({Path(found[-1][0]).name}, line {found[-1][1]})" if found else ""


def scores_by_parts(
    task: Task, model: FlatModel, config: Config, most: int | None = None
) -> Callable[[Any], dict[str, float]]:
    """Return a function that scores the model's weights by the task's parts: means by name.

    Held-out parts if there are any; `most`: at most this many of them.
    """
    seed, metric, scoring = config.seed, config.objective.metric, task.scoring
    assert scoring is not None
    lists: dict[Kind, list[Any]] = {of: list_parts(task, of, seed) for of in KINDS}
    kind: Kind = "heldout" if lists["heldout"] else "selection"
    count = len(lists[kind]) if most is None else min(most, len(lists[kind]))
    scorer = PartScorer(task, model, seed, {kind: PartPlaces(kind, range(count))}, lists)

    def score(_: Any) -> dict[str, float]:
        found = scorer.score(Job(model.flat.cpu(), kind, tuple(range(count))))
        if metric is not None:
            scoring.pick(found, metric)  # refuses a metric that the task does not have
        means = totals(found, [1.0] * count, scoring.corpus)
        return {name or "score": value for name, value in means.items()}

    return score


@dataclass(frozen=True)
class WorkerRecipe:
    """All that another process needs to do the same jobs; can be pickled."""

    config: Config
    newest: Path  # of the checkpoints: a task may be made from it
    integers: Mapping[str, Tensor]  # of the model's state, which the weights of a job lack
    device: str
    places: Mapping[Kind, PartPlaces]
    names: Mapping[Kind, str | None]  # of the lists of parts, by `name_parts`

    def open(self) -> PartScorer:
        """Load the task, build the model and list the parts, and check that these are the same."""
        config, seed = self.config, self.config.seed
        assert config.task is not None
        newest = cache(lambda: open_checkpoint(self.newest, Reads(), config.state_key))
        with seeded(seed):
            task = load_task(config.task, config.args, newest)
        with seeded(seed):
            model = build_model(task, newest(), find_device(self.device))
        model.load(self.integers.items())
        lists = {of: list_parts(task, of, seed) for of in {of for of, _ in self.places.values()}}
        names = [(self.names[of], name_parts(parts)) for of, parts in lists.items()]
        differ = any(before != now for before, now in names if before and now)
        if differ or any(max(at, default=-1) >= len(lists[of]) for of, at in self.places.values()):
            raise TaskError(
                f"{Path(task.source).name}: lists other parts in a worker, or in another order; "
                "list the same in every process (the order of a set changes)"
            )
        return PartScorer(task, model, seed, self.places, lists)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _blas().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


@cache  # to go through all libraries of the process takes a millisecond
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")
