"""The request that the flags of a command make, and where its answer goes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from sewa_cli import ranks
from sewa_cli.cli.console import ConsoleEvents
from sewa_cli.cli.flags import FLAGS, PATHS
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.files import real
from sewa_cli.mirrors import named
from sewa_cli.text import shown_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.config import Config
    from sewa_cli.report.shared import ReportHead
    from sewa_cli.task import Task

STDOUT: Final = "-"
PICTURES: Final[dict[str, dict[str, None]]] = {  # suffix → what to keep out: the time of day
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
PAGES: Final = (".html", ".htm")


class Request:
    """A command's settings, its input, and the streams and files for its answer."""

    def __init__(self, given: dict[str, Any], stdout: IO[bytes]) -> None:
        """Take what all commands have in common out of `given`; the command's own flags stay."""

        def take(name: str, default: Any = None) -> Any:
            return given.pop(name, default)

        self.stdout = stdout
        quiet, verbose = take("quiet", False), take("verbose", False)
        is_first = ranks.here().rank == 0  # the others neither talk nor draw
        self.talk = ConsoleEvents(quiet or not is_first, verbose and is_first)
        self.force: bool = take("force", False)
        plot, html, log = take("plot"), take("html"), take("log") or []
        self.plot: Path | None = plot if is_first else None
        self.html: Path | None = html if is_first else None
        name = "paths_format" if "paths_format" in given else "format"
        asked, as_json = take(name), take("json", False)
        self.form = _form(asked, as_json, FLAGS[name].choices)
        self._print0: bool = take("print0", False)
        self._wants_paths = asked == PATHS or self._print0
        self._sets: list[str] = take("sets") or []
        self._with_solver = "task" in given  # a command without a task chooses nothing
        self._masks = "methods" in given
        has_config = "config" in given
        self._config: Path | None = take("config")
        values = {name: take(name) for name in list(given) if FLAGS[name].key is not None}
        self.flags: dict[str, Any] = {  # key of sewa.yaml → its value, where one was given
            FLAGS[name].key or name: value
            for name, value in values.items()
            if value not in (None, False, [])
        }
        logs = log if is_first else []
        others: list[Path | str | None] = [one.partition(":")[2] or None for one in logs]
        inputs: list[Path | str] = []
        if has_config:  # faults of the config come before all others
            inputs = [*self.inputs, *self.config.checkpoints]
            others += [self.config.output, self.config.report]
            inputs += [self.config.task] if self.config.task else []
        check_places(self.plot, self.html, others, inputs, self.force)
        if logs:
            from sewa_cli.trackers import find
        self._trackers = [find(one) for one in logs]

    @cached_property
    def config(self) -> Config:
        from sewa_cli.config import find_config
        from sewa_cli.extensions import load_settings

        path = find_config(self._config)
        return load_settings(
            path, self.flags, self._sets, with_solver=self._with_solver, masks=self._masks
        )

    @cached_property
    def inputs(self) -> list[Path]:
        """The files, other than task and checkpoints, that must not be overwritten."""
        from sewa_cli.config import find_config

        config = self.config
        files = (find_config(self._config), config.compare.methods_from, config.solver_from)
        return [path.absolute() for path in files if path is not None]

    def load_task(self, as_given: bool = False) -> Task:
        """Import the task, which may change the working directory and with that `config`.

        `as_given`: the last checkpoint named is the newest, whatever its step.
        """
        from sewa_cli.candidates import open_newest
        from sewa_cli.rng import seeded
        from sewa_cli.task import load_task

        if self.config.task is None and self.config.score is not None:
            raise ConfigError("score: is for `sewa select` and `sewa evaluate`; give --task here")
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
        if Path.cwd() != here:
            self.config = self.config.anchored(here)
            self.plot, self.html = (path and here / path for path in (self.plot, self.html))
        self.talk.note(f"task {task.source}")
        self.talk.say(*task.notes)
        return task

    def check_stdout(self, output: str | None) -> None:
        """Refuse two outputs on standard output; decide whether paths must be one a line."""
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
        """Print data exactly; on a terminal, with control characters escaped."""
        text = shown_lines(text) if self.stdout.isatty() else text
        self.stdout.write(text.encode(errors="surrogateescape"))  # as file names are decoded
        self.stdout.flush()

    def write_paths(self, paths: Iterable[Path]) -> None:
        end = "\0" if self._print0 else "\n"
        self.write("".join(f"{named(path)}{end}" for path in paths))

    def write_chosen(self, paths: Iterable[Path]) -> None:
        """Print the paths of the checkpoints that were averaged; on a terminal, only if asked."""
        if self._wants_paths or not self.stdout.isatty():
            self.write_paths(paths)

    def tell(self, report: ReportHead, name: Path | None = None) -> None:
        """Print the report on standard output and its sentences on stderr, then draw."""
        from sewa_cli.present import show

        self.write(show(report, self.form))
        self.say(report)
        self.draw(report, name)

    def say(self, report: ReportHead) -> None:
        from sewa_cli.present import details, say

        for line in details(report):
            self.talk.note(line)
        self.talk.say(*say(report))

    def draw(self, report: ReportHead, name: Path | None = None) -> None:
        """Write the page and the picture of a report, then send it to trackers.

        `name`: the report's file, if it is not next to the output.
        """
        if self.html is not None:
            from sewa_cli.output.destination import report_of

            output = getattr(report, "output", None)
            if name is None and output not in (None, STDOUT):
                name = report.config.get("report") or report_of(Path(output))
            self.write_page(report, self.html, name)
        if self.plot is not None:
            from sewa_cli.present import draw

            save_figure(draw(report), self.plot, self.force)
            self.talk.say(f"wrote {self.plot}")
        for log in self._trackers:
            log(report)

    def write_page(self, report: ReportHead, path: Path, name: Path | None) -> None:
        """Write the page of a report, whose file has this name."""
        from sewa_cli.present.page import WITHOUT_PICTURES, has_pictures, page
        from sewa_cli.publish import new_output

        if not has_pictures():
            self.talk.show_warning(f"the page is {WITHOUT_PICTURES}")
        text = page(report, None if name is None else str(name)).encode()
        if str(path) == STDOUT:
            self.stdout.write(text)
            return
        with new_output(path, self.force) as file:
            file.write(text)
        self.talk.say(f"wrote {path}")

    def list(self, found: dict[str, dict[str, Any]]) -> None:
        from sewa_cli.present.terminal import listing

        if self.form == "json":
            self.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        else:
            self.write(listing(found, self.form))


def _form(form: str | None, as_json: bool, known: list[str]) -> str:
    if as_json and form not in (None, "json"):
        raise ConfigError(f"--json is short for --format json; leave out --format {form}")
    found = "json" if as_json else form or known[0]
    if found not in known:
        raise ConfigError(f"--format: must be one of {', '.join(known)}, found {found!r}")
    return found


def check_places(
    plot: Path | None,
    html: Path | None,
    others: Iterable[Path | str | None],
    inputs: Iterable[Path | str],
    force: bool,
) -> None:
    """Refuse, before any work, a picture or a page that could not be written in the end."""
    read = {real(Path(path)) for path in inputs}
    taken = {real(Path(path)) for path in others if path is not None}
    for flag, path, check in (("--plot", plot, check_plot), ("--html", html, check_page)):
        if path is None:
            continue
        if real(path) in read:
            raise OutputError(
                f"{path}: is one of the inputs, never overwritten; choose another name"
            )
        if real(path) in taken:
            raise ConfigError(f"{path}: {flag} must name another file than the others")
        taken.add(real(path))
        check(path, force)


def check_page(path: Path, force: bool) -> None:
    from sewa_cli.publish import check_free

    if path.suffix.lower() not in PAGES:
        raise ConfigError(f"{path}: a page is HTML; name it .html")
    check_free(path, force)


def check_plot(path: Path, force: bool) -> None:
    from sewa_cli.publish import check_free

    if path.suffix.lower() not in PICTURES:
        known = ", ".join(PICTURES)
        raise ConfigError(f"{path}: unknown kind of picture {path.suffix!r}; name it {known}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from None
    check_free(path, force)


def save_figure(figure: Figure, path: Path, force: bool = False) -> None:
    """Write the figure in the format that the suffix names, whole or not at all."""
    from sewa_cli.present.figures import own_style
    from sewa_cli.publish import new_output

    suffix = path.suffix.lower()
    with own_style(), new_output(path, force) as file:
        figure.savefig(file, format=suffix[1:], metadata=PICTURES[suffix])
