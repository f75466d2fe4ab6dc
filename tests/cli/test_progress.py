"""Progress: which stage, how far, how long still; a line every half a minute, whatever happens."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
from helpers.tiny import Sewa

from sewa_cli.cli import console
from sewa_cli.cli.console import SECONDS, Talk
from sewa_cli.cli.progress import Stages
from sewa_cli.events import Events, Planned
from sewa_cli.text import duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_a_log_has_a_line_every_half_a_minute_with_an_estimate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Talk(quiet=False, verbose=False)
    for done in range(101):
        talk.progress("learning", done, 100, None if done == 0 else 0.5)
        clock.now += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "learning 30/100, loss 0.5000, 30 s so far, about 70 s left",
        "learning 60/100, loss 0.5000, 60 s so far, about 40 s left",
        "learning 90/100, loss 0.5000, 90 s so far, about 10 s left",
    ]


def test_a_part_of_a_stage_is_named_beside_it(clock: Clock) -> None:
    stages = Stages(clock)
    stages.report("surveying", 0, 4, None)
    for checkpoint in range(1, 4):
        for rows in (0, 10, 20):
            stages.report("evaluating selection rows", rows, 20, None)
            clock.now += 5
        stages.report("surveying", checkpoint, 4, None)
    stages.report("evaluating selection rows", 10, 20, None)
    assert stages.line() == (
        "surveying 3/4 (evaluating selection rows 10/20), 45 s so far, about 15 s left"
    )
    stages.report("evaluating selection rows", 20, 20, None)
    stages.report("surveying", 4, 4, None)
    clock.now += 90
    assert stages.line() == "after surveying 4/4: working, 90 s so far"
    stages.report("writing", 0, 1, None)
    assert stages.line() == "writing, 90 s so far"


def test_a_stage_that_ended_early_or_begins_again_leaves_nothing_behind(clock: Clock) -> None:
    stages = Stages(clock)
    stages.report("learning", 5, 100, None)
    stages.report("learning", 6, 6, None)  # no more to be gained
    clock.now += 10
    stages.report("evaluating", 8, 10, None)
    clock.now += 90
    stages.report("evaluating", 1, 10, None)  # other rows
    clock.now += 9
    assert stages.line() == "evaluating 1/10, 99 s so far, about 15 min left"


def test_what_cannot_be_counted_yet_says_how_far_it_is(clock: Clock) -> None:
    stages = Stages(clock)
    stages.report("evaluating heldout rows", 37, 0, None)
    clock.now += 12
    assert stages.line() == "evaluating heldout rows 37, 12 s so far"


PLAN = [
    Planned("baselines", 40),
    Planned("outputs", 40),
    Planned("learning", 0),
    Planned("outputs", 40),
    Planned("outputs", 40, is_rare=True),
    Planned("end", 4),
]


def test_what_is_left_is_the_rest_of_the_plan_and_falls_steadily(clock: Clock) -> None:
    stages, passes = Stages(clock), 0
    stages.follow(PLAN, lambda: passes)
    left = []
    for name in ("baselines", "outputs"):
        for done in range(41):
            stages.report(name, done, 40, None)
            if stages.plan is not None and stages.plan.seconds_left is not None:
                left.append(stages.plan.seconds_left)
            clock.now, passes = clock.now + 3, passes + 1
        clock.now, passes = clock.now - 3, passes - 1
    assert left == sorted(left, reverse=True)
    assert left[0] == pytest.approx(3 * 123)
    stages.report("outputs", 40, 40, None)
    stages.report("learning", 3, 4, 0.5)
    clock.now += 300  # nothing goes through the model: the pace is that of the passes
    assert stages.line() == (
        "stage 3 of 5: learning 3/4, loss 0.5000, 9 min so far, about 4 min left"
    )
    stages.report("learning", 4, 4, None)
    stages.report("end", 0, 4, None)  # no second round
    stages.report("evaluating heldout rows", 1, 2, None)
    assert stages.line() == (
        "stage 4 of 4: end 0/4 (evaluating heldout rows 1/2), 9 min so far, about 12 s left"
    )


def test_a_stage_that_is_not_in_the_plan_does_not_stop_it(clock: Clock) -> None:
    stages, spent = Stages(clock), 0
    stages.follow([Planned("evaluating parts", 100), Planned("held-out parts", 40)], lambda: spent)
    for spent in range(1, 61):
        clock.now += 1
        stages.report("evaluating parts", spent, 100, None)
    assert stages.line() == "stage 1 of 2: evaluating parts 60/100, 60 s so far, about 80 s left"
    stages.report("evaluating parts", 60, 60, None)  # the contest is decided
    stages.report("averaging", 1, 2, None)
    clock.now += 10
    stages.report("averaging", 2, 2, None)
    for spent in range(61, 71):
        clock.now += 1
        stages.report("held-out parts", spent - 60, 10, None)
    assert stages.plan is not None
    assert stages.plan.seconds_left == pytest.approx(31 * 80 / 70)
    assert stages.line().startswith("stage 2 of 2: held-out parts, after held-out parts 10/10")


def test_items_are_told_of_with_their_sizes() -> None:
    told: list[tuple[str, int, int]] = []

    class Told(Events):
        def progress(self, stage: str, done: int, total: int, _: float | None = None) -> None:
            told.append((stage, done, total))

    assert list(Told().over("rows", ["ab", "cde"], 5, len)) == ["ab", "cde"]
    assert told == [("rows", 0, 5), ("rows", 2, 5), ("rows", 5, 5)]
    told.clear()
    assert list(Told().over("rows", ["ab", "cde"], 0, len)) == ["ab", "cde"]
    assert told == [("rows", 0, 0), ("rows", 2, 0), ("rows", 5, 0), ("rows", 5, 5)]
    told.clear()
    assert list(Told().over("none", [], 0)) == []
    assert told[-1] == ("none", 1, 1)


def test_where_nothing_reports_a_line_says_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SECONDS", 0.1)
    with Talk(quiet=False, verbose=False) as talk, talk.stage("metrics"):
        time.sleep(0.35)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4
    assert all(line.startswith("metrics, 0.") for line in lines)
    capsys.readouterr()
    with Talk(quiet=True, verbose=False) as talk, talk.stage("metrics"):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def _in_a_child() -> None:
    with Talk(quiet=False, verbose=False) as talk:
        talk.say("here")
        talk.progress("learning", 1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_what_is_forked_while_the_heart_beats_can_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    forking = multiprocessing.get_context("fork")
    with Talk(quiet=False, verbose=False):
        for _ in range(10):
            child = forking.Process(target=_in_a_child)
            child.start()
            child.join(20)
            assert child.exitcode == 0


def test_every_pass_over_the_data_is_told_of_and_every_stage_ends(
    run_dir: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    plain = Talk.progress

    def progress(self: Talk, stage: str, done: int, total: int, loss: float | None = None) -> None:
        told.append((stage, done, total))
        plain(self, stage, done, total, loss)

    monkeypatch.setattr(Talk, "progress", progress)
    for flags in (["--K", 3], [], ["--K", 3, "--solver", "linear"]):
        told.clear()
        assert sewa("select", *flags).code == 0
        stages = {stage for stage, _, _ in told}
        wanted = {"building the model", "reading", "evaluating selection rows", "averaging"}
        wanted |= {"evaluating heldout rows", "writing", "hashing the sources"}
        assert wanted <= stages
        for stage in stages:
            last = [(done, total) for name, done, total in told if name == stage][-1]
            assert last[0] == last[1] > 0, (stage, last)
        rows = {of for stage, _, of in told if stage == "evaluating selection rows"}
        assert len(rows - {0}) == 1
    assert run_dir.is_dir()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.42, "0.4 s"), (4.2, "4 s"), (99, "99 s"), (720, "12 min"), (11520, "3.2 h")],
)
def test_a_duration_has_the_unit_that_people_would_take(seconds: float, said: str) -> None:
    assert duration(seconds) == said
    assert duration(86400 * 4) == "4.0 days"
    assert SECONDS == 30.0
