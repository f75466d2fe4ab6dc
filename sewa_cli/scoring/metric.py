"""A metric to choose by: averages of a run, scored on the task's parts, here or by workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sewa_cli.config import Config
from sewa_cli.direction import Criterion, Sums
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events, Planned
from sewa_cli.extensions import make_solver
from sewa_cli.methods import Coefficients, Run, parse_one
from sewa_cli.methods.fixed import Name
from sewa_cli.mirrors import bring
from sewa_cli.objective.tree import rows
from sewa_cli.placing import PlacedRun
from sewa_cli.rng import seeded
from sewa_cli.scoring.jobs import (
    KINDS,
    Job,
    Kind,
    PartPlaces,
    PartScorer,
    Result,
    WorkerRecipe,
    divide_parts,
    list_parts,
    name_parts,
)
from sewa_cli.scoring.workers import InProcess, Workers
from sewa_cli.settings import AUTO, USUAL, seconds_of
from sewa_cli.solvers import Choice, Problem, default_for
from sewa_cli.solvers.board import REPORTED, Answer, Asked, Average, Board, Failed
from sewa_cli.stats import unit_scores
from sewa_cli.task.scoring import METRICS, Corpus, Score, Scoring, Value

if TYPE_CHECKING:
    from sewa_cli.scoring.script import ScriptJudge

AT_ONCE = 8  # parts in a call of scores()
SHOWN = 4  # averages that are scored on held-out parts, or fewer where some are the same


@dataclass
class Metric:
    """A metric over averages of a run. Close it: it may have processes.

    basis  the problem without a board
    judge  scores averages on parts, by the task's functions or by a command
    board  what was asked for the choice under way
    """

    basis: Problem
    config: Config
    criterion: Criterion
    judge: TaskJudge | ScriptJudge
    board: Board = field(init=False)
    heldout_evaluations: int = 0

    @property
    def events(self) -> Events:
        return self.basis.events

    @property
    def weights(self) -> Mapping[Kind, Tensor]:
        return self.judge.weights

    @property
    def heldout_parts(self) -> int | None:
        return len(self.weights["heldout"]) if "heldout" in self.weights else None

    def problem(self) -> Problem:
        """Return the problem with a new board."""
        config, judge = self.config.objective, self.judge
        budget = config.budget
        self.board = Board(
            self.criterion,
            self.weights["selection"],
            judge.evaluate,
            self.events,
            evaluations=budget if isinstance(budget, int) else None,
            seconds=seconds_of(budget) if isinstance(budget, str) else None,
            at_once=judge.at_once,
            abreast=config.workers * judge.at_once,
            whole=judge.whole,
            stop_after=judge.stop_after,
            name_of=partial(judge.name_of, "selection"),
            corpus=self.corpus,
        )
        if self.board.seconds is not None:
            judge.warm()
        self.board.ask([(average, range(self.board.parts)) for average in judge.tried])
        return replace(self.basis, board=self.board)

    def follow(self) -> None:
        """Show progress by the budget, and by the held-out parts of averages that are reported."""
        if (budget := self.board.evaluations) is None:  # of a time nobody knows what it is for
            return
        heldout = 0 if self.judge.whole else SHOWN * (self.heldout_parts or 0)
        self.events.follow(
            [Planned("evaluating", budget), Planned("held-out parts", heldout)],
            lambda: self.board.spent + self.heldout_evaluations,
        )

    def close(self) -> None:
        self.judge.close()

    def score_heldout(self, average: Average) -> list[Score] | None:
        """Return a score for each held-out part, without numbers where it has failed.

        None: there are no such parts.
        """
        count, events = self.heldout_parts, self.events
        if count is None:
            return None
        at_once = count if self.judge.whole else self.judge.at_once
        found: list[Score] = [{"": nan} for _ in range(count)]
        done, failures, repeated = 0, list[str](), list[Asked]()
        starts = range(0, count, at_once)
        first = [Asked(average, (*range(count)[n : n + at_once],)) for n in starts]
        for calls in (first, repeated):
            for place, result in self.judge.score_heldout(calls):
                parts = calls[place].parts
                if not isinstance(result, Failed):
                    found[parts[0] : parts[-1] + 1] = result
                elif result.is_final:
                    raise TaskError(result.line)
                elif len(parts) > 1:  # one of them may be to blame
                    repeated += calls[place].one_by_one()
                    continue
                else:
                    name = self.judge.name_of("heldout", parts[0])
                    failures.append(f"held-out part {name} has failed: {result.line}")
                done += len(parts)
                self.heldout_evaluations += 0 if self.judge.whole else len(parts)
                events.progress("held-out parts", done, count)
        for line in failures[:REPORTED]:
            events.warn(line)
        if len(failures) > REPORTED:
            events.warn(f"{len(failures) - REPORTED} more held-out parts have failed")
        return found

    def pick(self, scores: Sequence[Score]) -> Tensor:
        """Return the metric on each held-out part; NaN: that part has failed."""
        return unit_scores(self.judge.pick(scores), self.corpus)

    @cached_property
    def corpus(self) -> Callable[[Sums], float] | None:
        corpus = self.judge.corpus
        return None if corpus is None else partial(corpus, self.criterion.name)


@dataclass
class TaskJudge:
    """Scores by the task's functions.

    lists       the task's two lists of parts; `places` says which of them are for what
    weights     what each part counts in a mean
    whole       a call has all parts, and is one evaluation
    stop_after  failures in a row that end a search
    tried       averages that were scored before there was a board
    """

    run: PlacedRun
    scoring: Scoring
    metric: str
    lists: Mapping[Kind, Sequence[Any]]
    places: Mapping[Kind, PartPlaces]
    weights: Mapping[Kind, Tensor]
    pool: InProcess | Workers
    whole: bool = False
    stop_after: int | None = None
    tried: Sequence[Average] = ()
    _stored: OrderedDict[Average, Tensor | Path] = field(default_factory=OrderedDict)

    @property
    def at_once(self) -> int:
        """Return the number of parts in a call."""
        return AT_ONCE if self.scoring.at_once else 1

    def name_of(self, kind: Kind, part: int) -> int:
        return self.places[kind].at[part]

    def pick(self, scores: Sequence[Score]) -> list[Value]:
        return self.scoring.pick(scores, self.metric)

    @property
    def corpus(self) -> Corpus | None:
        """Return what makes metrics of sums over parts."""
        return self.scoring.corpus

    def warm(self) -> None:
        """Start all processes: their start is no measure of what a part takes."""
        self.pool.warm()

    def close(self) -> None:
        self.pool.close()

    def choose_by_loss(self, problem: Problem, K: int) -> Choice:
        """Choose by the loss, without batches that are held back as held-out parts."""
        kept = self.places.get("heldout")
        if self.scoring.parts is None and kept is not None and kept.of == "selection":
            some = [self.lists["selection"][at] for at in self.places["selection"].at]
            objective = replace(problem.objective, selection=some)
            problem = replace(problem, objective=objective)
        config = self.run.session.config
        return make_solver(config, default_for(K, sparse=False)).choose(problem, K)

    def evaluate(self, calls: Sequence[Asked], until: float | None) -> Iterator[tuple[int, Answer]]:
        """Yield the metric on parts to choose by, by the calls' places, as they finish.

        What is known from an earlier run comes first.
        """
        memo, left = self.run.session.objective.memo, []
        for place, call in enumerate(calls):
            keys = [self._key(call.average, part) for part in call.parts]
            known = [None if memo is None else memo.known(key) for key in keys]
            if all(value is not None for value in known):
                found = [value["score"].tolist() for value in known if value is not None]
                yield place, [tuple(one) if isinstance(one, list) else one for one in found]
            else:
                left.append(place)
        for n, result in self._run([calls[place] for place in left], "selection", until):
            place, call = left[n], calls[left[n]]
            if isinstance(result, Failed):
                yield place, result
                continue
            scores = self.pick(result)
            for part, score in zip(call.parts, scores, strict=True):
                if memo is not None:
                    memo.keep(
                        self._key(call.average, part),
                        {"score": torch.tensor(score, dtype=torch.float64)},
                    )
            yield place, scores

    def score_heldout(self, calls: Sequence[Asked]) -> Iterator[tuple[int, Result]]:
        """Yield all scores on held-out parts in the same way."""
        yield from self._run(calls, "heldout")

    def _key(self, average: Average, part: int) -> tuple[Any, ...]:
        """Name all that a score depends on besides the checkpoints, the task and the settings."""
        of, at = self.places["selection"]
        part_itself = self.lists[of][at[part]]
        return "score of a part", self.run.trajectory.kind, at[part], part_itself, list(average)

    def _run(
        self, calls: Sequence[Asked], kind: Kind, until: float | None = None
    ) -> Iterator[tuple[int, Result]]:
        jobs = (Job(self._weights(call.average), kind, call.parts) for call in calls)
        yield from self.pool.run(jobs, until)

    def _weights(self, average: Average) -> Tensor | Path:
        """Return the weights [P] that a file of the average would have, made once and kept."""
        if average in self._stored:
            self._stored.move_to_end(average)
            return self._stored[average]
        run = self.run
        with seeded(run.session.config.seed):  # a loader may shuffle: as it will for the file
            run.scores.load_as_file(average)
        size = 4 * run.session.model.layout.size
        most = max(run.session.config.objective.workers, run.memory_left // 8 // size) + 1
        while len(self._stored) >= most:
            self.pool.discard(self._stored.popitem(last=False)[1])
        self._stored[average] = self.pool.store(run.session.model.flat.detach().cpu())
        return self._stored[average]


def open_metric(run: PlacedRun) -> Metric:
    """List and divide the parts, and settle in which processes they are scored."""
    session, config = run.session, run.session.config
    task, scoring, name = session.task, session.task.scoring, config.objective.metric
    assert scoring is not None
    assert name is not None
    lists = {of: list_parts(task, of, config.seed) for of in KINDS}
    are_batches = scoring.parts is None
    places = divide_parts(lists, config, session.events, listed=not are_batches)
    weights = {
        kind: torch.tensor(
            [float(max(1, rows(lists[of][part]))) if are_batches else 1.0 for part in at],
            dtype=torch.float64,
        )
        for kind, (of, at) in places.items()
    }
    pool = _open_pool(run, lists, places)
    judge = TaskJudge(run, scoring, name, lists, places, weights, pool)
    if scoring.name == METRICS and task.heldout_data is not None:
        session.events.warn(
            "metrics() may use held-out examples; if so, the held-out loss is biased. Define "
            "score() and score_parts()."
        )
    problem = run.problem()
    problem = replace(
        problem,
        incumbent=named_incumbent(config, run.for_methods()),
        by_loss=partial(judge.choose_by_loss, problem) if task.has_loss else None,
    )
    return Metric(problem, config, Criterion(name, config.objective.direction), judge)


def _open_pool(
    run: PlacedRun, lists: Mapping[Kind, Sequence[Any]], places: Mapping[Kind, PartPlaces]
) -> InProcess | Workers:
    session, config = run.session, run.session.config
    workers, timeout = config.objective.workers, config.objective.part_timeout
    if workers == 1 and timeout is None:
        return InProcess(PartScorer(session.task, session.model, config.seed, places, lists))
    if config.task is None:
        raise ConfigError(
            "workers: functions cannot be sent to other processes; put them into a task file"
        )
    newest = session.newest
    integers = {
        name: newest.read(source)
        for name, source in session.names.items()
        if not newest.tensors[source].is_float
    }
    names = {of: name_parts(found) for of, found in lists.items()}
    for file in newest.files:  # other processes fetch nothing
        bring(file)
    recipe = WorkerRecipe(config, newest.path, integers, str(session.model.device), places, names)
    return Workers(recipe, workers, timeout)


def named_incumbent(config: Config, run: Run) -> tuple[Name, Coefficients] | None:
    if (named := config.objective.incumbent) is None:
        return None
    call, K = parse_one(named, "incumbent"), None
    if call.method.needs_loss or call.method.needs_metric:
        raise ConfigError(f"incumbent: {named} looks at a loss; name a method such as last")
    if call.method.has_budget:
        K = min(USUAL, run.k) if config.K == AUTO else config.K
    return (call.label, K), call(run, K)[0]
