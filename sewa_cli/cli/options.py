"""Every flag, written once; and the request that the flags of a command make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from sewa_cli import ranks
from sewa_cli.cli import launching, together
from sewa_cli.cli.console import Talk
from sewa_cli.cli.guard import check_address_space, says_what_was_cut
from sewa_cli.cli.main import stdout_for_data, typed
from sewa_cli.cli.memory import keep_memory
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
STDOUT: Final = "-"
WITHOUT_TORCH: Final = ("average", "apply", "verify", "methods", "init", "schema", "cache")
PATHS: Final = "paths"  # what `select` and `average` print, if nothing else is asked for


class Flag(NamedTuple):
    """`form`: names and what follows them, `--output -o PATH`; without names it is an argument."""

    form: str
    help: str
    key: str | None = ""  # of sewa.yaml; "": called as here; None: not a setting
    fallback: Any = None  # ...: must be given

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


_WHICH: Final = {
    "ckpts": Flag(
        "CKPTS", "A run's folder, checkpoints, or - for paths on standard input.", "checkpoints"
    ),
    "last": Flag("--last N", "Only the last N."),
    "every": Flag("--every N", "Only every N-th, counted back from the newest."),
    "from_step": Flag("--from-step STEP", "None before this step."),
    "to_step": Flag("--to-step STEP", "None after this step."),
    "nonfinite": Flag("--nonfinite skip|error", "With NaN or Inf: skip it, or stop."),
    "state_key": Flag("--state-key KEY", "Where PyTorch files have the weights, if unclear."),
}
_HOW: Final = {
    "task": Flag("--task TASK", "A .py file, huggingface, classification, gymnasium, or a module."),
    "ready_task": Flag(
        "--task NAME", "huggingface, classification or gymnasium: no task.py needed.", None
    ),
    "K": Flag("--K -K N", "How many checkpoints to average; auto: weights on all that help."),
    "sparse": Flag("--sparse", "K auto: few checkpoints equally, K by cross-validation."),
    "budgets": Flag("--K -K N", "How many checkpoints to average; or 5,10,20.", "compare.K"),
    "solver": Flag("--solver NAME", "`sewa solvers` lists them."),
    "solver_from": Flag("--solver-from FILE", "A Python file with solvers of your own."),
    "metric": Flag(
        "--metric NAME",
        "Choose by this metric, not the loss; -NAME: lower is better.",
        "objective.metric",
    ),
    "measured": Flag(
        "--metric NAME", "Score the task's parts, and report this metric.", "objective.metric"
    ),
    "effort": Flag(
        "--budget N", "Of parts to evaluate for it, or a time: 500, 10m.", "objective.budget"
    ),
    "workers": Flag("--workers N", "Processes that evaluate its parts.", "objective.workers"),
    "part_timeout": Flag(
        "--part-timeout TIME", "A part that takes longer has failed.", "objective.part_timeout"
    ),
    "iterations": Flag("--iterations N", "Of the solver.", "solver.iterations"),
    "guard": Flag("--guard SHARE", "Keep that share of the selection rows as held out."),
    "fallback": Flag("--fallback", "Write a simple average if it does better held out."),
    "methods": Flag(
        "--methods A,B,C", "`sewa methods` lists them; or ema:decay=0.5", "compare.methods"
    ),
    "method": Flag("--method NAME", "`sewa methods` lists them; options: ema:decay=0.5", None),
    "methods_from": Flag(
        "--methods-from FILE", "A Python file with methods of your own.", "compare.methods_from"
    ),
    "weights": Flag("--weights A,B,..", "One for each file, in the order given; sum 1.", None),
    "fast": Flag("--fast", "Search by predicted losses, over one cache.", "compare.fast"),
    "lora": Flag("--lora factors|merged", "Average A and B of adapters, or their products."),
    "bn": Flag("--bn auto|on|off", "Recompute BatchNorm statistics."),
}
_WRITE: Final = {
    "output": Flag("--output -o PATH", "The averaged file; - for standard output."),
    "rebuilt": Flag("--output -o PATH", "A file, or - for standard output.", None, ...),
    "output_best": Flag("--output-best FILE", "Write the best row's average here.", None),
    "report": Flag("--report FILE", "The JSON report. Default: OUTPUT with .report.json"),
    "recipe": Flag("--report FILE", "For `sewa apply`; hashes the sources.", "report"),
    "best_report": Flag("--report FILE", "The JSON report. Default: beside --output-best", None),
    "output_dtype": Flag("--output-dtype float32|bfloat16|float16|float64", "Of the output:"),
    "output_format": Flag("--output-format dcp", "A folder for torch.distributed.checkpoint."),
    "shard_size": Flag("--shard-size SIZE", "Split what is larger into a set: 5GB, 2GiB."),
    "plot": Flag("--plot FILE", "Draw it: .png, .svg or .pdf", None),
    "html": Flag("--html FILE", "A page of it, to look at and to send.", None),
    "page": Flag("--output -o FILE", "The page; - for standard output.", None, ...),
    "open_it": Flag("--open", "Show the page in a browser.", None),
    "log": Flag("--log NAME:WHERE", "Send it to a tracker: tensorboard:DIR, wandb:PROJECT", None),
    "force": Flag("--force -f", "Overwrite existing outputs.", None),
    "format": Flag(f"--format {'|'.join(FORMATS)}", "Of what is printed:", None),
    "paths_format": Flag(f"--format {'|'.join((PATHS, *FORMATS))}", "Of what is printed:", None),
    "json": Flag("--json", "Short for --format json.", None),
    "print0": Flag("--print0", "Paths end with a NUL byte, for xargs -0.", None),
}
_RUN: Final = {
    "folder": Flag("DIR", "Where to; the working directory by default.", None, Path()),
    "demo_folder": Flag("DIR", "A new folder.", None, Path("sewa-demo")),
    "shown": Flag("REPORT", "A JSON report of any command.", None, ...),
    "past": Flag("REPORT", "A report of `select`, `average` or `compare`.", None, ...),
    "verified": Flag("REPORT", "A report, or an output with its report beside it.", None, ...),
    "root": Flag("--root DIR", "Look for the report's files under this folder only.", None),
    "output_only": Flag("--output-only", "Leave the checkpoints out.", None),
    "kind": Flag("|".join(KINDS), "Of which report:", None, "select"),
    "config": Flag("--config -c FILE", "Default: sewa.yaml here, if there is one.", None),
    "sets": Flag("--set KEY=VALUE", "Override any key: --set compare.bootstrap=500", None),
    "memory": Flag("--memory SIZE", "Cap on what sewa allocates: 8GiB, 500MB."),
    "cache": Flag("--cache DIR", "Keep what is worked out here; after a kill, go on from it."),
    "cache_folder": Flag("DIR", "What --cache named.", None, ...),
    "clear": Flag("--clear", "Remove all that is in it.", None),
    "ranks": Flag("--ranks N", "On so many processes, as under torchrun; each has its part.", None),
    "device": Flag("--device DEVICE", "auto, cpu, cuda, cuda:1, mps ..."),
    "seed": Flag("--seed N", "Same seed, same bytes."),
    "strict": Flag("--strict", "Exit 5 if another average does better held out."),
    "dry_run": Flag("--dry-run", "Print what it will read, hold and compute; no more.", None),
    "quiet": Flag("--quiet -q", "Only errors on stderr.", None),
    "verbose": Flag("--verbose -v", "More on stderr, full tracebacks.", None),
}
_PANELS: Final = {
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
        self.form = _form(given.pop(form, None), given.pop("json", False), FLAGS[form].choices)
        self._print0: bool = given.pop("print0", False)
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
        self.talk.say(f"task {task.source}", *task.notes)
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
        from sewa_cli.output.destination import report_path
        from sewa_cli.present.page import WITHOUT_PICTURES, has_pictures, page

        output = getattr(report, "output", None)
        if name is None and output not in (None, STDOUT):
            name = report.config.get("report") or report_path(Path(output))
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


def add_command(app: typer.Typer, flags: str) -> Callable[[Callable[..., None]], None]:
    """Makes a function `name(request, **own)` the command of that name, with these flags."""
    names = flags.split()

    def add(function: Callable[..., None]) -> None:
        def run(**given: Any) -> None:
            typed.verbose = given.get("verbose", False)
            with_torch = function.__name__ not in WITHOUT_TORCH
            check_address_space((768 if with_torch else 160) * MIB)
            if with_torch:
                keep_memory()
            if "ranks" in given and not launching.begin(given):
                return
            with says_what_was_cut(), stdout_for_data() as stdout:
                request = Request(given, stdout)
                function(request, **given)
            if "ranks" in names:
                together.leave()
                ranks.leave()

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
        app.command(function.__name__)(run)

    return add


def _typer_info(name: str) -> Any:
    flag = FLAGS[name]
    options: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help, "show_default": False}
    options["readable"] = False  # that is: not for typer to check; whoever opens it says what it is
    if flag.choices:
        options["autocompletion"] = lambda: flag.choices
    if len(flag.choices) > 3:  # too many to stand in their column
        options |= {"metavar": "NAME", "help": f"{flag.help} {', '.join(flag.choices)}."}
    if not flag.names:
        return typer.Argument(**options)
    panel = next(title for title, flags in _PANELS.items() if name in flags)
    return typer.Option(*flag.names, **options, rich_help_panel=panel)


def _tracker(asked: str) -> Callable[[Head], None]:
    from sewa_cli.trackers import find

    return find(asked)
