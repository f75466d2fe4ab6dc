"""An ablation of the default: estimators judged offline, on one training run of each setting.

    python benchmarks/quality/ablate.py                     every setting and every estimator
    python benchmarks/quality/ablate.py --settings text     one setting
    python benchmarks/quality/ablate.py --true              true held-out losses of a few

The first call trains what is not trained yet, runs all checkpoints of it once and keeps their
outputs in the folder (`outputs.py`); it needs `make data`. Then every estimator is a function of a
draw of the selection examples, and is judged by the predicted held-out loss of its average.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from outputs import (
    QUARTERS,
    Cache,
    Part,
    Run,
    behind_in_errors,
    example_losses,
    load_cache,
)
from plan import SETTINGS, TUNING
from running import keep, left_by
from tables import estimate, markdown
from torch import Tensor

DRAWS = {"100": 6, "200": 6, "1000": 3, "all": 1}  # draws, by number of examples
EVALUATIONS = 8  # of the gradient, for each λ
FLOOR = 0.03  # of the prior is spread evenly: coefficients of zero could never grow
STRENGTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)  # λ, whatever the number of examples
BY_COUNT = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3)  # n·λ
REFERENCE = "the default"


@dataclass(frozen=True)
class Draw:
    """The examples that an estimator may look at, and the averages that it begins with."""

    part: Part
    averages: Tensor  # [A, k]
    names: list[str]
    index: Tensor  # of the examples among all
    run: Run  # for rules that look at true outputs
    true: dict[tuple[float, ...], float] = field(default_factory=dict)  # losses that are known

    def __len__(self) -> int:
        return len(self.part)

    @property
    def moving(self) -> slice:
        """The moving averages and the mean of all; the means of quarters come after them."""
        return slice(len(self.names) - QUARTERS)

    @property
    def members(self) -> Tensor:
        """All examples, [n]."""
        return torch.ones(len(self), dtype=torch.bool)

    def true_loss(self, coefficients: Tensor) -> float:
        known = tuple(coefficients.tolist())
        if known not in self.true:
            flat = coefficients.float() @ self.run.weights
            outputs = self.run.selection_outputs(flat, self.index)
            self.true[known] = float(example_losses(outputs, self.part.targets).mean())
        return self.true[known]


Estimator = Callable[[Draw], Tensor]  # → coefficients [k]
Prior = Callable[[Draw, Tensor], Tensor]  # a draw, and which examples to look at [n] → shares [A]
Solve = Callable[[Part, Tensor, Tensor], Tensor]  # priors [p, k], members [p, n] → [S, p, k]
Choose = Callable[[Tensor], Tensor]  # validated losses [S, n] → shares [S]


# ---- priors --------------------------------------------------------------------------------------


def by_losses(draw: Draw, members: Tensor) -> Tensor:
    """Weigh moving averages by exp(−z²)."""
    z = behind_in_errors(draw.part.losses[draw.moving][:, members])
    return with_quarters_at_zero(torch.softmax(-(z**2), 0))


def best_window(draw: Draw, members: Tensor) -> Tensor:
    means = draw.part.losses[draw.moving][:, members].mean(1)
    return torch.eye(len(draw.names), dtype=torch.float64)[int(means.argmin())]


def with_quarters(draw: Draw, members: Tensor) -> Tensor:
    """Let means of quarters count where the best is two errors ahead."""
    losses = draw.part.losses[:, members]
    z = behind_in_errors(losses)
    best = torch.cat([losses[draw.moving], losses[z.argmin()][None]])
    if int(z.argmin()) < draw.moving.stop or behind_in_errors(best)[:-1].min() <= 2:
        return by_losses(draw, members)
    return torch.softmax(-(z**2), 0)


def with_quarters_at_zero(shares: Tensor) -> Tensor:
    return torch.cat([shares, shares.new_zeros(QUARTERS)])


# ---- from the prior to what the examples favour --------------------------------------------------


def pulled(strengths: Sequence[float], by_count: bool) -> Solve:
    """Minimise L(c) + λ·L₀·KL(c ‖ prior) for falling λ by mirror descent; the prior comes first.

    `by_count`: the strengths are n·λ, for n examples.
    """

    def solve(part: Part, priors: Tensor, members: Tensor) -> Tensor:
        shares = members.double() / members.sum(1, keepdim=True)
        scale = (part.predict(priors) * shares).sum(1)
        log_prior = ((1 - FLOOR) * priors + FLOOR / priors.shape[1]).log()
        x, g = log_prior, part.gradient(log_prior.exp(), shares)
        eta = 1 / (g - (x.exp() * g).sum(1, keepdim=True)).abs().amax(1).clamp_min(1e-300)
        found = [priors]
        for strength in strengths:
            pull = (strength / (len(part) if by_count else 1) * scale)[:, None]
            good = eta
            for _ in range(EVALUATIONS):
                rate = 1 / eta[:, None]
                y = (rate * x + pull * log_prior - g) / (rate + pull)
                x, g, taken = _step(part, shares, x, y, g, eta, 1e-7 * scale)
                good = torch.where(taken, eta, good)
                eta = torch.where(taken, 1.6 * eta, eta / 3)
            eta = good  # at rest every step fails by rounding
            found.append(x.exp())
        return torch.stack(found)

    return solve


def _step(
    part: Part,
    shares: Tensor,
    x: Tensor,
    y: Tensor,
    g: Tensor,
    eta: Tensor,
    rounding: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Go from log c = x to y where the loss surely falls: the new x, its gradient, and where."""
    y = y - torch.logsumexp(y, 1, keepdim=True)
    slope = part.gradient(y.exp(), shares)
    bend = ((slope - g) * (y.exp() - x.exp())).sum(1)
    taken = bend <= (y.exp() * (y - x)).sum(1) / eta + rounding
    here = taken[:, None]
    return torch.where(here, y, x), torch.where(here, slope, g), taken


def by_z(sharpness: float) -> Choose:
    return lambda validated: torch.softmax(-sharpness * behind_in_errors(validated), 0)


def lowest(validated: Tensor) -> Tensor:
    return torch.eye(len(validated), dtype=torch.float64)[int(validated.mean(1).argmin())]


FIXED_PATH, COUNTED_PATH = pulled(STRENGTHS, False), pulled(BY_COUNT, True)
SHARPLY, MILDLY = by_z(4), by_z(2)


# ---- estimators ----------------------------------------------------------------------------------


def fixed(name: str) -> Estimator:
    return lambda draw: draw.averages[draw.names.index(name)]


def alone(prior: Prior) -> Estimator:
    return lambda draw: prior(draw, draw.members) @ draw.averages


def learn(
    prior: Prior = by_losses,
    solve: Solve = FIXED_PATH,
    choose: Choose = SHARPLY,
    folds: int = 5,
) -> Estimator:
    """Prior and path, whose solutions are weighed by cross-validation."""

    def found(draw: Draw) -> Tensor:
        n, generator = len(draw), torch.Generator().manual_seed(0)
        fold = torch.randperm(n, generator=generator) % folds
        members = torch.stack([fold != f for f in range(-1, folds)])  # all, then without each
        priors = torch.stack([prior(draw, some) for some in members]) @ draw.averages
        solutions = solve(draw.part, priors, members)
        validated = torch.zeros(len(solutions), n, dtype=torch.float64)
        for f in range(folds):
            here = (fold == f).nonzero()[:, 0]
            validated[:, here] = draw.part.take(here).predict(solutions[:, 1 + f])
        return choose(validated) @ solutions[:, 0]

    return found


def without_folds(prior: Prior, strength: float) -> Estimator:
    """One strength λ = strength / n, and nothing to choose."""

    def found(draw: Draw) -> Tensor:
        start = alone(prior)(draw)[None]
        strengths = [x for x in BY_COUNT if x > strength] + [strength]
        return pulled(strengths, True)(draw.part, start, draw.members[None])[-1, 0]

    return found


def greedy(draw: Draw) -> Tensor:
    """Take checkpoints, the best alone first, where the mean of those taken gets better."""
    each = draw.part.predict(torch.eye(draw.averages.shape[1])).mean(1)
    taken, best = torch.zeros_like(each), torch.inf
    for i in each.argsort().tolist():
        trial = taken.clone()
        trial[i] = 1.0
        loss = float(draw.part.predict((trial / trial.sum())[None]).mean())
        if loss < best:
            taken, best = trial, loss
    return taken / taken.sum()


# ---- rules on top of an estimator ----------------------------------------------------------------


def drop_negligible(estimator: Estimator) -> Estimator:
    """Set the smallest coefficients to zero, as many as make up 0.2 % together."""

    def found(draw: Draw) -> Tensor:
        c = estimator(draw).clone()
        ordered, order = c.sort()
        c[order[ordered.cumsum(0) <= 0.002]] = 0.0
        return c / c.sum()

    return found


def not_above(baselines: bool, estimator: Estimator, prior: Estimator) -> Estimator:
    """Take the prior where the answer's true loss is higher, with `baselines` the best window."""

    def found(draw: Draw) -> Tensor:
        candidates = [estimator(draw), prior(draw)]
        if baselines:
            candidates.append(alone(best_window)(draw))
        return min(candidates, key=draw.true_loss)

    return found


def kept(learned: Estimator) -> Estimator:
    """Finish as the default does."""
    return drop_negligible(not_above(False, learned, alone(by_losses)))


BY_NUMBER = learn(solve=COUNTED_PATH, choose=MILDLY)
ESTIMATORS: Mapping[str, Estimator] = {
    REFERENCE: kept(BY_NUMBER),
    "− true loss decides against the prior": drop_negligible(BY_NUMBER),
    "− negligible coefficients dropped": not_above(False, BY_NUMBER, alone(by_losses)),
    "− λ by the number of examples": kept(learn(choose=MILDLY)),
    "− exp(−2z): exp(−4z)": kept(learn(solve=COUNTED_PATH)),
    "− exp(−2z): the lowest": kept(learn(solve=COUNTED_PATH, choose=lowest)),
    "− folds: one λ = 3/n": kept(without_folds(by_losses, 3)),
    "− prior: the best moving average": kept(learn(best_window, COUNTED_PATH, MILDLY)),
    "− path: the prior alone": alone(by_losses),
    "+ not above the best moving average": drop_negligible(
        not_above(True, BY_NUMBER, alone(by_losses))
    ),
    "+ quarters of the run": kept(learn(with_quarters, COUNTED_PATH, MILDLY)),
    "the product before": drop_negligible(learn(with_quarters)),
    "plain: seven fixed λ, exp(−4z)": learn(),
    "best moving average by the examples": alone(best_window),
    "moving average, window 17": fixed("window 17"),
    "greedy": greedy,
    "mean of all": fixed("mean of all"),
    "last": fixed("window 1"),
}
TRUE = (
    REFERENCE,
    "the product before",
    "− path: the prior alone",
    "best moving average by the examples",
    "moving average, window 17",
    "greedy",
)


# ---- judging -------------------------------------------------------------------------------------


def draws(cache: Cache, run: Run) -> Iterator[tuple[str, Draw]]:
    """Draw examples, several times for each size, with the name of the size."""
    generator = torch.Generator().manual_seed(0)
    for size, times in DRAWS.items():
        count = len(cache.selection) if size == "all" else int(size)
        for _ in range(times):
            drawn = torch.randperm(len(cache.selection), generator=generator)[:count]
            index = drawn.sort().values
            part = cache.selection.take(index)
            yield size, Draw(part, cache.averages, cache.names, index, run)


def judge(
    cache: Cache, run: Run, estimators: Mapping[str, Estimator], is_true: bool
) -> dict[str, dict[str, float]]:
    """Return by estimator and size the mean loss above the best estimator's, in per cent."""
    found: dict[str, list[list[float]]] = {}
    for size, draw in draws(cache, run):
        answers = torch.stack([estimator(draw) for estimator in estimators.values()])
        if is_true:
            losses = torch.tensor([run.heldout_loss(c) for c in answers])
        else:
            losses = cache.heldout.predict(answers).mean(1)
        found.setdefault(size, []).append((100 * (losses / losses.min() - 1)).tolist())
    by_size = {size: torch.tensor(rows).mean(0).tolist() for size, rows in found.items()}
    return {
        name: {size: means[i] for size, means in by_size.items()}
        for i, name in enumerate(estimators)
    }


def table(regrets: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, str]]:
    """Regrets by setting, estimator and size → a row for each estimator."""
    rows = []
    for name in next(iter(regrets.values())):
        by_setting = {setting: own[name] for setting, own in regrets.items()}
        row = {"rule": name}
        for size in DRAWS:
            row[f"{size}, %"] = f"{fmean(own[size] for own in by_setting.values()):.2f}"
        behind = {
            setting: fmean(own.values()) - fmean(regrets[setting][REFERENCE].values())
            for setting, own in by_setting.items()
        }
        found, worst = estimate([*behind.values()]), max(behind, key=behind.__getitem__)
        half = "" if found.half is None else f" ± {found.half:.2f}"
        row["mean, %"] = f"{fmean(fmean(own.values()) for own in by_setting.values()):.3f}"
        row[f"minus {REFERENCE}"] = f"{found.mean:+.3f}{half}"
        row["worst setting"] = f"{behind[worst]:+.2f} ({worst})"
        rows.append(row)
    return sorted(rows, key=lambda row: float(row["mean, %"]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("quality-dir"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=TUNING[0])
    parser.add_argument("--true", action="store_true", help="run the averaged weights of a few")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = list(TRUE if asked.true else ESTIMATORS)
    regrets = {}
    for name in asked.settings:
        done = asked.folder / "judged" / f"{name} seed {asked.seed}{' true' * asked.true}.json"
        found = left_by(done, names)
        if found is None:
            cache = load_cache(SETTINGS[name], asked.folder, asked.seed)
            run = Run(SETTINGS[name], asked.folder, asked.seed)
            chosen = {rule: ESTIMATORS[rule] for rule in names}
            found = {"command": names, "regrets": judge(cache, run, chosen, asked.true)}
            done.parent.mkdir(parents=True, exist_ok=True)
            keep(done, found)
        regrets[name] = found["regrets"]
    print(markdown(table(regrets)))


if __name__ == "__main__":
    main()
