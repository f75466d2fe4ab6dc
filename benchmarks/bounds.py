"""Predictions of the paper's bounds: `python benchmarks/bounds.py --plot docs/images/theory.png`.

Bounds on the generalisation gap by uniform stability, Table 1 of SeWA. T steps of SGD at the step
size α on n rows; the loss is L-Lipschitz and β-smooth in the weights; k newest iterates, s = max
s_i of the mask. Where the loss is not convex, α = c/T and only the order in T is known.

                convex                not convex
    SGD         2αL²T/n               T^{cβ/(1+cβ)}/n
    SWA         αL²T/n                T^{cβ/(2+cβ)}/n
    last k      2αL²(T − k/2)/n       T^{cβ/(k+cβ)}/n
    SeWA        2αL²s(T − k/2)/n      T^{cβ/(k+cβ)}/n, with a constant that shrinks with s

Nothing is trained here. docs/explanation/theory.md says how far this explains what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import markdown

WINDOWS = (10, 100, 1000)  # k
BUDGETS = (10, 100)  # K
PRODUCTS = (100.0, 10.0, 1.0, 0.1)  # cβ, for the picture
# Okabe and Ito's colours; each line has a style of its own as well, for those who print in grey
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Training:
    """α, L, T and n. Ratios of bounds depend on T alone."""

    T: int
    alpha: float = 1.0
    lipschitz: float = 1.0
    n: int = 1


def average(run: Training, weights: Mapping[int, float]) -> float:
    """2αL²·Σ c_t t / n, for weights c_t ≥ 0 of the iterates t ≤ T that sum to one.

    For a convex, β-smooth loss and α ≤ 2/β, of two runs whose data differ in one row
    E‖w_t − w_t'‖ ≤ 2αLt/n (Hardt, Recht and Singer 2016); the triangle inequality gives the rest,
    where c is fixed before training. So only the mean step counts: T for SGD, about T/2 for SWA,
    T − (k − 1)/2 for the last k.
    """
    if not all(0 < t <= run.T and c >= 0 for t, c in weights.items()):
        raise ValueError(f"weights must be at least 0, and their steps 1 to {run.T}")
    if abs(sum(weights.values()) - 1) > 1e-9:
        raise ValueError(f"weights must sum to one, found {sum(weights.values())}")
    mean_step = sum(c * t for t, c in weights.items())
    return 2 * run.alpha * run.lipschitz**2 * mean_step / run.n


def sgd(run: Training) -> float:
    """2αL²T/n: the last iterate, of a convex loss."""
    return 2 * run.alpha * run.lipschitz**2 * run.T / run.n


def swa(run: Training) -> float:
    """αL²T/n: the mean of all iterates, half of `sgd`."""
    return sgd(run) / 2


def last_k(run: Training, k: int) -> float:
    """2αL²(T − k/2)/n: the mean of the last k; `sgd` for k = 0, `swa` for k = T."""
    if not 0 <= k <= run.T:
        raise ValueError(f"k must be 0 to {run.T}, found {k}")
    return sgd(run) * (1 - k / (2 * run.T))


def sewa(run: Training, k: int, s: float) -> float:
    """2αL²s(T − k/2)/n: K of the last k, by a mask whose largest probability is s."""
    if not 0 <= s <= 1:
        raise ValueError(f"s must be 0 to 1, found {s}")
    return s * last_k(run, k)


def least_s(K: int, k: int) -> float:
    """K/k: the least that max s_i can be where Σ s_i = K. A mask that is certain has s = 1."""
    if not 0 < K <= k:
        raise ValueError(f"K must be 1 to {k}, found {K}")
    return K / k


def exponent_sgd(product: float) -> float:
    """cβ/(1 + cβ), for a product cβ."""
    return exponent_last_k(product, 1)


def exponent_swa(product: float) -> float:
    """cβ/(2 + cβ): as of the last two."""
    return exponent_last_k(product, 2)


def exponent_last_k(product: float, k: float) -> float:
    """cβ/(k + cβ), SeWA's as well."""
    if product < 0 or k < 1:
        raise ValueError(f"cβ must be at least 0 and k at least 1, found {product} and {k}")
    return product / (k + product)


def order(run: Training, exponent: float) -> float:
    """T^exponent/n: what a bound for a loss that is not convex grows like; no constants."""
    return float(run.T**exponent / run.n)


def table(steps: Sequence[int], product: float) -> list[dict[str, object]]:
    """Bounds as ratios to SGD's, a row for each T and k."""
    rows: list[dict[str, object]] = []
    for run in map(Training, steps):
        for k in (k for k in WINDOWS if k <= run.T):
            row: dict[str, object] = {"T": run.T, "k": k}
            row["SWA"] = swa(run) / sgd(run)
            row["last k; SeWA, s=1"] = last_k(run, k) / sgd(run)
            for K in BUDGETS:
                known = sewa(run, k, least_s(K, k)) / sgd(run) if k >= K else "–"
                row[f"SeWA, K={K}, s=K/k"] = known
            orders = {
                "SWA": order(run, exponent_swa(product)),
                "last k; SeWA": order(run, exponent_last_k(product, k)),
            }
            for name, bound in orders.items():
                row[f"{name}, cβ={product:g}"] = bound / order(run, exponent_sgd(product))
            rows.append(row)
    return rows


def draw(target: Path) -> None:
    """Left: the convex bounds over k/T, as ratios to SGD's. Right: exponents of T over k."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
    run = Training(T=1000)
    windows = range(0, run.T + 1, 10)
    share = [k / run.T for k in windows]
    curves = {
        "SGD": [sgd(run) for _ in windows],
        "last k; SeWA, s = 1": [last_k(run, k) for k in windows],
        "SWA": [swa(run) for _ in windows],
        "SeWA, s = 0.5": [sewa(run, k, 0.5) for k in windows],
        "SeWA, s = 0.1": [sewa(run, k, 0.1) for k in windows],
    }
    for (name, curve), colour, style in zip(curves.items(), COLOURS, STYLES, strict=True):
        ratios = [bound / sgd(run) for bound in curve]
        left.plot(share, ratios, color=colour, linestyle=style, linewidth=1.8)
        beside = len(share) // 2  # a name begins above the middle of its line
        left.annotate(name, (share[beside], ratios[beside] + 0.025), fontsize=9, color=colour)
    left.set(xlim=(0, 1), ylim=(0, 1.1), xlabel="k/T", ylabel="bound, as a ratio to SGD's")
    left.set_title("convex loss", fontsize=10)

    ks = [10 ** (i / 20) for i in range(61)]  # 1 to 1000
    for product, colour, style in zip(PRODUCTS, COLOURS, STYLES, strict=False):
        curve = [exponent_last_k(product, k) for k in ks]
        right.plot(ks, curve, color=colour, linestyle=style, lw=1.8, label=f"cβ = {product:g}")
        right.plot([2], [exponent_swa(product)], "o", color=colour, markersize=5)
    right.plot([], [], "o", color="0.4", markersize=5, label="SWA")
    right.set_xscale("log")
    right.set_xticks([1, 10, 100, 1000], ["1 (SGD)", "10", "100", "1000"])
    right.minorticks_off()
    right.set(xlim=(1, 1000), ylim=(0, 1.03), xlabel="k", ylabel="cβ/(k + cβ), the exponent of T")
    right.set_title("loss that is not convex, α = c/T", fontsize=10)
    right.legend(fontsize=9, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the paper's bounds predict.")
    parser.add_argument("--steps", type=int, nargs="+", default=[2_000, 100_000], help="T")
    parser.add_argument("--product", type=float, default=1.0, help="cβ")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture")
    asked = parser.parse_args(arguments)
    print(markdown(table(asked.steps, asked.product)))
    if asked.plot is not None:
        draw(asked.plot)


if __name__ == "__main__":
    main()
