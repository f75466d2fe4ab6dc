"""One file, one command: from a config and a task to a report. Nothing here prints."""

from __future__ import annotations

from sewa_cli.output.average import Average
from sewa_cli.present import html
from sewa_cli.present.card import model_card, scores_of
from sewa_cli.report.shared import ReportHead


def make_card(average: Average, report: object, command: str | None) -> str:
    """Return the model card of an average that is written as a folder."""
    return model_card(
        average.metadata,
        [checkpoint.name for checkpoint in average.sources],
        dtype=average.dtype,
        lora=average.lora,
        is_adapter=average.sources[0].kind == "adapter",
        scores=scores_of(report),
        command=command,
    )


ReportHead.in_a_notebook = html  # a report knows nothing of how it is shown
