"""`sewa select --score` and `sewa evaluate --score`: a command judges files. No task, no model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from sewa_cli import mirrors
from sewa_cli.cache import open_cache
from sewa_cli.candidates import (
    check_names,
    leave_out,
    open_candidates,
    open_named,
    warn_of_no_steps,
)
from sewa_cli.checkpoints import Checkpoint, Reads, check_mergeable, paths_of
from sewa_cli.commands.select import Selection, write_selection
from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.extensions import chosen_solver, solver_for
from sewa_cli.files import MIB
from sewa_cli.methods import mean_of
from sewa_cli.opening import Clock, check_budget, peak_memory
from sewa_cli.output import layouts
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, decide_outputs
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.output.mean import is_finite
from sewa_cli.placing import list_candidates
from sewa_cli.report.kinds import Evaluated, Evaluation
from sewa_cli.report.shared import Cost, LeftOut, Measured, Placement, heading
from sewa_cli.rng import seeded
from sewa_cli.scoring.command import Call, Commands, words_of
from sewa_cli.scoring.heldout import choose_by_metric
from sewa_cli.scoring.printed import Record, mean_scores
from sewa_cli.scoring.script import open_script, parts_of, reader
from sewa_cli.solvers.board import Failed

METHOD = "score"  # in the metadata of what is written, and of all that were scored


@dataclass(frozen=True)
class Script:
    """The command, as reports and `--cache` name it."""

    words: Sequence[str]
    cache_key = None

    @property
    def source(self) -> str:
        return shlex.join(self.words)

    @property
    def files(self) -> tuple[Path, ...]:
        """Return files that the command names, and the program itself."""
        return tuple(path for path in map(Path, self.words) if path.is_file())

    @property
    def sha256(self) -> str:
        found = sha256(self.source.encode())
        for path in self.files:
            found.update(path.read_bytes() if path.stat().st_size <= MIB else b"")
        return found.hexdigest()


def open_command(config: Config, events: Events) -> Script:
    assert config.score is not None
    if assumed := config.objective.assumption:
        events.warn(assumed)
    return Script(words_of(config.score))


def run_scored(
    config: Config,
    events: Events,
    *,
    force: bool = False,
    stdout: IO[bytes] | None = None,
    protected: Sequence[Path] = (),
) -> Selection:
    """Choose by what the command prints for averages, and write the best."""
    if config.fallback:
        raise ConfigError(
            "--fallback: a choice by a metric needs none: what is not shown to be better is not "
            "taken; leave it out"
        )
    script, clock, reads = open_command(config, events), Clock(), Reads()
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
        outputs = outputs.check([*paths_of(found), *script.files, *protected])
        with clock("read"):
            used, left_out = usable(candidates, config, events)
        check_budget(config.K, used)

        def average_of(coefficients: Sequence[float]) -> Average:
            average = Average.of(used, coefficients, config=config, method=METHOD)
            return average.as_written(outputs.form)

        def write(coefficients: Sequence[float], path: Path) -> None:
            if outputs.form in ("folder", "dcp"):
                path.mkdir()
            layouts.fill(path, average_of(coefficients), outputs.form, outputs.shard_size)

        size = sum(average_of(mean_of(range(len(used)), len(used))).sizes().values())
        device, memo = torch.device("cpu"), None
        if config.cache is not None:
            memo = open_cache(config, script, used, device, events)
        name = Path(outputs.named).name if isinstance(outputs.average, Path) else "average"
        with open_script(
            config, script.words, used, write, size, name, outputs.form, memo, events
        ) as metric:
            choice, verdict = choose_by_metric(metric, solver, config.K, clock)
        average = average_of(choice.coefficients)
        if average.lora is not None:
            warn_of_factors(average.lora, events)

        def about() -> dict[str, Any]:
            return {
                **heading(config, events, script, device),
                "parameters": _count(used[-1]),
                "k": len(used),
                "candidates": list_candidates(used, choice.coefficients),
                "left_out": left_out,
                "placement": Placement(
                    tier="files",
                    reason="each average is written from the checkpoints' files",
                    cap_bytes=0,
                    planned_bytes=0,
                ),
                "standing": None,
                "cost": Cost(
                    seconds=clock.seconds(),
                    forward_passes=0,
                    backward_passes=0,
                    bytes_read=reads.bytes,
                    peak_memory_bytes=peak_memory(),
                    recalled=None if memo is None else memo.recalled,
                ),
                "selection_rows": 0,
                "heldout_rows": None,
                "average": Measured(selection_loss=None),
                "references": {},
                "verdict": verdict,
                "written": choice.method,
                "batchnorm": None,
            }

        return write_selection(average, choice, choice.coefficients, outputs, about, clock, events)


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
        left_out.append(leave_out(checkpoint, broken, config, events))
    if not used:
        raise CheckpointError(f"all {len(left_out)} checkpoints hold NaN or Inf; none is left")
    return used, left_out


def evaluate_scored(config: Config, events: Events) -> Evaluation:
    """Score files as they are, by all parts."""
    script, settings = open_command(config, events), config.objective
    checkpoints, read = open_named(config, events, keep_ours=True), reader(config)
    parts = parts_of(config) or [""]
    commands = Commands(script.words, settings.workers, settings.part_timeout)
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
        **heading(config, events, script, "cpu"), files=files, selection_rows=0, heldout_rows=None
    )
