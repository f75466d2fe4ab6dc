"""Two runs at once: in the end each output is wholly one run's, and its report is that run's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from faults.cases import BYSTANDERS, Case, Stage
from faults.driver import Ended
from faults.judge import Files, average_in, files_in, report_of
from faults.sweep import Tally, one_line

Argv = list[str]


@dataclass(frozen=True)
class Pair:
    """Two commands, started together in one folder."""

    name: str
    one: Argv
    two: Argv
    outputs: tuple[str, ...] = ("out.safetensors",)  # names that there are in the end
    older: Argv | None = None  # what both replace
    both: bool = True  # both do their work; else the second says that the name is taken


def average(form: str, last: int, *more: str) -> Argv:
    return [*Case("average", form).argv(force=False), "--last", str(last), *more]


def kinds() -> Iterator[Pair]:
    for form in ("file", "folder", "shards"):
        names = (Case("average", form).output,)
        one, two = (average(form, n, "--force") for n in (2, 3))
        yield Pair(f"{form} over {form}", one, two, names, older=average(form, 1))
        yield Pair(f"new {form}, --force", one, two, names)
        one, two = average(form, 2), average(form, 3)
        yield Pair(f"{form}, no --force", one, two, names, both=False)
    one, two = average("shards", 2, "--force"), average("three shards", 3, "--force")
    yield Pair("shards and three shards", one, two, ("out",), older=average("shards", 1))
    apply = Case("apply", "file").argv(force=True)
    older = average("file", 1)
    one = average("file", 2, "--force")
    yield Pair("average and apply", one, apply, older=older)
    yield Pair("select and average", Case("select", "file").argv(force=True), one, older=older)
    plain = ["average", "../inputs/files", "--last"]
    for more, suffix in (([], ".safetensors"), (["--shard-size", "450"], "")):
        one, two = ([*plain, n, *more] for n in ("2", "3"))
        yield Pair(f"no name{suffix}", one, two, (f"averaged{suffix}", f"averaged-2{suffix}"))
    one = average("shards", 2)
    two = [*plain, "2", "-o", "b.safetensors", "--report", "b.report.json"]
    yield Pair("two outputs in one folder", one, two, ("out", "b.safetensors"))


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
    tally = Tally(Case("average", "file"))
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
        known |= {report_of(output), *average_in(now, output)}
        if not any(is_whole(now, output, one, pair) for one in alone):
            tally.mixtures.append(f"{where}: {output}: {' '.join(now)}")
    if litter := [name for name in now if name not in known]:
        tally.litter.append(f"{where}: left {' '.join(litter)}")


def is_whole(now: Files, output: str, alone: Files, pair: Pair) -> bool:
    """Whether this output, and its report if one was asked for, are what a run alone has made."""
    own = pair.outputs[0] if "averaged" in output else output
    found, expected = average_in(now, output), average_in(alone, own)
    if not found or {n.replace(output, own, 1): data for n, data in found.items()} != expected:
        return False
    report, own_report = report_of(output), report_of(own)
    if own_report not in alone or report not in now:
        return own_report not in alone and report not in now
    return recipe(now[report]) == recipe(alone[own_report])


def recipe(report: bytes) -> object:
    return json.loads(report)["recipe"]
