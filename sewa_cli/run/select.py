"""`sewa select`: files become a trajectory, the solver's answer becomes a file and a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import IO

from torch import Tensor

from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.methods import Run, parse
from sewa_cli.report import Better, Candidate, Report, Scores
from sewa_cli.run.accounts import Clock, metadata_of, total_cost, versions
from sewa_cli.run.bench import Listener, seeded, set_up
from sewa_cli.run.fitting import as_written
from sewa_cli.run.learning import learn, read_trajectory
from sewa_cli.run.lora import average_factors, check_lora
from sewa_cli.run.lora import warning as lora_warning
from sewa_cli.run.outputs import decide_outputs, write_results
from sewa_cli.run.recipe import Averaged
from sewa_cli.run.scales import Scales
from sewa_cli.task import Task

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
    if config.strict and task.heldout_data is None:
        raise ConfigError(f"--strict needs held-out data: define heldout_data in {task.source}")
    bench = set_up(config, task, listener)
    check_lora(config, bench.checkpoints[-1])
    outputs = None
    if write:
        inputs, newest = [*bench.inputs, *protected], bench.checkpoints[-1]
        command = listener.command
        outputs = decide_outputs(config, inputs, force, stdout, like=newest, command=command)

    with clock("read"):
        placed = read_trajectory(bench, config.K)
        trajectory, used = placed.trajectory, placed.used
    with clock("evaluate"):
        scales = Scales(bench, trajectory, used)
        k = trajectory.k
        run = Run(k)
        references = {
            call.label: scales.weigh(call(run, config.K)[0]) for call in parse(REFERENCES)
        }
        if all(scores.selection_loss is None for scores in references.values()):
            raise TaskError(
                "loss() is NaN or Inf on the selection data for every checkpoint average"
            )
    with clock("learn"):
        solution = learn(bench, trajectory, config.K)
    with clock("evaluate"):
        averaged = Averaged(
            sources=[used[i] for i in solution.selected],
            coefficients=[1 / config.K] * config.K,
            names=bench.names,
            dtype=config.output_dtype,
            state_key=config.state_key,
        )
        lora = average_factors(averaged, config.lora)
        average, batchnorm = scales.weigh_file(averaged)
    if apart := lora_warning(lora):
        bench.warn(apart)
    beaten_by = _better(average, references)
    for better in beaten_by:
        bench.warn(
            f"the {better.name} average did better than the learned one on held-out data "
            f"({better.heldout_loss:.5g} against {average.heldout_loss:.5g})"
        )

    averaged.metadata = metadata_of(averaged, config.solver, config.K)
    writing_began = time.perf_counter()
    written = as_written(averaged, outputs.form if outputs else "file")
    recipe = written.recipe()

    def make_report() -> Report:
        clock.stages["write"] = time.perf_counter() - writing_began
        return Report(
            versions=versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=config.model_dump(mode="json"),
            task=task.source,
            device=str(bench.model.device),
            seed=config.seed,
            K=config.K,
            k=k,
            parameters=bench.model.layout.parameters,
            candidates=[
                Candidate(
                    index=i, path=str(c.path), step=c.step, probability=p, logged=c.metrics or None
                )
                for i, (c, p) in enumerate(zip(used, solution.probabilities, strict=True))
            ],
            left_out=placed.left_out,
            selected=solution.selected,
            selected_steps=[c.step for c in averaged.sources],
            selected_paths=[str(c.path) for c in averaged.sources],
            history=[loss if isfinite(loss) else None for loss in solution.history],
            selection_rows=scales.selection_rows,
            heldout_rows=scales.heldout_rows,
            average=average,
            references=references,
            beaten_by=beaten_by,
            placement=placed.placement,
            batchnorm=batchnorm,
            lora=lora,
            cost=total_cost(bench, clock),
            output=outputs.named if outputs else None,
            recipe=recipe,
            warnings=bench.warnings,
        )

    if outputs is None:
        return Selection(make_report(), averaged)
    return Selection(write_results(written, outputs, make_report), averaged)


def _better(average: Scores, references: dict[str, Scores]) -> list[Better]:
    """The references with a lower held-out loss, best first."""
    chosen = average.heldout_loss
    found = [
        Better(name=name, heldout_loss=loss, by=chosen - loss)
        for name, scores in references.items()
        if chosen is not None and (loss := scores.heldout_loss) is not None and loss < chosen
    ]
    return sorted(found, key=lambda better: better.heldout_loss)
