"""Averages that look at the selection loss, and so need a task."""

from __future__ import annotations

from sewa_cli.methods import Coefficients, Run, mean_of, method
from sewa_cli.settings import AUTO


@method(needs_loss=True)
def sewa(run: Run, K: int) -> Coefficients:
    """K checkpoints chosen by the learned mask.

    1/K on the K that the configured solver chooses. SeWA, Wang et al. 2025.
    """
    return run.learn(K)


@method(needs_loss=True)
def aggregate(run: Run) -> Coefficients:
    """The default: between moving averages and what the data favour.

    Σ_λ share_λ · c(λ), c(λ) = argmin L(c) + λ·L₀·KL(c ‖ π), π a mean of moving averages
    (docs/explanation/default.md).
    """
    return run.learn(AUTO)


@method(needs_loss=True, needs_metric=True)
def race(run: Run) -> Coefficients:
    """Averages compete by --metric; the budget goes to the leaders.

    The default of `sewa select --metric` (docs/how-to/metrics.md).
    """
    return run.contest("race", AUTO)


@method(needs_loss=True, needs_metric=True)
def reinforce(run: Run, K: int) -> Coefficients:
    """K checkpoints by policy gradient over masks, for --metric.

    1/K on the K largest s, s by ∇ E[f(w(m))] = E[(f − b) ∇ log p(m; s)].
    """
    return run.contest("reinforce", K)


@method(needs_loss=True)
def best(run: Run) -> Coefficients:
    """The checkpoint with the lowest selection loss.

    c_j = 1 for j = argmin L(w_i).
    """
    return mean_of(_by_loss(run)[:1], run.k)


@method(needs_loss=True)
def topk(run: Run, K: int) -> Coefficients:
    """The K checkpoints with the lowest selection losses, equally.

    c_i = 1/K on the K lowest L(w_i).
    """
    return mean_of(_by_loss(run)[:K], run.k)


@method(needs_loss=True)
def greedy(run: Run) -> Coefficients:
    """Greedy soup: from the best on, each is added if the loss falls.

    Wortsman et al. 2022, Recipe 1, by selection loss.
    """
    chosen: list[int] = []
    lowest = float("inf")
    for candidate in _by_loss(run):
        loss = run.loss(mean_of([*chosen, candidate], run.k))
        if loss < lowest:
            chosen, lowest = [*chosen, candidate], loss
    return mean_of(chosen or [run.k - 1], run.k)


@method(needs_loss=True)
def forward(run: Run, K: int) -> Coefficients:
    """Greedy: adds the checkpoint that lowers the loss most, up to K.

    S ← S ∪ {argmin_j L(mean of S ∪ {j})}. About K·k losses. Caruana et al. 2004.
    """
    chosen: list[int] = []
    lowest = float("inf")
    while len(chosen) < K:
        rest = [j for j in range(run.k) if j not in chosen]
        losses = {j: run.loss(mean_of([*chosen, j], run.k)) for j in rest}
        j = min(rest, key=lambda j: (_nan_last(losses[j]), -j))
        if not losses[j] < lowest:
            break
        chosen, lowest = [*chosen, j], losses[j]
    return mean_of(chosen or [run.k - 1], run.k)


@method(needs_loss=True)
def twa(run: Run, *, iterations: int = 100, lr: float = 0.1) -> Coefficients:
    """Learned coefficients on all k checkpoints.

    c = softmax(θ), θ from 0 by Adam on the selection loss, a batch an iteration. After TWA, Li
    et al. 2023.
    """
    import torch  # what needs no loss goes without

    from sewa_cli.solvers.mask import Adam

    theta = torch.zeros(run.k, dtype=torch.float64)
    adam = Adam(theta, lr)
    for _ in range(iterations):
        c = theta.softmax(0)
        _, gradient = run.gradient(c.tolist())
        g = torch.tensor(gradient, dtype=torch.float64)
        if not torch.isfinite(g).all():
            break  # a broken batch: what was learned so far stands
        adam.step(c * (g - c @ g))
    return [float(c) for c in theta.softmax(0)]


def _by_loss(run: Run) -> list[int]:
    """Indices by the loss of each checkpoint alone, lowest first; of equals, the later first."""
    losses = [run.loss(mean_of([i], run.k)) for i in range(run.k)]
    return sorted(range(run.k), key=lambda i: (_nan_last(losses[i]), -i))


def _nan_last(loss: float) -> float:
    return loss if loss == loss else float("inf")
