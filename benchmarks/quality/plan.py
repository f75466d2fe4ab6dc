"""The plan: settings, training runs, and the commands for each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SAMPLES = Path(__file__).parents[2] / "sample_configs"
BUDGETS = (10, 20, 50, 100)
TUNING = (0, 1, 2)  # seeds that defaults may be chosen by
REPORTED = (3, 4, 5)  # seeds that nothing was chosen by


@dataclass(frozen=True)
class Setting:
    """One of the paper's, as a folder of sample_configs/ and how to call what is in it."""

    name: str
    folder: str
    k: int
    metric: str
    train: tuple[str, ...] = ()  # options of train.py
    args: tuple[str, ...] = ()  # KEY=VALUE, for the task
    whole_run: int = 500  # checkpoints that train.py leaves
    before: int = 0  # steps before the first of them, less `every`
    every: int = 1  # steps between two of them
    studied: bool = True  # forward selection and overfitting: one data set of each task
    samples: Path = SAMPLES
    budgets: tuple[int, ...] = BUDGETS
    sizes: tuple[int, ...] = (200, 1000, 5000)  # rows to select by, few to all

    @property
    def home(self) -> Path:
        return self.samples / self.folder

    @property
    def learnable(self) -> list[int]:
        """Budgets that leave something to choose."""
        return [K for K in self.budgets if self.k > K]


def cloning(data: str, *train: str, kind: str = "", studied: bool = False) -> Setting:
    return Setting(
        f"{data} {kind}".strip(),
        "behavior_cloning",
        k=1000,
        metric="return",
        train=("--data", data, *train),
        args=(f"data={data}",),
        studied=studied,
    )


def images(*train: str, kind: str = "", run: int = 500) -> Setting:
    name, studied = f"images {kind}".strip(), not kind
    folder = "image_classification"
    sizes = (200, 1000, 5000 if studied else 3000)
    return Setting(
        name,
        folder,
        100,
        "accuracy",
        train,
        whole_run=run,
        before=1000,
        every=8,
        studied=studied,
        sizes=sizes,
    )


def text(*train: str, kind: str = "", run: int = 500) -> Setting:
    """Return a text setting; 4,955 of IMDB's rows are left to select by."""
    name, studied, sizes = f"text {kind}".strip(), not kind, (200, 1000, 4900 if not kind else 3000)
    folder = "text_classification"
    return Setting(
        name,
        folder,
        100,
        "accuracy",
        train,
        whole_run=run,
        before=500,
        every=4,
        studied=studied,
        sizes=sizes,
    )


HUNDRED = ("--checkpoints", "100")
SETTINGS = {
    setting.name: setting
    for setting in (
        cloning("hopper-medium", studied=True),
        cloning("hopper-medium-expert"),
        # ten times the rate: an unstable run
        cloning("hopper-medium", "--rate", "0.003", kind="at rate 0.003"),
        cloning("lunarlander-medium"),
        images(),
        text(),
        # as good alone after fewer steps, less steady
        text("--lr", "0.003", "--every", "2", kind="at rate 0.003"),
        # runs that drift: from the beginning of training on, at a constant rate
        cloning("hopper-medium", "--before", "500", kind="early"),
        images("--warmup", "100", *HUNDRED, kind="early", run=100),
        text("--warmup", "100", *HUNDRED, kind="early", run=100),
        # runs that come to rest: the rate falls to nothing over the checkpoints
        cloning("hopper-medium", "--decay", "linear", kind="decaying"),
        images("--warmup", "3000", "--decay", "linear", *HUNDRED, kind="decaying", run=100),
        text("--warmup", "1500", "--decay", "linear", *HUNDRED, kind="decaying", run=100),
        # runs that have settled: the rate fell to a tenth long before the first checkpoint
        cloning("hopper-medium", "--decay", "step", kind="settled"),
        images("--warmup", "3000", "--decay", "step", *HUNDRED, kind="settled", run=100),
        text("--warmup", "1500", "--decay", "step", *HUNDRED, kind="settled", run=100),
    )
}


@dataclass(frozen=True)
class Job:
    """One `sewa compare` over one training run. Its name is that of the file it leaves.

    Without budgets it is `sewa select`, which compares nothing but finds K itself.
    """

    study: str
    name: str
    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    options: tuple[str, ...] = ()
    sets: tuple[str, ...] = field(default=())  # KEY=VALUE, as for --set
    to_step: int | None = None  # the last that is looked at; None: all

    def arguments(self, setting: Setting, checkpoints: str, config: str) -> list[str]:
        sets = [f"args.{pair}" for pair in setting.args] + list(self.sets)
        output = f"{checkpoints}-auto.safetensors"
        budgets = ",".join(map(str, self.budgets)) or "auto"
        select = ("--json", "--output", output, "--force")
        return [
            "compare" if self.budgets else "select",
            checkpoints,
            *("--config", config),
            *(("--methods", ",".join(self.methods)) if self.budgets else ()),
            *("--K", budgets),
            *("--last", str(setting.k)),
            *(("--to-step", str(self.to_step)) if self.to_step else ()),
            *self.options,
            *(part for pair in sets for part in ("--set", pair)),
            *(("--format", "json") if self.budgets else select),
            "--quiet",
        ]


SIMPLE = ("last", "uniform", "lawa", "latest", "swa", "ema", "ema-window", "random", "wsm")
SEARCHED = ("best", "topk", "greedy", "twa")
LINEAR = ("--solver", "linear")
SPARSE = ("--sparse",)


def methods(setting: Setting) -> Iterator[Job]:
    """Every method of `compare`, at every K."""
    budgets = tuple(setting.learnable)
    yield Job("methods", "simple", SIMPLE, budgets)
    if setting.k in setting.budgets:  # two that are not the mean of all at K = k
        yield Job("methods", "all", ("wsm", "ema-window"), (setting.k,))
    yield Job("methods", "searched", SEARCHED, budgets)
    yield Job("methods", "gumbel", ("sewa",), budgets)
    yield Job("methods", "linear", ("sewa",), budgets, LINEAR)
    yield Job("methods", "auto", ("sewa",), (), SPARSE)
    if setting.studied:  # a search over K · k averages: from one cache of outputs, or not at all
        yield Job("methods", "forward", ("forward",), budgets, ("--fast",))


def overfitting(setting: Setting) -> Iterator[Job]:
    """Rows to select by, fresh or those of training; few checkpoints or half of them."""
    if not setting.studied:
        return
    few, half = setting.budgets[0], setting.learnable[-1]
    for rows in setting.sizes:
        yield _selecting_by(rows, "fresh", "gumbel", few, half)
        if rows != setting.sizes[1]:
            yield _selecting_by(rows, "training", "gumbel", few)
            yield _selecting_by(rows, "fresh", "linear", few)


def _selecting_by(rows: int, source: str, solver: str, *budgets: int) -> Job:
    sets = (f"args.selection={rows}", f"args.selection_from={source}")
    options = LINEAR if solver == "linear" else ()
    name = f"{solver} {source} {rows}"
    return Job("overfitting", name, ("sewa", "uniform"), budgets, options, sets)


FIXED = ("last", "uniform", "swa", "ema", "power", "lawa", "latest", "ema-window", "wsm")


def regret(setting: Setting, seed: int = REPORTED[0]) -> Iterator[Job]:
    """Yield the default and its alternatives, by few examples, some and all.

    Each training run has rows of its own: few of them mislead by chance, and if all runs had the
    same, their mean would not tell that from a fault.
    """
    # returns are not needed here, and take longer than all else
    sets = ("args.episodes=1",) if setting.metric == "return" else ()
    # what learns nothing needs no rows to learn by
    few = (*sets, f"args.selection={setting.sizes[0]}")
    yield Job("regret", "fixed", FIXED, tuple(setting.learnable), sets=few)
    for rows in setting.sizes:
        by = (*sets, f"args.selection={rows}")
        if rows != setting.sizes[-1] and (turn := seed % len(REPORTED)):
            by += (f"args.selection_skip={turn * rows}",)
        searched = ("aggregate", "sewa", "greedy")
        yield Job("regret", f"learned {rows}", searched, setting.budgets[:1], sets=by)
        yield Job("regret", f"sparse {rows}", ("sewa",), (), SPARSE, by)


DRAWN = ("hopper-medium at rate 0.003", "images", "text")
DRAWS = 8


def draws(setting: Setting) -> Iterator[Job]:
    """Yield the default on one training run, by other few examples each time."""
    rows = setting.sizes[0]
    for draw in range(DRAWS if setting.name in DRAWN else 0):
        sets = [f"args.selection={rows}", f"args.selection_skip={draw * rows}"]
        sets += ["args.episodes=1"] if setting.metric == "return" else []
        yield Job("draws", f"draw {draw}", (), (), sets=tuple(sets))


def windows(setting: Setting) -> Iterator[Job]:
    """The paper's curves: a point for each hundred checkpoints, where there are more."""
    if setting.studied and setting.k < setting.whole_run:
        chosen = ("last", "uniform", "lawa", "random", "ema", "sewa")
        for count in range(setting.k, setting.whole_run + 1, setting.k):
            step = setting.before + count * setting.every
            yield Job("windows", f"to step {step}", chosen, setting.budgets[:1], to_step=step)


STUDIES: dict[str, tuple[Callable[[Setting], Iterator[Job]], tuple[int, ...]]] = {
    "methods": (methods, REPORTED),
    "overfitting": (overfitting, REPORTED),
    "windows": (windows, REPORTED),
    "regret": (regret, REPORTED),
    "draws": (draws, TUNING[:1]),
}
