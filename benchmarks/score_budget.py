"""Few, dear evaluations: what is found with 10, 20 and 40, next to what people do?

`python benchmarks/score_budget.py SAMPLES RUN=CKPTS …` with SAMPLES a copy of sample_configs that
has its data, and RUN `text`, `images` or the data set of a behaviour cloning run. A number is the
score of one call on a subset of the selection examples (error rate in %, or squared error); of
each run there are several subsets. *grid*: the last n checkpoints, n from 1 to all, evenly on a
logarithmic scale. *greedy*: half of the budget on single checkpoints from all over the run, the
other half adds them in the order of their scores, each only if the score gets better.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import torch
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

    def errors(self, average: Average, of: str = "selection_data") -> Tensor:
        if of == "selection_data" and average in self._known:
            return self._known[average]
        some = [(c, row) for c, row in zip(average, self.rows, strict=True) if c]
        names = [name for name, tensor in some[0][1].items() if tensor.is_floating_point()]
        state = {name: sum(c * row[name].double() for c, row in some).float() for name in names}
        self.model.load_state_dict(state, strict=False)
        found = []
        with torch.no_grad():
            for batch in getattr(self.task, of):
                outputs, targets = self.task.predict(self.model, batch), batch[1]
                if self.is_class:
                    found.append(100.0 * (outputs.argmax(-1) != targets).double())
                else:
                    found.append((outputs - targets).square().mean(-1).double())
        errors = torch.cat(found)
        if of == "selection_data":
            self._known[average] = errors
        return errors

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


def main() -> None:
    samples, out = Path(sys.argv[1]).absolute(), sys.stdout.write
    named = [one.partition("=")[::2] for one in sys.argv[2:]]
    runs = {Path(path): kind for kind, path in named}
    head = " | ".join(f"{budget}: {' | '.join(METHODS)}" for budget in BUDGETS)
    columns = "|---:" * (1 + len(METHODS) * len(BUDGETS))
    tables: dict[str, list[str]] = {"on the subset": [], "on new examples": []}
    wins: dict[tuple[int, str, str], list[float]] = {}
    for path, kind in runs.items():
        run = Run(samples, kind, path.absolute())
        cells: dict[str, list[str]] = {name: [] for name in tables}
        digits = 2 if run.is_class else 4
        last = latest(1, run.k)
        first = {
            "on the subset": fmean(run.on(n)(last) for n in range(SUBSETS)),
            "on new examples": float(run.errors(last, "heldout_data").mean()),
        }
        for budget in BUDGETS:
            found = {
                name: [method(run.k, budget, run.on(n)) for n in range(SUBSETS)]
                for name, method in METHODS.items()
            }
            for name, averages in found.items():
                seen = [run.on(n)(average) for n, average in enumerate(averages)]
                new = [float(run.errors(one, "heldout_data").mean()) for one in averages]
                for of, scores in zip(tables, (seen, new), strict=True):
                    cells[of].append(f"{fmean(scores):.{digits}f}")
                    wins[budget, name, of] = wins.get((budget, name, of), []) + scores
        for of, lines in tables.items():
            name = f"{path.parts[-3]} | {first[of]:.{digits}f}"
            lines.append(f"| {name} | {' | '.join(cells[of])} |\n")
        sys.stderr.write(f"{path}\n")
    for of, lines in tables.items():
        out(f"\nScore {of}:\n\n| run | last | {head} |\n|---{columns}|\n{''.join(lines)}")
    for budget in BUDGETS:
        for of in tables:
            ours = wins[budget, "sewa", of]
            for name in ("grid", "greedy"):
                other = wins[budget, name, of]
                better = sum(a < b for a, b in zip(ours, other, strict=True))
                worse = sum(a > b for a, b in zip(ours, other, strict=True))
                lines = f"better than {name} {better}, worse {worse} of {len(ours)}"
                out(f"{budget} evaluations, {of}: {lines}\n")


if __name__ == "__main__":
    main()
