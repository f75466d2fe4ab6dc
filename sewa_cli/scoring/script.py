"""A metric that a command gives: each average is written like the output, and the command reads it.

No model is built and W is not held: an average is streamed from the checkpoints' files into a
scratch folder by the code that writes the final one.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import nan
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import psutil
import torch
from torch import Tensor

from sewa_cli import publish
from sewa_cli.checkpoints import Checkpoint
from sewa_cli.checkpoints.means import counts_of
from sewa_cli.config import RANGE, Config
from sewa_cli.direction import Criterion
from sewa_cli.errors import ConfigError, OutputError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import Run, mean_of
from sewa_cli.objective.memo import Memo
from sewa_cli.objective.objective import Objective
from sewa_cli.output.layouts import Form
from sewa_cli.scoring.command import Call, Commands
from sewa_cli.scoring.jobs import FEWEST, KINDS, Kind, Result, divide_parts, hold_back
from sewa_cli.scoring.metric import Metric, named_incumbent
from sewa_cli.scoring.printed import Record, mean_scores, read_printed
from sewa_cli.solvers import Problem
from sewa_cli.solvers.board import Answer, Asked, Average, Failed
from sewa_cli.task.scoring import Score, Value
from sewa_cli.text import size as in_bytes
from sewa_cli.trajectory import Layout, Trajectory

IN_MEMORY: Final = Path("/dev/shm")
MOST_KEPT: Final = 64  # averages in the scratch folder
IN_A_ROW: Final = 5  # failures that end the search
MOST_PARTS: Final = 100_000


class Unread(Trajectory):
    """W of checkpoints that nobody holds."""

    def __init__(self, k: int) -> None:
        super().__init__(Layout({}, {}, 0, 0), torch.device("cpu"), [*range(k)])

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError("score: the weights are not held; this solver needs a task")

    blocks = tile = row = _refuse  # type: ignore[assignment]


class Scratch:
    """Averages written like the output, for as long as something may ask for them."""

    def __init__(self, write: Callable[[Average, Path], None], folder: Path, most: int) -> None:
        self._write, self._folder, self._most = write, folder, most
        self._places: OrderedDict[Average, Path] = OrderedDict()
        self._count = 0

    def path_of(self, average: Average, name: str, in_use: Collection[Average]) -> Path:
        """Return where the average is; it is written if it is not there."""
        if average in self._places:
            self._places.move_to_end(average)
            return self._places[average] / name
        for other in [one for one in self._places if one not in in_use]:
            if len(self._places) < self._most:
                break
            shutil.rmtree(self._places.pop(other), ignore_errors=True)
        self._count += 1
        place = self._folder / str(self._count)
        try:
            place.mkdir()
            self._write(average, place / name)
        except OSError as error:
            raise OutputError(
                f"scratch: {self._folder.parent}: {error.strerror or error}; --scratch DIR names "
                "another"
            ) from error
        self._places[average] = place
        return place / name


@contextmanager
def open_scratch(
    config: Config, write: Callable[[Average, Path], None], size: int
) -> Iterator[Scratch]:
    """Make a folder for averages of this size, in memory where there is room."""
    fewest = config.objective.workers + 1
    parent, free = config.scratch, 0
    if parent is None:
        if IN_MEMORY.is_dir():
            free = psutil.virtual_memory().available // 2
            free = min(shutil.disk_usage(IN_MEMORY).free, free)
        parent = IN_MEMORY if free >= fewest * size else Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise ConfigError(f"scratch: {parent}: no such folder")
    if parent != IN_MEMORY:
        free = shutil.disk_usage(parent).free
    if free < fewest * size:
        raise ConfigError(
            f"scratch: {parent}: {fewest} averages need {in_bytes(fewest * size)}, and "
            f"{in_bytes(free)} are free; use another --scratch DIR"
        )
    most = fewest
    if config.objective.parts is not None:  # an average may be asked on more of them later
        most = min(MOST_KEPT, max(fewest, free // 2 // size))
    with publish.temporary(parent, is_folder=True) as folder:
        yield Scratch(write, folder, most)


class ScriptJudge:
    """Scores by what a command prints; its methods are those of `TaskJudge`.

    parts  what `{part}` is, of those to choose by and those held out; None: a call has it all
    """

    at_once = 1
    stop_after: int | None = IN_A_ROW
    corpus = None

    def __init__(
        self,
        commands: Commands,
        scratch: Scratch,
        name: str,
        read: Callable[[str], list[Record]],
        metric: str,
        memo: Memo | None,
        form: Form,
    ) -> None:
        self._commands, self._scratch, self._name, self._read = commands, scratch, name, read
        self._metric, self._memo, self._form = metric, memo, form
        self._parts: Mapping[Kind, Sequence[str]] | None = None
        self._units: list[Record] = []  # as they were printed first
        self._at: dict[Kind, Sequence[int]] = {}  # of the units
        self._found: dict[Average, list[Record] | Failed] = {}
        self.weights: Mapping[Kind, Tensor] = {}
        self.tried: Sequence[Average] = ()
        self.whole = True

    def use_parts(self, parts: Mapping[Kind, Sequence[str]]) -> None:
        """Score part by part. What a part weighs is known once it was scored."""
        self._parts, self.whole = parts, False
        self.weights = {
            kind: torch.ones(len(found), dtype=torch.float64) for kind, found in parts.items()
        }

    def use_records(self, tries: Sequence[Average], config: Config, events: Events) -> None:
        """Score an average to see what is printed: one number, or records to divide."""
        for average in tries:
            [(_, found)] = self._call([(average, "")])
            self._found[average] = found
            self.tried = (*self.tried, average)
            if not isinstance(found, Failed):
                break
        else:
            line = cast(Failed, self._found[tries[0]]).line
            raise TaskError(f"no average could be scored: {line}")
        self._units = found
        count = len(found)
        weights = torch.tensor([one.weight for one in found], dtype=torch.float64)
        if count < FEWEST:
            for name in ("strict", "guard"):
                if getattr(config, name):
                    raise ConfigError(
                        f"--{name} needs units: print {FEWEST} JSON lines or more, each with an "
                        "id, or give objective.parts"
                    )
            self._at = {"selection": range(count)}
        else:
            kept = hold_back(range(count), config)
            self._at = dict(zip(KINDS, kept, strict=True))
            events.note(f"{count} records: {len(kept[1])} are held back for the report")
        self.weights = {kind: weights[list(at)] for kind, at in self._at.items()}

    def name_of(self, kind: Kind, part: int) -> str:
        if self._parts is not None:
            return self._parts[kind][part]
        return self._units[self._at[kind][part]].id or ""

    def evaluate(self, calls: Sequence[Asked], until: float | None) -> Iterator[tuple[int, Answer]]:
        for place, result in self._score(calls, "selection", until):
            yield place, result if isinstance(result, Failed) else self.pick(result)

    def score_heldout(self, calls: Sequence[Asked]) -> Iterator[tuple[int, Result]]:
        for place, result in self._score(calls, "heldout", None):
            if self.whole and isinstance(result, Failed):  # said when it was evaluated
                yield place, [{"": nan}] * len(calls[place].parts)
            else:
                yield place, result

    def pick(self, scores: Sequence[Score]) -> list[Value]:
        return [score.get(self._metric, nan) for score in scores]

    def warm(self) -> None: ...

    def close(self) -> None:
        self._commands.close()

    def _score(
        self, calls: Sequence[Asked], kind: Kind, until: float | None
    ) -> Iterator[tuple[int, Result]]:
        if self._parts is None:
            known = [n for n, call in enumerate(calls) if call.average in self._found]
            for n in known:
                yield n, self._of_units(self._found[calls[n].average], kind, calls[n].parts)
            left = [n for n in range(len(calls)) if n not in known]
            for n, found in self._call([(calls[n].average, "") for n in left], until):
                call = calls[left[n]]
                self._found[call.average] = self._alike(found)
                yield left[n], self._of_units(self._found[call.average], kind, call.parts)
            return
        named = [(call.average, self._parts[kind][call.parts[0]]) for call in calls]
        for n, found in self._call(named, until):
            if isinstance(found, Failed):
                yield n, found
                continue
            weight = sum(record.weight for record in found)
            self.weights[kind][calls[n].parts[0]] = weight
            yield n, [mean_scores(found)]

    def _alike(self, found: list[Record] | Failed) -> list[Record] | Failed:
        """Return records in the order of the first ones; a failure where they are of others."""
        if isinstance(found, Failed):
            return found
        given = {record.id: record for record in found}
        for unit in self._units:
            if unit.id not in given:
                return Failed(f"it prints {len(given)} records, without that of {unit.id}")
            if given[unit.id].weight != unit.weight:
                return Failed(f"the weight of {unit.id} was {unit.weight} before")
        if len(given) > len(self._units):
            return Failed(f"it prints {len(given)} records, and {len(self._units)} before")
        return [given[unit.id] for unit in self._units]

    def _of_units(self, found: list[Record] | Failed, kind: Kind, parts: Sequence[int]) -> Result:
        if isinstance(found, Failed):
            return found
        return [found[self._at[kind][part]].scores for part in parts]

    def _call(
        self, wanted: Sequence[tuple[Average, str]], until: float | None = None
    ) -> Iterator[tuple[int, list[Record] | Failed]]:
        """Yield what was printed in an earlier run at once, the rest as the commands end."""
        left = []
        for n, (average, part) in enumerate(wanted):
            memo = self._memo
            kept = None if memo is None else memo.known(self._key(average, part))
            if kept is None:
                left.append(n)
            else:
                yield n, [Record(*one) for one in json.loads(bytes(kept["records"].tolist()))]
        under_way: list[Average] = []

        def calls() -> Iterator[Call]:
            for n in left:
                average, part = wanted[n]
                under_way.append(average)
                yield Call(self._scratch.path_of(average, self._name, under_way), part)

        for n, printed in self._commands.run(calls(), until):
            average, part = wanted[left[n]]
            under_way.remove(average)
            if isinstance(printed, Failed):
                yield left[n], printed
                continue
            try:
                records = self._read(printed)
            except ValueError as error:
                yield left[n], Failed(str(error))
                continue
            if self._memo is not None:
                text = torch.tensor(list(json.dumps(records).encode()), dtype=torch.uint8)
                self._memo.keep(self._key(average, part), {"records": text})
            yield left[n], records

    def _key(self, average: Average, part: str) -> tuple[Any, ...]:
        return "what a command printed", self._form, part, list(average)


@contextmanager
def open_script(
    config: Config,
    words: Sequence[str],
    checkpoints: Sequence[Checkpoint],
    write: Callable[[Average, Path], None],
    size: int,
    name: str,
    form: Form,
    memo: Memo | None,
    events: Events,
) -> Iterator[Metric]:
    """Settle what a unit is, which are held back, and where averages are written."""
    objective, k = config.objective, len(checkpoints)
    assert objective.metric is not None
    commands = Commands(words, objective.workers, objective.part_timeout)
    run = Run.at([c.step for c in checkpoints], config.seed, counts=counts_of(checkpoints))
    with open_scratch(config, write, size) as scratch, closing(commands):
        judge = ScriptJudge(commands, scratch, name, reader(config), objective.metric, memo, form)
        if parts := parts_of(config):
            lists: dict[Kind, Sequence[str]] = {"selection": parts, "heldout": []}
            places = divide_parts(lists, config, events, listed=True)
            judge.use_parts(
                {kind: [lists[of][place] for place in at] for kind, (of, at) in places.items()}
            )
        else:
            budget = objective.budget if isinstance(objective.budget, int) else IN_A_ROW
            apart = list(dict.fromkeys((k - 1, 0, k // 2, k // 4, 3 * k // 4)))[:budget]
            tries = [tuple(mean_of([i], k)) for i in apart]
            judge.use_records(tries, config, events)
        problem = Problem(
            cast(Objective, None),  # there is no loss to look at
            Unread(k),
            0,
            config.seed,
            events,
            steps=[checkpoint.step for checkpoint in checkpoints],
            counts=counts_of(checkpoints),
            incumbent=named_incumbent(config, run),
        )
        criterion = Criterion(objective.metric, objective.direction)
        yield Metric(problem, config, criterion, judge)


def reader(config: Config) -> Callable[[str], list[Record]]:
    metric, given = config.objective.metric, config.objective.score_regex
    assert metric is not None
    regex = None if given is None else re.compile(given, re.MULTILINE)
    return lambda text: read_printed(text, metric, regex)


def parts_of(config: Config) -> list[str]:
    """Return the parts that are listed, those of a range, or the lines of a file."""
    given = config.objective.parts
    if not given and "{part}" in (config.score or ""):
        raise ConfigError("score: has {part}, and there are none; list them as objective.parts")
    if given is None or not isinstance(given, str):
        return [] if given is None else list(given)
    if found := re.fullmatch(RANGE, given):
        first, last = int(found[1]), int(found[2])
        if not 0 <= last - first < MOST_PARTS:
            raise ConfigError(f"objective.parts: {given}: from 1 to {MOST_PARTS:,} parts")
        return [str(number) for number in range(first, last + 1)]
    try:
        lines = Path(given).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"objective.parts: {given}: is neither a list, a range such as 1-20 nor a file: {error}"
        ) from error
    return [line.strip() for line in lines if line.strip()]
