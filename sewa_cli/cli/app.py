"""The commands. Each imports what it needs when it runs: `--help` stays fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sewa_cli import mirrors, ranks
from sewa_cli.cli.console import check_one_a_line
from sewa_cli.cli.flags import PATHS, add_command, plain
from sewa_cli.cli.main import (
    called_from,
    check_address_space,
    keep_memory,
    stdout_for_data,
    typed,
    without_blas,
)
from sewa_cli.cli.request import STDOUT, Request, check_page
from sewa_cli.errors import BaselineWins, CheckpointError, ConfigError, OutputError
from sewa_cli.files import MIB, real

SPAN = "source last every from_step to_step exclude"
CKPTS = "ckpts revisions scratch scratch_size"
START, AVERAGE, INSPECT, REPRODUCE = "Start", "Average", "Inspect", "Reproduce"
DATA = "format json"
TALK = "quiet verbose"
WITHOUT_TORCH = ("average", "apply", "verify", "methods", "init", "schema")


class _Group(TyperGroup):
    """Typer has None for its own switches, and imports pydantic to find out that this is False."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = plain(super().get_params(ctx))
        for param in params:
            if param.is_flag and param.default is None:
                param.default = False
        return params


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Learn which checkpoints of a training run to average.",
)


def run(function: Callable[..., None], given: dict[str, Any]) -> None:
    """Call a command with its request; standard output is for data from here on."""
    typed.verbose = given.get("verbose", False)
    with_torch = function.__name__ not in WITHOUT_TORCH
    check_address_space((768 if with_torch else 160) * MIB)
    if with_torch:
        keep_memory()
    if ranks.here().several and "-" in (given.get("ckpts") or []):
        raise ConfigError("-: standard input reaches one rank only; name the files instead")
    try:
        with stdout_for_data() as stdout:
            function(Request(given, stdout), **given)
    finally:
        mirrors.close()


command = partial(add_command, app, run)


@app.callback(invoke_without_command=True)
def top(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        from sewa_cli import __version__

        typer.echo(__version__)
        raise typer.Exit


@command("folder ready_task force", START)
def init(request: Request, folder: Path, ready_task: str | None) -> None:
    """Write a commented sewa.yaml and task.py to start from."""
    from sewa_cli.config import READY_MADE
    from sewa_cli.templates import write_template

    if ready_task is not None and ready_task not in READY_MADE:
        known = ", ".join(READY_MADE)
        raise ConfigError(f"--task: no ready-made {ready_task!r}; there are {known}")
    check_one_a_line([folder], "choose another name")
    name, say = ready_task or "init", request.talk.say
    request.write_paths(write_template(name, folder, request.force, keep=say))


@command(f"demo_folder seed force {TALK}", START)
def demo(request: Request, demo_folder: Path) -> None:
    """Train a small network on real digits and average its 100 checkpoints."""
    from sewa_cli.config import load_config
    from sewa_cli.demo import run_demo

    check_one_a_line([demo_folder], "choose another name")
    seed = load_config(None, request.flags).seed
    request.html = demo_folder / "demo.html"
    if demo_folder.is_dir():
        check_page(request.html, request.force)
    with request.talk as talk:
        selection = run_demo(demo_folder, seed, talk, force=request.force)
    request.say(selection.report)
    request.write_chosen(selection.paths)
    request.draw(selection.report)
    sewa = called_from(demo_folder)
    talk.say(
        "",
        "try next:",
        f"  cd {quote(str(demo_folder))}",
        f"  {sewa} select ckpts/ --K 10",
        f"  {sewa} select ckpts/ --json | jq .average",
        f"  {sewa} compare ckpts/ --html compare.html",
        "",
        f"open the page: {request.html}",
    )


@command(
    f"{CKPTS} task score K metric output force config sets dry_run {SPAN} state_key effort workers "
    "sparse incumbent solver guard fallback report output_dtype shard_size plot html log "
    f"paths_format json print0 memory cache device seed strict {TALK}",
    AVERAGE,
    "sewa select ckpts/ --task task.py",
    "sewa select ckpts/ --K 10 -o best.safetensors --plot weights.png",
    "sewa select ckpts/ --metric accuracy --budget 10m --json | jq .average",
    "sewa select exp/ --score './decode.sh {checkpoint}' --metric -wer --budget 20 -o best.pt",
)
def select(request: Request, dry_run: bool) -> None:
    """Learn which checkpoints to average; write the average and a report.

    When piped, prints the chosen paths, one per line. --format table, jsonl, csv or
    markdown prints the scores of the average and of baselines, --json the report.
    """
    if request.config.objective.metric is not None and ranks.here().several:
        raise ConfigError("--metric does not run under torchrun; use --workers N instead")
    if dry_run:
        if request.config.objective.metric is not None:
            raise ConfigError(
                "--dry-run: only score() knows what a metric takes; --budget says how much, "
                "as --budget 10m"
            )
        if request.plot is not None:
            raise ConfigError("--plot: a forecast has no picture; leave out --dry-run")
        from sewa_cli.commands.forecast import run_forecast

        with request.talk as talk:
            forecast = run_forecast(request.config, request.load_task(), talk)
        request.form = "table" if request.form == PATHS else request.form
        request.tell(forecast)
        return
    request.check_stdout(request.config.output)
    from sewa_cli.commands.scored import run_scored
    from sewa_cli.commands.select import run_select
    from sewa_cli.present import show
    from sewa_cli.report.findings import ContestFinding

    with request.talk as talk:
        is_script = request.config.score is not None
        run = run_scored if is_script else partial(run_select, task=request.load_task())
        selection = run(
            request.config,
            events=talk,
            force=request.force,
            stdout=request.stdout,
            protected=request.inputs,
        )
        report = selection.report
    if request.form not in ("table", "markdown"):  # on standard output, as data
        for line in show(report).splitlines():
            talk.note(line)
    request.say(report)
    if request.form != PATHS:
        request.write(show(report, request.form))
    elif request.config.output != STDOUT:
        request.write_chosen(selection.paths)
    request.draw(report)
    # a fallback has already taken the better one
    if request.config.strict and report.verdict.beaten_by and report.learned is None:
        best = report.verdict.beaten_by[0]
        contest = report.find(ContestFinding)
        measure = contest.metric if contest else "loss"
        raise BaselineWins(f"--strict: `{best.name}` has the better held-out {measure}")


@command(
    f"{CKPTS} task methods budgets metric output_best force config sets {SPAN} state_key effort "
    f"workers fast learner best_report output_dtype plot html log {DATA} memory cache device "
    f"seed {TALK}",
    AVERAGE,
    "sewa compare ckpts/ --methods lawa,swa,ema --K 5,10,20",
    "sewa compare ckpts/ --output-best best.safetensors --html compare.html",
)
def compare(request: Request, output_best: Path | None, best_report: Path | None) -> None:
    """Compare ways to average on the same checkpoints and data."""
    if str(output_best) == STDOUT:
        raise ConfigError("--output-best: - is not a file; name one")
    from sewa_cli.commands.compare import run_compare

    named = [real(path) for path in (output_best, best_report, request.plot, request.html) if path]
    if len(set(named)) < len(named):
        raise ConfigError("--output-best, --report, --plot and --html must name different files")
    with request.talk as talk:
        task = request.load_task()
        found = run_compare(
            request.config,
            task,
            talk,
            output_best=output_best,
            report=best_report,
            force=request.force,
            protected=request.inputs,
        )
    request.tell(found, best_report)


@command(
    f"{CKPTS} task score measured force config sets source state_key plot html log {DATA} cache "
    f"device seed {TALK}",
    INSPECT,
    "sewa evaluate averaged.safetensors ckpts/step-900.safetensors",
)
def evaluate(request: Request) -> None:
    """Print the loss and metrics of checkpoints or averaged files."""
    from sewa_cli.commands.evaluate import run_evaluate
    from sewa_cli.commands.scored import evaluate_scored

    with request.talk as talk:
        if request.config.score is not None:
            found = evaluate_scored(request.config, talk)
        else:
            found = run_evaluate(request.config, request.load_task(as_given=True), talk)
    request.tell(found)


@command(f"{CKPTS} {SPAN} state_key plot html log force {DATA} config sets {TALK}", INSPECT)
def inspect(request: Request) -> None:
    """Show what checkpoints there are, and whether the run still moves.

    Needs no task. Reports steps, gaps, sizes, dtypes, duplicates, NaN and Inf, distances from the
    last checkpoint and from the mean, and cosines of successive steps. --format csv or jsonl prints
    a row for each checkpoint.
    """
    from sewa_cli.commands.inspect import run_inspect

    with request.talk as talk:
        found = run_inspect(request.config, talk, request.plot)
    request.tell(found)


@command(f"{CKPTS} {SPAN} state_key task measured K {DATA} config sets device {TALK}", START)
def validate(request: Request) -> None:
    """Check config, task and checkpoints with one batch; write nothing."""
    from sewa_cli.commands.validate import run_validate

    with request.talk as talk:
        task = request.load_task()
        found = run_validate(request.config, task, talk)
    request.tell(found)


@command(
    f"{CKPTS} method K weights output force config sets {SPAN} state_key recipe output_dtype "
    f"shard_size paths_format json print0 seed {TALK}",
    AVERAGE,
    "sewa average ckpts/ --method lawa --K 10 -o average.safetensors",
    "sewa average a.safetensors b.safetensors --weights 0.7,0.3",
)
def average(request: Request, method: str | None, weights: str | None) -> None:
    """Average checkpoints by a method or given weights, without a model.

    When piped, prints the averaged paths, one per line. --format table, jsonl, csv or
    markdown prints them with their coefficients.
    """
    without_blas()
    numbers = None
    if request.flags.get("K") == "auto":
        raise ConfigError("--K: auto needs a model and data to learn from; name a number: --K 10")
    if weights is not None:
        numbers = _numbers(weights)
        if method is not None or not request.flags.keys().isdisjoint({"K", *SPAN.split()}):
            raise ConfigError(
                "--weights sets the coefficient of every file; leave out --method, --K and --last"
            )
    config = request.config
    request.check_stdout(config.output)
    from sewa_cli.commands.average import run_average
    from sewa_cli.extensions import register_methods
    from sewa_cli.present import show
    from sewa_cli.present.parts import describe_lora
    from sewa_cli.present.terminal import render
    from sewa_cli.present.views.others import weighed

    with request.talk as talk:
        register_methods(config, talk, wanted=method or "uniform")
        averaged, written, report = run_average(
            config,
            method or "uniform",
            numbers,
            force=request.force,
            stdout=request.stdout,
            protected=request.inputs,
            with_report=request.form == "json",
            events=talk,
        )
    if written == STDOUT:
        return
    if request.form == PATHS:
        request.write_chosen(source.path for source in averaged.sources)
    elif report is not None and request.form == "json":
        request.write(show(report, "json"))
    else:
        pairs = zip(averaged.sources, averaged.coefficients, strict=True)
        request.write(render(weighed((c.path, c.step, w) for c, w in pairs), request.form))
    if averaged.lora is not None and averaged.lora.mode == "merged":
        talk.say(describe_lora(averaged.lora))
    count = len(averaged.sources)
    checkpoints = f"{count} checkpoint{'s' if count > 1 else ''}"
    talk.say(f"wrote {written}: {averaged.metadata['sewa_method']} of {checkpoints}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights: must be numbers such as 0.5,0.5, found {text!r}") from None


@command(f"shown page open_it force {TALK}", INSPECT)
def report(request: Request, shown: Path, page: Path, open_it: bool) -> None:
    """Make an HTML page from a report, to look at and to send.

    The page is one file and loads nothing from the net. Needs no task, checkpoints or model.
    """
    from sewa_cli.report.reading import read_any

    if open_it and str(page) == STDOUT:
        raise ConfigError("--open: a page on standard output cannot be shown; name a file")
    if real(page) == real(shown):
        raise OutputError(f"{page}: is the report itself; choose another name")
    if str(page) != STDOUT:
        check_page(page, request.force)
    with request.talk as talk:
        found = read_any(shown)
        with talk.stage("drawing"):
            request.write_page(found, page, shown)
    if open_it:
        import webbrowser

        webbrowser.open(real(page).as_uri())


@command(f"past rebuilt root force {TALK}", REPRODUCE)
def apply(request: Request, past: Path, rebuilt: str, root: Path | None) -> None:
    """Build a report's averaged file again, byte for byte.

    Needs no task. Refuses when a checkpoint's size or SHA-256 differs from the report's.
    """
    without_blas()
    from sewa_cli.commands.apply import run_apply
    from sewa_cli.remote.scratch import local_path
    from sewa_cli.report.recipe import read_report

    past = local_path(past, beside=True)
    report = read_report(past)
    with request.talk as talk:
        target = request.stdout if rebuilt == STDOUT else Path(rebuilt)
        written = run_apply(report, past, target, root=root, force=request.force)
        if rebuilt != STDOUT:
            talk.say(f"wrote {written}")


@command(f"verified root output_only {DATA} {TALK}", REPRODUCE)
def verify(request: Request, verified: Path, root: Path | None, output_only: bool) -> None:
    """Check an output and its checkpoints against their report.

    Compares sizes and SHA-256, and loads safetensors files. One error line for each fault; exit
    code 3.
    """
    without_blas()
    from sewa_cli.commands.verify import run_verify

    with request.talk as talk:
        found = run_verify(verified, root=root, output_only=output_only, events=talk)
    request.tell(found)
    if faults := [f"{row.path}: {row.fault}" for row in found.files if not row.ok]:
        raise CheckpointError(*faults)


@command(f"{DATA} config sets", INSPECT)
def methods(request: Request) -> None:
    """List the ways to average."""
    from sewa_cli.extensions import register_methods
    from sewa_cli.methods import REGISTRY

    register_methods(request.config)
    request.list(
        {
            name: {
                "line": found.line,
                "needs_loss": found.needs_loss,
                "takes_K": found.has_budget,
                "options": dict(found.options),
            }
            for name, found in REGISTRY.items()
        }
    )


@command(f"{DATA} config sets", INSPECT)
def solvers(request: Request) -> None:
    """List the ways to choose coefficients."""
    from sewa_cli.extensions import list_solvers

    request.list({name: {"line": line} for name, line in list_solvers(request.config).items()})


@command("kind", REPRODUCE)
def schema(request: Request, kind: str) -> None:
    """Print the JSON Schema of a report."""
    from sewa_cli.report import KINDS, model_of
    from sewa_cli.report.shared import schema as schema_of

    if kind not in KINDS:
        raise ConfigError(f"there is no report of {kind!r}; there are {', '.join(KINDS)}")
    request.write(json.dumps(schema_of(model_of(kind)), indent=2) + "\n")
