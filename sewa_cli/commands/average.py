"""`sewa average`: for people without a task. Same reader, same writer, no model, no data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from sewa_cli.candidates import check_alike, check_names, open_candidates, open_named
from sewa_cli.checkpoints import Checkpoint, check_mergeable, in_order, paths_of
from sewa_cli.checkpoints.means import choose, counts_of, with_running
from sewa_cli.commands import make_card
from sewa_cli.config import AUTO, Config
from sewa_cli.errors import ConfigError
from sewa_cli.events import Events
from sewa_cli.extensions import propose
from sewa_cli.methods import Run, check_K, parse_one
from sewa_cli.output.average import Average, taking_part
from sewa_cli.output.destination import decide_outputs, write_results
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.remote.scratch import local_paths
from sewa_cli.remote.streamed import settle
from sewa_cli.report.kinds import AverageReport
from sewa_cli.report.shared import heading
from sewa_cli.settings import USUAL
from sewa_cli.text import few


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
        candidates, found, config = open_candidates(config, events)
        coefficients = _coefficients(method, candidates, config)
    else:
        found = open_named(config, events)
        is_folder = len(config.checkpoints) == 1 and local_paths(config)[0].is_dir()
        candidates = found
        if is_folder or config.source:
            candidates, _ = choose(with_running(found), config.source, events.say)
        candidates = in_order(candidates) if is_folder else candidates
        check_alike(candidates)
        coefficients, method = _checked(weights, len(candidates)), "weights"
    candidates = settle(candidates, once=True)
    newest = taking_part(candidates, coefficients)[0][-1]
    outputs = decide_outputs(config, force, stdout, newest, always_report=False)
    outputs = outputs.check([*paths_of(found), *protected])
    if outputs.report is not None or with_report:
        check_names(config)
    if config.lora == "merged":
        check_mergeable(newest)
    average = Average.of(candidates, coefficients, config=config, method=method)
    if average.lora is not None:
        warn_of_factors(average.lora, events)
    statistics = [n for n in average.names if n.endswith((".running_mean", ".running_var"))]
    if statistics and len(average.sources) > 1:
        events.warn(
            f"BatchNorm statistics ({few(statistics, 1)}) are averaged; `sewa select` recomputes "
            "them"
        )

    def make_report() -> AverageReport | None:
        if outputs.report is None and not with_report:  # hashing takes longer than averaging
            return None
        return AverageReport(
            **heading(config, events),
            lora=average.lora,
            output=outputs.named,
            recipe=average.recipe(outputs.shard_size, events),
        )

    report, outputs = write_results(average, outputs, make_report, make_card, events)
    return average, outputs.named, report


def _checked(weights: Sequence[float], k: int) -> list[float]:
    if len(weights) != k:
        raise ConfigError(
            f"--weights: {len(weights)} coefficients for {k} checkpoints; give one for each"
        )
    if not abs(sum(weights) - 1) <= 1e-6:  # nor do NaN and Inf
        raise ConfigError(f"--weights: must sum to 1, and sum to {sum(weights):.6g}")
    return list(weights)


def _coefficients(spec: str, candidates: Sequence[Checkpoint], config: Config) -> list[float]:
    call = parse_one(spec, "--method")
    if call.method.needs_loss:
        raise ConfigError(
            f"--method: {spec} needs a loss, so a model and data; use `sewa select`, or `sewa "
            "compare --output-best`"
        )
    if call.method.has_budget and config.K == AUTO and "K" in config.model_fields_set:
        raise ConfigError("K: auto needs a model and data to learn from; name a number: --K 10")
    K = min(USUAL, len(candidates)) if config.K == AUTO else config.K
    if call.method.has_budget:
        check_K(K, len(candidates), len(candidates))
    run = Run.at([c.step for c in candidates], config.seed, counts=counts_of(candidates))
    return propose(call, run, K)[0]
