"""`sewa average`: for people without a task. Same reader, same writer, no model, no data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from sewa_cli.checkpoints import (
    Checkpoint,
    Reads,
    check_agreement,
    check_same_product,
    in_order,
    open_all,
)
from sewa_cli.config import AUTO, Config
from sewa_cli.errors import ConfigError
from sewa_cli.events import Events
from sewa_cli.methods import Run, checked, parse_one
from sewa_cli.output.average import Average, taking_part
from sewa_cli.output.destination import decide_outputs, write_average, write_results
from sewa_cli.output.lora import check_lora
from sewa_cli.output.lora import warning as lora_warning
from sewa_cli.report.average import AverageReport
from sewa_cli.session.candidates import open_candidates
from sewa_cli.session.extensions import propose
from sewa_cli.session.heading import heading


def run_average(
    config: Config,
    method: str,
    weights: Sequence[float] | None = None,
    *,
    force: bool = False,
    stdout: IO[bytes] | None = None,
    protected: Sequence[Path] = (),
    with_report: bool = False,
    events: Events | None = None,
) -> tuple[Average, str, AverageReport | None]:
    """Average by a method that needs no loss, or by explicit weights.

    Weights belong to files in the order given; those of a folder, in the order of their steps.
    Returns the average, where it was written, and the report if one is written or wanted.
    """
    events = events or Events()
    if weights is None:
        candidates, found = open_candidates(config, Reads(), events)
        coefficients = _coefficients(method, candidates, config)
        label = method
    else:
        candidates = _as_given(config, events)
        found = [path for c in candidates for path in (c.path, *c.files)]
        if len(weights) != len(candidates):
            raise ConfigError(f"--weights: {len(weights)} for {len(candidates)} checkpoints")
        try:
            coefficients = checked(weights, len(candidates), "--weights")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        label = "weights"
    newest = taking_part(candidates, coefficients)[0][-1]
    outputs = decide_outputs(
        config,
        [*found, *protected],
        force,
        stdout,
        always_report=False,
        like=newest,
        command=events.command,
    )
    check_lora(config, newest)
    average = Average.of(
        candidates,
        coefficients,
        method=label,
        dtype=config.output_dtype,
        state_key=config.state_key,
        lora=config.lora,
    )
    if apart := lora_warning(average.lora):
        events.warn(apart)

    def make_report() -> AverageReport:
        return AverageReport(
            **heading(config, events.warnings),
            lora=average.lora,
            output=outputs.named,
            recipe=average.recipe(),
        )

    # a report holds the sources' hashes, which take three times as long as averaging them
    report = None
    if outputs.report is None and not with_report:
        write_average(average, outputs)
    else:
        report = write_results(average, outputs, make_report)
    return average, outputs.written_as(average), report


def _as_given(config: Config, events: Events) -> list[Checkpoint]:
    checkpoints = open_all(
        config.checkpoints,
        Reads(),
        state_key=config.state_key,
        warn=events.warn,
        note=events.note,
    )
    if not checkpoints:
        raise ConfigError("no checkpoints named: give files, or a folder")
    check_agreement(checkpoints)
    check_same_product(checkpoints)
    is_folder = len(config.checkpoints) == 1 and config.checkpoints[0].is_dir()
    return in_order(checkpoints) if is_folder else checkpoints


def _coefficients(spec: str, candidates: Sequence[Checkpoint], config: Config) -> list[float]:
    try:
        call = parse_one(spec)
    except ValueError as error:
        raise ConfigError(f"--method: {error}") from error
    if call.method.needs_loss:
        raise ConfigError(
            f"--method: {spec} needs a loss, so a model and data; use `sewa select`, or `sewa "
            "compare --output-best`"
        )
    if call.method.has_budget and config.K == AUTO:
        raise ConfigError(
            "K: auto is for `sewa select`, which has data to choose by; give a number"
        )
    if call.method.has_budget and len(candidates) < config.K:
        raise ConfigError(f"K: {config.K} of {len(candidates)} checkpoints; take fewer")
    steps = [c.step for c in candidates if c.step is not None]
    run = Run(len(candidates), steps if len(steps) == len(candidates) else None, config.seed)
    return propose(call, run, config.K)[0]
