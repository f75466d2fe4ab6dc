"""`select --dry-run`: the plan of a run, and what the run then takes."""

import json
from pathlib import Path

import pytest

SOLVERS = [
    ["--K", "auto"],
    ["--K", 3],
    ["--K", 3, "--solver", "linear"],
    ["--K", "auto", "--sparse"],
]


def compared(sewa, flags):
    before = sorted(Path().rglob("*"))
    planned = sewa("select", "--dry-run", "--json", *flags)
    assert planned.code == 0, planned.err
    assert sorted(Path().rglob("*")) == before
    ended = sewa("select", "--json", *flags)
    assert ended.code == 0, ended.err
    return json.loads(planned.out), json.loads(ended.out)


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("flags", SOLVERS, ids=str)
def test_a_run_takes_the_passes_that_were_planned(sewa, flags):
    plan, report = compared(sewa, flags)
    cost = report["cost"]
    assert plan["at_least"] <= cost["forward_passes"] <= plan["forward_passes"]
    # scores that are known anyway are all that may be left out
    assert plan["forward_passes"] <= 2 * cost["forward_passes"]
    assert 0 <= cost["backward_passes"] <= plan["backward_passes"]
    assert cost["bytes_read"] <= plan["bytes_read"] <= 4 * cost["bytes_read"]
    assert plan["placement"]["tier"] == report["placement"]["tier"]
    assert report["placement"]["planned_bytes"] <= plan["placement"]["planned_bytes"]
    assert (plan["found"], plan["k"]) == (12, 12)


@pytest.mark.usefixtures("run_dir")
def test_the_time_is_the_planned_batches_times_one_that_was_timed(sewa):
    flags = ["--dry-run", "--K", "auto", "--last", 5]
    found = json.loads(sewa("select", "--json", *flags).out)
    assert (found["found"], found["k"]) == (12, 5)
    assert found["seconds"] == pytest.approx(found["forward_passes"] * found["batch_seconds"])
    for_people = sewa("select", *flags).out
    assert "5 of 12 found" in for_people
    passes = [found[name] for name in ("at_least", "forward_passes")]
    assert passes == sorted(passes)
    assert "{} to {} batches".format(*passes) in for_people
