"""Is the linear solver as good as Gumbel's? `python benchmarks/solvers.py`, tables in Markdown.

Four real tasks, five training runs of each (a seed is another run):

    digits      the demo's network at a high rate: 100 checkpoints, 500 rows to select by
    text        a character model of the Python library's own sources, 60 checkpoints, 200 rows
    batchnorm   a convolutional network with BatchNorm on digits, 60 checkpoints, 200 rows
    diabetes    a regression on 442 patients, 60 checkpoints, only 100 rows: easy to over-fit

Each run: Gumbel and linear at K=10, `--sparse` (linear, K by cross-validation), and `--sparse` once
more with the labels of the selection data shuffled, where nothing can be learned. `--study` changes
one setting of the linear solver at a time instead.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import markdown
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sewa_cli.commands.forecast import run_forecast
from sewa_cli.commands.select import run_select
from sewa_cli.config import Config
from sewa_cli.present.views.select import verdict
from sewa_cli.report.select import Report
from sewa_cli.session.extensions import load_settings
from sewa_cli.task import Task, load_task, make_task
from sewa_cli.templates import write_template

K = 10
BATCH = 250
SEEDS = 5
# Student's t for 1, 2 … degrees of freedom; where there are more, the last is wide enough
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
CHANGES: list[dict[str, Any]] = [
    {},
    {"h": 0.03},
    {"h": 0.3},
    {"h": 1.0},
]

Data = tuple[Tensor, Tensor]


# ---- the tasks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A network, rows to train, select and judge by, and how it is trained."""

    build_model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Any], Tensor]
    training: Data
    selection: Data
    heldout: Data
    train: Callable[[Problem, int], Iterator[nn.Module]]  # yields at each checkpoint

    def shuffled(self, seed: int) -> Problem:
        """The same, but the labels to select by belong to other rows."""
        x, y = self.selection
        generator = torch.Generator().manual_seed(seed)
        mixed = y.reshape(-1)[torch.randperm(y.numel(), generator=generator)].view(y.shape)
        return replace(self, selection=(x, mixed))

    def task(self) -> Task:
        functions = {
            "build_model": self.build_model,
            "loss": self.loss,
            "selection_data": lambda: _batches(self.selection),
            "heldout_data": lambda: _batches(self.heldout),
            "training_data": lambda: _batches(self.training),
        }
        return make_task(functions, source="benchmarks/solvers.py", args={})


def _batches(data: Data) -> list[Data]:
    return list(zip(*(torch.split(part, BATCH) for part in data), strict=True))


def _train(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    warm_up: int,
    checkpoints: int,
    spacing: int,
    batch: int,
) -> Callable[[Problem, int], Iterator[nn.Module]]:
    """At a constant, rather high learning rate: the run still moves, so that choosing may pay."""

    def train(problem: Problem, seed: int) -> Iterator[nn.Module]:
        torch.manual_seed(seed)
        model = problem.build_model()
        x, y = problem.training
        steps = optimizer(model.parameters())
        for step in range(1, warm_up + checkpoints * spacing + 1):
            chosen = torch.randint(len(x), (batch,))
            steps.zero_grad()
            loss = problem.loss(model(x[chosen]), (None, y[chosen]))
            loss.backward()  # type: ignore[no-untyped-call]
            steps.step()
            if step > warm_up and (step - warm_up) % spacing == 0:
                yield model

    return train


def _cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def digits(quick: bool) -> Problem:
    with tempfile.TemporaryDirectory() as folder:
        write_template("demo", Path(folder), force=False)
        task = load_task(str(Path(folder) / "task.py"), {})

    def whole(batches: Any) -> Data:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return x, y

    return Problem(
        task.build_model,
        _cross_entropy,
        whole(task.training_data),
        whole(task.selection_data),
        whole(task.heldout_data),
        _train(
            lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.8),
            warm_up=600,
            checkpoints=20 if quick else 100,
            spacing=50 if quick else 10,
            batch=16,
        ),
    )


TRAINING = "argparse ast configparser copy csv difflib doctest enum inspect optparse pickle tarfile"
SELECTION = "fractions mailbox pprint shlex"
HELDOUT = "calendar cmd gettext imaplib pdb statistics textwrap"
ROW = 24  # characters
KINDS = {" ": 26, "\n": 27, "_": 28, "(": 29, ")": 29, ".": 30, ",": 30}  # others: 31; digits: 32
SYMBOLS = 33


def _encode(text: str) -> Tensor:
    """Letters without their case, a few signs, digits, and all the rest as one."""
    codes = [
        ord(c) - ord("a") if "a" <= c <= "z" else 32 if c.isdigit() else KINDS.get(c, 31)
        for c in text.lower()
    ]
    return torch.tensor(codes)


def _windows(modules: str, rows: int | None) -> Data:
    """Return rows of characters and the character after each: all, or some at random."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in modules.split():
        codes = _encode((library / f"{name}.py").read_text(encoding="utf-8"))
        found.append(codes.unfold(0, ROW + 1, ROW))
    every = torch.cat(found)
    if rows is not None:
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(7))
        every = every[order[:rows]]
    return every[:, :-1].contiguous(), every[:, 1:].contiguous()


class Characters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 32)
        self.recur = nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recur(self.embed(x))[0])
        return logits


def text(quick: bool) -> Problem:
    parts = _windows(TRAINING, None), _windows(SELECTION, 200), _windows(HELDOUT, 1000)
    run = (20, 14, 5) if quick else (400, 60, 15)
    train = _train(lambda p: torch.optim.Adam(p, lr=0.01), *run, batch=32)
    return Problem(Characters, _cross_entropy, *parts, train)


def batchnorm(quick: bool) -> Problem:
    from sklearn.datasets import load_digits

    def build_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    parts = _split(x, torch.tensor(found.target), 600, 200)
    run = (10, 14, 5) if quick else (200, 60, 10)
    train = _train(lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), *run, batch=16)
    return Problem(build_model, _cross_entropy, *parts, train)


def diabetes(quick: bool) -> Problem:
    from sklearn.datasets import load_diabetes

    def build_model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def squares(outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs[:, 0], batch[1])

    found = load_diabetes(scaled=False)
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (found.data, found.target))
    training, selection, heldout = _split((x - x.mean(0)) / x.std(0), y, 200, 100)
    mean, std = training[1].mean(), training[1].std()

    def scaled(data: Data) -> Data:
        return data[0], (data[1] - mean) / std

    run = (20, 14, 5) if quick else (300, 60, 10)
    train = _train(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8), *run, batch=16)
    return Problem(
        build_model, squares, scaled(training), scaled(selection), scaled(heldout), train
    )


def _split(x: Tensor, y: Tensor, training: int, selection: int) -> tuple[Data, Data, Data]:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(7))
    first, second, rest = torch.tensor_split(order, (training, training + selection))
    return (x[first], y[first]), (x[second], y[second]), (x[rest], y[rest])


TASKS = {"digits": digits, "text": text, "batchnorm": batchnorm, "diabetes": diabetes}


# ---- the runs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A training run on disk."""

    task: str
    seed: int
    problem: Problem
    folder: Path

    def config(self, **settings: Any) -> Config:
        flags = {
            "checkpoints": (self.folder,),
            "K": K,
            "device": "cpu",
            "seed": self.seed,
            **settings,
        }
        return load_settings(None, flags)

    def select(self, shuffled: bool = False, **settings: Any) -> Report:
        problem = self.problem.shuffled(self.seed) if shuffled else self.problem
        return run_select(self.config(**settings), problem.task(), write=False).report


def train_all(tasks: Sequence[str], seeds: int, quick: bool, where: Path) -> Iterator[Run]:
    for name in tasks:
        problem = TASKS[name](quick)
        for seed in range(seeds):
            run = Run(name, seed, problem, where / name / str(seed))
            run.folder.mkdir(parents=True)
            for n, model in enumerate(problem.train(problem, seed), 1):
                state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
                save_file(state, run.folder / f"step-{n}.safetensors")
            yield run


def measure(run: Run) -> dict[str, Any]:
    """All that the tables need of one run."""
    reports = {
        "gumbel": run.select(solver="gumbel"),
        "linear": run.select(solver="linear"),
        "sparse": run.select(K="auto", sparse=True),
        "shuffled": run.select(K="auto", sparse=True, shuffled=True),
    }
    P = sum(t.numel() for t in run.problem.build_model().state_dict().values())
    small = run.config(solver="gumbel", memory=64 * P)  # a few rows of W, and no more
    streamed = run_forecast(small, run.problem.task())
    if streamed.placement.tier != "files":
        raise ValueError(f"meant to stream from files, found {streamed.placement.tier}")
    bytes_streamed = {"gumbel": streamed.bytes_read, "linear": reports["linear"].cost.bytes_read}
    return {
        "task": run.task,
        "seed": run.seed,
        **{name: brief(report) for name, report in reports.items()},
        "bytes_streamed": bytes_streamed,
    }


def brief(report: Report) -> dict[str, Any]:
    cost, interval = report.cost, report.verdict.interval
    return {
        "heldout": _known(report.average.heldout_loss),
        "selection": _known(report.average.selection_loss),
        "references": {n: _known(s.heldout_loss) for n, s in report.references.items()},
        "chosen": report.written,
        "K": report.K,
        "k": report.k,
        "over": next(iter(report.references)),  # the best simple average by selection rows
        "vs baseline": report.verdict.difference,
        "interval": (interval.low, interval.high) if interval is not None else None,
        "verdict": verdict(report),
        "options": [option.model_dump() for option in report.budget or []],
        "forward_equivalents": cost.forward_passes + 2 * cost.backward_passes,
        "bytes_read": cost.bytes_read,
        "seconds": cost.seconds.total,
    }


def _known(loss: float | None) -> float:
    return float("nan") if loss is None else loss


# ---- the tables ----------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def t_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 %, Student's t over the runs."""
    n, middle = len(differences), mean(differences)
    if n < 2:
        return float("-inf"), float("inf")
    variance = sum((d - middle) ** 2 for d in differences) / (n - 1)
    half = T95[min(n - 2, len(T95) - 1)] * (variance / n) ** 0.5
    return middle - half, middle + half


def cost_rows(found: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for task in dict.fromkeys(record["task"] for record in found):
        runs = [record for record in found if record["task"] == task]
        for solver in ("gumbel", "linear"):
            streamed = mean([record["bytes_streamed"][solver] for record in runs])
            rows.append(
                {
                    "task": task,
                    "solver": solver,
                    "held-out loss": f"{_mean_of(runs, solver, 'heldout'):.4f}",
                    "selection loss": f"{_mean_of(runs, solver, 'selection'):.4f}",
                    "forward-equivalents": round(_mean_of(runs, solver, "forward_equivalents")),
                    "MB read, W in memory": _mean_of(runs, "gumbel", "bytes_read") / 1e6
                    if solver == "gumbel"
                    else "–",
                    "MB read, streamed": streamed / 1e6,
                    "seconds": _mean_of(runs, solver, "seconds"),
                }
            )
    return rows


def _mean_of(runs: Sequence[dict[str, Any]], solver: str, what: str) -> float:
    return mean([record[solver][what] for record in runs])


def difference_rows(found: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for task in dict.fromkeys(record["task"] for record in found):
        runs = [record for record in found if record["task"] == task]
        differences = [r["linear"]["heldout"] - r["gumbel"]["heldout"] for r in runs]
        low, high = t_interval(differences)
        share = mean(differences) / _mean_of(runs, "gumbel", "heldout")
        said = "better" if high < 0 else "worse" if low > 0 else "a tie"
        rows.append(
            {
                "task": task,
                "linear − gumbel, held out": f"{mean(differences):+.4f}",
                "95 % over the runs": f"{low:+.4f} .. {high:+.4f}",
                "of the loss": f"{100 * share:+.1f} %",
                "linear lower in": f"{sum(d < 0 for d in differences)} of {len(runs)}",
                "linear is": said,
            }
        )
    return rows


def sparse_rows(found: Sequence[dict[str, Any]], which: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for record in found:
        sparse = record[which]
        row: dict[str, object] = {
            "task": record["task"],
            "seed": record["seed"],
            "taken": _taken(sparse),
            "held-out loss": f"{sparse['heldout']:.4f}",
            "uniform": f"{sparse['references']['uniform']:.4f}",
            "last": f"{sparse['references']['last']:.4f}",
        }
        if which == "sparse":
            row["vs baseline, 95 % CI"] = _difference(sparse)
            row["over"] = sparse["over"]
        else:
            row["said"] = sparse["verdict"]
        rows.append(row)
    return rows


def _taken(sparse: dict[str, Any]) -> str:
    chosen: str = sparse["chosen"]
    return chosen if chosen in ("uniform", "last") else f"{chosen} K={sparse['K']}"


def _difference(sparse: dict[str, Any]) -> str:
    if sparse["vs baseline"] is None:  # what was taken is the best simple average itself
        return "–"
    low, high = sparse["interval"] or (float("nan"), float("nan"))
    return f"{sparse['vs baseline']:+.4f} ({low:+.4f} .. {high:+.4f})"


def surely_worse(sparse: dict[str, Any]) -> bool:
    """The best simple average is better than what was taken, beyond the interval sewa reports."""
    return sparse["interval"] is not None and sparse["interval"][1] < 0


def conclude(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences that say what the tables show."""
    n = len(found)
    worse = [r for r in found if surely_worse(r["sparse"])]
    by_over = ", ".join(f"{r['task']} {r['seed']} ({r['sparse']['over']})" for r in worse)
    above = {
        name: sum(r["sparse"]["heldout"] > r["sparse"]["references"][name] for r in found)
        for name in ("uniform", "last")
    }
    safe = [r for r in found if r["shuffled"]["chosen"] != "learned"]
    return [
        f"`--sparse` is worse than the best simple average by selection rows beyond the interval "
        f"in {len(worse)} of {n} runs{': ' + by_over if worse else ''}; its loss is above that of "
        f"uniform, by however little, in {above['uniform']}, above that of last in "
        f"{above['last']}.",
        f"With shuffled labels it takes a simple average in {len(safe)} of {n} runs.",
    ]


def study(runs: Sequence[Run]) -> Iterator[dict[str, object]]:
    """One setting of the linear solver changed at a time, in % of the Gumbel solver's losses."""
    gumbel = [brief(run.select(solver="gumbel")) for run in runs]
    unchanged: list[float] = []
    for change in CHANGES:
        changed = [brief(run.select(solver="linear", linear=change)) for run in runs]
        pairs = list(zip(changed, gumbel, strict=True))
        selection = [100 * (c["selection"] / g["selection"] - 1) for c, g in pairs]
        heldout = [100 * (c["heldout"] / g["heldout"] - 1) for c, g in pairs]
        unchanged = unchanged or heldout
        low, high = t_interval([one - two for one, two in zip(heldout, unchanged, strict=True)])
        yield {
            "changed": ", ".join(f"`{key}: {value}`" for key, value in change.items()) or "nothing",
            "selection, %": f"{mean(selection):+.2f}",
            "held out, %": f"{mean(heldout):+.2f}",
            "against no change (95 %)": f"{low:+.2f} .. {high:+.2f}",
            **{
                f"{task}, held out, %": f"{mean(own):+.2f}"
                for task in dict.fromkeys(run.task for run in runs)
                if (own := [x for run, x in zip(runs, heldout, strict=True) if run.task == task])
            },
            "seconds": mean([c["seconds"] for c in changed]),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="short runs: does it work at all?")
    parser.add_argument("--study", action="store_true", help="settings of the linear solver")
    parser.add_argument("--json", type=Path, help="everything that was measured")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = train_all(given.tasks.split(","), given.seeds, given.quick, Path(folder))
        if given.study:
            measured: Sequence[object] = (rows := list(study(list(runs))))
            print(markdown(rows))
        else:
            found = [measure(run) for run in runs]
            for table in (cost_rows(found), difference_rows(found)):
                print(markdown(table), end="\n\n")
            for which in ("sparse", "shuffled"):
                print(markdown(sparse_rows(found, which)), end="\n\n")
            print("\n".join(conclude(found)))
            measured = found
    if given.json is not None:
        given.json.write_text(json.dumps({"benchmark": "solvers", "runs": measured}, indent=2))


if __name__ == "__main__":
    main()
