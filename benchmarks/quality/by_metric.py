"""Does it pay to choose by the metric itself? Returns of cloned policies; accuracies.

`python benchmarks/quality/by_metric.py` trains sample_configs/behavior_cloning five ways with three
seeds each, 1,000 checkpoints a run, lets every solver that chooses by a metric choose by episodes,
and plays what they chose for 100 episodes that nothing was chosen by; the same by accuracy for the
text and image samples. Hours on one core; it may be stopped and started again at any time. It needs
`make data`.

    python benchmarks/quality/by_metric.py --settings lunarlander-medium --seeds 3
    python benchmarks/quality/by_metric.py --budgets 500
    python benchmarks/quality/by_metric.py --tables              only what there is, nothing new
    python benchmarks/quality/by_metric.py --tables --plot docs/images/by_metric.png \
        --into docs/explanation/results.md benchmarks/quality/results/metric.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, cast

from arena import arena_of
from hopper import lean
from plan import REPORTED, SAMPLES
from running import keep
from tables import estimate, fill, markdown

from sewa_cli.solvers.contest import Outcome

RESULTS = Path(__file__).with_name("by_metric.json")


@dataclass(frozen=True)
class Setting:
    """A sample, how it is trained, and what its parts are."""

    folder: str
    metric: str
    train: tuple[str, ...]
    args: Mapping[str, Any]
    digits: int = 0  # of what is printed
    last: int = 1000  # checkpoints that are chosen among

    @property
    def home(self) -> Path:
        return SAMPLES / self.folder


def cloning(data: str, rate: str = "0.0003") -> Setting:
    args = {"data": data, "score_episodes": 4000}  # more than any average will be asked for
    return Setting("behavior_cloning", "return", ("--data", data, "--rate", rate), args)


def classification(folder: str, rows: int) -> Setting:
    """Parts of 25 rows; the checkpoints that the page's other tables have."""
    return Setting(folder, "accuracy", (), {"selection": rows, "heldout": 5000}, 4, last=100)


SETTINGS = {
    "hopper-medium": cloning("hopper-medium"),
    "hopper-medium at rate 0.003": cloning("hopper-medium", "0.003"),
    "hopper-medium-expert": cloning("hopper-medium-expert"),
    "hopper-medium-expert at rate 0.003": cloning("hopper-medium-expert", "0.003"),
    "lunarlander-medium": cloning("lunarlander-medium"),
    "text": classification("text_classification", 4900),
    "images": classification("image_classification", 5000),
}
SOLVERS = {"race": 0, "reinforce": 10}  # and K; 0: auto
BUDGETS = (500, 2000, 5000)
TOGETHER = "all cloning runs together"
GAINS = "gains on the default by loss"
SIMPLE = (("last", None), ("uniform", None), ("ema", None), ("latest", 10), ("lawa", 10))
BY_LOSS = "default by loss"
COLUMNS = ("last", "uniform", "ema", "latest K=10", "lawa K=10", "greedy by loss", BY_LOSS)


def train(setting: str, seed: int, folder: Path) -> Path:
    about, where = SETTINGS[setting], folder / setting / f"seed-{seed}"
    if not (where / "done").exists():
        where.mkdir(parents=True, exist_ok=True)
        for file in (where / "ckpts").glob("*"):
            file.unlink()
        command = [sys.executable, str(about.home / "train.py"), *about.train]
        subprocess.run([*command, "--seed", str(seed), "--out", str(where / "ckpts")], check=True)
        (where / "done").touch()
    return where / "ckpts"


class Study:
    """One run, opened once: its references, and what each solver chooses at each budget."""

    def __init__(self, setting: str, seed: int, checkpoints: Path) -> None:
        from sewa_cli.commands.select import open_setup
        from sewa_cli.events import Events
        from sewa_cli.extensions import load_settings
        from sewa_cli.scoring.metric import open_metric
        from sewa_cli.task import load_task

        about = SETTINGS[setting]
        os.chdir(about.home)
        flags: dict[str, Any] = {f"args.{name}": value for name, value in about.args.items()}
        flags |= {"checkpoints": (checkpoints,), "K": "auto", "seed": seed, "last": about.last}
        flags["objective.metric"] = about.metric
        config = load_settings(Path("sewa.yaml"), flags)
        task = load_task(str(config.task), config.args)
        self.run = open_setup(config, task, Events()).place()
        self.metric = open_metric(self.run)
        if about.metric == "return":
            self.metric.judge.pool = cast(Any, arena_of(self.run.session, self.metric))
        self.metric.problem()
        self._evaluate = self.metric.board.evaluate
        self._file = checkpoints.parent / "episodes.json"  # goes on where a stop has cut it off
        found = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._known: dict[str, float] = found.get("scores", {})
        self._played: dict[str, list[float]] = found.get("heldout", {})
        self._chosen: dict[int, Any] = {}

    def keep_episodes(self) -> None:
        keep(self._file, {"scores": self._known, "heldout": self._played})

    def by_loss(self, K: int) -> Any:
        if K not in self._chosen:
            problem = self.metric.problem()
            assert problem.by_loss is not None
            self._chosen[K] = problem.by_loss(K)
        return self._chosen[K]

    def choose(self, solver: str, K: int, budget: int) -> Any:
        """Choose as `sewa select --metric return --budget …` does, with known episodes."""
        from sewa_cli.extensions import make_solver
        from sewa_cli.solvers.board import Board

        problem, old = self.metric.problem(), self.metric.board
        self.board = Board(
            *(old.criterion, old.weights, self._recalling, old.events, budget),
            at_once=old.at_once,
        )
        problem = replace(problem, by_loss=self.by_loss, board=self.board)
        return make_solver(self.run.session.config, solver).choose(problem, K)

    def _recalling(self, asked: Sequence[Any], until: float | None) -> Iterator[tuple[int, Any]]:
        """An episode of an average is the same each time, and need not be played again."""
        left = []
        for place, one in enumerate(asked):
            known = [self._known.get(_named(one.average, part)) for part in one.parts]
            if None in known:
                left.append(place)
            else:
                yield place, known
        for at, answer in self._evaluate([asked[place] for place in left], until):
            one = asked[left[at]]
            if isinstance(answer, list):
                for part, score in zip(one.parts, answer, strict=True):
                    self._known[_named(one.average, part)] = score
            yield left[at], answer

    def play(self, coefficients: Sequence[float]) -> list[float]:
        """Returns of the held-out episodes."""
        average = tuple(coefficients)
        name = _named(average)
        if name not in self._played:
            scores = self.metric.score_heldout(average)
            assert scores is not None
            self._played[name] = [score[self.metric.criterion.name] for score in scores]
        return self._played[name]

    def greedy(self) -> list[float]:
        from sewa_cli.comparison.evaluator import open_evaluator
        from sewa_cli.methods import parse_one

        evaluator = open_evaluator(self.run, self.run.solver)
        return parse_one("greedy")(evaluator.proposing(), None)[0]


def _named(average: Sequence[float], part: int | None = None) -> str:
    """Short; a run's seed and setting are its folder's."""
    digest = hashlib.sha256(repr(tuple(average)).encode()).hexdigest()[:24]
    return digest if part is None else f"{digest} {part}"


def study(
    setting: str,
    seed: int,
    folder: Path,
    budgets: Sequence[int],
    solvers: Sequence[str],
    file: Path,
) -> None:
    from sewa_cli.methods import Run, parse_one
    from sewa_cli.text import with_K

    results = json.loads(file.read_text()) if file.exists() else []
    done = {(r["setting"], r["seed"], r["column"], r["budget"]) for r in results}
    wanted: list[tuple[str, int | None]] = [(name, None) for name in COLUMNS]
    wanted += [(solver, budget) for budget in budgets for solver in solvers]
    wanted = [one for one in wanted if (setting, seed, *one) not in done]
    if not wanted:
        return
    opened = Study(setting, seed, train(setting, seed, folder))
    k, simple = opened.run.trajectory.k, {with_K(*one): one for one in SIMPLE}

    def add(column: str, budget: int | None, returns: list[float], **more: Any) -> None:
        row = {"setting": setting, "seed": seed, "column": column, "budget": budget}
        results.append({**row, **_summed("", returns), **more})
        keep(file, results)
        opened.keep_episodes()
        at = time.strftime("%H:%M:%S")
        sys.stderr.write(f"{at} {setting} {seed} {column} {budget}: {mean(returns):.5g}\n")

    for column, budget in wanted:
        if column in simple:
            name, K = simple[column]
            add(column, None, opened.play(parse_one(name)(Run(k), K)[0]))
        elif column == "greedy by loss":
            add(column, None, opened.play(opened.greedy()))
        elif column == BY_LOSS:
            add(column, None, opened.play(opened.by_loss(0).coefficients))
        else:
            assert budget is not None
            choice = opened.choose(column, SOLVERS[column], budget)
            outcome = choice.find(Outcome)
            add(
                column,
                budget,
                opened.play(choice.coefficients),
                confirmed=outcome.confirmed,
                evidence=min(outcome.evidence, 1e9),
                leader=outcome.leader.label,
                **_summed("leader_", opened.play(outcome.leader.average)),
                evaluations=opened.board.spent,
            )


def _summed(prefix: str, returns: Sequence[float]) -> dict[str, float]:
    error = stdev(returns) / len(returns) ** 0.5
    return {f"{prefix}return": round(mean(returns), 5), f"{prefix}error": round(error, 5)}


def rows_of(file: Path) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """(setting, column) → seed → the result; columns by their budget, and in the order above."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    order = (*COLUMNS, *SOLVERS)
    rows = json.loads(file.read_text())
    for row in sorted(rows, key=lambda r: (r["budget"] or 0, order.index(r["column"]), r["seed"])):
        column = row["column"] if row["budget"] is None else f"{row['column']} {row['budget']:,}"
        found.setdefault((row["setting"], column), {})[row["seed"]] = row
    return found


def tables_of(file: Path) -> dict[str, list[dict[str, str]]]:
    """Return a table for each setting, and two of the gains on the default by loss."""
    found, tables = rows_of(file), {}
    columns = list(dict.fromkeys(column for _, column in found))
    gains = []
    for setting, about in SETTINGS.items():
        here = {column: found[setting, column] for column in columns if (setting, column) in found}
        base = here.get(BY_LOSS, {})
        if base:
            tables[setting] = [_row(c, runs, base, about) for c, runs in here.items()]
            if about.metric == "return":
                gains.append(_gains(setting, here, base, about))
    if tables:
        tables[GAINS] = gains
        tables[TOGETHER] = _together(found)
    return tables


def _gains(
    setting: str, here: Mapping[str, Mapping[int, Any]], base: Mapping[int, Any], about: Setting
) -> dict[str, str]:
    """Return the row of one setting: the default, and what `race` adds to it at each budget."""
    row = {"setting": setting, BY_LOSS: _shown([run["return"] for run in base.values()], about)}
    for budget in BUDGETS:
        runs = here.get(f"race {budget:,}", {})
        gained = [run["return"] - base[seed]["return"] for seed, run in runs.items()]
        row[f"race {budget:,}"] = _shown(gained, about, "+")
    return row


def _together(found: Mapping[tuple[str, str], Mapping[int, Any]]) -> list[dict[str, str]]:
    """Return how often each solver's choice was confirmed, and its mean gain, over all returns."""
    played = [s for s, about in SETTINGS.items() if about.metric == "return"]
    rows = []
    for solver in SOLVERS:
        row = {"": f"`{solver}`"}
        for budget in BUDGETS:
            runs = {
                (setting, seed): run
                for setting in played
                for seed, run in found.get((setting, f"{solver} {budget:,}"), {}).items()
            }
            confirmed = sum(bool(run["confirmed"]) for run in runs.values())
            gains = [
                run["return"] - found[setting, BY_LOSS][seed]["return"]
                for (setting, seed), run in runs.items()
            ]
            gain = f"{confirmed} of {len(runs)}, {_shown(gains, SETTINGS[played[0]], '+')}"
            row[f"{budget:,} episodes"] = gain if runs else ""
        rows.append(row)
    return rows


def _row(
    column: str, runs: Mapping[int, Any], base: Mapping[int, Any], about: Setting
) -> dict[str, str]:
    def against(key: str) -> str:
        gains = [
            run[key] - base[s]["return"] for s, run in runs.items() if key in run and s in base
        ]
        return _shown(gains, about, "+") if gains and column != BY_LOSS else ""

    known = [run["confirmed"] for run in runs.values() if "confirmed" in run]
    return {
        "": column,
        about.metric: _shown([run["return"] for run in runs.values()], about),
        "against the default by loss": against("return"),
        "seeds": str(len(runs)),
        "confirmed": f"{sum(map(bool, known))} of {len(known)}" if known else "",
        "the leader, confirmed or not": against("leader_return"),
    }


def _shown(values: Sequence[float], about: Setting, sign: str = "") -> str:
    """Return the mean of some runs and half of its 95 % interval."""
    found = estimate(values)
    half = "" if found.half is None else f" ± {found.half:.{about.digits}f}"
    return f"{round(found.mean, about.digits) + 0.0:{sign}.{about.digits}f}{half}"  # no -0


def plot(file: Path, picture: Path) -> None:
    from matplotlib.figure import Figure

    found = rows_of(file)
    settings = [s for s in SETTINGS if (s, BY_LOSS) in found]
    figure = Figure(figsize=(9, 2.6 * len(settings)), layout="constrained")
    for axes, setting in zip(
        figure.subplots(len(settings), 1, squeeze=False)[:, 0], settings, strict=True
    ):
        columns = [column for s, column in found if s == setting]
        for n, column in enumerate(columns):
            returns = [run["return"] for run in found[setting, column].values()]
            axes.plot(returns, [n] * len(returns), "o", mfc="white", mec="black", ms=5)
            axes.plot([mean(returns)], [n], "D", color="black", ms=6)
        axes.set_yticks(range(len(columns)), columns, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{setting}: held-out {SETTINGS[setting].metric}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("each seed, and their mean")
    figure.savefig(picture, dpi=110)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--folder", type=Path, default=Path("by-metric-dir"))
    asked.add_argument("--results", type=Path, default=RESULTS)
    asked.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    asked.add_argument("--seeds", nargs="+", type=int, default=list(REPORTED))
    asked.add_argument("--budgets", nargs="+", type=int, default=BUDGETS)
    asked.add_argument("--solvers", nargs="+", default=list(SOLVERS), choices=list(SOLVERS))
    asked.add_argument("--tables", action="store_true", help="only what there is")
    asked.add_argument("--plot", type=Path)
    asked.add_argument("--into", type=Path, nargs="+", default=[], help="pages to fill, at marks")
    args = asked.parse_args()
    folder, results = args.folder.resolve(), args.results.resolve()
    picture = args.plot.resolve() if args.plot else None
    pages = [page.resolve() for page in args.into]
    if not args.tables:
        lean()
        for seed in args.seeds:
            for setting in args.settings:
                study(setting, seed, folder, args.budgets, args.solvers, results)
    tables = tables_of(results)
    for setting, rows in tables.items():
        sys.stdout.write(f"**{setting}**\n\n{markdown(rows)}\n\n")
    fill(pages, tables, "metric")
    if picture is not None:
        plot(results, picture)


if __name__ == "__main__":
    main()
