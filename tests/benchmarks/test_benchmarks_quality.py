"""The quality benchmark, small: the text setting on texts made here, two short training runs."""

import csv
import importlib
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

QUALITY = Path(__file__).parents[2] / "benchmarks" / "quality"
MODULES = ("plan", "running", "tables", "claims", "studies", "pictures", "regret")
sys.path.insert(0, str(QUALITY))
plan, running, tables, claims, studies, pictures, regret = map(importlib.import_module, MODULES)
sys.path.remove(str(QUALITY))

STEPS = ("--checkpoints", "12", "--every", "2", "--warmup", "4")
TRAIN = (*STEPS, "--length", "8", "--width", "8", "--vocabulary", "100")
TASK = ("length=8", "width=8", "vocabulary=100", "selection=40", "heldout=60")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Half the words of a text give its class away."""
    data = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for name, rows in (("train", 300), ("test", 80)):
        with (data / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file, quoting=csv.QUOTE_ALL)
            for _ in range(rows):
                kind = draw.randint(1, 2)
                words = [draw.choice(("good", "fine", "bad", "poor")[2 * kind - 2 :][:2])]
                words += [draw.choice(("the", "film", "plot", "bad", "good")) for _ in range(6)]
                table.writerow([kind, "", " ".join(draw.sample(words, len(words)))])
    return plan.Setting(
        name="tiny",
        folder="text_classification",
        k=6,
        metric="accuracy",
        train=(*TRAIN, "--data", str(data)),
        args=(*TASK, f"data={data}"),
        whole_run=12,
        before=4,
        every=2,
        budgets=(2, 4, 6),
        sizes=(20, 30, 40),
    )


@pytest.fixture
def ran(setting, tmp_path_factory, monkeypatch, sewa):
    """Every study, run when first asked for; each command in this process, which has torch."""
    folder = tmp_path_factory.getbasetemp() / "quality"
    if (folder / "done").exists():
        return folder
    jobs = [*plan.methods(setting), *plan.windows(setting)]
    jobs += list(plan.overfitting(setting))[:1]
    work = [(0, job) for job in jobs]
    # the second training run through two jobs only: intervals and pairs need no more
    work += [(1, job) for job in jobs if job.name in ("simple", "gumbel")][:2]
    for seed in (0, 1):
        running.train(folder, setting, seed)

    def call(command, _):
        assert command[:3] == [sys.executable, "-m", "sewa_cli"]
        ended = sewa(*command[3:])
        assert ended.code == 0, ended.err
        return ended.out

    with monkeypatch.context() as here:
        here.setattr(running, "call", call)
        for seed, job in work:
            running.run(folder, setting, seed, job)
    (folder / "done").touch()
    return folder


@pytest.mark.breadth
def test_the_tables_say_what_the_jobs_found(ran, setting):
    found = tables.load(ran, [setting], (0, 1))
    results = tables.Results(found, [setting])
    raw = [
        json.loads((ran / "tiny" / f"seed-{seed}" / "methods" / "gumbel.json").read_text())
        for seed in (0, 1)
    ]
    mine = [run["report"]["rows"][0]["heldout_loss"] for run in raw]
    [row, *_] = tables.paper_table(results, "heldout_loss")
    assert row["K"] == "2"
    assert row["SeWA"].startswith(f"{sum(mine) / 2:.4g} ±")
    [line] = [
        r for r in tables.full_table(results, setting, "heldout_loss") if r["method"] == "sewa"
    ]
    assert line["K=2"] == row["SeWA"]
    against = tables.learned_against(results, setting, "heldout_loss")
    assert {r["rival"] for r in against} == set(tables.RIVALS)
    for finding in claims.findings(results, "metric"):
        alone = "linear" in finding.claim  # which went over one training run only
        assert finding.verdict in (("one run",) if alone else ("holds", "ties", "fails"))
    assert claims.gains(results, "heldout_loss")[0]["setting"] == "tiny"
    by_loss, by_metric = (claims.findings(results, what) for what in ("heldout_loss", "metric"))
    first = claims.counted(by_loss, by_metric)[0]
    assert sum(map(int, first["by loss"].split("/"))) == 1
    assert [line["K"] for line in studies.overfitting_table(found, setting)] == ["2", "4"]
    assert len(studies.auto_table(ran, [setting], (0, 1))) == 1
    curves = studies.load_curves(ran, setting, (0, 1))
    assert len(curves.at) == 2
    assert curves.at[-1] == 4 + 12 * 2
    assert {row["method"] for row in studies.windows_table(curves)} >= {"last", "sewa"}
    pictures.draw(results, ran / "quality.png")
    assert (ran / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_that_fails_is_reported_in_one_line(setting, tmp_path):
    (tmp_path / "tiny" / "seed-0").mkdir(parents=True)
    job = plan.Job("methods", "none", ("no-such-method",), (2,))
    with pytest.raises(running.Failed, match=r"exit 2: error: methods: .*no-such-method") as told:
        running.run(tmp_path, setting, 0, job)
    assert "\n" not in str(told.value)
    assert not list(tmp_path.rglob("*.json"))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(-100, 100))
def test_a_claim_holds_only_if_zero_is_outside_of_the_interval(values, shift):
    one = {seed: value + shift for seed, value in enumerate(values)}
    two = dict.fromkeys(one, 0.0)
    found = tables.difference(one, two)
    message = tables.verdict(found, better=1)
    low, high = found.mean - found.half, found.mean + found.half
    assert message == ("holds" if low > 0 else "fails" if high < 0 else "ties")


def test_tables_go_into_a_page_at_their_marks_and_again():
    page = "Before.\n\n<!-- quality: one -->\n\n| old |\n|---|\n| 0 |\n\nAfter | all.\n"
    once = tables.filled(page, {"one": [{"a": "1", "b": "2"}], "other": []})
    assert once == (
        "Before.\n\n<!-- quality: one -->\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nAfter | all.\n"
    )
    assert tables.filled(once, {"one": [{"a": "1", "b": "2"}]}) == once
    assert tables.filled(page.replace("0 |\n\n", "0 |\n"), {"one": [{"a": "1", "b": "2"}]}) == once
    assert tables.filled(page, {"one": []}) == page  # made elsewhere
    with pytest.raises(SystemExit, match="no such table: one"):
        tables.filled(page, {})


def test_the_default_is_held_against_what_the_same_rows_say_is_the_best_simple_average():
    def unit(seed, size, default, by_rows):
        learned = {"**the default**": default}
        learned |= {} if by_rows is None else {regret.BY_ROWS: by_rows}
        return regret.Unit("tiny", seed, size, learned, {("uniform", None): 1.0})

    few, some, every = regret.SIZES
    units = [unit(seed, few, 0.98 + seed / 1000, 1.0) for seed in (3, 4, 5)]
    units += [unit(3, some, 1.01, 1.0), unit(4, every, 0.5, None)]
    (row,) = regret.fair_table(units)
    assert row[f"{few}, %"] == "-1.60 ± 0.25: better"
    assert row[f"{some}, %"] == "1.00: one run"
    assert row[f"{every}, %"] == ""
    assert row["all of them, %"] == "-1.15 ± 1.73: tie"  # seed 3 counts once: -0.35
    assert regret.BY_ROWS not in regret.columns(units)  # some of them do not have it
    assert regret.BY_ROWS in regret.columns(units[:-1])


def test_the_page_has_the_tables_of_the_units_that_are_kept(tmp_path):
    page = (QUALITY / "results" / "regret.md").read_text()
    units = regret.load_units(tmp_path, plan.SETTINGS.values(), plan.REPORTED)
    for title, rows in regret.tables(units).items():
        assert f"<!-- quality: {title} -->\n\n{tables.markdown(rows)}\n" in page
