"""One fault at every point of a case, and what each run left."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from faults.cases import Case, Stage
from faults.driver import Ended
from faults.inject import TAKING_SPACE
from faults.judge import Files, Scene, files_in

REMOVING = {"unlink", "remove", "rmdir"}
NAMING = {"link", "rename", "replace", "renameat2"}


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
    has_report = case.report == "report" and case.command not in ("inspect", "init")
    tally.expect((scene.report in scene.after) == has_report, "undisturbed", "the report")
    if not tally.faults:
        tally.expect(scene.is_after(now), "undisturbed", f"half: {' '.join(now)}")
    return tally, scene, ended.points


def kills(stage: Stage, case: Case, every: int = 1, **faults: object) -> Tally:
    """SIGKILL before every point and after the last; then the same command once more."""
    tally, scene, points = undisturbed(stage, case, **faults)
    force = case.over is not None
    forced = scene if force else stage.scene(case, scene.before, force=True, **faults)
    places = [(at, "before") for at in range(0, len(points), every)]
    for at, when in [*places, (len(points) - 1, "after")]:
        tally.runs += 1
        where = f"killed {when} {at} {points[at]}"
        stage.clear(scene.before)
        ended = stage.run(case.argv(force), at=at, when=when, signal=int(signal.SIGKILL), **faults)
        now = files_in(stage.out)
        tally.expect(ended.code == -signal.SIGKILL, where, f"exit {ended.code}")
        tally.judge(where, scene, now, settled=False)
        again(tally, stage, where, scene, forced, scene.state(now), **faults)
    for fault in stage.inputs_changed():
        tally.other.append(fault)
    return tally


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
    if ended.code == 3 and not force and state in ("new", "old"):
        tally.expect("exists" in ended.err, where, ended.err)
        tally.judge(where, scene, files_in(stage.out), settled=True)
        scene, where = forced, f"{where} with --force"
        ended = stage.run(case.argv(force=True), **faults)
    now = files_in(stage.out)
    tally.expect(ended.code == 0, where, f"exit {ended.code}: {ended.err.strip()}")
    tally.judge(where, scene, now, settled=True)
    if ended.code == 0 and not scene.litter(now) and not scene.mixtures(now):
        tally.expect(scene.is_after(now), where, "is not what an undisturbed run makes")


def interrupts(stage: Stage, case: Case, every: int = 1, term: bool = True) -> Tally:
    """SIGINT before and after every point, SIGTERM after it; all is as it was, or all is done."""
    tally, scene, points = undisturbed(stage, case)
    signals = [("before", signal.SIGINT), ("after", signal.SIGINT)]
    signals += [("after", signal.SIGTERM)] if term else []
    for at in range(0, tally.points, every):
        for when, number in signals:
            tally.runs += 1
            where = f"{number.name} {when} {at} {points[at]}"
            stage.clear(scene.before)
            argv = case.argv(case.over is not None)
            ended = stage.run(argv, at=at, when=when, signal=int(number))
            now = files_in(stage.out)
            tally.judge(where, scene, now, settled=True)
            if not scene.mixtures(now) and not scene.litter(now):
                all_or_nothing = whole(scene, now)
                tally.expect(all_or_nothing, where, f"half: {' '.join(now)}")
            tally.expect(ended.code == 130, where, f"exit {ended.code}: {ended.err}")
            tally.expect("Traceback" not in ended.err, where, ended.err)
    return tally


def whole(scene: Scene, now: Files) -> bool:
    """All is as it was, or all is done; where several outputs appear one by one, each of them."""
    if len(scene.outputs) > 1:
        return True
    return scene.is_before(now) or scene.is_after(now)


def errors(stage: Stage, case: Case, error: int, *, for_good: bool, every: int = 1) -> Tally:
    """The N-th call fails: exit 3, one line, and nothing was changed; or it could do without it."""
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
            stage.run(argv)
            tally.judge(f"{where}, next run", scene, files_in(stage.out), settled=True)
        one_line(tally, where, ended)
        if not scene.mixtures(now) and not scene.litter(now):
            as_told = scene.is_after(now) if ended.code == 0 else whole(scene, now)
            tally.expect(as_told, where, f"exit {ended.code}, but half: {' '.join(now)}")
            changed = ended.code == 3 and len(scene.outputs) == 1 and not scene.is_before(now)
            tally.expect(not changed, where, "exit 3, but changed")
    return tally


def one_line(tally: Tally, where: str, ended: Ended) -> None:
    """It worked, or it says in one line what of the files did not."""
    fine = ended.code == 0 or (ended.code == 3 and len(ended.errors()) == 1)
    tally.expect(fine and "Traceback" not in ended.err, where, f"exit {ended.code}: {ended.err}")


def all_cases() -> Iterator[Case]:
    """Every command that writes × every form × over nothing, over its like and over another."""
    others = {
        "file": ["set"],
        "set": ["file", "set of three"],
        "folder": ["folder of shards"],
        "folder of shards": ["folder"],
    }
    for command in ("average", "select", "apply", "compare"):
        for form, over in others.items():
            report = "none" if command == "apply" else "report"
            for older in (None, form, *over):
                yield Case(command, form, older, report)
            if command in ("average", "apply"):
                yield Case(command, form, form, "stale")
            if command == "average":
                yield Case(command, form, form, "none")
    for command in ("inspect", "init"):
        for older in (None, "file"):
            yield Case(command, "file", older, "none")
