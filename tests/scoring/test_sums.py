"""A metric that is made of sums over parts, such as a word error rate."""

import json
import textwrap

import pytest
import torch
from helpers.tiny import TASK

from sewa_cli.stats import compare_rows, unit_scores

SCORES = """
    def score_parts():
        return range(60)

    def heldout_parts():
        return range(100, 160)

    def score(model, part):
        words = 1 + part % 7
        errors = float(words * (model[0].weight.mean() + torch.rand(())).abs())
        return {"wer": [errors, words], "errors": errors}

    def corpus(name, sums):
        errors, words = sums
        return errors / words
"""


def ratio(sums):
    return sums[0] / sums[1]


def test_the_mean_of_units_is_the_score_of_all_and_their_spread_that_of_a_bootstrap():
    torch.manual_seed(0)
    words = torch.randint(1, 30, (200,)).double()
    found = torch.stack([(words * torch.rand(200)).round(), words], dim=1)
    units = unit_scores([*map(tuple, found.tolist())], ratio)
    assert float(units.mean()) == pytest.approx(ratio(found.sum(0).tolist()))
    drawn = torch.randint(200, (2000, 200))
    resampled = found[drawn].sum(1)
    scores = resampled[:, 0] / resampled[:, 1]
    [(low, high)] = compare_rows(units[None], torch.ones(200).double()).intervals
    assert low == pytest.approx(float(scores.quantile(0.025)), abs=0.005)
    assert high == pytest.approx(float(scores.quantile(0.975)), abs=0.005)


def test_a_part_that_failed_is_nan_and_the_others_are_scored_without_it():
    units = unit_scores([(1.0, 2.0), float("nan"), (3.0, 4.0)], ratio)
    assert units.isnan().tolist() == [False, True, False]
    assert float(units[[0, 2]].mean()) == pytest.approx(4 / 6)
    assert unit_scores([(1.0, 2.0)], ratio).tolist() == [0.5]


def test_the_reported_metric_is_made_of_the_sums_of_all_parts(run_dir, sewa):
    (run_dir / "task.py").write_text(TASK + textwrap.dedent(SCORES))
    ended = sewa("select", "--metric", "wer", "--budget", 100, "--cache", "kept", "--json")
    assert ended.code == 0, ended.err
    [contest] = [found for found in json.loads(ended.out)["findings"] if "scores" in found]
    written = next(iter(contest["scores"].values()))
    words = sum(1 + part % 7 for part in range(100, 160))
    assert written["heldout"] * words == pytest.approx(written["others"]["errors"] * 60)
    low, high = written["interval"].values()
    assert low < written["heldout"] < high
    again = sewa("select", "--metric", "wer", "--budget", 100, "--cache", "kept", "--json")
    [second] = [found for found in json.loads(again.out)["findings"] if "scores" in found]
    assert second["scores"] == contest["scores"]
    output = json.loads(ended.out)["output"]
    [file] = json.loads(sewa("evaluate", output, "--metric", "wer", "--json").out)["files"]
    assert file["metrics"]["wer"] == written["heldout"]
