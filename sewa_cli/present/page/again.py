"""The end of every page: all that is needed to do it once more, or to check that it was."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from sewa_cli.present.view import Cell, Code, Facts, Part, Rows, Section, Table
from sewa_cli.text import shown

if TYPE_CHECKING:
    from sewa_cli.report.recipe import OutputFile, Recipe
    from sewa_cli.report.shared import Head


def again(report: Head, name: str | None) -> Section:
    """Return the section; `name`: of the report's file, if it has one."""
    found: Any = report
    output: str | None = getattr(found, "output", None)
    files: list[OutputFile] = (getattr(found, "files", None) or []) if output else []
    recipe: Recipe | None = getattr(found, "recipe", None)
    lines = {}
    if report.command is not None:
        lines["the command that made this"] = report.command
    if recipe is not None:
        apply = f"sewa apply {_word(name or 'REPORT.json')} -o again.safetensors"
        lines["the same bytes again, without the task"] = apply
        if output not in (None, "-"):
            lines["is everything as it was then?"] = f"sewa verify {_word(name or output or '')}"
    facts: dict[str, Cell] = {"made": when(report)}
    facts |= {key: getattr(found, key) for key in ("device", "seed", "task") if hasattr(found, key)}
    facts |= report.versions.model_dump()
    parts: list[Part] = [Code(lines), Facts(facts)]
    if files:
        rows: Rows = [{"file": one.path, "bytes": one.size, "SHA-256": one.sha256} for one in files]
        parts.append(Table("What was written", rows, is_folded=len(rows) > 4))
    settings: Rows = [
        {"setting": key, "value": json.dumps(value, ensure_ascii=False)}
        for key, value in report.config.items()
        if value not in (None, [], {})
    ]
    parts.append(Table("Every setting", settings, is_folded=True))
    return Section("To do it again", parts)


def when(report: Head) -> str:
    return f"{report.created.replace('T', ' ').removesuffix('+00:00')} UTC"


def _word(text: str) -> str:
    """Quote a word for a shell; it is never read as a flag."""
    word = shown(text)
    return shlex.quote(f"./{word}" if word.startswith("-") else word)
