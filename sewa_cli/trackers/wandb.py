"""A report for Weights & Biases: curves, pictures, the table's numbers (docs/how-to/reports.md).

Where it goes is W&B's own matter: its login, its servers, or a folder with WANDB_MODE=offline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.errors import ConfigError
from sewa_cli.present.figures import figure_of
from sewa_cli.task import user_code
from sewa_cli.trackers import charts, curves, names, numbers

if TYPE_CHECKING:
    from sewa_cli.report.shared import ReportHead


def check(where: str) -> str:
    """Return the project; refuse it if there is no wandb."""
    try:
        import matplotlib.pyplot  # noqa: F401 - wandb asks for it before it takes a figure
        import wandb  # noqa: F401
    except ImportError:
        raise ConfigError("--log: needs wandb: pip install wandb") from None
    return where


def log(report: ReportHead, where: str) -> None:
    with user_code("wandb"):  # no login, no network: not our bug
        send(report, where)


def send(report: ReportHead, where: str) -> None:
    import wandb

    with wandb.init(project=where or "sewa", job_type=report.kind, config=report.config) as run:
        for name, points in curves(report).items():  # sewa/weight by step, ...
            run.define_metric(name, step_metric=f"{name}_at")
            for at, value in points:
                run.log({name: value, f"{name}_at": at})
        for n, chart in enumerate(charts(report), 1):
            run.log({f"sewa/picture_{n}": wandb.Image(figure_of(chart), caption=chart.title)})
        run.summary.update(numbers(report) | names(report))  # sewa/heldout_loss, ...
