"""`sewa select`: a problem is made of files and a task, the solver's choice becomes a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch import Tensor

from sewa_cli.config import AUTO, STDOUT, Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import Coefficients, parse
from sewa_cli.methods import Run as Proposing
from sewa_cli.objective.intervals import gained
from sewa_cli.objective.scorer import Scored
from sewa_cli.output.average import Average
from sewa_cli.output.destination import decide_outputs, write_results
from sewa_cli.output.lora import check_lora
from sewa_cli.present import draw, show, summary
from sewa_cli.report.select import Better, Report
from sewa_cli.report.shared import Scores
from sewa_cli.rng import seeded
from sewa_cli.session.extensions import solvers_that_find_k
from sewa_cli.session.session import Run, Session, check_budget, chosen_solver, open_session
from sewa_cli.solvers import LEARNED, Choice
from sewa_cli.task import Task
from sewa_cli.text import finite, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = "last,uniform,lawa"  # what the learned average has to beat


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
        outputs = decide_outputs(config, force, stdout, session.newest, events.command)
        outputs = outputs.check([*session.inputs, *protected], session.events.show_warning)

    references, choice = run.retry(lambda: _learn(run, config.K))
    name = (config.solver or "") if choice.name == LEARNED else choice.name
    with clock("evaluate"):
        average, scored = _finish(run, choice.coefficients, name)
    # what was chosen may be one of them, and has then nothing to gain over itself
    others = {
        name: simple.scored
        for name, simple in references.items()
        if simple.coefficients != choice.coefficients
    }
    gain = gained(scored.heldout, {n: other.heldout for n, other in others.items()}, config.seed)
    beaten_by = _better(scored.scores, others)
    _warn(session, choice, scored.scores, beaten_by, others)
    session.warn_of_overlap(training=session.objective.batch_statistics)
    written, instead_of, learned = choice.name, None, None
    if config.fallback and beaten_by:
        written, instead_of, learned = beaten_by[0].name, choice.name, scored.scores
        with clock("evaluate"):
            average, scored = _finish(run, references[written].coefficients, written)
        events.warn(f"--fallback: the {written} average is written instead")

    writing_began = time.perf_counter()
    final = average.as_written(outputs.form if outputs else "file")
    recipe = final.recipe(outputs.shard_size if outputs else None)
    paths = [str(c.path) for c in average.sources]

    def make_report() -> Report:
        clock.stages["write"] = time.perf_counter() - writing_began
        return Report(
            **run.report(choice),
            K=len(average.sources),
            selected=[i for i, c in enumerate(run.used) if str(c.path) in set(paths)],
            selected_steps=[c.step for c in average.sources],
            selected_paths=paths,
            history=[finite(loss) for loss in choice.history],
            selection_rows=scored.selection_rows,
            heldout_rows=scored.heldout_rows,
            average=scored.scores,
            references={name: simple.scored.scores for name, simple in references.items()},
            beaten_by=beaten_by,
            written=written,
            instead_of=instead_of,
            learned=learned,
            labels=choice.labels,
            gained=gain,
            guard=session.guard,
            details=choice.details or None,
            budget=choice.budget,
            stability=choice.stability,
            batchnorm=scored.batchnorm,
            lora=average.lora,
            output=outputs.written_as(final) if outputs else None,
            recipe=recipe,
        )

    report = (
        make_report() if outputs is None else write_results(final, outputs, make_report, events)[0]
    )
    return Selection(report, average)


def open_run(config: Config, task: Task, events: Events) -> Run:
    """Everything opened, and refused now what could not be kept in the end."""
    for name in ("strict", "fallback"):
        if getattr(config, name) and task.heldout_data is None and config.guard is None:
            raise ConfigError(
                f"--{name} needs held-out data: define heldout_data in {task.source}, or keep "
                "some of the selection data aside with --guard 0.2"
            )
    solver = chosen_solver(config)
    session = open_session(config, task, events)
    check_budget(config.K, session.checkpoints)
    check_lora(config, session.newest)
    return Run(session, solver)


def _learn(run: Run, K: int) -> tuple[dict[str, _Simple], Choice]:
    """Read, choose, and score the simple averages.

    These first where W is held, so that a broken loss is found early.
    """
    clock = run.session.clock
    with clock("read"):
        run.read()
    held = run.solver.reading == "held"
    if held:
        check_budget(K, run.used)
    references: dict[str, _Simple] = {}
    if held and K != AUTO:
        with clock("evaluate"):
            references = _score_references(run, K)
    with clock("learn"):
        choice = run.solver.choose(run.problem(), K)
    if not references:
        with clock("evaluate"):
            references = _score_references(run, len(choice.selected) if K == AUTO else K)
    return references, choice


def _score_references(run: Run, K: int) -> dict[str, _Simple]:
    found = {}
    for call in parse(REFERENCES):
        coefficients = call(Proposing(run.trajectory.k), K)[0]
        found[call.label] = _Simple(coefficients, run.score(coefficients))
    if all(simple.scored.scores.selection_loss is None for simple in found.values()):
        raise TaskError("loss() is NaN or Inf on the selection data for every checkpoint average")
    return found


def _finish(run: Run, coefficients: Coefficients, method: str) -> tuple[Average, Scored]:
    """The average as it will be written, and what that scores."""
    return run.score_file(run.average(coefficients, method, sum(c != 0 for c in coefficients)))


def _better(average: Scores, others: dict[str, Scored]) -> list[Better]:
    """Those with a lower held-out loss, best first; NaN and Inf lose to all."""
    chosen = average.heldout_loss
    found = [
        Better(name=name, heldout_loss=loss, by=None if chosen is None else chosen - loss)
        for name, other in others.items()
        if (loss := other.scores.heldout_loss) is not None and (chosen is None or loss < chosen)
    ]
    return sorted(found, key=lambda better: better.heldout_loss)


def _warn(
    session: Session,
    choice: Choice,
    average: Scores,
    beaten_by: Sequence[Better],
    others: dict[str, Scored],
) -> None:
    events = session.events
    for better in beaten_by:
        own = "NaN or Inf" if average.heldout_loss is None else number(average.heldout_loss)
        events.warn(
            f"the {better.name} average did better than the {choice.name} one on held-out data "
            f"({number(better.heldout_loss)} against {own})"
        )
    if not beaten_by or choice.name != LEARNED or average.heldout_loss is None:
        return
    # the very mark of over-fitting: better on the rows it was chosen by, worse on others
    better = beaten_by[0]
    chosen, other = average.selection_loss, others[better.name].scores.selection_loss
    if chosen is not None and other is not None and chosen < other:
        able = " or ".join(f"--solver {name}" for name in solvers_that_find_k())
        auto = "" if session.config.K == AUTO else f", or --K auto {able}"
        events.warn(
            f"the choice is over-fitted: {other - chosen:.3g} below `{better.name}` on selection "
            f"rows, {average.heldout_loss - better.heldout_loss:.3g} above it on held-out ones; "
            f"choose by more rows, or take a larger K{auto}"
        )
