"""The ablation of the default: its estimators on a linear model, whose predictions are exact."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

QUALITY = Path(__file__).parents[2] / "benchmarks" / "quality"
sys.path.insert(0, str(QUALITY))
ablate, outputs = map(importlib.import_module, ("ablate", "outputs"))
sys.path.remove(str(QUALITY))

K, N, D = 20, 120, 4


@pytest.fixture(scope="module")
def run():
    """Twenty noisy checkpoints of a linear regression with two targets."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * N, D, generator=draw)
    weights = torch.ones(K, 2 * D) + 0.5 * torch.randn(K, 2 * D, generator=draw)
    targets = inputs.sum(1, keepdim=True) + torch.randn(2 * N, 2, generator=draw)

    def outputs_of(flat, index):
        return inputs[index] @ flat.view(D, 2)

    def selection(flat, index=None):
        return outputs_of(flat, slice(N) if index is None else index)

    return SimpleNamespace(
        weights=weights,
        selection=(inputs[:N], targets[:N]),
        heldout=(inputs[N:], targets[N:]),
        selection_outputs=selection,
        heldout_outputs=lambda flat: outputs_of(flat, slice(N, None)),
    )


@pytest.fixture(scope="module")
def cache(run):
    found, averages = outputs.record(run), outputs.baselines(K)
    parts = (outputs.Part(*found[name]) for name in ("selection", "heldout"))
    return outputs.Cache(list(averages), torch.stack(list(averages.values())), *parts)


def test_the_outputs_of_averages_are_predicted(cache):
    """The true losses of all baselines are those that their coefficients predict."""
    predicted = cache.heldout.predict(cache.averages)
    torch.testing.assert_close(predicted, cache.heldout.losses, rtol=1e-4, atol=1e-5)


def test_every_estimator_gives_an_average(cache, run):
    _, draw = next(ablate.draws(cache, run))
    fixed = {name: rule for name, rule in ablate.ESTIMATORS.items() if "17" not in name}
    for name, estimator in fixed.items():
        c = estimator(draw)
        assert c.min() >= 0, name
        assert float(c.sum()) == pytest.approx(1, abs=1e-5), name


def test_the_table_compares_with_the_default():
    sizes = dict.fromkeys(ablate.DRAWS, 1.0)
    better = dict.fromkeys(ablate.DRAWS, 0.5)
    regrets = {name: {"the default": sizes, "other": better} for name in ("text", "images")}
    first, second = ablate.table(regrets)
    assert (first["rule"], first["minus the default"]) == ("other", "-0.500 ± 0.00")
    assert (second["rule"], second["minus the default"]) == ("the default", "+0.000 ± 0.00")
