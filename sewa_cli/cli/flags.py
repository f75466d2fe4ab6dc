"""Every flag, written once; and commands made of a function and the names of their flags."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand

from sewa_cli.present import FORMS
from sewa_cli.report import KINDS
from sewa_cli.text import one_line

FORMATS: Final = tuple(FORMS)
PATHS: Final = "paths"  # what `select` and `average` print, if nothing else is asked for


class Flag(NamedTuple):
    """`form`: names and what follows them, `--output -o PATH`; without names it is an argument."""

    form: str
    help: str
    key: str | None = ""  # of sewa.yaml; "": called as here; None: not a setting
    fallback: Any = None  # ...: must be given
    shown: str = ""  # the default as `--help` shows it
    is_rare: bool = False  # named at the end of `--help`

    @property
    def names(self) -> list[str]:
        return [word for word in self.form.split() if word.startswith("-")]

    @property
    def metavar(self) -> str | None:
        return next((word for word in self.form.split() if not word.startswith("-")), None)

    @property
    def choices(self) -> list[str]:
        words = (self.metavar or "").split("|")
        return words if len(words) > 1 else []

    @property
    def default(self) -> Any:
        return False if self.metavar is None else self.fallback

    @property
    def type(self) -> Any:
        """Numbers are text, so that the config tells all faults together and in the same words."""
        if self.metavar is None:
            return bool
        if self.metavar in ("CKPTS", "GLOB", "KEY=VALUE", "NAME:WHERE"):
            return list[str] | None
        one: type = Path if self.metavar in ("FILE", "DIR", "REPORT") else str
        return one | None if self.fallback is None else one


_BASELINES: Final = "the best baseline, the last checkpoint or the mean of all"
_COMMON: Final = {
    "ckpts": Flag(
        "CKPTS", "A run's folder, checkpoints, or - for paths on standard input.", "checkpoints"
    ),
    "task": Flag("--task TASK", "A task.py, a module, or the name of a ready-made task."),
    "score": Flag(
        "--score CMD", "Instead of a task: a command that prints the score of {checkpoint}."
    ),
    "ready_task": Flag("--task NAME", "huggingface, gymnasium, …: no task.py needed.", None),
    "K": Flag(
        "--K -K N",
        "Average K checkpoints with equal coefficients.",
        shown="auto, which learns the coefficients",
    ),
    "budgets": Flag(
        "--K -K N,N", "Numbers of checkpoints to average, 5,10,20.", "compare.K", shown="10"
    ),
    "metric": Flag(
        "--metric NAME",
        "Choose by this metric instead of the loss; -NAME if lower is better.",
        "objective.metric",
    ),
    "measured": Flag("--metric NAME", "Also report this metric.", "objective.metric"),
    "methods": Flag(
        "--methods A,B,C",
        "Names from `sewa methods`, or ema:decay=0.5.",
        "compare.methods",
        shown="aggregate, sewa and eight others",
    ),
    "method": Flag(
        "--method NAME", "A name from `sewa methods`, or ema:decay=0.5.", None, shown="uniform"
    ),
    "weights": Flag(
        "--weights A,B,..", "One coefficient for each file, in order; they sum to 1.", None
    ),
    "output": Flag(
        "--output -o PATH",
        "The averaged checkpoint; - for standard output.",
        shown="averaged.safetensors",
    ),
    "rebuilt": Flag("--output -o PATH", "A file, or - for standard output.", None, ...),
    "page": Flag("--output -o FILE", "The page; - for standard output.", None, ...),
    "output_best": Flag("--output-best FILE", "Write the average of the best row here.", None),
    "force": Flag("--force -f", "Overwrite existing outputs.", None),
    "config": Flag("--config -c FILE", "The settings.", None, shown="sewa.yaml"),
    "sets": Flag("--set KEY=VALUE", "Override any key of sewa.yaml: --set gumbel.lr=0.1", None),
    "dry_run": Flag(
        "--dry-run", "Print what would be read and computed, and how long it takes.", None
    ),
}
_WHICH: Final = {
    "last": Flag("--last N", "Only the last N.", shown="all"),
    "every": Flag("--every N", "Only every N-th, counted back from the newest.", is_rare=True),
    "source": Flag(
        "--from snapshots|means|both",
        "The weights at the saves, or means.",
        "from",
        shown="means, if each save has one",
    ),
    "from_step": Flag("--from-step STEP", "First step to include."),
    "to_step": Flag("--to-step STEP", "Last step to include.", is_rare=True),
    "exclude": Flag("--exclude GLOB", "Leave out these names: 'epoch-*'.", is_rare=True),
    "revisions": Flag(
        "--revisions PATTERN", "Of hf://NAME/NAME, the revisions to average: 'step*'.", is_rare=True
    ),
    "scratch": Flag(
        "--scratch DIR", "Where remote files and averages for --score are kept.", is_rare=True
    ),
    "scratch_size": Flag(
        "--scratch-size SIZE", "The most that is kept of them: 50GB.", is_rare=True
    ),
    "state_key": Flag("--state-key KEY", "Average the tensors under this key alone.", is_rare=True),
}
_HOW: Final = {
    "sparse": Flag("--sparse", "Average few checkpoints equally, K by cross-validation."),
    "solver": Flag(
        "--solver NAME",
        "A name from `sewa solvers`.",
        shown="aggregate; with --K, gumbel; with --metric, race",
    ),
    "learner": Flag("--solver NAME", "The solver of the method `sewa`.", "solver", shown="gumbel"),
    "effort": Flag(
        "--budget N",
        "Evaluations of the metric, or a time: 500, 10m.",
        "objective.budget",
        shown="500",
    ),
    "incumbent": Flag(
        "--incumbent NAME",
        "The average to beat by the metric, from `sewa methods`.",
        "objective.incumbent",
        shown="the choice by the loss",
        is_rare=True,
    ),
    "workers": Flag(
        "--workers N", "Processes that evaluate the metric.", "objective.workers", shown="1"
    ),
    "guard": Flag("--guard FRACTION", "Hold back this fraction of the selection data: 0.2."),
    "fallback": Flag("--fallback", f"Write {_BASELINES} if its held-out loss is lower."),
    "fast": Flag("--fast", "Search by predicted losses, from one cache.", "compare.fast"),
}
_WRITE: Final = {
    "report": Flag("--report FILE", "The JSON report.", shown="next to the output, or inside"),
    "recipe": Flag(
        "--report FILE", "Write a report for `sewa apply`; hashes the sources.", "report"
    ),
    "best_report": Flag("--report FILE", "The JSON report.", None, shown="next to --output-best"),
    "output_dtype": Flag(
        "--output-dtype float32|bfloat16|float16|float64", "Write as", shown="as the checkpoints"
    ),
    "shard_size": Flag(
        "--shard-size SIZE", "Write a folder of shards: 5GB, 2GiB.", shown="one file", is_rare=True
    ),
    "plot": Flag("--plot FILE", "Write a figure: .png, .svg or .pdf", None),
    "html": Flag("--html FILE", "Write a self-contained HTML page.", None),
    "open_it": Flag("--open", "Show the page in a browser.", None),
    "log": Flag("--log NAME:WHERE", "Log to tensorboard:DIR or wandb:PROJECT.", None),
    "format": Flag(f"--format {'|'.join(FORMATS)}", "Print as", None, shown=FORMATS[0]),
    "paths_format": Flag(
        f"--format {'|'.join((PATHS, *FORMATS))}", "Print as", None, shown="paths when piped"
    ),
    "json": Flag("--json", "The same as --format json.", None),
    "print0": Flag("--print0", "End each path with a NUL byte, for xargs -0.", None, is_rare=True),
}
_RUN: Final = {
    "folder": Flag("DIR", "The folder to write to.", None, Path(), shown="this one"),
    "demo_folder": Flag("DIR", "A new folder.", None, Path("sewa-demo"), shown="sewa-demo"),
    "shown": Flag("REPORT", "A JSON report of any command.", None, ...),
    "past": Flag("REPORT", "A report of `select`, `average` or `compare`.", None, ...),
    "verified": Flag("REPORT", "A report, or an output that has one.", None, ...),
    "root": Flag("--root DIR", "Look for the report's files under this folder only.", None),
    "output_only": Flag("--output-only", "Do not check the checkpoints.", None),
    "kind": Flag("|".join(KINDS), "The kind of report:", None, "select", shown="select"),
    "memory": Flag("--memory SIZE", "Memory budget: 8GiB, 500MB.", shown="half of what is free"),
    "cache": Flag("--cache DIR", "Keep results here; an interrupted command resumes."),
    "device": Flag("--device DEVICE", "cpu, cuda, cuda:1, mps.", shown="auto"),
    "seed": Flag("--seed N", "The same seed gives the same bytes.", shown="0"),
    "strict": Flag("--strict", f"Exit with 5 if {_BASELINES} has a lower held-out loss."),
    "quiet": Flag("--quiet -q", "Print only errors on stderr.", None),
    "verbose": Flag("--verbose -v", "Print more on stderr, and full tracebacks.", None),
}
_PANELS: Final = {
    "Common": _COMMON,
    "Which checkpoints": _WHICH,
    "How to choose": _HOW,
    "What to write": _WRITE,
    "How to run": _RUN,
}
FLAGS: Final = {name: flag for panel in _PANELS.values() for name, flag in panel.items()}


class _Argument(TyperArgument):
    """An argument whose `--help` says what it is, and not its type in Python."""

    def display_type_rich(self, ctx: Any) -> str | None:  # noqa: ARG002
        return None


def plain(params: list[Any]) -> list[Any]:
    """Take the types of switches and arguments out of `--help`, where they say nothing."""
    for param in params:
        if isinstance(param, TyperArgument):
            param.__class__ = _Argument
        elif param.is_flag:
            param.metavar = ""
    return params


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        params = plain(super().get_params(ctx))
        for param in params:
            if "--help" in param.opts:
                param.rich_help_panel = list(_PANELS)[-1]
        return params


def add_command(
    app: typer.Typer,
    run: Callable[[Callable[..., None], dict[str, Any]], None],
    flags: str,
    group: str,
    *examples: str,
) -> Callable[[Callable[..., None]], None]:
    """Return a decorator that makes a function the command of its name, with these flags.

    `run(function, given)` is called with the flags as they were given.
    """
    panels = list(_PANELS)
    names = sorted(flags.split(), key=lambda name: panels.index(_panel(name)))

    def add(function: Callable[..., None]) -> None:
        def command(**given: Any) -> None:
            run(function, given)

        hints = {name: Annotated[FLAGS[name].type, _typer_info(name)] for name in names}
        command.__annotations__ = hints
        command.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(
                    name, Parameter.KEYWORD_ONLY, default=FLAGS[name].default, annotation=hint
                )
                for name, hint in hints.items()
            ]
        )
        # typer keeps the line breaks of a paragraph
        paragraphs = (function.__doc__ or "").split("\n\n")
        command.__doc__ = "\n\n".join(one_line(paragraph) for paragraph in paragraphs)
        epilog = ["Examples:", *examples] if examples else []
        if rare := [FLAGS[name].form for name in names if FLAGS[name].is_rare]:
            epilog.append(f"Also (see the docs): {', '.join(rare)}.")
        app.command(
            function.__name__, cls=Command, rich_help_panel=group, epilog="\n\n".join(epilog)
        )(command)

    return add


def _panel(name: str) -> str:
    return next(title for title, flags in _PANELS.items() if name in flags)


def _typer_info(name: str) -> Any:
    flag = FLAGS[name]
    options: dict[str, Any] = {"metavar": flag.metavar or "", "show_default": False}
    options["help"] = f"{flag.help} Default: {flag.shown}." if flag.shown else flag.help
    options["readable"] = False  # that is: not for typer to check; whoever opens it says what it is
    if flag.choices:
        options["autocompletion"] = lambda: flag.choices
    if len(flag.choices) > 3:  # too many to stand in their column
        default = f" Default: {flag.shown}." if flag.shown else ""
        words = f"{flag.help} {', '.join(flag.choices)}.{default}"
        options |= {"metavar": "NAME", "help": words.strip()}
    if not flag.names:
        return typer.Argument(**options)
    return typer.Option(*flag.names, **options, rich_help_panel=_panel(name), hidden=flag.is_rare)
