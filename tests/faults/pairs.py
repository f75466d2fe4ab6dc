"""Two runs at once: in the end each output is wholly one run's, and its report is that run's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from faults.cases import BYSTANDERS, Case, Stage
from faults.driver import Ended
from faults.judge import Files, average_in, files_in, shards_in
from faults.sweep import Tally, one_line

Argv = list[str]
REPORT = ".report.json"
APART = {"a": ["--shard-size", "450"], "b.safetensors": ["--report", f"b{REPORT}"]}


@dataclass(frozen=True)
class Pair:
    """Two commands, started together in one folder."""

    name: str
    one: Argv
    two: Argv
    outputs: tuple[str, ...] = ("out.safetensors",)  # names that there are in the end
    older: Argv | None = None  # what both replace
    both: bool = True  # both do their work; else the second says that the name is taken


def average(form: str, *more: str, over: str | None = None, report: bool = True) -> Argv:
    return [*Case("average", form, report="report" if report else "none").argv(bool(over)), *more]


def kinds() -> Iterator[Pair]:
    select = Case("select", "set").argv(force=True)
    apply = Case("apply", "set").argv(force=True)
    older = average("set", "--last", "1")
    one, two = (average("set", "--last", n, over="set") for n in ("2", "3"))
    yield Pair("set over set", one, two, older=older)
    yield Pair("new set, --force", one, two)
    yield Pair("set and file", one, average("file", "--last", "3", over="set"), older=older)
    yield Pair("set and set of three", one, average("set of three", over="set"), older=older)
    yield Pair("average and apply", one, apply, older=older)
    yield Pair("select and average", select, one, older=older)
    for form in ("file", "set"):
        new, other = (average(form, "--last", n) for n in ("2", "3"))
        yield Pair(f"{form}, no --force", new, other, both=False)
    one, two = (average("folder", "--last", n, over="folder") for n in ("2", "3"))
    yield Pair("folder over folder", one, two, outputs=("out",), older=average("folder"))
    one, two = (average("folder", "--last", n) for n in ("2", "3"))
    yield Pair("folder, no --force", one, two, outputs=("out",), both=False)
    plain = ["average", "../inputs/files", "--last"]
    names = ("averaged.safetensors", "averaged-2.safetensors")
    yield Pair("no name", [*plain, "2"], [*plain, "3"], names)
    one, two = ([*plain, n, "--shard-size", "450"] for n in ("2", "3"))
    yield Pair("sets, no name", one, two, names)
    one, two = ([*plain, "2", "-o", name, *reporting] for name, reporting in APART.items())
    yield Pair("two outputs in one folder", one, two, tuple(APART))


def collide(stage: Stage, pair: Pair, seeds: Iterable[int | None]) -> Tally:
    """For each seed both wait for each other before they publish, and go on at random speed.

    None: they are only started together.
    """
    before = dict(BYSTANDERS)
    if pair.older is not None:
        stage.clear(before)
        assert stage.run(pair.older).code == 0
        before = files_in(stage.out)
    alone = []
    for argv in (pair.one, pair.two):
        stage.clear(before)
        assert stage.run(argv).code == 0
        alone.append(files_in(stage.out))
    tally = Tally(Case("average", "set"))
    for seed in seeds:
        stage.clear(before)
        tally.runs += 1
        one = stage.asked(pair.one, jitter=None if seed is None else 2 * seed)
        two = stage.asked(pair.two, jitter=None if seed is None else 2 * seed + 1)
        ended = stage.together(one, two)
        judge(tally, f"{pair.name}, seed {seed}", pair, ended, files_in(stage.out), alone)
    return tally


def judge(
    tally: Tally, where: str, pair: Pair, ended: list[Ended], now: Files, alone: list[Files]
) -> None:
    for run in ended:
        one_line(tally, where, run)
    codes = sorted(-1 if run.code is None else run.code for run in ended)
    tally.expect(codes == ([0, 0] if pair.both else [0, 3]), where, f"exit {codes}")
    known = {*BYSTANDERS}
    for output in pair.outputs:
        known |= {output.removesuffix(".safetensors") + REPORT, *average_in(now, output)}
        if not any(is_whole(now, output, one, pair) for one in alone):
            tally.mixtures.append(f"{where}: {output}: {' '.join(now)}")
    if litter := [name for name in now if name not in known]:
        tally.litter.append(f"{where}: left {' '.join(litter)}")


def is_whole(now: Files, output: str, alone: Files, pair: Pair) -> bool:
    """Whether this output, and its report if one was asked for, are what a run alone has made."""
    own = output if len(pair.outputs) == 1 or "averaged" not in output else pair.outputs[0]
    stem, own_stem = (name.removesuffix(".safetensors") for name in (output, own))
    found, expected = average_in(now, output), average_in(alone, own)
    if not found or renamed(found, stem) != renamed(expected, own_stem):
        return False
    if shards_in(now, output).keys() - found.keys():
        return False
    report, own_report = stem + REPORT, own_stem + REPORT
    if own_report not in alone or report not in now:
        return own_report not in alone and report not in now
    return recipe(now[report]) == recipe(alone[own_report])


def renamed(files: Files, stem: str) -> Files:
    """The same under another name; an index has the names of its shards in it."""
    return {
        name.replace(stem, "*", 1): data.replace(stem.encode(), b"*")
        if name.endswith(".json")
        else data
        for name, data in files.items()
    }


def recipe(report: bytes) -> object:
    return json.loads(report)["recipe"]
