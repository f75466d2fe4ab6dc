"""Ways to average that need no learning: from k (and K) to coefficients over the checkpoints.

Coefficients are plain lists of k floats, in step order, that sum to one.
"""

from __future__ import annotations

from collections.abc import Iterable


def mean_of(indices: Iterable[int], k: int) -> list[float]:
    """Equal weights on `indices`, zero elsewhere."""
    chosen = set(indices)
    if not chosen or min(chosen) < 0 or max(chosen) >= k:
        raise ValueError(f"indices must lie between 0 and {k - 1}, found {sorted(chosen)}")
    return [1.0 / len(chosen) if i in chosen else 0.0 for i in range(k)]


def last(k: int) -> list[float]:
    """The newest checkpoint alone: what plain SGD gives."""
    return mean_of([k - 1], k)


def uniform(k: int) -> list[float]:
    """The mean of all k."""
    return mean_of(range(k), k)


def lawa(k: int, K: int) -> list[float]:
    """K checkpoints at equal intervals of k/K, the newest among them (Kaddour 2022, LAWA)."""
    if not 0 < K <= k:
        raise ValueError(f"cannot take {K} of {k}")
    return mean_of(((j + 1) * k // K - 1 for j in range(K)), k)
