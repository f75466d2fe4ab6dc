"""The study of choices by a metric: its tables, from rows that are made up and from those kept."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUALITY = ROOT / "benchmarks" / "quality"
sys.path.insert(0, str(QUALITY))
by_metric = importlib.import_module("by_metric")
tables = importlib.import_module("tables")
sys.path.remove(str(QUALITY))


@pytest.mark.parametrize(
    "page", ["docs/explanation/results.md", "benchmarks/quality/results/metric.md"]
)
def test_the_page_has_the_tables_of_the_rows_that_are_kept(page):
    text = (ROOT / page).read_text()
    assert tables.filled(text, by_metric.tables_of(by_metric.RESULTS), "metric") == text


def test_gains_are_paired_by_training_run_and_solvers_are_summed_up_over_all(tmp_path):
    def row(setting, seed, column, score, **more):
        start = {"setting": setting, "seed": seed, "column": column, "budget": None}
        return {**start, "return": score, "error": 1.0, **more}

    chosen = {"budget": 500, "leader_error": 1.0}
    rows = [
        row("hopper-medium", 3, "race", 130, confirmed=True, leader_return=130, **chosen),
        row("hopper-medium", 4, "race", 220, confirmed=False, leader_return=180, **chosen),
        row("hopper-medium", 3, by_metric.BY_LOSS, 100),
        row("hopper-medium", 4, by_metric.BY_LOSS, 220),
        row("text", 3, "race", 0.5, confirmed=True, leader_return=0.5, **chosen),
        row("text", 3, by_metric.BY_LOSS, 0.4),
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    found = by_metric.tables_of(file)
    [_, race] = found["hopper-medium"]
    assert race["return"] == "175 ± 572"
    assert race["against the default by loss"] == "+15 ± 191"
    assert race["the leader, confirmed or not"] == "-5 ± 445"
    assert race["confirmed"] == "1 of 2"
    together = {row[""]: row for row in found[by_metric.TOGETHER]}
    assert together["`race`"]["500 episodes"] == "1 of 2, +15 ± 191"  # no accuracies
    assert together["`race`"]["2,000 episodes"] == together["`reinforce`"]["500 episodes"] == ""
