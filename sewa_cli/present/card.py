"""The model card: a README.md that says how an average was made."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from sewa_cli.checkpoints import WRITTEN_BY
from sewa_cli.output.average import Averaged
from sewa_cli.report.compare import Comparison
from sewa_cli.report.select import Report
from sewa_cli.report.shared import Scores


def model_card(averaged: Averaged, report: BaseModel | None, command: str | None) -> str:
    about = averaged.metadata
    library = "peft" if averaged.sources[0].kind == "adapter" else "transformers"
    count = len(averaged.sources)
    head = ["---", f"library_name: {library}", "tags:", "- sewa", "- weight-averaging", "---"]
    title = f"# Average of {count} checkpoints" if count > 1 else "# One checkpoint, chosen"
    made = f"Made by sewa {about[WRITTEN_BY]} from the checkpoints of one training run."
    rows = ["| | |", "|---|---|", *(_row(*fact) for fact in _facts(averaged))]
    parts = ["\n".join(head), title, made, "\n".join(rows)]
    if losses := "\n".join(_losses(report)):
        parts.append(losses)
    if command is not None:
        parts.append(f"```console\n$ {command}\n```")
    return "\n\n".join(parts) + "\n"


def _facts(averaged: Averaged) -> Iterator[tuple[str, str]]:
    about = averaged.metadata
    K = f", K = {about['sewa_K']}" if "sewa_K" in about else ""
    yield "method", f"`{about['sewa_method']}`{K}"
    yield "steps", about["sewa_steps"].replace(",", ", ")
    weights = about.get("sewa_coefficients")
    yield "weights", "equal" if weights is None else weights.replace(",", ", ")
    yield "dtype", averaged.dtype or "as in the checkpoints"
    yield "sources", ", ".join(f"`{c.path.name}`" for c in averaged.sources)
    yield from averaged.facts.items()


def _losses(report: BaseModel | None) -> Iterator[str]:
    if isinstance(report, Report):
        rows = {"this average": report.average, **report.references}
    elif isinstance(report, Comparison):
        named = {f"{r.method}{'' if r.K is None else f', K = {r.K}'}": r for r in report.rows}
        rows = {
            name: Scores(
                selection_loss=r.selection_loss, heldout_loss=r.heldout_loss, metrics=r.metrics
            )
            for name, r in named.items()
        }
    else:
        return
    metrics = list(dict.fromkeys(m for scores in rows.values() for m in scores.metrics or {}))
    yield _row("average", "selection loss", "held-out loss", *metrics)
    yield "|---|---|---|" + "---|" * len(metrics)
    for name, scores in rows.items():
        found = [(scores.metrics or {}).get(metric) for metric in metrics]
        values = [scores.selection_loss, scores.heldout_loss, *found]
        yield _row(name, *map(_number, values))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
