"""The model card: a README.md that says how an average was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from sewa_cli.checkpoints import WRITTEN_BY
from sewa_cli.checkpoints.means import short_name
from sewa_cli.present import view_of
from sewa_cli.present.parts import describe_lora
from sewa_cli.present.terminal import render
from sewa_cli.present.view import Table
from sewa_cli.report.shared import Lora, ReportHead
from sewa_cli.text import code, markdown, shown


def model_card(
    metadata: Mapping[str, str],
    sources: Sequence[str],
    *,
    dtype: str | None = None,
    lora: Lora | None = None,
    is_adapter: bool = False,
    scores: str = "",
    command: str | None = None,
) -> str:
    """Return the card.

    metadata: of the averaged file; sources: paths of checkpoints; scores: a table in Markdown.

    Plain values, since a card is also written where no report was asked for.
    """
    unknown = dict.fromkeys(("sewa_method", "sewa_steps"), "unknown")
    metadata = {**unknown, WRITTEN_BY: "(unknown version)", **metadata}  # `apply` knows no more
    library = "peft" if is_adapter else "transformers"
    head = ["---", f"library_name: {library}", "tags:", "- sewa", "- weight-averaging", "---"]
    count = len(sources)
    K = f", K = {metadata['sewa_K']}" if "sewa_K" in metadata else ""
    facts = {
        "method": f"{code(metadata['sewa_method'])}{markdown(K)}",
        "steps": markdown(metadata["sewa_steps"].replace(",", ", ")),
        "weights": markdown(metadata.get("sewa_coefficients", "equal").replace(",", ", ")),
        "dtype": markdown(dtype or "as in the checkpoints"),
        "sources": ", ".join(code(short_name(PurePath(path))) for path in sources),
    }
    if lora is not None:
        facts["LoRA"] = describe_lora(lora)
    parts = [
        "\n".join(head),
        f"# Average of {count} checkpoints" if count > 1 else "# One checkpoint, chosen",
        f"Made by sewa {markdown(metadata[WRITTEN_BY])} from the checkpoints of one training run.",
        "\n".join(["| | |", "|---|---|", *(_row(*fact) for fact in facts.items())]),
    ]
    if scores:
        parts.append(scores)
    if command is not None:
        fence = "```"
        while fence in command:
            fence += "`"
        parts.append(f"{fence}console\n$ {shown(command)}\n{fence}")
    return "\n\n".join(parts) + "\n"


def scores_of(report: object) -> str:
    """Return the scores that a report compares, as a table in Markdown; "": it compares none."""
    if not isinstance(report, ReportHead) or report.kind not in ("select", "compare"):
        return ""
    table = view_of(report).tables[0]
    assert isinstance(table, Table)
    # seconds differ from run to run, and the same seed gives the same bytes
    rows = [{name: cell for name, cell in row.items() if name != "seconds"} for row in table.rows]
    return render(rows, "markdown").rstrip()


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
