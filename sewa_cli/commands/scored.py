"""`sewa select --score` and `sewa evaluate --score`: a command judges files. No task, no model."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO

import torch

from sewa_cli import mirrors
from sewa_cli.cache import open_cache
from sewa_cli.candidates import check_names, open_candidates, open_named, warn_of_no_steps
from sewa_cli.checkpoints import Checkpoint, Reads, check_mergeable, paths_of
from sewa_cli.commands import make_card
from sewa_cli.commands.select import Selection
from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.extensions import chosen_solver, solver_for
from sewa_cli.files import MIB
from sewa_cli.methods import mean_of
from sewa_cli.opening import Clock, check_budget, peak_memory
from sewa_cli.output import layouts
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, decide_outputs, write_results
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.output.mean import is_finite
from sewa_cli.placing import list_candidates
from sewa_cli.report.findings import ContestFinding, Finding
from sewa_cli.report.kinds import Evaluated, Evaluation
from sewa_cli.report.select import Report
from sewa_cli.report.shared import Cost, LeftOut, Measured, Placement, Seconds, heading
from sewa_cli.rng import seeded
from sewa_cli.scoring.command import Call, Commands, words_of
from sewa_cli.scoring.heldout import confirm
from sewa_cli.scoring.printed import Record, mean_scores
from sewa_cli.scoring.script import open_script, parts_of, reader
from sewa_cli.solvers.board import Failed

METHOD = "score"  # in the metadata of what is written, and of all that were scored


@dataclass(frozen=True)
class Script:
    """The command, as reports and `--cache` name it."""

    source: str
    cache_key: Callable[[], str] | None = None

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """Return files that the command names, and the program itself."""
        return tuple(path for path in map(Path, shlex.split(self.source)) if path.is_file())

    @property
    def sha256(self) -> str:
        found = sha256(self.source.encode())
        for path in self.files:
            found.update(path.read_bytes() if path.stat().st_size <= MIB else b"")
        return found.hexdigest()


@dataclass(frozen=True)
class ScoredRun:
    """The checkpoints that take part, and how an average of them is written."""

    config: Config
    used: list[Checkpoint]
    outputs: Outputs

    def average(self, coefficients: Sequence[float]) -> Average:
        found = Average.of(self.used, coefficients, config=self.config, method=METHOD)
        return found.as_written(self.outputs.form)

    def write(self, coefficients: Sequence[float], path: Path) -> None:
        """Write an average as the output will be."""
        form, average = self.outputs.form, self.average(coefficients)
        if form == "file":
            with path.open("wb") as file:
                average.write(file)
            return
        if form in ("folder", "dcp"):
            path.mkdir()
        layouts.fill(path, average, form, self.outputs.shard_size)


def run_scored(
    config: Config,
    events: Events | None = None,
    *,
    force: bool = False,
    stdout: IO[bytes] | None = None,
    write: bool = True,
    protected: Sequence[Path] = (),
) -> Selection:
    """Choose by what the command prints for averages, and write the best."""
    events = events or Events()
    assert config.score is not None
    if config.fallback:
        raise ConfigError(
            "--fallback: a choice by a metric needs none: what is not shown to be better is not "
            "taken; leave it out"
        )
    words = words_of(config.score)
    script, clock, reads = Script(shlex.join(words)), Clock(), Reads()
    if assumed := config.objective.assumption:
        events.warn(assumed)
    with seeded(config.seed):
        candidates, found, config = open_candidates(config, events, reads)
        check_names(config, config.score)
        warn_of_no_steps(candidates, events)
        solver = chosen_solver(config)
        config = config.model_copy(update={"solver": solver_for(config, config.K)})
        check_budget(config.K, candidates)
        if config.lora == "merged":
            check_mergeable(candidates[-1])
        outputs = _outputs(config, force, stdout, candidates[-1])
        if write:
            outputs = outputs.check([*paths_of(found), *script.files, *protected])
        with clock("read"):
            used, left_out = usable(candidates, config, events)
        check_budget(config.K, used)
        run = ScoredRun(config, used, outputs)
        size = sum(run.average(mean_of(range(len(used)), len(used))).sizes().values())
        device, memo = torch.device("cpu"), None
        if config.cache is not None:
            memo = open_cache(config, script, used, device, events)
        name = Path(outputs.named).name if isinstance(outputs.average, Path) else "average"
        with open_script(config, used, run.write, size, name, outputs.form, memo, events) as metric:
            with clock("learn"):
                problem = metric.problem()
                metric.follow()
                choice = solver.choose(problem, config.K)
                spent = metric.board.spent
                events.progress("evaluating", spent, spent)
            with clock("evaluate"):
                choice, verdict = confirm(metric, choice)
        began, reported = time.perf_counter(), choice.find(ContestFinding)
        assert reported is not None
        average, last = run.average(choice.coefficients), used[-1]
        if average.lora is not None:
            warn_of_factors(average.lora, events)
        recipe = average.recipe(outputs.shard_size, events) if write else None

        def make_report() -> Report:
            clock.stages["write"] = time.perf_counter() - began
            chosen = [i for i, weight in enumerate(choice.coefficients) if weight != 0]
            return Report(
                **heading(config, events, script, device),
                parameters=_count(last),
                k=len(used),
                candidates=list_candidates(used, choice.coefficients),
                left_out=left_out,
                placement=Placement(
                    tier="files",
                    reason="each average is written from the checkpoints' files",
                    cap_bytes=0,
                    planned_bytes=0,
                ),
                standing=None,
                cost=Cost(
                    seconds=Seconds(total=time.perf_counter() - clock.started, **clock.stages),
                    forward_passes=0,
                    backward_passes=0,
                    bytes_read=reads.bytes,
                    peak_memory_bytes=peak_memory(),
                    recalled=None if memo is None else memo.recalled,
                ),
                K=len(chosen),
                selected=chosen,
                selected_steps=[one.step for one in average.sources],
                selected_paths=[one.name for one in average.sources],
                selection_rows=0,
                heldout_rows=None,
                average=Measured(selection_loss=None),
                references={},
                verdict=verdict,
                written=choice.method,
                findings=[one for one in choice.findings if isinstance(one, Finding)],
                batchnorm=None,
                lora=average.lora,
                output=outputs.named if write else None,
                recipe=recipe,
            )

        if not write:
            return Selection(make_report(), average)
        report, _ = write_results(average, outputs, make_report, make_card, events)
        return Selection(report, average)


def _outputs(config: Config, force: bool, stdout: IO[bytes] | None, newest: Checkpoint) -> Outputs:
    """Decide where the average goes; without a name it gets the checkpoints' own format."""
    outputs = decide_outputs(config, force, stdout, newest)
    if outputs.wanted is None or newest.kind != "torch" or outputs.form != "file":
        return outputs
    wanted = outputs.wanted.with_suffix(newest.path.suffix)
    return replace(outputs, average=wanted, wanted=wanted, form="torch")


def _count(checkpoint: Checkpoint) -> int:
    return sum(prod(one.shape) for one in checkpoint.tensors.values() if one.is_float)


def usable(
    checkpoints: Sequence[Checkpoint], config: Config, events: Events
) -> tuple[list[Checkpoint], list[LeftOut]]:
    """Look through all checkpoints; one with NaN or Inf is left out, or stops the run."""
    used, left_out = list[Checkpoint](), list[LeftOut]()
    for checkpoint in events.over("reading", checkpoints, len(checkpoints)):
        broken = next(
            (
                name
                for name, about in checkpoint.tensors.items()
                if about.is_float and not is_finite(checkpoint.read_array(name))
            ),
            None,
        )
        checkpoint.close()
        if broken is None:
            used.append(checkpoint)
            continue
        reason = f"{broken} holds NaN or Inf"
        if config.nonfinite == "error":
            raise CheckpointError(
                f"{checkpoint.name}: {reason}; --set nonfinite=skip leaves it out"
            )
        events.warn(f"{checkpoint.name}: left out: {reason}")
        left_out.append(LeftOut(path=checkpoint.name, step=checkpoint.step, reason=reason))
    if not used:
        raise CheckpointError(f"all {len(left_out)} checkpoints hold NaN or Inf; none is left")
    return used, left_out


def evaluate_scored(config: Config, events: Events | None = None) -> Evaluation:
    """Score files as they are, by all parts."""
    events = events or Events()
    assert config.score is not None
    script = Script(shlex.join(words_of(config.score)))
    if assumed := config.objective.assumption:
        events.warn(assumed)
    checkpoints, read = open_named(config, events, keep_ours=True), reader(config)
    parts, settings = parts_of(config) or [""], config.objective
    commands = Commands(words_of(config.score), settings.workers, settings.part_timeout)
    for file in (file for one in checkpoints for file in one.files):
        mirrors.bring(file)
    calls = [Call(one.path.absolute(), part) for one in checkpoints for part in parts]
    printed: dict[int, list[Record]] = {}
    with closing(commands):
        for n, found in events.over("evaluating", commands.run(calls), len(calls)):
            where = mirrors.named(calls[n].checkpoint)
            where += f", part {calls[n].part}" if calls[n].part else ""
            if isinstance(found, Failed):
                raise TaskError(f"{where}: {found.line}")
            try:
                printed[n] = read(found)
            except ValueError as error:
                raise TaskError(f"{where}: {error}") from error
    files = []
    for n, one in enumerate(checkpoints):
        own = [record for m in range(len(parts)) for record in printed[n * len(parts) + m]]
        metrics = dict[str, float | None](mean_scores(own))
        about = {"path": one.name, "step": one.step}
        files.append(Evaluated(**about, selection_loss=None, metrics=metrics))
    return Evaluation(
        **heading(config, events, script, "cpu"),
        files=files,
        selection_rows=0,
        heldout_rows=None,
    )
