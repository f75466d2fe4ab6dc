"""Few, dear evaluations: what is found with 10, 20 and 40, next to what people do?

`python benchmarks/score_budget.py SAMPLES RUN=CKPTS …` with SAMPLES a copy of sample_configs that
has its data, and RUN `text`, `images` or the data set of a behaviour cloning run. A call gives the
error rate, or the squared error, on 500 selection examples; of each run there are four such
subsets, and numbers are means over them. *5.7 / 2.1*: what was found is 5.7 % below the last
checkpoint's score on the subset, and 2.1 % on other, held-out examples. *grid*: the last n
checkpoints, n from 1 to all, evenly on a logarithmic scale. *greedy*: half of the budget on single
checkpoints from all over the run, the other half adds them in the order of their scores, each only
if the score gets better. Without arguments: the made-up contests of `contests.py`, which have no
other examples.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import torch
from contests import CONTESTS, World, k
from safetensors.torch import load_file
from torch import Tensor

from sewa_cli import solvers
from sewa_cli.direction import Criterion
from sewa_cli.events import Events
from sewa_cli.methods import mean_of
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Problem
from sewa_cli.solvers.board import Asked, Average, Board
from sewa_cli.solvers.contest import Outcome
from sewa_cli.task import load_task

BUDGETS, SUBSETS, EXAMPLES, MOST = (10, 20, 40), 4, 500, 100  # MOST: checkpoints
FOLDERS = {"text": "text_classification", "images": "image_classification"}
Score = Callable[[Average], float]


class Run:
    """A trained run in memory: errors of an average, example by example."""

    def __init__(self, samples: Path, kind: str, folder: Path) -> None:
        home = samples / FOLDERS.get(kind, "behavior_cloning")
        os.chdir(home)
        args = {} if kind in FOLDERS else {"data": kind}
        args |= {"selection": SUBSETS * EXAMPLES, "heldout": 2000}
        self.task = load_task("./task.py", args)
        paths = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
        paths = paths[:: -max(1, len(paths) // MOST)][::-1]
        self.k, self.model = len(paths), self.task.build_model().eval()
        self.rows = [load_file(path) for path in paths]
        self.is_class = kind in FOLDERS
        self._known: dict[Average, Tensor] = {}

    def errors(self, average: Average) -> Tensor:
        if average not in self._known:
            self._known[average] = self._errors(average, self.task.selection_data)
        return self._known[average]

    def heldout(self, average: Average) -> float:
        return float(self._errors(average, self.task.heldout_data).mean())

    def _errors(self, average: Average, data: Any) -> Tensor:
        some = [(c, row) for c, row in zip(average, self.rows, strict=True) if c]
        names = [name for name, tensor in some[0][1].items() if tensor.is_floating_point()]
        state = {name: sum(c * row[name].double() for c, row in some).float() for name in names}
        self.model.load_state_dict(state, strict=False)
        found = []
        with torch.no_grad():
            for batch in data:
                outputs, targets = self.task.predict(self.model, batch), batch[1]
                if self.is_class:
                    found.append((outputs.argmax(-1) != targets).double())
                else:
                    found.append((outputs - targets).square().mean(-1).double())
        return torch.cat(found)

    def on(self, subset: int) -> Score:
        rows = slice(subset, None, SUBSETS)
        return lambda average: float(self.errors(average)[rows].mean())


def latest(n: int, k: int) -> Average:
    return tuple(mean_of(range(k - n, k), k))


def grid(k: int, budget: int, score: Score) -> Average:
    points, lengths = 1, {1, k}
    while len(lengths) < min(budget, k):  # rounding makes some the same
        points += 1
        lengths = {round(k ** (i / points)) for i in range(points + 1)}
    return min((latest(n, k) for n in sorted(lengths)[:budget]), key=score)


def greedy(k: int, budget: int, score: Score) -> Average:
    half = min(budget // 2, k)
    places = sorted({round(i * (k - 1) / (half - 1)) for i in range(half)})
    order = sorted(places, key=lambda i: score(tuple(mean_of([i], k))))
    best, found = order[:1], score(tuple(mean_of(order[:1], k)))
    for i in order[1 : budget - half + 1]:
        if (more := score(tuple(mean_of([*best, i], k)))) < found:
            best, found = [*best, i], more
    return tuple(mean_of(best, k))


def sewa(k: int, budget: int, score: Score) -> Average:
    def evaluate(asked: Sequence[Asked], _: float | None) -> Iterator[tuple[int, list[float]]]:
        yield from ((place, [score(call.average)]) for place, call in enumerate(asked))

    weights = torch.ones(1, dtype=torch.float64)
    board = Board(
        Criterion("loss", "min"), weights, evaluate, Events(), evaluations=budget, whole=True
    )
    problem = Problem(
        *(cast(Any, None), cast(Any, SimpleNamespace(k=k)), 0, 0, Events()), board=board
    )
    race = solvers.find("race")
    outcome = race(race.Settings()).choose(problem, AUTO).find(Outcome)
    assert board.spent <= budget
    return cast(Outcome, outcome).taken.average


METHODS = {"grid": grid, "greedy": greedy, "sewa": sewa}


def made_up() -> None:
    for spread in (0.02, 0.1, 0.4):
        cells = []
        for budget, method in product(BUDGETS, METHODS.values()):
            worlds = [World(seed, spread, 1) for seed in range(CONTESTS)]
            levels = [world.level(method(k, budget, world.level)) for world in worlds]
            before = [world.level(latest(1, k)) for world in worlds]
            cells.append(f"{100 - 100 * fmean(levels) / fmean(before):.1f}")
        sys.stdout.write(f"| made up, spread {spread} | {' | '.join(cells)} |\n")


def main() -> None:
    samples, out = Path(sys.argv[1]).absolute(), sys.stdout.write
    named = [one.partition("=")[::2] for one in sys.argv[2:]]
    runs = {Path(path).absolute(): kind for kind, path in named}
    head = " | ".join(f"{budget}: {' | '.join(METHODS)}" for budget in BUDGETS)
    out(f"| run | {head} |\n|---{'|---:' * len(METHODS) * len(BUDGETS)}|\n")
    columns: list[list[tuple[float, float]]] = [[] for _ in BUDGETS for _ in METHODS]
    for path, kind in runs.items():
        run = Run(samples, kind, path)
        last = latest(1, run.k)
        before = fmean(run.on(n)(last) for n in range(SUBSETS)), run.heldout(last)
        cells = []
        each = product(BUDGETS, METHODS.values())
        for column, (budget, method) in zip(columns, each, strict=True):
            found = [method(run.k, budget, run.on(n)) for n in range(SUBSETS)]
            seen = fmean(run.on(n)(average) for n, average in enumerate(found))
            after = seen, fmean(map(run.heldout, found))
            column.append((100 - 100 * after[0] / before[0], 100 - 100 * after[1] / before[1]))
            cells.append("{:.1f} / {:.1f}".format(*column[-1]))
        out(f"| {path.parts[-3]}, {path.parts[-2]} | {' | '.join(cells)} |\n")
        sys.stdout.flush()
    means = [tuple(map(fmean, zip(*column, strict=True))) for column in columns]
    out(f"| mean | {' | '.join('{:.1f} / {:.1f}'.format(*mean) for mean in means)} |\n")


if __name__ == "__main__":
    main() if len(sys.argv) > 1 else made_up()
