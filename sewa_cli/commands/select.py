"""`sewa select`: a problem is made of files and a task, the solver's choice becomes a file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor

from sewa_cli import ranks
from sewa_cli.config import AUTO, STDOUT, Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import Coefficients
from sewa_cli.methods.family import Name, family
from sewa_cli.objective.judge import judge
from sewa_cli.objective.scorer import Scored
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, decide_outputs, write_results
from sewa_cli.output.lora import check_lora
from sewa_cli.present import draw, html, show, summary
from sewa_cli.report.select import Report, Simple
from sewa_cli.report.shared import Scores
from sewa_cli.report.verdict import Verdict
from sewa_cli.rng import seeded
from sewa_cli.session.building import check_objective
from sewa_cli.session.extensions import solver_for
from sewa_cli.session.plan import follow
from sewa_cli.session.session import (
    Run,
    Session,
    check_budget,
    chosen_solver,
    open_session,
)
from sewa_cli.solvers import LEARNED, Choice
from sewa_cli.solvers.equal import any_of
from sewa_cli.task import Task
from sewa_cli.text import finite, number, or_inf, with_K

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALWAYS: Sequence[Name] = (("last", None), ("uniform", None))  # shown beside the best simple average


@dataclass(frozen=True)
class Selection:
    """The result of `select`: which checkpoints, how good their average is, and the average."""

    report: Report
    average: Average = field(repr=False)

    @property
    def selected(self) -> list[int]:
        """Indices into `report.candidates`, ascending."""
        return self.report.selected

    @property
    def paths(self) -> list[Path]:
        return [Path(path) for path in self.report.selected_paths]

    @property
    def steps(self) -> list[int | None]:
        return self.report.selected_steps

    @property
    def probabilities(self) -> list[float]:
        return [candidate.probability or 0.0 for candidate in self.report.candidates]

    @property
    def output(self) -> Path | None:
        """The file that was written, if one was."""
        named = self.report.output
        return Path(named) if named not in (None, STDOUT) else None

    def summary(self) -> str:
        """What the command line says: its scores beside simple averages', and what was gained."""
        return summary(self.report)

    def table(self, form: str = "table") -> str:
        """The scores alone; also as markdown, csv, jsonl, or the report as json."""
        return show(self.report, form)

    def plot(self) -> Figure:
        """The mask and the losses; needs matplotlib."""
        return draw(self.report)

    def _repr_html_(self) -> str:
        """In a notebook: the page's core."""
        return html(self.report)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights by the model's names; a tied tensor has one of its names."""
        return dict(self.average.tensors())


@dataclass(frozen=True)
class _Simple:
    """A simple average that the choice has to beat."""

    coefficients: Coefficients
    scored: Scored


def run_select(
    config: Config,
    task: Task,
    events: Events | None = None,
    *,
    force: bool = False,
    stdout: IO[bytes] | None = None,
    write: bool = True,
    protected: Sequence[Path] = (),
) -> Selection:
    """Choose, evaluate the average beside the references, write the file and the report.

    `protected`: inputs besides the task and the checkpoints, which force does not overwrite either.
    """
    with seeded(config.seed):
        return _select(open_run(config, task, events or Events()), force, stdout, write, protected)


def _select(
    run: Run, force: bool, stdout: IO[bytes] | None, write: bool, protected: Sequence[Path]
) -> Selection:
    session = run.session
    config, events, clock = session.config, session.events, session.clock
    outputs = None
    if write:
        outputs = Outputs(None)
        if ranks.here().rank == 0:
            outputs = decide_outputs(config, force, stdout, session.newest, events.command)
            outputs = outputs.check([*session.inputs, *protected])
        outputs = outputs.shared()

    found = run.retry(lambda: _by_metric(run) if config.objective.metric else _by_loss(run))
    choice, average, scored = found.choice, found.average, found.scored
    writing_began = time.perf_counter()
    final = average.as_written(outputs.form if outputs else "file")
    recipe = final.recipe(outputs.shard_size, events) if outputs else None  # hashes all sources
    paths = [str(c.path) for c in average.sources]

    def make_report() -> Report:
        clock.stages["write"] = time.perf_counter() - writing_began
        return Report(
            **run.report(choice, found.weights),
            K=len(average.sources),
            selected=[i for i, c in enumerate(run.used) if str(c.path) in set(paths)],
            selected_steps=[c.step for c in average.sources],
            selected_paths=paths,
            selection_rows=scored.selection_rows,
            heldout_rows=scored.heldout_rows,
            selection_groups=session.objective.count_groups(session.objective.selection),
            heldout_groups=scored.heldout_groups,
            average=scored.scores,
            written=found.written,
            labels=choice.labels,
            guard=session.guard,
            details=choice.details or None,
            budget=choice.budget,
            blend=choice.blend,
            expected=choice.expected,
            batchnorm=scored.batchnorm,
            lora=average.lora,
            output=outputs.named if outputs else None,
            recipe=recipe,
            **found.about,
        )

    report = (
        make_report() if outputs is None else write_results(final, outputs, make_report, events)[0]
    )
    return Selection(report, average)


@dataclass(frozen=True)
class _Found:
    """What is to be written, and what the report says of it besides."""

    choice: Choice
    average: Average
    scored: Scored
    weights: Coefficients
    written: str
    about: dict[str, Any]


def _by_metric(run: Run) -> _Found:
    """Read, let averages compete, score the choice and its references on held-out parts."""
    from sewa_cli.objective.judge import judge_by_metric
    from sewa_cli.session import verdict
    from sewa_cli.session.metric import Metric

    session = run.session
    with session.clock("read"):
        run.read()
    check_budget(session.config.K, run.used)
    metric = Metric(run)
    try:
        problem = metric.problem()
        metric.follow()
        with session.clock("learn"):
            choice = run.solver.choose(problem, session.config.K)
            spent = metric.board.spent
            session.events.progress("evaluating parts", spent, spent)
        with session.clock("evaluate"):
            choice, contest = verdict.judge(metric, choice)
            with seeded(session.config.seed):
                average, scored = _finish(run, choice.coefficients, choice.name)
    finally:
        metric.close()
    history = [finite(metric.score(loss)) for loss in choice.history]
    about = {
        "references": {},
        "verdict": judge_by_metric(contest),
        "contest": contest,
        "history": history,
    }
    return _Found(choice, average, scored, choice.coefficients, choice.name, about)


def _by_loss(run: Run) -> _Found:
    """Read, choose, score the choice beside simple averages; one of these may be taken instead."""
    session, config, events = run.session, run.session.config, run.session.events
    session.warn_of_overlap(training=session.objective.batch_statistics)
    choice, simple, average, scored, references = _learn(run, config.K)
    # what was chosen may be one of them, or equal to all, and has then nothing to gain
    others = {
        name: reference.scored
        for name, reference in references.items()
        if not (choice.equal or _same(reference.coefficients, choice.coefficients))
    }
    verdict = judge(
        scored,
        others,
        best=next(iter(references)),
        seed=config.seed,
        is_baseline=choice.name != LEARNED,
    )
    _warn(session, choice, scored.scores, verdict, others)
    written, instead_of, learned, weights = choice.name, None, None, choice.coefficients
    if config.fallback and verdict.beaten_by:
        written, instead_of, learned = verdict.beaten_by[0].name, choice.name, scored.scores
        weights = references[written].coefficients
        with session.clock("evaluate"):
            average, scored = _finish(run, weights, written)
        events.warn(f"--fallback: the {written} average is written instead")
    about = {
        "references": {name: found.scored.scores for name, found in references.items()},
        "simple": [
            Simple(name=name, K=K, selection_loss=finite(simple[name, K]))
            for name, K in sorted(simple, key=lambda one: or_inf(simple[one]))
        ],
        "verdict": verdict,
        "instead_of": instead_of,
        "learned": learned,
        "history": [finite(loss) for loss in choice.history],
    }
    return _Found(choice, average, scored, weights, written, about)


def open_run(config: Config, task: Task, events: Events) -> Run:
    """Everything opened, and refused now what could not be kept in the end."""
    by_metric = config.objective.metric is not None
    if by_metric and config.fallback:
        raise ConfigError(
            "--fallback: a choice by a metric needs none: what is not shown to be better is not "
            "taken; leave it out"
        )
    for name in () if by_metric else ("strict", "fallback"):
        if getattr(config, name) and task.heldout_data is None and config.guard is None:
            raise ConfigError(
                f"--{name} needs held-out data: define heldout_data in {task.source}, or keep "
                "some of the selection data aside with --guard 0.2"
            )
    check_objective(config, task)
    solver = chosen_solver(config)
    config = config.model_copy(update={"solver": solver_for(config, config.K)})
    session = open_session(config, task, events)
    check_budget(config.K, session.checkpoints)
    check_lora(config, session.newest)
    # by a metric W is held, and the loss chooses too
    return Run(session, solver, share=0.5 if by_metric else 1.0, stream=not by_metric)


def _learn(
    run: Run, K: int
) -> tuple[Choice, dict[Name, float], Average, Scored, dict[str, _Simple]]:
    """Read, choose, score the choice and the simple averages; the best one by selection rows first.

    All of them are run first where W is held, so that a broken loss is found early; a solver that
    passes over the checkpoints has run them on its way.
    """
    clock = run.session.clock
    with clock("read"):
        run.read()
        follow(run, K)
    simple: dict[Name, float] | None = None
    if run.solver.reading == "held":
        check_budget(K, run.used)
        with clock("evaluate"):
            simple = run.simple_losses(K)
            _check_finite(simple)
    with clock("learn"):
        problem = run.problem()
        choice = any_of(problem, simple, K) if simple else None
        choice = choice or run.solver.choose(problem, K)
    simple = simple or choice.simple
    if choice.examples is not None:
        run.choose_examples(choice.examples)
    with clock("evaluate"):
        if simple is None:
            simple = run.simple_losses(K)
        _check_finite(simple)
        averages, events = family(run.trajectory.k, K), run.session.events
        method = solver_for(run.session.config, K) if choice.name == LEARNED else choice.name
        choice = _by_its_name(choice, averages)
        best = min(simple, key=lambda name: or_inf(simple[name]))
        names = list(dict.fromkeys((best, *ALWAYS)))
        events.progress("scoring", 0, 1 + len(names))
        average, scored = _finish(run, choice.coefficients, method)
        events.progress("scoring", 1, 1 + len(names))
        if choice.spares:
            run.know({tuple(averages[name]): loss for name, loss in simple.items()})
        references = {}
        for done, name in enumerate(names, 2):
            is_choice = _same(averages[name], choice.coefficients)
            found = scored if is_choice else run.score(averages[name])
            references[with_K(*name)] = _Simple(averages[name], found)
            events.progress("scoring", done, 1 + len(names))
        if choice.expected and run.session.objective.batch_statistics:
            written = references["uniform"].scored.scores.selection_loss
            choice = _as_written(choice, simple["uniform", None], written)
    return choice, simple, average, scored, references


def _as_written(choice: Choice, learning: float, written: float | None) -> Choice:
    """With a file's BatchNorm statistics what folds have judged by the batch's own.

    What that changes is known of the mean of all: its two selection losses.
    """
    expected, blend = choice.expected, choice.blend
    if expected is None or written is None or not isfinite(learning):
        return choice
    by = written - learning
    expected = expected.model_copy(update={"loss": expected.loss + by})
    if blend is not None:
        path = [
            pull.model_copy(update={"loss": None if pull.loss is None else pull.loss + by})
            for pull in blend.path
        ]
        blend = blend.model_copy(update={"path": path})
    return choice.but(expected=expected, blend=blend)


def _by_its_name(choice: Choice, averages: Mapping[Name, Coefficients]) -> Choice:
    """What anybody could have had without choosing is called what it is."""
    if choice.name != LEARNED:
        return choice
    names = (name for name, c in averages.items() if _same(c, choice.coefficients))
    name = next(names, None)
    return choice if name is None else choice.but(name=with_K(*name))


def _check_finite(losses: Mapping[Name, float]) -> None:
    if not any(map(isfinite, losses.values())):
        raise TaskError("loss() is NaN or Inf on the selection data for every checkpoint average")


def _same(one: Coefficients, two: Coefficients) -> bool:
    return all(isclose(a, b, abs_tol=1e-9) for a, b in zip(one, two, strict=True))


def _finish(run: Run, coefficients: Coefficients, method: str) -> tuple[Average, Scored]:
    """The average as it will be written, and what that scores."""
    return run.score_file(run.average(coefficients, method, sum(c != 0 for c in coefficients)))


def _warn(
    session: Session,
    choice: Choice,
    average: Scores,
    verdict: Verdict,
    others: Mapping[str, Scored],
) -> None:
    """Of what did better for sure; what lies within the interval is undecided, and no alarm."""
    events, own = session.events, average.heldout_loss
    sure = [
        b for b in verdict.beaten_by if own is None or (b.interval and not b.interval.has_zero())
    ]
    for better in sure:
        loss = "NaN or Inf" if own is None else number(own)
        events.warn(
            f"the {better.name} average did better than the {choice.name} one on held-out data "
            f"({number(better.score)} against {loss})"
        )
    if not sure or choice.name != LEARNED or own is None:
        return
    # the very mark of over-fitting: better on the rows it was chosen by, worse on others
    better = sure[0]
    chosen, other = average.selection_loss, others[better.name].scores.selection_loss
    if chosen is not None and other is not None and chosen < other:
        auto = "" if session.config.K == AUTO else ", or leave out --K"
        events.warn(
            f"the choice is over-fitted: {other - chosen:.3g} below `{better.name}` on selection "
            f"rows, {own - better.score:.3g} above it on held-out ones; choose by more "
            f"rows{auto}"
        )
