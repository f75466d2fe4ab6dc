"""Read any report from a file that anyone may have written, and check that it is consistent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json

from sewa_cli.errors import CheckpointError
from sewa_cli.files import check_values, read_bytes
from sewa_cli.report import KINDS, model_of
from sewa_cli.report.recipe import why
from sewa_cli.report.shared import SCHEMA_VERSION

if TYPE_CHECKING:
    from sewa_cli.report.shared import Candidate, ReportHead

MOST_SHOWN: Final = 2**24  # bytes of a report that is to be looked at
MOST_VALUES: Final = 500_000  # in it; if all are wrong, pydantic keeps a kilobyte of each


def read_any(path: Path) -> ReportHead:
    """Read a report by the model of its kind, and refuse it if it contradicts itself."""
    try:
        report = _validated(read_bytes(path, MOST_SHOWN), path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not a report of sewa: {why(error)}") from None
    if fault := misfit(report):
        raise CheckpointError(f"{path}: is inconsistent ({fault}); the file may be corrupted")
    return report


def _validated(text: bytes, path: Path) -> ReportHead:
    check_values(text, MOST_VALUES)
    content = from_json(text)
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"its kind is {kind!r:.40}, and must be one of {', '.join(KINDS)}")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: its schema_version is {version!r:.40}, and this version of sewa shows "
            f"{SCHEMA_VERSION}; run the command again, or use the version that wrote it"
        )
    return model_of(kind).model_validate(content)


def misfit(report: ReportHead) -> str | None:
    """Return the first contradiction, or None."""
    check = {"select": _select, "compare": _compare, "inspect": _inspect}.get(report.kind)
    if report.kind == "evaluate" and not getattr(report, "files", None):
        return "files: there are none"
    return next(check(report), None) if check else None


def _select(report: Any) -> Iterator[str]:
    yield from _candidates(report.candidates, report.k)
    if not 0 < report.K <= report.k:
        yield f"K is {report.K} of {report.k}"
    for name in ("selected", "selected_steps", "selected_paths"):
        if (count := len(getattr(report, name))) != report.K:
            yield f"{name} has {count} entries, K is {report.K}"
    if len({*report.selected} & {*range(report.k)}) < report.K:
        yield "selected: some are not candidates, or listed twice"
    for one in report.findings:
        yield from one.misfits(report.k)
    if any(one.kind == "contest" for one in report.findings):
        return
    if "last" not in report.references:
        yield "references: the last checkpoint is missing"
    if any(one.name not in report.references for one in report.verdict.beaten_by):
        yield "verdict: beaten by an average that is not among the references"


def _compare(report: Any) -> Iterator[str]:
    yield from _candidates(report.candidates, report.k)
    if not report.rows:
        yield "rows: there are none"
    for row in report.rows:
        if any(len(weights) != report.k for weights in row.coefficients):
            yield f"{row.method}: not a coefficient for each of {report.k}"
    if report.best is not None and not 0 <= report.best < len(report.rows):
        yield f"best: there is no row {report.best}"


def _inspect(report: Any) -> Iterator[str]:
    count = len(report.checkpoints)
    if not count:
        yield "checkpoints: there are none"
    if any(not 0 <= (one.same_as or 0) < count for one in report.checkpoints):
        yield "same_as: a checkpoint that is not there"


def _candidates(found: list[Candidate], k: int) -> Iterator[str]:
    if not found or [one.index for one in found] != [*range(k)]:
        yield f"candidates: not {k}, numbered from 0"
