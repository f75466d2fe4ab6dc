"""Snapshots or interval means? The held-out loss of averages, by the number of saves.

`python benchmarks/quality/means.py` trains four samples with three seeds at a constant rate. A
hundred snapshots and the means of the weights between them are kept: fewer saves are some of the
snapshots, and means of the means. The last fifth is trained once more, with the rate decayed to
nothing. It may be stopped and started again at any time. It needs `make data`.

    python benchmarks/quality/means.py --folder means-dir --settings text --seeds 3
    python benchmarks/quality/means.py --tables \
        --into benchmarks/quality/results/means.md --picture docs/images/means.png
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from outputs import moving_average, windows
from plan import REPORTED, SAMPLES
from running import call, keep, left_by
from safetensors.torch import load_file, save_file
from tables import estimate, fill, markdown
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from sewa_cli.callbacks import save_weights
from sewa_cli.commands.select import run_select
from sewa_cli.config import Config
from sewa_cli.extensions import load_settings
from sewa_cli.objective.batchnorm import tracking
from sewa_cli.objective.model import batchnorm_layers
from sewa_cli.task import load_task

SAVES = (5, 10, 20, 50, 100)
SOURCES = ("snapshots", "means", "both")


@dataclass(frozen=True)
class Setting:
    """A sample, the options of its train.py, and the data that its averages are judged by."""

    sample: str
    steps: int
    train: str
    args: tuple[str, ...]  # KEY=VALUE, for the task
    strides: tuple[int, ...] = (1,)  # a mean takes in every n-th step

    def training(self, seed: int) -> list[str]:
        """Return the arguments of `record`, but for folders."""
        own = [str(self.steps), str(self.steps // 5), ",".join(map(str, self.strides))]
        train = [f"{self.sample}/train.py", "--seed", str(seed), *self.train.split()]
        return [*own, *train, "--checkpoints", "1"]


CLONING, TEXT = ("env=none", "heldout=4000", "selection=1000"), ("heldout=1000", "selection=250")
LLAMA = "--steps 1000 --decay 0 --every 1 --width 64 --words 4096"
SETTINGS = {
    "cloning": Setting(
        "behavior_cloning", 8000, "--before 0 --every 8000", CLONING, strides=(1, 2, 10)
    ),
    "text": Setting("text_classification", 1500, "--warmup 0 --every 1500", TEXT),
    "images": Setting(
        "image_classification", 2000, "--warmup 0 --every 2000", (*TEXT, "statistics=500")
    ),
    "language model": Setting("language_model", 1000, LLAMA, ("limit=64",)),
}


# ---- training ------------------------------------------------------------------------------------


class Recorder:
    """Adds up the weights after each optimizer step, and saves them at each interval's end.

    It sees any training loop through torch's global hooks. A forked child decays the rate.
    """

    def __init__(self, home: Path, steps: int, decay: int, strides: Sequence[int]) -> None:
        self.home, self.steps, self.decay, self.strides = home, steps, decay, strides
        self.every, self.done, self.decays = steps // SAVES[-1], 0, False
        self.model: Any = None
        self._shadow: Any = None
        self._sums: dict[int, list[Tensor]] = {}
        self._handle = nn.modules.module.register_module_forward_pre_hook(self._find)
        optimizers.register_optimizer_step_pre_hook(self._slow_down)
        optimizers.register_optimizer_step_post_hook(self._after)

    def _find(self, module: nn.Module, _: Any) -> None:
        """Keep the first module that runs: the whole model."""
        self._handle.remove()
        self.model, self._shadow = module, copy.deepcopy(module)
        self._start()

    def _start(self) -> None:
        self._sums = {
            n: [torch.zeros_like(p) for p in self.model.parameters()] for n in self.strides
        }

    def _slow_down(self, optimizer: Any, *_: Any) -> None:
        """Scale the rate that the loop has set for this step."""
        for group in optimizer.param_groups if self.decays else ():
            group["lr"] *= (self.steps - self.done) / self.decay

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        self.done += 1
        if self.decays:
            if self.done == self.steps:
                save_weights(self.model, self.home / "decayed", self.done)
                os._exit(0)
            return
        for stride, sums in self._sums.items():
            if self.done % stride == 0:
                torch._foreach_add_(sums, list(self.model.parameters()))
        if self.done % self.every == 0:
            self._save()
        if self.done == self.steps - self.decay:
            child = os.fork()
            if child and os.waitpid(child, 0)[1]:
                raise RuntimeError("the decayed run failed")
            self.decays = not child

    def _save(self) -> None:
        save_weights(self.model, self.home / "snapshots", self.done)
        self._shadow.load_state_dict(self.model.state_dict())
        for stride, sums in self._sums.items():
            torch._foreach_div_(sums, self.every // stride)
            for mine, mean in zip(self._shadow.parameters(), sums, strict=True):
                mine.copy_(mean)
            save_weights(self._shadow, self.home / f"means-{stride}", self.done)
        self._start()


def record(home: str, steps: str, decay: str, strides: str, script: str, *options: str) -> None:
    """Run a sample's train.py under a recorder."""
    Recorder(Path(home), int(steps), int(decay), [int(n) for n in strides.split(",")])
    sys.path.insert(0, str(Path(script).parent.resolve()))
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


def train(folder: Path, name: str, setting: Setting, seed: int) -> Path:
    home = folder.resolve() / name / f"seed-{seed}"
    command = setting.training(seed)
    if left_by(home / "trained.json", command) is None:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        places = ["--out", str(home / "ckpts")]
        if setting.sample == "language_model":
            places += ["--data", str(home.parent / "data")]
        start = time.perf_counter()
        call([sys.executable, __file__, "--record", str(home), *command, *places], SAMPLES)
        seconds = round(time.perf_counter() - start, 1)
        keep(home / "trained.json", {"command": command, "seconds": seconds})
        print(f"{name} {seed}: trained in {seconds} s", file=sys.stderr)
    return home


# ---- averages ------------------------------------------------------------------------------------


class Trained:
    """A run's snapshots, interval means and decayed end as rows of weights, and their losses."""

    def __init__(self, setting: Setting, home: Path) -> None:
        self.setting, self.home = setting, home
        args = list(setting.args)
        if setting.sample == "language_model":
            args.append(f"model={home}/ckpts/checkpoint-{setting.steps}")
            args += [f"{part}={home.parent}/data/{part}.jsonl" for part in ("selection", "heldout")]
        self._sets = [f"args.{pair}" for pair in args]
        config = self._config(home)
        self._task = load_task(config.task, config.args)
        self._model = self._task.build_model().eval()
        self._heldout = list(self._task.heldout_data)
        has_statistics = bool(batchnorm_layers(self._model))
        self._statistics = list(self._task.training_data) if has_statistics else []
        self._template = load_file(home / "decayed" / f"step-{setting.steps}.safetensors")
        self._known: dict[bytes, float] = {}

    def _config(self, checkpoints: Path) -> Config:
        flags = {"checkpoints": (checkpoints,), "K": "auto", "last": None}
        return load_settings(SAMPLES / self.setting.sample / "sewa.yaml", flags, self._sets)

    def rows(self, kind: str) -> Tensor:
        """Return the weights [saves, P] of "snapshots", "means-1", … or "decayed"."""
        files = sorted((self.home / kind).iterdir(), key=lambda path: int(path.stem[5:]))
        return torch.stack([self._flat(load_file(file)) for file in files])

    def _flat(self, state: Mapping[str, Tensor]) -> Tensor:
        own = [state[name] for name, x in self._template.items() if x.is_floating_point()]
        return torch.cat([x.float().flatten() for x in own])

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        own = {name: x for name, x in self._template.items() if x.is_floating_point()}
        parts = flat.split([x.numel() for x in own.values()])
        named = zip(own.items(), parts, strict=True)
        return self._template | {name: part.view_as(x) for (name, x), part in named}

    @torch.no_grad()
    def loss(self, flat: Tensor) -> float:
        """Return the held-out loss of weights [P], with BatchNorm statistics recomputed."""
        key = hashlib.sha256(flat.numpy()).digest()
        if key not in self._known:
            self._model.load_state_dict(self._state(flat), strict=False)
            with tracking(self._model):
                for batch in self._statistics:
                    self._task.predict(self._model, batch)
            pairs = [(self._task.predict(self._model, batch), batch) for batch in self._heldout]
            self._known[key] = fmean(float(self._task.loss(*pair)) for pair in pairs)
        return self._known[key]

    def select(self, rows: Tensor) -> float:
        """Return the held-out loss of what `sewa select` makes of these rows by default."""
        with TemporaryDirectory() as folder:
            for step, row in enumerate(rows, 1):
                save_file(self._state(row), Path(folder) / f"step-{step}.safetensors")
            task = replace(self._task, metrics=None, summarize=None, heldout_data=None)
            chosen = run_select(self._config(Path(folder)), task, write=False)
        return self.loss(self._flat(chosen.state_dict()))


def thin(source: str, snapshots: Tensor, means: Tensor, saves: int) -> Tensor:
    """Return the rows of a run with fewer saves: some of the snapshots, or means of means."""
    between = len(snapshots) // saves
    some = snapshots[between - 1 :: between]
    coarse = means.view(saves, between, -1).mean(1)
    both = torch.stack([coarse, some], 1).flatten(0, 1)  # a mean is older than its snapshot
    return {"snapshots": some, "means": coarse, "both": both}[source]


def hindsight(run: Trained, rows: Tensor) -> float:
    """Return the lowest held-out loss of moving averages, `latest` and the mean of all.

    All windows at the last save, then the two best at five earlier ends in the second half.
    """
    k = len(rows)

    def moving(end: int, window: int) -> float:
        return run.loss(moving_average(end, window).float() @ rows[:end])

    last = {window: moving(k, window) for window in windows(k)}
    best = sorted(last, key=last.__getitem__)[:2]
    ends = {k * tenth // 10 for tenth in range(5, 10)}
    earlier = [moving(end, window) for end in ends for window in best]
    latest = [run.loss(rows[-K:].mean(0)) for K in (2, 5, 10, 20, 50, k) if k >= K]
    return min(*last.values(), *earlier, *latest)


Units = dict[str, float]


def measure(units: Units, path: Path, run: Trained, key: str) -> None:
    """Measure what is not in `units`; each is kept as soon as it is known."""

    def unit(name: str, find: Callable[[], float]) -> None:
        if f"{key} {name}" not in units:
            units[f"{key} {name}"] = float(f"{find():.7g}")
            keep(path, units)

    snapshots, means = run.rows("snapshots"), run.rows("means-1")
    unit("decayed", lambda: run.loss(run.rows("decayed")[0]))
    unit("newest snapshots", lambda: run.loss(snapshots[-1]))
    for stride in run.setting.strides:
        sums = run.rows(f"means-{stride}")
        for saves in SAVES:
            rows = thin("means", snapshots, sums, saves)
            unit(f"newest means-{stride} {saves}", lambda rows=rows: run.loss(rows[-1]))
            unit(f"best means-{stride} {saves}", lambda rows=rows: hindsight(run, rows))
    for saves in SAVES:
        some = thin("snapshots", snapshots, means, saves)
        unit(f"best snapshots {saves}", lambda rows=some: hindsight(run, rows))
        # the snapshots or the means may have no coefficients
        either = [units[f"{key} best {source} {saves}"] for source in ("snapshots", "means-1")]
        both = thin("both", snapshots, means, saves)
        unit(
            f"best both {saves}",
            lambda rows=both, either=either: min(hindsight(run, rows), *either),
        )
        for source in SOURCES:
            rows = thin(source, snapshots, means, saves)
            unit(f"default {source} {saves}", lambda rows=rows: run.select(rows))
    print(f"{key}: measured", file=sys.stderr)


# ---- tables --------------------------------------------------------------------------------------


def runs_of(units: Units, name: str, setting: str | None) -> dict[str, float]:
    """Return a unit's losses by run, "text 3"; of one setting or of all."""
    end = f" {name}"
    named = {key.removesuffix(end): loss for key, loss in units.items() if key.endswith(end)}
    return {run: x for run, x in named.items() if setting in (None, run.rpartition(" ")[0])}


def change(mine: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """Show by how many per cent losses are higher, paired by run; bold if significant.

    Runs of several settings are also counted: how many of the losses are lower.
    """
    paired = sorted(mine.keys() & theirs.keys())
    found = estimate([100 * (mine[run] / theirs[run] - 1) for run in paired])
    if found.half is None:
        return f"{found.mean:+.2f}" if found.runs else ""
    low, high = found.mean - found.half, found.mean + found.half
    shown = f"{found.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    shown = f"**{shown}**" if low * high > 0 else shown
    lower = sum(mine[run] < theirs[run] for run in paired)
    is_mixed = len({run.rpartition(" ")[0] for run in paired}) > 1
    return f"{shown}, {lower} of {found.runs}" if is_mixed else shown


Table = list[dict[str, str]]


def compared(units: Units, columns: Mapping[str, str], settings: Sequence[str]) -> Table:
    """A row for each setting and number of saves: a loss, and how far others are above it.

    `columns`: title → name of a unit, with {} for the number of saves. All runs come last.
    """
    (first, base), *others = columns.items()
    table = []
    for setting in [*settings, None]:
        for saves in SAVES:
            known = runs_of(units, base.format(saves), setting)
            row = {"setting": setting or f"all {len(known)} runs", "saves": str(saves)}
            row[first] = f"{fmean(known.values()):#.4g}" if setting and known else ""
            for title, name in others:
                row[f"{title}, %"] = change(runs_of(units, name.format(saves), setting), known)
            table += [row] if known else []
    return table


def tables_of(units: Units, settings: Sequence[str]) -> dict[str, Table]:
    best = {"snapshots": "best snapshots {}", "means": "best means-1 {}", "both": "best both {}"}
    default = {source: f"default {source} {{}}" for source in SOURCES}
    newest = {"newest snapshot": "newest snapshots", "newest mean": "newest means-1 {}"}
    decay = {
        "decayed": "decayed",
        "newest snapshot": "newest snapshots",
        "default of snapshots": "default snapshots {}",
        "default of means": "default means {}",
        "default of both": "default both {}",
        "newest mean": "newest means-1 {}",
    }

    def dense(kind: str, columns: Mapping[str, str]) -> Table:
        first = {"snapshots of 100 saves": f"{kind} snapshots 100"}
        return compared(units, first | dict(columns), settings)

    strides = {f"every {n} steps" if n > 1 else "every step": n for n in (1, 2, 10)}
    thinned = {title: f"best means-{n} {{}}" for title, n in strides.items()}
    return {
        "best average by hindsight": compared(units, best, settings),
        "a hundred snapshots by hindsight": dense("best", best),
        "the default": compared(units, default, settings),
        "a hundred snapshots by default": dense("default", default),
        "the newest mean": compared(units, newest, settings),
        "decay": compared(units, decay, settings),
        "every n steps": compared(units, thinned, ["cloning"])[: len(SAVES)],
    }


LINES = {
    "snapshots, `sewa select`": ("default snapshots", "-", "#0072B2"),
    "snapshots, best by hindsight": ("best snapshots", "--", "#0072B2"),
    "means, `sewa select`": ("default means", "-", "#D55E00"),
    "means, best by hindsight": ("best means-1", "--", "#D55E00"),
    "both, `sewa select`": ("default both", "-", "#009E73"),
}
LEVELS = {"newest snapshot": ("newest snapshots", ":"), "rate decayed": ("decayed", "-.")}


def draw(units: Units, settings: Sequence[str], path: Path) -> None:
    """Draw the held-out loss by the number of saves, a panel for each setting."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(settings), figsize=(3.3 * len(settings), 3.4), squeeze=False)
    for axis, setting in zip(axes[0], settings, strict=True):
        for label, (name, style, colour) in LINES.items():
            points = {n: runs_of(units, f"{name} {n}", setting).values() for n in SAVES}
            known = {n: fmean(losses) for n, losses in points.items() if losses}
            xs, ys = list(known), list(known.values())
            axis.plot(xs, ys, style, color=colour, marker="o", markersize=3.5, label=label)
        for label, (name, style) in LEVELS.items():
            level = fmean(runs_of(units, name, setting).values())
            axis.axhline(level, linestyle=style, color="#555555", linewidth=1, label=label)
        axis.set_xscale("log")
        axis.set_xticks(SAVES, map(str, SAVES))
        axis.minorticks_off()
        axis.set_title(setting, fontsize=10)
        axis.set_xlabel("saves in the run")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("held-out loss")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False
    )
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--folder", type=Path, default=Path("means-dir"))
    add("--units", type=Path, default=Path(__file__).with_suffix(".json"), help="what is known")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add("--seeds", nargs="+", type=int, default=REPORTED)
    add("--tables", action="store_true", help="run nothing")
    add("--into", type=Path, nargs="+", default=[], help="pages to fill, at marks")
    add("--picture", type=Path, help="where to draw the losses")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    units = json.loads(asked.units.read_text()) if asked.units.exists() else {}
    for name in () if asked.tables else asked.settings:
        for seed in asked.seeds:
            home = train(asked.folder, name, SETTINGS[name], seed)
            measure(units, asked.units, Trained(SETTINGS[name], home), f"{name} {seed}")
    known = [name for name in asked.settings if runs_of(units, "decayed", name)]
    tables = tables_of(units, known)
    for title, rows in tables.items():
        print(f"### {title}\n\n{markdown(rows)}\n", flush=True)
    fill(asked.into, tables, "means")
    if asked.picture:
        draw(units, known, asked.picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(*sys.argv[2:])
    else:
        main()
