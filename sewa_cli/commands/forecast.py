"""`sewa select --dry-run`: the plan of a run, and its time by one batch through the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, inf, prod
from typing import Any

import torch

from sewa_cli.commands.select import open_setup
from sewa_cli.config import Config
from sewa_cli.dtypes import DTYPES
from sewa_cli.errors import TaskError
from sewa_cli.events import Events, Planned
from sewa_cli.extensions import solver_for
from sewa_cli.methods.fixed import baselines
from sewa_cli.objective.tree import rows, tensors
from sewa_cli.opening import Session, peak_memory
from sewa_cli.placing import PlacedRun, Setup
from sewa_cli.report.kinds import Forecast, PlannedStage
from sewa_cli.report.shared import heading
from sewa_cli.rng import seeded
from sewa_cli.scores import BASELINE_BATCHES, has_learning_losses
from sewa_cli.settings import AUTO
from sewa_cli.solvers import BACK, Plan, Sizes, Stage
from sewa_cli.task import Task
from sewa_cli.trajectory.placement import TIERS, Tier

SCORED = 4  # the choice, the best baseline, the newest checkpoint and the mean of all
SHORT = 0.5  # seconds: work that takes less is timed more than twice


def run_forecast(config: Config, task: Task, events: Events) -> Forecast:
    """Read the newest checkpoint, time one batch with it, and multiply by the plan."""
    with seeded(config.seed):
        return _forecast(open_setup(config, task, events))


def _forecast(setup: Setup) -> Forecast:
    session, objective, K = setup.session, setup.session.objective, setup.session.config.K
    k, flat = len(session.checkpoints), objective.model.flat
    tier = None if setup.placer.streams else setup.placer.fitting()[0]
    placement, memory_left = setup.placer.plan(tier)
    found = [(batch, n) for batch in session.task.selection_data if (n := rows(batch)) > 0]
    if not found:
        raise TaskError("selection_data() gives no examples; return one batch or more")
    examples, counts = sum(n for _, n in found), Counts.of(session)

    batch, n = found[0]
    setup.rows.fill(k - 1, flat)
    objective.model.set(flat)
    session.load_integers(session.newest)
    forward = _seconds(lambda: objective.mean_loss([batch]))
    sizes = _sizes(setup, counts, batch, examples / n, memory_left)
    own = setup.solver.plan(sizes)
    plan = own or Plan(())
    stages = stages_of(setup, plan, sizes, tier)
    through = sum(map(counts.forward, stages))
    backward = counts.selection * sum(stage.backward for stage in stages)
    both = _seconds(lambda: objective.gradient(flat, [batch])) if backward else forward

    names, tensors_of = session.names.values(), session.newest.tensors
    size = sum(prod(tensors_of[n].shape) * DTYPES[tensors_of[n].dtype].itemsize for n in names)
    products = sum(stage.products for stage in stages)
    reads = sum(stage.reads for stage in stages) + (tier.reads(products) if tier else 0)
    is_cuda = session.model.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(session.model.device) if is_cuda else peak_memory()
    placement = placement.model_copy(update={"planned_bytes": placement.planned_bytes + plan.bytes})
    return Forecast(
        **heading(session.config, session.events, session.task, session.model.device),
        parameters=session.model.parameters,
        solver=solver_for(session.config, K),
        K="auto" if K == AUTO else K,
        found=session.found,
        k=k,
        selection_rows=examples,
        rows_used=round(examples * plan.share),
        placement=placement,
        peak_memory_bytes=peak + placement.planned_bytes,
        bytes_read=ceil(k * size * reads / session.model.ranks.size),
        is_declared=own is not None,
        stages=[PlannedStage(**asdict(stage)) for stage in stages],
        forward_passes=ceil(through),
        at_least=int(sum(counts.forward(stage) * stage.at_least for stage in stages)),
        backward_passes=ceil(backward),
        batch_seconds=forward,
        seconds=plan.share * (through * forward + backward * max(0.0, both - forward)),
    )


def _sizes(setup: Setup, counts: Counts, batch: Any, times: float, memory_left: int) -> Sizes:
    """Return what a plan depends on; `times`: as many rows are in all batches as in this one."""
    session, objective, vector = setup.session, setup.session.objective, 4 * setup.placer.sizes.P
    k, K = len(session.checkpoints), session.config.K
    sizes = Sizes(k, K, counts.selection, memory_left, vector)
    if "outputs" not in setup.solver.needs:
        return sizes
    targets = objective.targets(batch)
    if targets is not None and objective.classes is not None:
        many = int(len(targets.where) * times)
        return replace(sizes, targets=many, classes=objective.classes.width)
    with torch.no_grad():
        outputs = tensors(objective.outputs(batch))
    numbers = sum(x.numel() for x in outputs if x.is_floating_point())
    return replace(sizes, numbers=int(numbers * times))


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest of a few times: the first pays for caches, and any may be disturbed."""
    found: list[float] = []
    while len(found) < 2 or (len(found) < 5 and sum(found) < SHORT):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


# ---- the plan, for --dry-run and for progress ---------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """The number of batches in each set of data."""

    selection: int
    heldout: int
    training: int  # for BatchNorm

    @classmethod
    def of(cls, session: Session) -> Counts:
        task, training = session.task, 0
        with seeded(session.config.seed):  # a loader that shuffles does so alike each time
            selection = task.selection_data.count()
            heldout = task.heldout_data.count() if task.heldout_data else 0
            if session.scorer.mode != "off":
                training = task.training_data.count() if task.training_data else selection
        if not selection:
            raise TaskError("selection_data() gives no examples; return one batch or more")
        return cls(selection, heldout, training)

    def forward(self, stage: Stage) -> float:
        found = stage.passes * self.selection + stage.heldout * self.heldout
        return found + stage.training * self.training


def stages_of(setup: Setup, own: Plan, sizes: Sizes, tier: Tier | None) -> list[Stage]:
    """Return the solver's own stages with those of `select` around them; no tier: W is streamed."""
    k, K, is_held = sizes.k, sizes.K, setup.solver.reading == "held"
    streams = tier is None or tier.reads(1) > tier.reads(0)
    holds = tier is not None and tier.holds
    share, anew = 1.0 if K == AUTO else K / k, int(setup.session.scorer.recomputes_for(2))
    is_exact = holds or streams
    has_all = is_held and sizes.batches <= BASELINE_BATCHES
    is_known = has_all and is_exact and has_learning_losses(setup.session)
    stages = [stage if streams else replace(stage, reads=0) for stage in own.stages]
    if is_held:
        averages = len(baselines(k, K))
        passes = averages * min(1.0, BASELINE_BATCHES / sizes.batches)
        products = ceil(averages / sizes.at_once)
        stages.insert(0, Stage("baselines", passes, products=products))
    stages.append(
        Stage(
            "scoring",
            passes=1 + anew + (SCORED - 1) * (not is_known),
            heldout=SCORED + anew,
            training=(SCORED - 1) * anew,
            reads=share + (not holds) * (1 + is_held),
            at_least=0.3,  # the choice may be a baseline, and the best one the mean of all
        )
    )
    if setup.session.config.fallback:
        once = 1 + anew
        stages.append(Stage("fallback", once, 0, once, anew, reads=1 + share, at_least=0))
    return [*stages, Stage("writing", reads=share)]


def planned(setup: Setup, run: PlacedRun) -> list[Planned]:
    """Return the stages of a run and the passes of each, for progress."""
    session, objective = run.session, run.session.objective
    counts, k = Counts.of(session), run.trajectory.k
    classes = inf if objective.classes else 0  # the task says targets() where they are many
    vector = 4 * run.trajectory.layout.size
    sizes = Sizes(k, session.config.K, counts.selection, run.memory_left, vector, classes=classes)
    if (own := setup.solver.plan(sizes)) is None:
        return []
    tier = next(tier for tier in TIERS if tier.name == run.placement.tier)
    back = BACK * counts.selection
    stages = stages_of(setup, own, sizes, None if setup.placer.streams else tier)
    return [Planned(stage.name, counts.forward(stage) + back * stage.backward) for stage in stages]
