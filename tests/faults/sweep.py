"""One fault at every point of a case, and what each run left."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from faults.cases import Case, Stage
from faults.driver import Ended
from faults.inject import TAKING_SPACE
from faults.judge import Files, Scene, average_in, files_in

REMOVING = {"unlink", "remove", "rmdir"}
NAMING = {"rename", "replace", "renameat2"}


@dataclass
class Tally:
    """The faults of many runs of one case, by kind."""

    case: Case
    points: int = 0
    runs: int = 0
    mixtures: list[str] = field(default_factory=list)
    litter: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)  # exit codes, tracebacks, halves

    @property
    def faults(self) -> list[str]:
        return [*self.mixtures, *self.litter, *self.other]

    def figures(self) -> dict[str, int]:
        """How many points there are and how many runs were made; how many of these went wrong."""
        kinds = {"mixtures": self.mixtures, "litter": self.litter, "other": self.other}
        bad = {kind: len({run_of(fault) for fault in found}) for kind, found in kinds.items()}
        return {"points": self.points, "runs": self.runs, **bad}

    def judge(self, where: str, scene: Scene, now: Files, *, settled: bool) -> None:
        """`settled`: there is nobody left to clear anything away."""
        self.mixtures += [f"{where}: {fault}" for fault in scene.mixtures(now)[:1]]
        self.other += [f"{where}: {fault}" for fault in scene.others(now)]
        if settled and (left := scene.litter(now)):
            self.litter.append(f"{where}: left {' '.join(left)}")

    def expect(self, is_so: bool, where: str, what: str) -> None:
        if not is_so:
            self.other.append(f"{where}: {what}")


def run_of(fault: str) -> str:
    return fault.split(": ")[0].split(", next run")[0]


def undisturbed(stage: Stage, case: Case, **faults: object) -> tuple[Tally, Scene, Sequence[str]]:
    """The case itself, and its points; of what --force replaces nothing is left."""
    force, before = case.over is not None, stage.prepare(case)
    scene = stage.scene(case, before, force, **faults)
    stage.clear(before)
    ended = stage.run(case.argv(force), **faults)
    now = files_in(stage.out)
    tally = Tally(case, points=len(ended.points))
    tally.expect(ended.code == 0, "undisturbed", ended.err)
    tally.judge("undisturbed", scene, now, settled=True)
    writes = case.report in ("report", "elsewhere") and case.command not in ("inspect", "init")
    has_report = writes and case.command != "apply"
    tally.expect((scene.report in scene.after) == has_report, "undisturbed", "the report")
    if not tally.faults:
        tally.expect(scene.is_after(now), "undisturbed", f"half: {' '.join(now)}")
    return tally, scene, ended.points


def kills(stage: Stage, case: Case, every: int = 1, **faults: object) -> Tally:
    """SIGKILL before every point and after the last."""
    return signals(stage, case, [("before", signal.SIGKILL)], every, **faults)


def interrupts(stage: Stage, case: Case, every: int = 1) -> Tally:
    """SIGINT before and after every point, SIGTERM after it."""
    both = [("before", signal.SIGINT), ("after", signal.SIGINT), ("after", signal.SIGTERM)]
    return signals(stage, case, both, every)


def signals(
    stage: Stage,
    case: Case,
    asked: Sequence[tuple[str, signal.Signals]],
    every: int,
    **faults: object,
) -> Tally:
    """A signal at every point; then the same command once more, which clears up."""
    tally, scene, points = undisturbed(stage, case, **faults)
    force = case.over is not None
    forced = scene if force else stage.scene(case, scene.before, force=True, **faults)
    places = [(at, when, number) for at in range(0, len(points), every) for when, number in asked]
    for at, when, number in [*places, (len(points) - 1, "after", asked[0][1])]:
        tally.runs += 1
        where = f"{number.name} {when} {at} {points[at]}"
        stage.clear(scene.before)
        ended = stage.run(case.argv(force), at=at, when=when, signal=int(number), **faults)
        now = files_in(stage.out)
        expected = -number if number == signal.SIGKILL else 130
        tally.expect(ended.code == expected, where, f"exit {ended.code}: {ended.err}")
        tally.expect("Traceback" not in ended.err, where, ended.err)
        tally.judge(where, scene, now, settled=False)
        there(tally, where, scene, now, **faults)
        again(tally, stage, where, scene, forced, scene.state(now), **faults)
    tally.other += stage.inputs_changed()
    return tally


def there(tally: Tally, where: str, scene: Scene, now: Files, **faults: object) -> None:
    """Check that there is always the old or the new; two renames in place of one cannot do that."""
    if "renameat2" not in cast(Sequence[str], faults.get("lacking", ())):
        for output in scene.outputs:
            was = bool(average_in(scene.before, output))
            tally.expect(not was or scene.state(now, output) != "absent", where, "absent")


def again(
    tally: Tally,
    stage: Stage,
    where: str,
    scene: Scene,
    forced: Scene,
    state: str,
    **faults: object,
) -> None:
    """After a kill the same command does its work, or says that it is done; nothing is left."""
    case, where = tally.case, f"{where}, next run"
    force = case.over is not None
    ended = stage.run(case.argv(force), **faults)
    if ended.code == 3 and not force and state == "new":
        tally.expect("exists" in ended.err or "nothing left" in ended.err, where, ended.err)
        scene, where = forced, f"{where} with --force"
        ended = stage.run(case.argv(force=True), **faults)
    now = files_in(stage.out)
    tally.expect(ended.code == 0, where, f"exit {ended.code}: {ended.err.strip()}")
    tally.judge(where, scene, now, settled=True)
    if ended.code == 0 and not scene.litter(now) and not scene.mixtures(now):
        tally.expect(scene.is_after(now), where, "is not what an undisturbed run makes")


def errors(stage: Stage, case: Case, error: int, *, for_good: bool, every: int = 1) -> Tally:
    """The N-th call fails: exit 3 and one line, with no mixture; or it could do without it."""
    tally, scene, points = undisturbed(stage, case)
    for at in range(0, len(points), every):
        kind = points[at].split()[0]
        if for_good and kind not in TAKING_SPACE | NAMING:
            continue
        tally.runs += 1
        where = f"errno {error} at {at} {points[at]}"
        stage.clear(scene.before)
        argv = case.argv(case.over is not None)
        ended = stage.run(argv, at=at, error=error, for_good=for_good)
        now = files_in(stage.out)
        # what cannot be removed stays for the next run
        tally.judge(where, scene, now, settled=kind not in REMOVING)
        if scene.litter(now) and kind in REMOVING:
            stage.run(case.argv(force=True))
            tally.judge(f"{where}, next run", scene, files_in(stage.out), settled=True)
        one_line(tally, where, ended)
        there(tally, where, scene, now)
        if ended.code == 0 and not scene.mixtures(now) and not scene.litter(now):
            tally.expect(scene.is_after(now), where, f"exit 0, but half: {' '.join(now)}")
    return tally


def one_line(tally: Tally, where: str, ended: Ended) -> None:
    """It worked, or it says in one line what of the files did not."""
    fine = ended.code == 0 or (ended.code == 3 and len(ended.errors()) == 1)
    tally.expect(fine and "Traceback" not in ended.err, where, f"exit {ended.code}: {ended.err}")


def all_cases() -> Iterator[Case]:
    """Every command that writes × every form × over nothing, over its like and over another."""
    for command in ("average", "apply"):
        report = "report" if command == "average" else "none"
        for form in ("file", "folder", "shards"):
            yield Case(command, form, None, report)
            yield Case(command, form, form, report)
            yield Case(command, form, form, "stale")
            if command == "average":
                yield Case(command, form, form, "none")
    yield Case("average", "shards", "three shards")
    yield Case("average", "folder", "folder", "elsewhere")
    for command in ("select", "compare"):  # slow, and they write as average does
        yield Case(command, "file", "file")
        yield Case(command, "shards")
    for command in ("inspect", "init"):
        for older in (None, "file"):
            yield Case(command, "file", older, "none")
