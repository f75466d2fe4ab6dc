"""`sewa select`: files become a trajectory, the solver's answer becomes a file and a report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch import Tensor

from sewa_cli import checkpoints as library
from sewa_cli import methods
from sewa_cli.checkpoints import Checkpoint
from sewa_cli.config import STDOUT, Config
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.evaluate import cycle
from sewa_cli.report import Better, Candidate, Cost, LeftOut, Report, Scores, Seconds, Versions
from sewa_cli.run.bench import Bench, Listener, check_budget, seeded, set_up
from sewa_cli.run.outputs import decide_outputs, write_results
from sewa_cli.run.recipe import Averaged
from sewa_cli.run.scales import Scales
from sewa_cli.solvers import Solution, gumbel
from sewa_cli.task import Task
from sewa_cli.trajectory import Trajectory


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
    clock = _Clock()
    if config.strict and task.heldout_data is None:
        raise ConfigError(f"--strict needs held-out data: define heldout_data in {task.source}")
    bench = set_up(config, task, listener)
    outputs = decide_outputs(config, [*bench.inputs, *protected], force, stdout) if write else None

    with clock("read"):
        trajectory, used, left_out = _read(bench)
    with clock("evaluate"):
        scales = Scales(bench, trajectory, used)
        k = trajectory.k
        references = {
            "last": scales.weigh(methods.last(k)),
            "uniform": scales.weigh(methods.uniform(k)),
            "lawa": scales.weigh(methods.lawa(k, config.K)),
        }
        if all(scores.selection_loss is None for scores in references.values()):
            raise TaskError(
                "loss() is NaN or Inf on the selection data for every checkpoint average"
            )
    with clock("learn"):
        solution = _learn(bench, trajectory)
    with clock("evaluate"):
        averaged = Averaged(
            sources=[used[i] for i in solution.selected],
            coefficients=[1 / config.K] * config.K,
            names=bench.names,
            dtype=config.output_dtype,
        )
        average, batchnorm = scales.weigh_file(averaged)
    beaten_by = _better(average, references)
    for better in beaten_by:
        bench.warn(
            f"the {better.name} average did better than the learned one on held-out data "
            f"({better.heldout_loss:.5g} against {average.heldout_loss:.5g})"
        )

    averaged.metadata = _metadata(averaged, config)
    writing_began = time.perf_counter()
    recipe = averaged.recipe()

    def make_report() -> Report:
        clock.stages["write"] = time.perf_counter() - writing_began
        return Report(
            versions=_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=config.model_dump(mode="json"),
            task=task.source,
            device=str(bench.model.device),
            seed=config.seed,
            K=config.K,
            k=k,
            parameters=bench.model.layout.parameters,
            candidates=[
                Candidate(index=i, path=str(c.path), step=c.step, probability=p)
                for i, (c, p) in enumerate(zip(used, solution.probabilities, strict=True))
            ],
            left_out=left_out,
            selected=solution.selected,
            selected_steps=[c.step for c in averaged.sources],
            selected_paths=[str(c.path) for c in averaged.sources],
            history=[loss if isfinite(loss) else None for loss in solution.history],
            selection_rows=scales.selection_rows,
            heldout_rows=scales.heldout_rows,
            average=average,
            references=references,
            beaten_by=beaten_by,
            batchnorm=batchnorm,
            cost=Cost(
                seconds=clock.seconds(),
                forward_passes=bench.objective.passes.forward,
                backward_passes=bench.objective.passes.backward,
                bytes_read=bench.reads.bytes,
                peak_memory_bytes=_peak_memory(),
                peak_device_memory_bytes=_peak_device_memory(bench.model.device),
            ),
            output=outputs.named if outputs else None,
            recipe=recipe,
            warnings=bench.warnings,
        )

    if outputs is None:
        return Selection(make_report(), averaged)
    return Selection(write_results(averaged, outputs, make_report), averaged)


def _read(bench: Bench) -> tuple[Trajectory, list[Checkpoint], list[LeftOut]]:
    """Fill W row by row; checkpoints with NaN or Inf are left out, or stop the run."""
    config, total = bench.config, len(bench.checkpoints)
    needed = Trajectory.bytes_needed(total, bench.model.layout)
    trajectory = Trajectory(total, bench.model.layout, _home(needed, bench.model.device))
    used: list[Checkpoint] = []
    left_out: list[LeftOut] = []
    for n, checkpoint in enumerate(bench.checkpoints, 1):
        broken = trajectory.append(bench.floats(checkpoint))
        checkpoint.close()
        if broken is None:
            used.append(checkpoint)
        else:
            reason = f"{broken} holds NaN or Inf"
            if config.nonfinite == "error":
                raise CheckpointError(
                    f"{checkpoint.path}: {reason}; --nonfinite skip leaves it out"
                )
            left_out.append(LeftOut(path=str(checkpoint.path), step=checkpoint.step, reason=reason))
            bench.warn(f"{checkpoint.path}: left out: {reason}")
        bench.listener.progress("reading", n, total)
    if not used:
        raise CheckpointError(f"all {total} checkpoints hold NaN or Inf; none is left")
    check_budget(config.K, used)
    return trajectory, used, left_out


def _home(needed: int, device: torch.device) -> torch.device:
    """W lives on the device if it fits there with room for the model, else in host memory."""
    if device.type == "cuda" and needed < 0.7 * torch.cuda.mem_get_info(device)[0]:
        return device
    free = psutil.virtual_memory().available
    if needed > 0.9 * free:
        raise ConfigError(
            f"the checkpoints need {needed / 2**30:.1f} GiB of memory as float32 and "
            f"{free / 2**30:.1f} GiB are free; take fewer with --last or --every"
        )
    return torch.device("mps") if device.type == "mps" else torch.device("cpu")


def _learn(bench: Bench, trajectory: Trajectory) -> Solution:
    config, objective = bench.config, bench.objective
    stream = cycle(bench.task.selection_data, bench.model.device)
    batches: list[Any] = []

    def next_batches() -> None:
        batches[:] = [next(stream) for _ in range(config.gumbel.batches)]

    def on_iteration(iteration: int, loss: Tensor) -> None:
        done = iteration + 1
        bench.listener.progress("learning", done, config.gumbel.iterations, float(loss))

    try:
        return gumbel.solve(
            trajectory,
            lambda flat: objective.loss_and_gradient(flat, batches),
            config.K,
            config.gumbel,
            config.seed,
            next_batches,
            on_iteration,
        )
    except ValueError as error:
        raise TaskError(f"learning the mask failed: {error}") from error


def _better(average: Scores, references: dict[str, Scores]) -> list[Better]:
    """The references with a lower held-out loss, best first."""
    chosen = average.heldout_loss
    found = [
        Better(name=name, heldout_loss=loss, by=chosen - loss)
        for name, scores in references.items()
        if chosen is not None and (loss := scores.heldout_loss) is not None and loss < chosen
    ]
    return sorted(found, key=lambda better: better.heldout_loss)


def _metadata(averaged: Averaged, config: Config) -> dict[str, str]:
    """Strings only, as safetensors wants; `format` is what transformers looks for."""
    steps = [c.step if c.step is not None else c.path.name for c in averaged.sources]
    return {
        "format": "pt",
        library.WRITTEN_BY: version("sewa-cli"),
        "sewa_method": config.solver,
        "sewa_K": str(config.K),
        "sewa_steps": ",".join(map(str, steps)),
    }


def _versions() -> Versions:
    return Versions(
        sewa=version("sewa-cli"),
        python=platform.python_version(),
        torch=torch.__version__,
        safetensors=version("safetensors"),
    )


def _peak_memory() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_device_memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.stages: dict[str, float] = {"read": 0.0, "learn": 0.0, "evaluate": 0.0, "write": 0.0}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[stage] += time.perf_counter() - start

    def seconds(self) -> Seconds:
        return Seconds(total=time.perf_counter() - self.started, **self.stages)
