"""`sewa select`: files become a trajectory, the solver's answer becomes a file and a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch import Tensor

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.config import AUTO, STDOUT, Config
from sewa_cli.errors import TaskError
from sewa_cli.events import Listener
from sewa_cli.methods import Coefficients, Run, parse
from sewa_cli.objective.objective import UnitLosses
from sewa_cli.objective.overlap import warn_of_overlap
from sewa_cli.objective.scorer import Scales
from sewa_cli.objective.split import check_settings, gained, keep_aside
from sewa_cli.output.average import Averaged
from sewa_cli.output.destination import decide_outputs, write_results
from sewa_cli.output.layouts import as_written
from sewa_cli.output.lora import average_factors, check_lora
from sewa_cli.output.lora import warning as lora_warning
from sewa_cli.present import draw, show, summary
from sewa_cli.report.select import Better, Report
from sewa_cli.report.shared import Candidate, Placement, Scores
from sewa_cli.rng import seeded
from sewa_cli.session.cost import Clock, metadata_of, total_cost
from sewa_cli.session.heading import heading
from sewa_cli.session.session import Bench, set_up
from sewa_cli.solvers.chosen import Chosen
from sewa_cli.solvers.crossvalidate import LEARNED
from sewa_cli.solvers.learning import make_solver, read_run
from sewa_cli.solvers.linear.findings import budget_part, details_of, stability_part
from sewa_cli.solvers.linear.streaming import Streaming
from sewa_cli.task import Task
from sewa_cli.text import finite
from sewa_cli.trajectory.placement import Placed, despite_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = "last,uniform,lawa"  # what the learned average has to beat


@dataclass(frozen=True)
class Selection:
    """The result of `select`: which checkpoints, how good their average is, and the average."""

    report: Report
    averaged: Averaged = field(repr=False)

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
        return dict(self.averaged.tensors())


def run_select(
    config: Config,
    task: Task,
    listener: Listener | None = None,
    *,
    force: bool = False,
    stdout: IO[bytes] | None = None,
    write: bool = True,
    protected: Sequence[Path] = (),
) -> Selection:
    """Learn a mask, evaluate its average beside the references, write the file and the report.

    `protected`: inputs besides the task and the checkpoints, which force does not overwrite either.
    """
    with seeded(config.seed):
        return _select(config, task, listener or Listener(), force, stdout, write, protected)


def _select(
    config: Config,
    task: Task,
    listener: Listener,
    force: bool,
    stdout: IO[bytes] | None,
    write: bool,
    protected: Sequence[Path],
) -> Selection:
    clock = Clock()
    check_settings(config, task)
    guard = None
    if config.guard is not None:
        task, guard = keep_aside(task, config.guard, config.seed)
    bench = set_up(config, task, listener)
    check_lora(config, bench.checkpoints[-1])
    outputs = None
    if write:
        inputs, newest = [*bench.inputs, *protected], bench.checkpoints[-1]
        command = listener.command
        outputs = decide_outputs(config, inputs, force, stdout, like=newest, command=command)

    placed, scales, references, chosen = despite_memory(bench, lambda: _learn(bench, clock))
    used = placed.used
    with clock("evaluate"):
        averaged = _averaged(bench, used, chosen.coefficients)
        lora = average_factors(averaged, config.lora)
        average, batchnorm = scales.weigh_file(averaged)
    if apart := lora_warning(lora):
        bench.warn(apart)
    # what was chosen may be one of them, and has then nothing to gain over itself
    others = {
        n: found.units
        for n, found in references.items()
        if found.coefficients != chosen.coefficients
    }
    gain = gained(scales.heldout, others, config.seed)
    beaten_by = _better(average, {n: references[n].scores for n in others})
    for better in beaten_by:
        own = "NaN or Inf" if average.heldout_loss is None else f"{average.heldout_loss:.5g}"
        bench.warn(
            f"the {better.name} average did better than the {chosen.name} one on held-out data "
            f"({better.heldout_loss:.5g} against {own})"
        )
    if beaten_by and chosen.name == LEARNED:
        _warn_of_overfitting(bench, average, references[beaten_by[0].name].scores, beaten_by[0])
    _warn_of_few(bench, chosen)
    warn_of_overlap(bench, training=bench.objective.batch_statistics)
    written, instead_of, learned = chosen.name, None, None
    if config.fallback and beaten_by:
        written, instead_of, learned = beaten_by[0].name, chosen.name, average
        averaged = _averaged(bench, used, references[written].coefficients)
        with clock("evaluate"):
            lora = average_factors(averaged, config.lora)
            average, batchnorm = scales.weigh_file(averaged)
        bench.warn(f"--fallback: the {written} average is written instead")

    solution = chosen.solution
    probabilities = solution.probabilities if solution else [None] * len(used)
    stability = chosen.stability
    frequencies = stability.frequencies if stability else [None] * len(used)
    method = config.solver if written == LEARNED else written
    averaged.metadata = metadata_of(averaged, method, len(averaged.sources))
    writing_began = time.perf_counter()
    final = as_written(averaged, outputs.form if outputs else "file")
    recipe = final.recipe()
    selected = [i for i, c in enumerate(used) if any(c is source for source in averaged.sources)]

    def make_report() -> Report:
        clock.stages["write"] = time.perf_counter() - writing_began
        return Report(
            **heading(config, bench.warnings, task=task.source, device=bench.model.device),
            K=len(selected),
            k=len(used),
            parameters=bench.model.layout.parameters,
            candidates=[
                Candidate(
                    index=i,
                    path=str(c.path),
                    step=c.step,
                    probability=p,
                    frequency=f,
                    logged=c.metrics or None,
                )
                for i, (c, p, f) in enumerate(zip(used, probabilities, frequencies, strict=True))
            ],
            left_out=placed.left_out,
            selected=selected,
            selected_steps=[c.step for c in averaged.sources],
            selected_paths=[str(c.path) for c in averaged.sources],
            history=[finite(loss) for loss in solution.history] if solution else [],
            selection_rows=scales.selection_rows,
            heldout_rows=scales.heldout_rows,
            average=average,
            references={name: found.scores for name, found in references.items()},
            beaten_by=beaten_by,
            written=written,
            instead_of=instead_of,
            learned=learned,
            labels=chosen.labels,
            gained=gain,
            guard=guard,
            details=details_of(chosen),
            budget=budget_part(chosen),
            stability=stability_part(chosen),
            placement=_placement(placed, chosen),
            batchnorm=batchnorm,
            lora=lora,
            cost=total_cost(bench, clock),
            output=outputs.named if outputs else None,
            recipe=recipe,
        )

    if outputs is None:
        return Selection(make_report(), averaged)
    return Selection(write_results(final, outputs, make_report), averaged)


def _learn(bench: Bench, clock: Clock) -> tuple[Placed, Scales, dict[str, _Reference], Chosen]:
    """Read, weigh what is simple (so that a broken loss is found early), choose."""
    K = bench.config.K
    with clock("read"):
        placed = read_run(bench)
    scales = Scales(bench, placed.trajectory, placed.used)
    with clock("learn"):
        solver = make_solver(bench, placed)
    run = Run(len(placed.used))
    with clock("evaluate"):
        references = _weigh_references(scales, run, K) if K != AUTO else {}
    with clock("learn"):
        chosen = solver.choose(K)
    with clock("evaluate"):
        if K == AUTO:
            references = _weigh_references(scales, run, max(1, min(chosen.K, run.k)))
    return placed, scales, references, chosen


def _placement(placed: Placed, chosen: Chosen) -> Placement:
    if isinstance(placed, Streaming) and chosen.cache is not None:
        return placed.room.placement(chosen.cache.bytes)
    return placed.placement


@dataclass(frozen=True)
class _Reference:
    """A simple average, weighed."""

    coefficients: Coefficients
    scores: Scores
    units: UnitLosses | None


def _weigh_references(scales: Scales, run: Run, K: int) -> dict[str, _Reference]:
    found = {}
    for call in parse(REFERENCES):
        coefficients = call(run, K)[0]
        scores = scales.weigh(coefficients)
        found[call.label] = _Reference(coefficients, scores, scales.heldout)
    if all(reference.scores.selection_loss is None for reference in found.values()):
        raise TaskError("loss() is NaN or Inf on the selection data for every checkpoint average")
    return found


def _averaged(bench: Bench, used: Sequence[Checkpoint], coefficients: Coefficients) -> Averaged:
    chosen = [i for i, c in enumerate(coefficients) if c != 0]
    return Averaged(
        sources=[used[i] for i in chosen],
        coefficients=[coefficients[i] for i in chosen],
        names=bench.names,
        dtype=bench.config.output_dtype,
        state_key=bench.config.state_key,
    )


def _warn_of_overfitting(bench: Bench, average: Scores, simple: Scores, better: Better) -> None:
    """Its very mark: better on the rows it was chosen by, worse on others."""
    own, other = average.selection_loss, simple.selection_loss
    if own is None or other is None or own >= other or average.heldout_loss is None:
        return
    auto = "" if bench.config.K == AUTO else ", or --K auto --solver linear"
    lost = average.heldout_loss - better.heldout_loss
    bench.warn(
        f"the choice is over-fitted: {other - own:.3g} below `{better.name}` on the selection "
        f"rows, {lost:.3g} above it on held-out ones; choose by more rows, or take a larger K{auto}"
    )


def _warn_of_few(bench: Bench, chosen: Chosen) -> None:
    stability = chosen.stability
    if stability is None or not stability.too_few:
        return
    needed = stability.rows_needed
    advice = (
        f"about {needed} would do"
        if needed is not None and needed > stability.rows
        else "and more would hardly help; the mean of all is as good"
    )
    bench.warn(
        f"{stability.rows} selection rows are too few to choose {chosen.K} of "
        f"{len(chosen.coefficients)} by: on rows it has not seen, such a choice is no better than "
        f"the mean of all; {advice}"
    )


def _better(average: Scores, references: dict[str, Scores]) -> list[Better]:
    """The references with a lower held-out loss, best first; NaN and Inf lose to all."""
    chosen = average.heldout_loss
    found = [
        Better(name=name, heldout_loss=loss, by=None if chosen is None else chosen - loss)
        for name, scores in references.items()
        if (loss := scores.heldout_loss) is not None and (chosen is None or loss < chosen)
    ]
    return sorted(found, key=lambda better: better.heldout_loss)
