"""A metric to choose by: the task's parts on a board, evaluated here or by workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import nan
from typing import Any

import torch
from torch import Tensor

from sewa_cli.config import Config
from sewa_cli.direction import score_of
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events, Planned
from sewa_cli.methods import Coefficients, parse_one
from sewa_cli.methods import Run as Methods
from sewa_cli.methods.family import Name
from sewa_cli.objective.board import (
    TOLD,
    Answer,
    Asked,
    Average,
    Board,
    Failed,
)
from sewa_cli.objective.memo import number
from sewa_cli.objective.tree import rows
from sewa_cli.rng import seeded
from sewa_cli.session.extensions import make_solver
from sewa_cli.session.jobs import Examiner, Failure, Job, Kind, Places, Recipe, parts_of, told
from sewa_cli.session.run import Run
from sewa_cli.session.workers import InProcess, Workers
from sewa_cli.settings import AUTO, USUAL, seconds_of
from sewa_cli.solvers import Choice, Problem, default_for
from sewa_cli.solvers.contest import FEWEST as CAN_TELL
from sewa_cli.task.scoring import METRICS, Score

KINDS: tuple[Kind, ...] = ("selection", "heldout")
AT_ONCE = 8  # parts in a call of scores()
ASIDE = 0.5  # of the parts, where a task has none that are held out
SHOWN = 4  # averages that are scored on held-out parts, or fewer where some are the same
FEWEST = 4  # parts; of fewer, none are kept aside


class Metric:
    """The task's metric over a run's averages. To be closed: it may have processes."""

    def __init__(self, run: Run) -> None:
        session, config = run.session, run.session.config
        task, scoring = session.task, session.task.scoring
        assert scoring is not None
        assert config.objective.metric is not None
        self.run, self._scoring = run, scoring
        self.name, self.goal = config.objective.metric, config.objective.direction
        lists = {of: parts_of(task, of, config.seed) for of in KINDS}
        self.places = _places(lists, config, session.events, listed=scoring.parts is not None)
        self._lists = lists
        self._at_once = AT_ONCE if scoring.at_once else 1
        self.heldout_evaluations = 0
        self._flats: OrderedDict[Average, Tensor] = OrderedDict()
        self._pool = self._open_pool(lists)
        weights = {
            kind: torch.tensor(
                [
                    float(max(1, rows(lists[of][part]))) if scoring.parts is None else 1.0
                    for part in at
                ],
                dtype=torch.float64,
            )
            for kind, (of, at) in self.places.items()
        }
        self._part_weights = weights["selection"]
        self.heldout_weights = weights.get("heldout", torch.zeros(0, dtype=torch.float64))
        self.board = self._open_board()
        if scoring.name == METRICS and task.heldout_data is not None:
            session.events.warn(
                "chosen by metrics(model), as one part: if it looks at held-out rows, their loss "
                "is too good now; score(model, part) and score_parts() keep them apart"
            )

    def _open_pool(self, lists: Mapping[Kind, Sequence[Any]]) -> InProcess | Workers:
        session, objective = self.run.session, self.run.session.config.objective
        if objective.workers == 1 and objective.part_timeout is None:
            seed = session.config.seed
            examiner = Examiner(session.task, session.model, seed, self.places, lists)
            return InProcess(examiner.evaluate)
        if session.config.task is None:
            raise ConfigError(
                "workers: functions cannot be sent to other processes; name a task's file"
            )
        newest, names = session.newest, session.names
        integers = {
            name: newest.read(source)
            for name, source in names.items()
            if not newest.tensors[source].is_float
        }
        recipe = Recipe(
            *(session.config, newest.path, integers, str(session.device), self.places),
            {of: told(found) for of, found in lists.items()},
        )
        return Workers(recipe, objective.workers, objective.part_timeout)

    def _open_board(self) -> Board:
        """With nothing on it and the whole budget."""
        session, budget = self.run.session, self.run.session.config.objective.budget
        return Board(
            len(self._part_weights),
            self._evaluate,
            session.events,
            self._part_weights,
            evaluations=budget if isinstance(budget, int) else None,
            seconds=seconds_of(budget) if isinstance(budget, str) else None,
            at_once=self._at_once,
            abreast=session.config.objective.workers * self._at_once,
            numbers=self.places["selection"].at,
        )

    def close(self) -> None:
        self._pool.close()

    def follow(self) -> None:
        """Show progress by the budget, and by the held-out parts of those that are shown."""
        if (budget := self.board.evaluations) is None:  # a time: nobody knows how many it is for
            return
        heldout = SHOWN * (self.heldout_parts or 0)
        self.run.session.events.follow(
            [Planned("evaluating parts", budget), Planned("held-out parts", heldout)],
            lambda: self.board.spent + self.heldout_evaluations,
        )

    @property
    def heldout_parts(self) -> int | None:
        found = self.places.get("heldout")
        return None if found is None else len(found.at)

    def problem(self) -> Problem:
        """With a new board, and what the loss would choose, where there is a loss."""
        problem, self.board = self.run.problem(), self._open_board()
        if self.board.seconds is not None:
            self._pool.warm()
        return replace(
            problem,
            board=self.board,
            incumbent=self._incumbent(),
            by_loss=partial(self._by_loss, problem) if self.run.session.task.has_loss else None,
        )

    def _incumbent(self) -> tuple[Name, Coefficients] | None:
        """The baseline that the user names."""
        config, k = self.run.session.config, self.run.trajectory.k
        if (named := config.objective.incumbent) is None:
            return None
        call, K = parse_one(named, "incumbent"), None
        if call.method.needs_loss or call.method.needs_metric:
            raise ConfigError(f"incumbent: {named} looks at a loss; name a method such as last")
        if call.method.has_budget:
            K = min(USUAL, k) if config.K == AUTO else config.K
        return (call.label, K), call(Methods.at([c.step for c in self.run.used], config.seed), K)[0]

    def _by_loss(self, problem: Problem, K: int) -> Choice:
        """By batches that are not kept aside as held-out parts."""
        session, kept = self.run.session, self.places.get("heldout")
        scoring = session.task.scoring
        are_batches = scoring is not None and scoring.parts is None
        if are_batches and kept is not None and kept.of == "selection":
            some = [self._lists["selection"][at] for at in self.places["selection"].at]
            objective = replace(problem.objective, selection=some)
            problem = replace(problem, objective=objective)
        return make_solver(session.config, default_for(K, sparse=False)).choose(problem, K)

    # ---- to choose by -----------------------------------------------------------------------

    def _evaluate(
        self, asked: Sequence[Asked], until: float | None
    ) -> Iterator[tuple[int, Answer]]:
        """What is known from another run is answered at once; then one group after the other."""
        memo, left = self.run.session.objective.memo, []
        for place, one in enumerate(asked):
            known = [memo.known(self._key(one.average, part)) for part in one.parts]
            if all(value is not None for value in known):
                yield place, [float(value["loss"]) for value in known if value is not None]
            else:
                left.append((place, one))
        for place, answer in self._run(left, "selection", until):
            losses = answer if isinstance(answer, Failed) else self._losses(answer)
            if not isinstance(losses, Failed):
                for part, loss in zip(asked[place].parts, losses, strict=True):
                    memo.keep(self._key(asked[place].average, part), {"loss": number(loss)})
            yield place, losses

    def _losses(self, scores: Sequence[Score]) -> list[float]:
        return self._scoring.losses(scores, self.name, self.goal)

    def _key(self, average: Average, part: int) -> tuple[Any, ...]:
        """What a score depends on besides the checkpoints, the task and the settings."""
        places = self.places["selection"]
        at = places.at[part]
        return "score", self.run.trajectory.kind, at, self._lists[places.of][at], list(average)

    def _run(
        self, asked: Sequence[tuple[int, Asked]], kind: Kind, until: float | None
    ) -> Iterator[tuple[int, list[Score] | Failed]]:
        """Weights are made for as many averages at a time as there is room for."""
        for group in self._groups(asked):
            jobs = [Job(self._weights(one.average), kind, one.parts) for _, one in group]
            done = 0
            for index, result in self._pool.run(jobs, until):
                done += 1
                yield (
                    group[index][0],
                    Failed(*result) if isinstance(result, Failure) else result,
                )
            if done < len(group):
                return

    def _groups(self, asked: Sequence[tuple[int, Asked]]) -> Iterator[list[tuple[int, Asked]]]:
        group: list[tuple[int, Asked]] = []
        averages = 0
        for _, some in groupby(asked, key=lambda one: one[1].average):
            group += some
            averages += 1
            if averages == self._most:
                yield group
                group, averages = [], 0
        if group:
            yield group

    @property
    def _most(self) -> int:
        size = 4 * self.run.session.model.layout.size
        workers = self.run.session.config.objective.workers
        return max(workers, self.run.placed.room // 8 // size, 1)

    def _weights(self, average: Average) -> Tensor:
        """[P] on the processor, as a file of it would have them, BatchNorm too."""
        if average in self._flats:
            self._flats.move_to_end(average)
            return self._flats[average]
        run = self.run
        with seeded(run.session.config.seed):  # a loader may shuffle: as it will for the file
            run.scores.load_as_file(average)
        flat = run.session.model.flat.detach().to("cpu", copy=True)
        self._flats[average] = flat
        while len(self._flats) > self._most:
            self._flats.popitem(last=False)
        return flat

    # ---- held out ---------------------------------------------------------------------------

    def score_heldout(self, average: Average) -> list[Score] | None:
        """Part by part; what fails has no numbers. None: there are no such parts."""
        count = self.heldout_parts
        if count is None:
            return None
        every = range(count)
        pieces = [
            Asked(average, tuple(every[n : n + self._at_once])) for n in every[:: self._at_once]
        ]
        found: list[Score] = [{"": nan} for _ in every]
        events = self.run.session.events
        done = failed = 0
        while pieces:
            singly: list[Asked] = []  # of several that were asked at once some has failed
            for place, answer in self._run(list(enumerate(pieces)), "heldout", None):
                parts = pieces[place].parts
                if not isinstance(answer, Failed):
                    found[parts[0] : parts[-1] + 1] = answer
                elif answer.is_task:
                    raise TaskError(answer.line)
                elif len(parts) > 1:
                    singly += pieces[place].one_by_one()
                    continue
                else:
                    failed += 1
                    if failed <= TOLD:
                        name = self.places["heldout"].at[parts[0]]
                        events.warn(f"held-out part {name} has failed: {answer.line}")
                done += len(parts)
                self.heldout_evaluations += len(parts)
                events.progress("held-out parts", done, count)
            pieces = singly
        if failed > TOLD:
            events.warn(f"{failed - TOLD} more held-out parts have failed")
        return found

    def heldout_losses(self, scores: Sequence[Score]) -> Tensor:
        """NaN: that part has failed."""
        return torch.tensor(self._losses(scores), dtype=torch.float64)

    def score(self, loss: float) -> float:
        """The metric itself."""
        return score_of(loss, self.goal)


def _places(
    lists: Mapping[Kind, Sequence[Any]], config: Config, events: Events, *, listed: bool
) -> dict[Kind, Places]:
    """Held-out parts are the task's own, or some of those to choose by are kept aside.

    `listed`: by the task. Then copies of a part, as far as can be told, count once.
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
    kept = _kept_aside(count, config.guard)
    what = "parts" if listed else "batches"
    events.warn(
        f"no held-out {what}: {kept} of the {count} to choose by are kept aside, to report by; "
        "nothing is chosen by these, by the loss neither"
    )
    generator = torch.Generator().manual_seed(config.seed)
    order = [every["selection"][i] for i in torch.randperm(count, generator=generator).tolist()]
    return {
        "selection": Places("selection", tuple(sorted(order[kept:]))),
        "heldout": Places("selection", tuple(sorted(order[:kept]))),
    }


def _kept_aside(count: int, guard: float | None) -> int:
    """Half of them, but that as many are left to choose by as can show a lead to be no luck."""
    kept = min(max(1, round((ASIDE if guard is None else guard) * count)), count - 1)
    most = count - CAN_TELL
    return min(kept, most) if guard is None and most >= FEWEST else kept


def _without_copies(lists: Mapping[Kind, Sequence[Any]], events: Events) -> dict[Kind, list[int]]:
    """The first of each: seeds, names, tensors, and nests of them, can be told to be the same."""
    names = {
        of: [told([part]) or f"{of} {place}" for place, part in enumerate(parts)]
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
