"""The stages of a run of `select`: those that the solver declares, and those around them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from sewa_cli.errors import TaskError
from sewa_cli.events import Planned
from sewa_cli.methods.family import baselines
from sewa_cli.rng import seeded
from sewa_cli.scores import BASELINE_BATCHES, has_learning_losses
from sewa_cli.session.run import PlacedRun, Setup
from sewa_cli.session.session import Session
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Plan, Sizes, Stage
from sewa_cli.trajectory.placement import TIERS, Tier

BACK = 2  # forward passes that take as long as a backward pass
SCORED = 4  # the choice, the best baseline, the newest checkpoint and the mean of all


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
            if session.scorer().recomputes:
                training = task.training_data.count() if task.training_data else selection
        if not selection:
            raise TaskError("selection_data(): there are no examples")
        return cls(selection, heldout, training)

    def forward(self, stage: Stage) -> float:
        """Return the batches that a stage puts through the model."""
        found = stage.passes * self.selection + stage.heldout * self.heldout
        return found + stage.training * self.training


def stages_of(setup: Setup, own: Plan, sizes: Sizes, tier: Tier | None) -> list[Stage]:
    """Return the solver's own stages with those of `select` around them; no tier: W is streamed."""
    k, K, is_held = sizes.k, sizes.K, setup.solver.reading == "held"
    streams = tier is None or tier.reads(1) > tier.reads(0)
    holds = tier is not None and tier.holds
    share, anew = 1.0 if K == AUTO else K / k, int(setup.scorer.recomputes_for(2))
    is_exact = holds or streams
    has_all = is_held and sizes.batches <= BASELINE_BATCHES
    is_known = has_all and is_exact and has_learning_losses(setup.session, setup.scorer)
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


def follow(run: PlacedRun, K: int) -> None:
    """Show progress by the solver's plan, if it has one."""
    session, objective, room = run.session, run.session.objective, run.placed.room
    counts, k = Counts.of(session), run.trajectory.k
    classes = inf if objective.classes else 0  # the task says targets() where they are many
    vector = 4 * run.trajectory.layout.size
    sizes = Sizes(k, K, counts.selection, room, vector, classes=classes)
    if (own := run.solver.plan(sizes)) is None:
        return
    tier = next(tier for tier in TIERS if tier.name == run.placed.placement.tier)
    passes, back = objective.passes, BACK * counts.selection
    session.events.follow(
        [
            Planned(stage.name, counts.forward(stage) + back * stage.backward)
            for stage in stages_of(run.setup, own, sizes, None if run.setup.streams else tier)
        ],
        lambda: passes.forward + BACK * passes.backward,
    )
