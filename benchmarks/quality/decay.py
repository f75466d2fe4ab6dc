"""How much of a decay's gain does an average give without decaying?

`python benchmarks/quality/decay.py` trains sample_configs/language_model with three seeds, each at
a constant rate, then decayed to nothing. It puts every method to them through `sewa compare` and
prints tables in Markdown. An hour or so on one core; it may be stopped and started again at any
time. It needs `make data`.

    python benchmarks/quality/decay.py --seeds 3 --train     one run, trained and no more
    python benchmarks/quality/decay.py --options='--memory 4GiB'
    python benchmarks/quality/decay.py --tables              only what there is, nothing new
    python benchmarks/quality/decay.py --tables \
        --into benchmarks/quality/results/decay.md
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from shlex import split
from typing import Any

from plan import REPORTED, SAMPLES
from running import Failed, call, keep, left_by
from tables import Runs, estimate, fill, markdown

HOME = SAMPLES / "language_model"
STEPS = 1024  # as train.py has them
SIMPLE = ("last", "uniform", "swa", "latest", "lawa", "ema-window", "wsm")
NAMES = {"aggregate": "**the default**", "sewa": "SeWA's mask, linear"}


@dataclass(frozen=True)
class Job:
    """One `sewa compare` over one part of a run."""

    part: str  # "constant" or "decayed"
    name: str
    methods: tuple[str, ...]
    budgets: tuple[int, ...] = (10,)
    options: tuple[str, ...] = ()

    def arguments(self, checkpoints: str) -> list[str]:
        where = {
            "constant": (checkpoints, "--to-step", str(STEPS)),
            "decayed": (f"{checkpoints}-decayed",),
        }
        return [
            *("compare", *where[self.part], "--methods", ",".join(self.methods)),
            *("--K", ",".join(map(str, self.budgets)), *self.options),
            *("--set", "args.metrics=false"),  # the loss is the mean over tokens: exp is all
            *("--format", "json", "--quiet"),
        ]


def jobs() -> Iterator[Job]:
    """Yield the jobs in the order in which they run."""
    yield Job("decayed", "last", ("last", "uniform"))
    yield Job("constant", "simple", SIMPLE, (10, 20))
    yield Job("constant", "default", ("aggregate",))
    yield Job("constant", "linear", ("sewa",), options=("--solver", "linear"))
    yield Job("constant", "greedy", ("greedy",))
    yield Job("decayed", "default", ("aggregate",))


class Study:
    """Runs and reports in one folder; what is there is not done again."""

    def __init__(self, folder: Path, training: Sequence[str], options: Sequence[str]) -> None:
        self.folder = folder.resolve()
        self._training = ["train.py", *training]
        self._options = list(options)

    def train(self, seed: int) -> None:
        """train.py itself goes on where it was."""
        home = self._home(seed)
        home.mkdir(parents=True, exist_ok=True)
        command = [*self._training, "--seed", str(seed)]
        if left_by(home / "trained.json", command) is None:
            places = ("--out", str(home / "ckpts"), "--data", str(self.folder / "data"))
            start = time.perf_counter()
            call([sys.executable, *command, *places], HOME)
            seconds = round(time.perf_counter() - start, 1)
            keep(home / "trained.json", {"command": command, "seconds": seconds})

    def run(self, seed: int, job: Job) -> None:
        if self.report(seed, job) is not None:
            return
        checkpoints, data = self._home(seed) / "ckpts", self.folder / "data"
        sets = {
            "model": checkpoints / f"checkpoint-{STEPS}",
            "selection": data / "selection.jsonl",
            "heldout": data / "heldout.jsonl",
        }
        command = [
            *(sys.executable, "-m", "sewa_cli", *self._command(job, str(checkpoints))),
            *("--config", str(HOME / "sewa.yaml")),
            *(part for key, path in sets.items() for part in ("--set", f"args.{key}={path}")),
        ]
        start = time.perf_counter()
        report = json.loads(call(command, Path.cwd()))
        seconds = round(time.perf_counter() - start, 1)
        found = {"command": self._command(job), "seconds": seconds, "report": report}
        self._file(seed, job).parent.mkdir(exist_ok=True)
        keep(self._file(seed, job), found)
        print(f"seed {seed}: {job.part} {job.name}: {seconds} s", file=sys.stderr)

    def report(self, seed: int, job: Job) -> dict[str, Any] | None:
        found = left_by(self._file(seed, job), self._command(job))
        report: dict[str, Any] | None = found["report"] if found else None
        return report

    def _command(self, job: Job, checkpoints: str = "ckpts") -> list[str]:
        return [*job.arguments(checkpoints), *self._options]

    def _home(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def _file(self, seed: int, job: Job) -> Path:
        return self._home(seed) / job.part / f"{job.name}.json"


Key = tuple[str, str, int | None]  # part, method, K


def losses(study: Study, seeds: Sequence[int]) -> dict[Key, Runs]:
    """Held-out losses, by seed."""
    found: dict[Key, Runs] = {}
    for job in jobs():
        for seed in seeds:
            report = study.report(seed, job)
            for row in report["rows"] if report else ():
                runs = found.setdefault((job.part, row["method"], row["K"]), {})
                runs[seed] = row["heldout_loss"]
    return found


def shares(found: Mapping[Key, Runs], key: Key) -> list[float]:
    """Return the share of the decay's gain in percent, run by run."""
    before, after = found["constant", "last", None], found["decayed", "last", None]
    seeds = [seed for seed in found[key] if seed in before and seed in after]
    return [100 * (before[s] - found[key][s]) / (before[s] - after[s]) for s in seeds]


def table(found: Mapping[Key, Runs], part: str) -> list[dict[str, str]]:
    """The default first, then the others, the lowest loss first."""
    keys = [key for key in found if key[0] == part]
    keys.sort(key=lambda key: (key[1] != "aggregate", estimate(list(found[key].values())).mean))
    rows = []
    for key in keys:
        _, method, K = key
        runs = list(found[key].values())
        rows.append(
            {
                "method": NAMES.get(method, method) + (f", K={K}" if K else ""),
                "held-out loss": estimate(runs).show(),
                "perplexity": estimate([exp(loss) for loss in runs]).show(),
                "share of the decay's gain": f"{estimate(shares(found, key)).show(3)} %",
                "runs": str(len(runs)),
            }
        )
    return rows


TITLES = {
    "constant": "averages of the constant run, where the decay would begin",
    "decayed": "the decayed run",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("decay-dir"))
    parser.add_argument("--seeds", nargs="+", type=int, default=REPORTED)
    parser.add_argument("--training", type=split, default=(), help="more options of train.py")
    parser.add_argument("--options", type=split, default=(), help="more options of sewa compare")
    parser.add_argument("--train", action="store_true", help="compare nothing")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--into", type=Path, nargs="+", default=[], help="pages to fill, at marks")
    asked = parser.parse_args(arguments)
    study = Study(asked.folder, asked.training, asked.options)
    try:
        for seed in () if asked.tables else asked.seeds:
            study.train(seed)
        for job in () if asked.tables or asked.train else jobs():
            for seed in asked.seeds:
                study.run(seed, job)
    except Failed as failed:
        sys.exit(str(failed))
    found = losses(study, asked.seeds)
    tables = {title: table(found, part) for part, title in TITLES.items()}
    for title, rows in tables.items():
        print(f"### {title}\n\n{markdown(rows)}\n", flush=True)
    fill(asked.into, tables, "decay")


if __name__ == "__main__":
    main()
