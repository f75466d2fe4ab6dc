"""Progress: which stage, how far, how long still; in a log, a line every half a minute."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time

import pytest
from helpers.tiny import Sewa

from sewa_cli.cli import console
from sewa_cli.cli.console import Talk
from sewa_cli.cli.progress import Stages
from sewa_cli.events import Events, Planned


class Clock:
    now = 1000.0

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
        "learning 30/100, 30 s so far, loss 0.5000, about 70 s left",
        "learning 60/100, 60 s so far, loss 0.5000, about 40 s left",
        "learning 90/100, 90 s so far, loss 0.5000, about 10 s left",
    ]


def test_the_innermost_stage_is_in_the_line(clock: Clock) -> None:
    stages = Stages(clock)
    stages.report("surveying", 0, 4, None)
    for checkpoint in range(1, 4):
        for examples in (0, 10, 20):
            stages.report("evaluating", examples, 20, None)
            clock.now += 5
        stages.report("surveying", checkpoint, 4, None)
    stages.report("evaluating", 10, 20, None)
    assert stages.line() == "surveying 3/4 (evaluating 10/20), 45 s so far, about 15 s left"
    stages.report("surveying", 4, 4, None)
    clock.now += 90
    assert stages.line() == "after surveying 4/4: working, 90 s so far"
    stages.report("writing", 0, 1, None)
    assert stages.line() == "writing, 90 s so far"


def test_a_stage_that_begins_again_is_timed_anew(clock: Clock) -> None:
    stages = Stages(clock)
    stages.report("evaluating", 8, 10, None)
    clock.now += 90
    stages.report("evaluating", 1, 10, None)
    clock.now += 9
    assert stages.line() == "evaluating 1/10, 99 s so far, about 15 min left"
    stages.report("counting", 37, 0, None)  # a total that is not known
    clock.now += 12
    assert "(counting 37)" in stages.line()


def test_the_time_left_is_of_the_whole_plan_and_falls_steadily(clock: Clock) -> None:
    stages, passes, left = Stages(clock), 0, []
    stages.follow(
        [
            Planned("baselines", 40),
            Planned("outputs", 40),
            Planned("learning", 0),
            Planned("outputs", 40),
            Planned("end", 4),
        ],
        lambda: passes,
    )
    assert stages.plan is not None
    for name in ("baselines", "outputs"):
        for done in range(40):
            stages.report(name, done, 40, None)
            left.append(stages.plan.seconds_left)
            clock.now, passes = clock.now + 3, passes + 1
        stages.report(name, 40, 40, None)
    estimates = [seconds for seconds in left if seconds is not None]
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[0] == pytest.approx(3 * 123)
    stages.report("learning", 3, 4, 0.5)
    clock.now += 300  # nothing goes through the model: the pace is that of the passes
    assert stages.line() == (
        "stage 3 of 5: learning 3/4, 9 min so far, loss 0.5000, about 4 min left"
    )
    assert stages.whole == (80, 124)
    stages.report("learning", 4, 4, None)
    stages.report("end", 0, 4, None)  # no second round of outputs
    stages.report("evaluating", 1, 2, None)
    assert stages.line() == (
        "stage 4 of 4: end 0/4 (evaluating 1/2), 9 min so far, about 12 s left"
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
        stages.report("held-out parts", spent - 60, 20, None)
    assert stages.line() == "stage 2 of 2: held-out parts 10/20, 80 s so far, about 35 s left"


def test_items_are_counted_by_their_sizes_and_every_stage_ends() -> None:
    told: list[tuple[str, int, int]] = []

    class Told(Events):
        def progress(self, stage: str, done: int, total: int, _: float | None = None) -> None:
            told.append((stage, done, total))

    assert list(Told().over("rows", ["ab", "cde"], 5, len)) == ["ab", "cde"]
    assert told == [("rows", 0, 5), ("rows", 2, 5), ("rows", 5, 5)]
    assert list(Told().over("unknown", ["ab", "cde"], 0, len)) == ["ab", "cde"]
    assert told[-1] == ("unknown", 5, 5)
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


def _in_a_child() -> None:
    with Talk(quiet=False, verbose=False) as talk:
        talk.say("here")
        talk.progress("learning", 1, 2)


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_can_report_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    forking = multiprocessing.get_context("fork")
    with Talk(quiet=False, verbose=False):
        for _ in range(10):
            child = forking.Process(target=_in_a_child)
            child.start()
            child.join(20)
            assert child.exitcode == 0


@pytest.mark.parametrize(
    "flags",
    [
        [],
        *(
            pytest.param(["--K", "3", *more], marks=pytest.mark.breadth)
            for more in ([], ["--solver", "linear"])
        ),
    ],
)
@pytest.mark.usefixtures("run_dir")
def test_every_stage_of_a_run_ends(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    last: dict[str, tuple[int, int]] = {}
    monkeypatch.setattr(Talk, "progress", lambda _, stage, *now: last.update({stage: now[:2]}))
    assert sewa("select", *flags).code == 0
    assert {"reading", "writing"} <= last.keys()
    for stage, (done, total) in last.items():
        assert done == total > 0, stage


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
@pytest.mark.usefixtures("run_dir")
def test_a_terminal_has_one_bar(sewa: Sewa, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    update = Talk._draw
    monkeypatch.setattr(console, "BLINK", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def draw(self: Talk) -> None:
        update(self)
        assert self._bars is not None
        drawn.append([task.description for task in self._bars.tasks])

    monkeypatch.setattr(Talk, "_draw", draw)
    assert sewa("select").code == 0
    assert {len(bars) for bars in drawn} == {1}
    assert any(bars[0].startswith("stage 2 of ") for bars in drawn)
