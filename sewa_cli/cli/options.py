"""Every flag, written once; and the request that the flags of a command make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand

from sewa_cli import ranks
from sewa_cli.cli.console import Talk
from sewa_cli.cli.main import stdout_for_data, typed
from sewa_cli.cli.memory import check_address_space, keep_memory
from sewa_cli.cli.pictures import (
    check_apart,
    check_no_input,
    check_page,
    check_plot,
    save_figure,
    save_page,
)
from sewa_cli.errors import ConfigError
from sewa_cli.files import MIB
from sewa_cli.present import FORMS
from sewa_cli.report import KINDS
from sewa_cli.text import one_line, shown_lines

if TYPE_CHECKING:
    from sewa_cli.config import Config
    from sewa_cli.report.shared import Head
    from sewa_cli.task import Task

FORMATS: Final = tuple(FORMS)
STDIN: Final = "-"
STDOUT: Final = "-"
WITHOUT_TORCH: Final = ("average", "apply", "verify", "methods", "init", "schema")
PATHS: Final = "paths"  # what `select` and `average` print, if nothing else is asked for


class Flag(NamedTuple):
    """`form`: names and what follows them, `--output -o PATH`; without names it is an argument."""

    form: str
    help: str
    key: str | None = ""  # of sewa.yaml; "": called as here; None: not a setting
    fallback: Any = None  # ...: must be given
    shown: str = ""  # the default as `--help` shows it

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
        if self.metavar in ("CKPTS", "KEY=VALUE", "NAME:WHERE"):
            return list[str] | None
        one: type = Path if self.metavar in ("FILE", "DIR", "REPORT") else str
        return one | None if self.fallback is None else one


_COMMON: Final = {
    "ckpts": Flag(
        "CKPTS", "A run's folder, checkpoints, or - for paths on standard input.", "checkpoints"
    ),
    "task": Flag("--task TASK", "A task.py, a module, or huggingface, classification, gymnasium."),
    "ready_task": Flag(
        "--task NAME", "huggingface, classification or gymnasium: no task.py needed.", None
    ),
    "K": Flag(
        "--K -K N",
        "Average K checkpoints with equal weights.",
        shown="auto, which learns the weights",
    ),
    "budgets": Flag("--K -K N,N", "Numbers of checkpoints to average, 5,10,20.", "compare.K"),
    "metric": Flag(
        "--metric NAME",
        "Choose by this metric instead of the loss; -NAME if lower is better.",
        "objective.metric",
    ),
    "measured": Flag("--metric NAME", "Also report this metric.", "objective.metric"),
    "methods": Flag(
        "--methods A,B,C", "Names from `sewa methods`, or ema:decay=0.5.", "compare.methods"
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
    "every": Flag("--every N", "Only every N-th, counted back from the newest."),
    "from_step": Flag("--from-step STEP", "First step to include."),
    "to_step": Flag("--to-step STEP", "Last step to include."),
    "state_key": Flag("--state-key KEY", "Average the tensors under this key alone."),
}
_HOW: Final = {
    "sparse": Flag("--sparse", "Average few checkpoints equally, K by cross-validation."),
    "solver": Flag("--solver NAME", "A name from `sewa solvers`.", shown="by K and metric"),
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
    ),
    "workers": Flag(
        "--workers N", "Processes that evaluate the metric.", "objective.workers", shown="1"
    ),
    "guard": Flag("--guard SHARE", "Hold back this share of the selection data: 0.2."),
    "fallback": Flag("--fallback", "Write a baseline if its held-out loss is lower."),
    "fast": Flag("--fast", "Search by predicted losses, from one cache.", "compare.fast"),
}
_WRITE: Final = {
    "report": Flag("--report FILE", "The JSON report.", shown="next to the output, or inside"),
    "recipe": Flag(
        "--report FILE", "Write a report for `sewa apply`; hashes the sources.", "report"
    ),
    "best_report": Flag("--report FILE", "The JSON report.", None, shown="as of --output"),
    "output_dtype": Flag(
        "--output-dtype float32|bfloat16|float16|float64", "Write as", shown="as the checkpoints"
    ),
    "shard_size": Flag(
        "--shard-size SIZE", "Write a folder of shards: 5GB, 2GiB.", shown="one file"
    ),
    "plot": Flag("--plot FILE", "Write a figure: .png, .svg or .pdf", None),
    "html": Flag("--html FILE", "Write a page that can be sent.", None),
    "open_it": Flag("--open", "Show the page in a browser.", None),
    "log": Flag("--log NAME:WHERE", "Log to tensorboard:DIR or wandb:PROJECT.", None),
    "format": Flag(f"--format {'|'.join(FORMATS)}", "Print as", None, shown=FORMATS[0]),
    "paths_format": Flag(f"--format {'|'.join((PATHS, *FORMATS))}", "Print as", None, shown=PATHS),
    "json": Flag("--json", "The same as --format json.", None),
    "print0": Flag("--print0", "End each path with a NUL byte, for xargs -0.", None),
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
    "cache": Flag("--cache DIR", "Keep results here; after a kill, the same command goes on."),
    "device": Flag("--device DEVICE", "cpu, cuda, cuda:1, mps.", shown="auto"),
    "seed": Flag("--seed N", "The same seed gives the same bytes.", shown="0"),
    "strict": Flag("--strict", "Exit with 5 if a baseline has a lower held-out loss."),
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


class Request:
    """What a command was asked for, and where its answer goes."""

    def __init__(self, given: dict[str, Any], stdout: IO[bytes]) -> None:
        """Takes from `given` what is alike in all commands; what is left is the command's own."""
        self.stdout = stdout
        quiet, verbose = given.pop("quiet", False), given.pop("verbose", False)
        speaks = ranks.here().rank == 0
        self.talk = Talk(quiet or not speaks, verbose and speaks)
        self.force: bool = given.pop("force", False)
        self.plot: Path | None = given.pop("plot", None)
        self.html: Path | None = given.pop("html", None)
        log: list[str] = given.pop("log", None) or []
        if not speaks:  # nor draws
            self.plot, self.html, log = None, None, []
        form = "paths_format" if "paths_format" in given else "format"
        asked: str | None = given.pop(form, None)
        self.form = _form(asked, given.pop("json", False), FLAGS[form].choices)
        self._print0: bool = given.pop("print0", False)
        self._wants_paths = asked == PATHS or self._print0
        self._sets: list[str] = given.pop("sets", None) or []
        has_config = "config" in given
        self._with_solver = "task" in given  # whoever has no task chooses nothing
        self._masks = "methods" in given
        self._config: Path | None = given.pop("config", None)
        self.flags: dict[str, Any] = {}  # key of sewa.yaml → its value, where one was given
        for name in [name for name in given if FLAGS[name].key is not None]:
            value = given.pop(name)
            if value not in (None, False, []):
                self.flags[FLAGS[name].key or name] = value
        if has_config:
            _ = self.inputs  # faults of the config come before all others
        others: list[Path | str | None] = [one.partition(":")[2] or None for one in log]
        if has_config and (self.plot or self.html):
            others += [self.config.output, self.config.report]
            inputs = [self.config.task, *self.config.checkpoints, *self.inputs]
            check_no_input([self.plot, self.html], inputs)
        check_apart("--plot", self.plot, others)
        check_apart("--html", self.html, [*others, self.plot])
        if self.plot is not None:
            check_plot(self.plot, self.force)
        if self.html is not None:
            check_page(self.html, self.force)
        self._trackers = [_tracker(asked) for asked in log]

    @cached_property
    def config(self) -> Config:
        from sewa_cli.config import find_config
        from sewa_cli.session.extensions import load_settings

        path = find_config(self._config)
        return load_settings(
            path, self.flags, self._sets, with_solver=self._with_solver, masks=self._masks
        )

    @cached_property
    def inputs(self) -> list[Path]:
        """Files that are neither task nor checkpoints, and must not be overwritten either."""
        from sewa_cli.config import find_config

        config = self.config
        files = (find_config(self._config), config.compare.methods_from, config.solver_from)
        return [path.absolute() for path in files if path is not None]

    def load_task(self, as_given: bool = False) -> Task:
        """Import the task, which may change the working directory and with that `config`.

        `as_given`: the last checkpoint named is the newest, whatever its step.
        """
        from sewa_cli.rng import seeded
        from sewa_cli.session import open_newest
        from sewa_cli.task import load_task

        if self.config.task is None:
            raise ConfigError(
                "no task: give --task, or `task:` in sewa.yaml; `sewa init` writes both"
            )
        if assumed := self.config.objective.assumption:
            self.talk.warn(assumed)
        here = Path.cwd()
        # a task may shuffle while it is imported, and read all its data
        with seeded(self.config.seed), self.talk.stage("loading the task"):
            newest = partial(open_newest, self.config, as_given)
            task = load_task(self.config.task, self.config.args, newest)
        if Path.cwd() != here:  # it may go elsewhere, too
            self.config = self.config.anchored(here)
            self.plot, self.html = (path and here / path for path in (self.plot, self.html))
        self.talk.note(f"task {task.source}")
        self.talk.say(*task.notes)
        return task

    def check_stdout(self, output: str | None) -> None:
        """Who wants it, and whether checkpoints' paths can be told apart there."""
        form = "--json" if self.form == "json" else f"--format {self.form}"
        if self._print0 and self.form != PATHS:
            raise ConfigError(f"--print0 is for paths; leave out {form}")
        if output != STDOUT:
            self.talk.one_a_line = self.form == PATHS and not self._print0
        elif self._print0:
            raise ConfigError("--print0: with --output - no paths are printed; leave it out")
        elif self.form != PATHS:
            raise ConfigError(f"{form} and --output - both want standard output; use --report")

    def write(self, text: str) -> None:
        """Data: exact, but nothing in them moves the cursor of a terminal."""
        text = shown_lines(text) if self.stdout.isatty() else text
        self.stdout.write(text.encode(errors="surrogateescape"))  # as file names are decoded
        self.stdout.flush()

    def write_paths(self, paths: Iterable[Path]) -> None:
        end = "\0" if self._print0 else "\n"
        self.write("".join(f"{path}{end}" for path in paths))

    def write_chosen(self, paths: Iterable[Path]) -> None:
        """Print the paths of the checkpoints that were averaged; on a terminal, only if asked."""
        if self._wants_paths or not self.stdout.isatty():
            self.write_paths(paths)

    def tell(self, report: Head, name: Path | None = None) -> None:
        """Data to standard output, words to standard error, a picture to its file."""
        from sewa_cli.present import say, show

        self.write(show(report, self.form))
        self.talk.say(*say(report))
        self.draw(report, name)

    def draw(self, report: Head, name: Path | None = None) -> None:
        """Write the page and the picture of a report, then send it to trackers.

        `name`: the report's file, if it is not next to the output.
        """
        if self.html is not None:
            self._write_page(report, self.html, name)
        if self.plot is not None:
            from sewa_cli.present import draw

            save_figure(draw(report), self.plot, self.force)
            self.talk.say(f"wrote {self.plot}")
        for log in self._trackers:
            log(report)

    def _write_page(self, report: Head, path: Path, name: Path | None) -> None:
        from sewa_cli.output.sources import report_of
        from sewa_cli.present.page import WITHOUT_PICTURES, has_pictures, page

        output = getattr(report, "output", None)
        if name is None and output not in (None, STDOUT):
            name = report.config.get("report") or report_of(Path(output))
        if not has_pictures():
            self.talk.show_warning(f"the page is {WITHOUT_PICTURES}")
        save_page(page(report, None if name is None else str(name)), path, self.force)
        self.talk.say(f"wrote {path}")

    def list(self, found: dict[str, dict[str, Any]]) -> None:
        """What there is to choose from."""
        import json

        from sewa_cli.present.tables import listing

        if self.form == "json":
            self.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        else:
            self.write(listing(found).show(self.form))


def _form(form: str | None, json: bool, known: list[str]) -> str:
    if json and form not in (None, "json"):
        raise ConfigError(f"--json is short for --format json; leave out --format {form}")
    found = "json" if json else form or known[0]
    if found not in known:
        raise ConfigError(f"--format: must be one of {', '.join(known)}, found {found!r}")
    return found


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
    """A command with `--help` in a panel of ours."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = plain(super().get_params(ctx))
        for param in params:
            if "--help" in param.opts:
                param.rich_help_panel = list(_PANELS)[-1]
        return params


def add_command(
    app: typer.Typer, flags: str, group: str, *examples: str
) -> Callable[[Callable[..., None]], None]:
    """Makes a function `name(request, **own)` the command of that name, with these flags."""
    panels = list(_PANELS)
    names = sorted(flags.split(), key=lambda name: panels.index(_panel(name)))

    def add(function: Callable[..., None]) -> None:
        def run(**given: Any) -> None:
            typed.verbose = given.get("verbose", False)
            with_torch = function.__name__ not in WITHOUT_TORCH
            check_address_space((768 if with_torch else 160) * MIB)
            if with_torch:
                keep_memory()
            if ranks.here().several and STDIN in (given.get("ckpts") or []):
                raise ConfigError("-: paths on standard input reach one rank only; name them")
            with stdout_for_data() as stdout:
                request = Request(given, stdout)
                function(request, **given)

        hints = {name: Annotated[FLAGS[name].type, _typer_info(name)] for name in names}
        defaults = {name: FLAGS[name].default for name in names}
        run.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
                for name, default in defaults.items()
            ]
        )
        run.__annotations__ = hints
        # typer keeps the line breaks of a paragraph
        paragraphs = (function.__doc__ or "").split("\n\n")
        run.__doc__ = "\n\n".join(one_line(paragraph) for paragraph in paragraphs)
        epilog = "\n\n".join(("Examples:", *examples)) if examples else None
        app.command(function.__name__, cls=Command, rich_help_panel=group, epilog=epilog)(run)

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
    return typer.Option(*flag.names, **options, rich_help_panel=_panel(name))


def _tracker(asked: str) -> Callable[[Head], None]:
    from sewa_cli.trackers import find

    return find(asked)
