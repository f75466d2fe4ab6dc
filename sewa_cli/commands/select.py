"""`sewa select`: files and a task become a problem, the solver's choice becomes a file.

The stages: open the checkpoints and the task, place W, choose, measure the choice and the
baselines, judge, write. Each is a function that returns a frozen value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose, isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor

from sewa_cli.checkpoints import check_mergeable
from sewa_cli.checkpoints.means import counts_of
from sewa_cli.commands import make_card
from sewa_cli.config import AUTO, STDOUT, Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.extensions import chosen_solver, solver_for
from sewa_cli.judge import judge
from sewa_cli.methods import Coefficients
from sewa_cli.methods.fixed import Name, baselines
from sewa_cli.opening import Clock, Session, check_budget, check_objective, open_session
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, decide_outputs, settle_outputs, write_results
from sewa_cli.placing import PlacedRun, Setup, set_up
from sewa_cli.present import draw, html, show, summary
from sewa_cli.report.findings import Blend, Expected, Finding, Mask, Predicted
from sewa_cli.report.select import Report, Simple
from sewa_cli.report.shared import Measured, Verdict
from sewa_cli.rng import seeded
from sewa_cli.scores import BaselineLosses, Scored
from sewa_cli.solvers import BACK, LEARNED, Choice, Ground, Solver
from sewa_cli.task import Task
from sewa_cli.text import finite, number, or_inf, with_K

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALWAYS: Sequence[Name] = (("last", None), ("uniform", None))  # shown with the best baseline


@dataclass(frozen=True)
class Chosen:
    """The solver's choice, and the selection losses of the baselines.

    run  on the examples that took part in the choice
    """

    run: PlacedRun
    choice: Choice
    baselines: BaselineLosses


@dataclass(frozen=True)
class Selected:
    """The average that is to be written, and more for the report."""

    choice: Choice
    average: Average
    scored: Scored
    weights: Coefficients
    written: str
    about: dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """Which checkpoints were chosen, how good their average is, and the average."""

    report: Report
    average: Average = field(repr=False)

    @property
    def selected(self) -> list[int]:
        """Return indices into `report.candidates`, ascending."""
        return self.report.selected

    @property
    def paths(self) -> list[Path]:
        return [Path(path) for path in self.report.selected_paths]

    @property
    def steps(self) -> list[int | None]:
        return self.report.selected_steps

    @property
    def probabilities(self) -> list[float]:
        mask = self.report.find(Mask)
        return mask.probabilities if mask else [0.0] * self.report.k

    @property
    def output(self) -> Path | None:
        named = self.report.output
        return Path(named) if named not in (None, STDOUT) else None

    def summary(self) -> str:
        """Return what the command line prints: losses, the best baseline, the verdict."""
        return summary(self.report)

    def table(self, form: str = "table") -> str:
        """Return the scores alone, also as markdown, csv or jsonl; or the report as json."""
        return show(self.report, form)

    def plot(self) -> Figure:
        """Draw the weights and the losses; needs matplotlib."""
        return draw(self.report)

    def _repr_html_(self) -> str:
        """Show the core of the page in a notebook."""
        return html(self.report)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights by the model's names; a tied tensor has one of its names."""
        return dict(self.average.tensors())


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
    """Choose, evaluate the average and the baselines, write the file and the report.

    `protected`: further inputs, which force does not overwrite either.
    """
    with seeded(config.seed):
        setup = open_setup(config, task, events or Events())
        outputs, newest = None, setup.session.newest
        if write:
            decide = partial(decide_outputs, setup.session.config, force, stdout, newest)
            outputs = settle_outputs(decide, [*setup.session.inputs, *protected])
        select = _by_metric if config.objective.metric else _by_loss
        selected, run = setup.placer.retry(lambda: select(setup))
        return _write(run, selected, outputs)


# ---- open -----------------------------------------------------------------------------------


def open_setup(config: Config, task: Task, events: Events) -> Setup:
    """Open everything, and refuse now what could not be kept in the end."""
    by_metric = config.objective.metric is not None
    if by_metric and config.fallback:
        raise ConfigError(
            "--fallback: leave it out; --metric keeps the choice by the loss unless another is "
            "confirmed"
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
    if config.lora == "merged":
        check_mergeable(session.newest)
    # by a metric W is held, and the loss chooses too
    return set_up(session, solver, share=0.5 if by_metric else 1.0, stream=not by_metric)


# ---- choose ---------------------------------------------------------------------------------


def _by_metric(setup: Setup) -> tuple[Selected, PlacedRun]:
    """Read, let averages compete, score the choice and its references on held-out parts."""
    from sewa_cli.scoring.heldout import choose_by_metric
    from sewa_cli.scoring.metric import open_metric

    session = setup.session
    with session.clock("read"):
        run = setup.place()
    check_budget(session.config.K, run.used)
    metric = open_metric(run)
    try:
        choice, verdict = choose_by_metric(metric, setup.solver, session.config.K, session.clock)
        with session.clock("evaluate"), seeded(session.config.seed):
            average, scored = _finish(run, choice.coefficients, choice.method)
    finally:
        metric.close()
    about: dict[str, Any] = {"references": {}, "verdict": verdict}
    return Selected(choice, average, scored, choice.coefficients, choice.method, about), run


def _by_loss(setup: Setup) -> tuple[Selected, PlacedRun]:
    """Read, choose, and judge the choice next to the baselines."""
    session = setup.session
    with session.clock("read"):
        run = setup.place()
    if session.events.shows_progress:
        from sewa_cli.commands.forecast import planned

        passes = session.objective.passes
        session.events.follow(planned(setup, run), lambda: passes.forward + BACK * passes.backward)
    chosen = _choose(run, setup.solver)
    return _judge(chosen), chosen.run


def _choose(run: PlacedRun, solver: Solver) -> Chosen:
    """Let the solver choose.

    The baselines are run first where W is held, so that a broken loss is found early; a solver
    that passes over the checkpoints has run them on its way.
    """
    session, K = run.session, run.session.config.K
    found: BaselineLosses | None = None
    if solver.reading == "held":
        check_budget(K, run.used)
        found = _baseline_losses(run)
    with session.clock("learn"):
        choice = solver.choose(run.problem(), K)
    ground = choice.find(Ground)
    if ground is not None and ground.examples is not session.objective.selection:
        run = run.on(ground.examples)  # not all selection examples have taken part
    if found is None:
        found = BaselineLosses(ground.losses) if ground else _baseline_losses(run)
    if choice.method == LEARNED:  # the name of a baseline that is the same average
        same = (n for n, c in _baselines(run).items() if _same(c, choice.coefficients))
        choice = replace(choice, method=next((with_K(*name) for name in same), LEARNED))
    return Chosen(run, choice, found)


def _baselines(run: PlacedRun) -> dict[Name, Coefficients]:
    return baselines(run.trajectory.k, run.session.config.K, counts_of(run.used))


def _baseline_losses(run: PlacedRun) -> BaselineLosses:
    with run.session.clock("evaluate"):
        found = run.scores.baseline_losses(_baselines(run))
    if not any(map(isfinite, found.losses.values())):
        raise TaskError("loss() is NaN or Inf for every average; check it with `sewa validate`")
    return found


def _same(one: Coefficients, two: Coefficients) -> bool:
    return all(isclose(a, b, abs_tol=1e-9) for a, b in zip(one, two, strict=True))


# ---- measure and judge ----------------------------------------------------------------------


def _measure(chosen: Chosen) -> tuple[Average, Scored, dict[str, tuple[Coefficients, Scored]]]:
    """Score the choice and the baselines; the best one by selection loss comes first."""
    run, choice, losses = chosen.run, chosen.choice, chosen.baselines.losses
    session, K = run.session, run.session.config.K
    averages = _baselines(run)
    method = solver_for(session.config, K) if choice.method == LEARNED else choice.method
    best = min(losses, key=lambda name: or_inf(losses[name]))
    names = list(dict.fromkeys((best, *ALWAYS)))
    session.events.progress("scoring", 0, 1 + len(names))
    average, scored = _finish(run, choice.coefficients, method)
    session.events.progress("scoring", 1, 1 + len(names))
    references = {}
    for done, name in enumerate(names, 2):
        is_choice = _same(averages[name], choice.coefficients)
        found = scored if is_choice else run.scores.evaluate(averages[name])
        references[with_K(*name)] = averages[name], found
        session.events.progress("scoring", done, 1 + len(names))
    return average, scored, references


def _finish(run: PlacedRun, coefficients: Coefficients, method: str) -> tuple[Average, Scored]:
    """Return the average as it will be written, and what that scores."""
    sources = sum(c != 0 for c in coefficients)
    return run.scores.written(run.average(coefficients, method, sources))


def _judge(chosen: Chosen) -> Selected:
    """Compare the choice with the baselines; with --fallback one of these may be taken instead."""
    run, choice, losses = chosen.run, chosen.choice, chosen.baselines.losses
    session, config = run.session, run.session.config
    with session.clock("evaluate"):
        average, scored, references = _measure(chosen)
    if choice.find(Expected) and session.objective.batch_statistics:
        # folds judged by each batch's own statistics; the change is known of the mean of all
        written = references["uniform"][1].scores.selection_loss
        if written is not None and isfinite(by := written - losses["uniform", None]):
            found = [one for one in choice.findings if isinstance(one, Expected | Blend)]
            choice = choice.having(*(one.shifted(by) for one in found))
    # what was chosen may be one of them, or equal to all, and has then nothing to gain
    others = {
        name: found
        for name, (coefficients, found) in references.items()
        if not _same(coefficients, choice.coefficients)
    }
    verdict = judge(
        scored,
        others,
        best=next(iter(references)),
        seed=config.seed,
        is_baseline=choice.method != LEARNED,
    )
    _warn(session, choice, scored.scores, verdict, others)
    written_as, instead_of, learned, weights = choice.method, None, None, choice.coefficients
    if config.fallback and verdict.beaten_by:
        written_as, instead_of, learned = verdict.beaten_by[0].name, choice.method, scored.scores
        weights, _ = references[written_as]
        with session.clock("evaluate"):
            average, scored = _finish(run, weights, written_as)
        session.events.warn(f"--fallback: the {written_as} average is written instead")
    about = {
        "references": {name: found.scores for name, (_, found) in references.items()},
        "simple": [
            Simple(name=name, K=K, selection_loss=finite(losses[name, K]))
            for name, K in sorted(losses, key=lambda one: or_inf(losses[one]))
        ],
        "simple_rows": chosen.baselines.rows,
        "verdict": verdict,
        "instead_of": instead_of,
        "learned": learned,
    }
    return Selected(choice, average, scored, weights, written_as, about)


def _warn(
    session: Session,
    choice: Choice,
    average: Measured,
    verdict: Verdict,
    others: Mapping[str, Scored],
) -> None:
    """Warn of baselines that are significantly better, and of overfitting."""
    events, own = session.events, average.heldout_loss
    sure = [
        b for b in verdict.beaten_by if own is None or (b.interval and not b.interval.has_zero())
    ]
    for better in sure:
        loss = "NaN or Inf" if own is None else number(own)
        events.warn(
            f"the {better.name} average did better than the {choice.method} one on held-out data "
            f"({number(better.score)} against {loss})"
        )
    if not sure or choice.method != LEARNED or own is None:
        return
    # overfitting: better on the examples it was chosen by, worse on others
    better = sure[0]
    chosen, other = average.selection_loss, others[better.name].scores.selection_loss
    if chosen is not None and other is not None and chosen < other:
        auto = "" if session.config.K == AUTO else ", or leave out --K"
        events.warn(
            f"the choice overfits: its loss is {other - chosen:.3g} below `{better.name}` on "
            f"selection examples and {own - better.score:.3g} above it on held-out ones; use "
            f"more selection examples{auto}"
        )


# ---- write ----------------------------------------------------------------------------------


def _write(run: PlacedRun, selected: Selected, outputs: Outputs | None) -> Selection:
    session, choice, scored = run.session, selected.choice, selected.scored
    predicted = choice.find(Predicted)

    def about() -> dict[str, Any]:
        return {
            **run.report(selected.weights, predicted.bytes if predicted else 0),
            "selection_rows": scored.selection_rows,
            "heldout_rows": scored.heldout_rows,
            "selection_groups": session.objective.count_groups(session.objective.selection),
            "heldout_groups": scored.heldout_groups,
            "average": scored.scores,
            "written": selected.written,
            "guard": session.guard,
            "batchnorm": scored.batchnorm,
            **selected.about,
        }

    average = selected.average.as_written(outputs.form if outputs else "file")
    return write_selection(
        average, choice, selected.weights, outputs, about, session.clock, session.events
    )


def write_selection(
    average: Average,
    choice: Choice,
    weights: Coefficients,
    outputs: Outputs | None,
    about: Callable[[], dict[str, Any]],
    clock: Clock,
    events: Events,
) -> Selection:
    """Write the file, then its report; without outputs, make the report alone.

    weights: of the average, which may be another than the choice; about: the rest of the report.
    """
    began = time.perf_counter()
    # hashes all sources
    recipe = average.recipe(outputs.shard_size, events) if outputs else None

    def make_report() -> Report:
        clock.stages["write"] = time.perf_counter() - began
        return Report(
            **about(),
            K=len(average.sources),
            selected=[i for i, weight in enumerate(weights) if weight != 0],
            selected_steps=[c.step for c in average.sources],
            selected_paths=[c.name for c in average.sources],
            findings=[one for one in choice.findings if isinstance(one, Finding)],
            lora=average.lora,
            output=outputs.named if outputs else None,
            recipe=recipe,
        )

    if outputs is None:
        return Selection(make_report(), average)
    return Selection(write_results(average, outputs, make_report, make_card, events)[0], average)
