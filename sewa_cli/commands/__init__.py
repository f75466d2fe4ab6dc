"""One file, one command: from a config and a task to a report. Nothing here prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sewa_cli.events import Events
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, R, write_results
from sewa_cli.present import html
from sewa_cli.present.card import model_card, scores_of
from sewa_cli.report.shared import Head

if TYPE_CHECKING:
    from sewa_cli.session.session import Session


def settle_outputs(
    session: Session, decide: Callable[[], Outputs], protected: Sequence[Path]
) -> Outputs:
    """Decide where results go, on rank 0 for all."""
    outputs = Outputs(None)
    if session.ranks.rank == 0:
        outputs = decide().check([*session.inputs, *protected])
    return outputs.shared()


def write_average(
    average: Average | None,
    outputs: Outputs,
    make_report: Callable[[], R],
    events: Events | None = None,
) -> tuple[R, Outputs]:
    """Write the results; return the report and where they are."""
    command = None if events is None else events.command

    def make_card(report: R) -> str:
        assert average is not None
        return model_card(
            average.metadata,
            [str(checkpoint.path) for checkpoint in average.sources],
            dtype=average.dtype,
            lora=average.lora,
            is_adapter=average.sources[0].kind == "adapter",
            scores=scores_of(report),
            command=command,
        )

    return write_results(average, outputs, make_report, make_card, events)


Head.in_a_notebook = html  # a report knows nothing of how it is shown
