"""The model card: a README.md that says how an average was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from sewa_cli.checkpoints import WRITTEN_BY
from sewa_cli.present.words import describe_lora
from sewa_cli.report.shared import Lora, Scores
from sewa_cli.text import code, markdown, number, shown

if TYPE_CHECKING:
    from sewa_cli.report.average import AverageReport
    from sewa_cli.report.compare import Comparison
    from sewa_cli.report.select import Report


def card_of(report: Report | Comparison | AverageReport, command: str | None = None) -> str:
    """The card of the average that a report describes; `command`: as it was typed, if it was."""
    recipe = report.recipe
    if recipe is None:
        raise ValueError("the report describes no average: `compare` has written none")
    return model_card(
        recipe.metadata,
        [source.path for source in recipe.sources],
        dtype=recipe.dtype,
        lora=getattr(report, "lora", None),
        is_adapter=recipe.lora is not None,
        scores=scores_of(report),
        command=command,
    )


def model_card(
    metadata: Mapping[str, str],
    sources: Sequence[str],
    *,
    dtype: str | None = None,
    lora: Lora | None = None,
    is_adapter: bool = False,
    scores: Mapping[str, Scores] | None = None,
    command: str | None = None,
) -> str:
    """metadata: of the averaged file; sources: paths of checkpoints; scores: of averages, by name.

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
        "sources": ", ".join(code(PurePath(path).name) for path in sources),
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
        parts.append("\n".join(_losses(scores)))
    if command is not None:
        fence = "```"
        while fence in command:
            fence += "`"
        parts.append(f"{fence}console\n$ {shown(command)}\n{fence}")
    return "\n\n".join(parts) + "\n"


def scores_of(report: object) -> dict[str, Scores]:
    """Of every average that a report has judged, by name.

    By what it has, not by its class: `average` need not import the reports of other commands.
    """
    if (contest := getattr(report, "contest", None)) is not None:
        names = f"{contest.metric} to choose by", f"held-out {contest.metric}"
        return {
            name: Scores(
                selection_loss=None,
                metrics=dict(zip(names, (found.selection, found.heldout), strict=True)),
            )
            for name, found in contest.scores.items()
        }
    if hasattr(report, "references") and hasattr(report, "average"):
        return {"this average": report.average, **report.references}
    return {
        f"{row.method}{'' if row.K is None else f', K = {row.K}'}": Scores(
            selection_loss=row.selection_loss, heldout_loss=row.heldout_loss, metrics=row.metrics
        )
        for row in getattr(report, "rows", ())
    }


def _losses(averages: Mapping[str, Scores]) -> Iterator[str]:
    metrics = list(dict.fromkeys(m for scores in averages.values() for m in scores.metrics or {}))
    losses = ["selection_loss", "heldout_loss"]
    if all(getattr(scores, loss) is None for scores in averages.values() for loss in losses):
        losses = []  # a choice by a metric
    titles = [loss.replace("_", " ").replace("heldout", "held-out") for loss in losses]
    yield _row("average", *titles, *map(markdown, metrics))
    yield "|---|" + "---|" * (len(losses) + len(metrics))
    for name, scores in averages.items():
        found = [(scores.metrics or {}).get(metric) for metric in metrics]
        values = [*(getattr(scores, loss) for loss in losses), *found]
        yield _row(markdown(name), *(number(value, 6) for value in values))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
