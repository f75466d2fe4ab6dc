"""Progress: which stage, how far, how long still; in a log, a line every half a minute."""

import io
import multiprocessing
import os
import sys
import time

import pytest

from sewa_cli.cli import console
from sewa_cli.cli.console import ConsoleEvents
from sewa_cli.cli.progress import Stages
from sewa_cli.events import Planned


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_a_log_has_a_line_every_half_a_minute_with_an_estimate(clock, capsys):
    talk = ConsoleEvents(quiet=False, verbose=False)
    for done in range(101):
        talk.progress("learning", done, 100, None if done == 0 else 0.5)
        clock.now += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "learning 30/100, 30 s so far, loss 0.5000, about 70 s left",
        "learning 60/100, 60 s so far, loss 0.5000, about 40 s left",
        "learning 90/100, 90 s so far, loss 0.5000, about 10 s left",
    ]


def test_the_time_left_is_of_the_whole_plan_and_falls_steadily(clock):
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


def test_where_nothing_reports_a_line_says_what_is_under_way(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS", 0.1)
    with ConsoleEvents(quiet=False, verbose=False) as talk, talk.stage("metrics"):
        time.sleep(0.35)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4
    assert all(line.startswith("metrics, 0.") for line in lines)


def _in_a_child():
    with ConsoleEvents(quiet=False, verbose=False) as talk:
        talk.say("here")
        talk.progress("learning", 1, 2)


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_can_report_too(monkeypatch):
    monkeypatch.setattr(console, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    forking = multiprocessing.get_context("fork")
    with ConsoleEvents(quiet=False, verbose=False):
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
def test_every_stage_of_a_run_ends(sewa, monkeypatch, flags):
    last = {}
    monkeypatch.setattr(
        ConsoleEvents, "progress", lambda _, stage, *now: last.update({stage: now[:2]})
    )
    assert sewa("select", *flags).code == 0
    assert {"reading", "writing"} <= last.keys()
    for stage, (done, total) in last.items():
        assert done == total > 0, stage


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
@pytest.mark.usefixtures("run_dir")
def test_a_terminal_has_one_bar(sewa, monkeypatch):
    drawn = []
    update = ConsoleEvents._draw
    monkeypatch.setattr(console, "BLINK", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def draw(self):
        update(self)
        drawn.append([task.description for task in self._bars.tasks])

    monkeypatch.setattr(ConsoleEvents, "_draw", draw)
    assert sewa("select").code == 0
    assert {len(bars) for bars in drawn} == {1}
    assert any(bars[0].startswith("stage 2 of ") for bars in drawn)
