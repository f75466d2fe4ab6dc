"""Parts that the pages of several kinds of report have."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present import pictures, sentences, tables
from sewa_cli.present.page.parts import Code, Drawing, Facts, Part, Section, Table, Words
from sewa_cli.present.sheet import Cell, Rows, Sheet
from sewa_cli.text import shown, size

if TYPE_CHECKING:
    from sewa_cli.report.recipe import OutputFile, Recipe
    from sewa_cli.report.shared import Candidate, Cost, Head, Interval, LeftOut, Placement
    from sewa_cli.report.standing import Standing

WAYS: Final = "Beside three simple ways of moving"
# what a picture can show, and is drawn within seconds
MOST_DRAWN: Final = {
    "references": 60,
    "rows": 240,
    "simple": 500,
    "budget": 500,
    "candidates": 3000,
    "checkpoints": 3000,
    "files": 3000,
    "history": 50_000,
}


def drawings(report: Head, name: str) -> list[Part]:
    """The pictures for this part of the page; a word in the first one's place, where it is full."""
    for part, most in MOST_DRAWN.items():
        count = len(getattr(report, part, None) or ())
        if count > most:
            said = f"Nothing is drawn: {count:,} {part} are more than a picture shows."
            return [Words([said])] if name in ("scores", "run") else []
    return [Drawing(picture) for part, picture in pictures(report) if part == name]


def section(title: str, *parts: Part | None) -> list[Section]:
    """None where there is nothing to show."""
    there = [part for part in parts if part is not None]
    return [Section(title, there)] if there else []


def sheets(sheet: Sheet, titles: Iterable[str] = ()) -> list[Part]:
    """What the terminal shows, part by part."""
    found: list[Part] = []
    names = iter(titles)
    for title, part in sheet.parts or [("", sheet.rows)]:
        if isinstance(part, list):
            found.append(Table(title or next(names, "In rows"), part, folded=len(part) > 60))
        elif isinstance(part, dict):
            found.append(Facts(part))
    return found


def checkpoints(candidates: list[Candidate], left_out: list[LeftOut]) -> list[Part]:
    rows: Rows = []
    for one in candidates:
        row: dict[str, Cell] = {"step": one.step}
        for name in ("weight", "probability"):
            if any(getattr(other, name) is not None for other in candidates):
                row[name] = getattr(one, name)
        row |= {f"logged {name}": value for name, value in (one.logged or {}).items()}
        rows.append({**row, "checkpoint": one.path})
    found: list[Part] = [Table(f"All {len(rows)} checkpoints", rows, folded=True)]
    if left_out:
        gone: Rows = [
            {"step": one.step, "checkpoint": one.path, "why": one.reason} for one in left_out
        ]
        found.append(Table("Left out", gone))
    return found


def cost(found: Cost, placement: Placement | None = None) -> Section:
    took = found.seconds
    facts: dict[str, Cell] = {
        "seconds in all": took.total,
        "reading": took.read,
        "learning": took.learn,
        "evaluating": took.evaluate,
        "writing": took.write,
        "forward passes": found.forward_passes,
        "backward passes": found.backward_passes,
        "read from checkpoints": size(found.bytes_read),
        "peak memory": size(found.peak_memory_bytes),
    }
    if found.peak_device_memory_bytes is not None:
        facts["peak memory of the device"] = size(found.peak_device_memory_bytes)
    if found.recalled is not None:
        facts["results from --cache"] = found.recalled
    if placement is not None:
        facts["checkpoints held in"] = placement.tier
    why = [] if placement is None else [Words([f"tier `{placement.tier}`: {placement.reason}"])]
    return Section("What it cost", [Facts(facts), *why])


def again(report: Head, name: str | None) -> Section:
    """All that is needed to do it once more, or to check that it was."""
    found: Any = report
    output: str | None = getattr(found, "output", None)
    files: list[OutputFile] = (getattr(found, "files", None) or []) if output else []
    recipe: Recipe | None = getattr(found, "recipe", None)
    lines = {}
    if report.command is not None:
        lines["the command that made this"] = report.command
    if recipe is not None:
        lines["the same bytes again, without the task"] = (
            f"sewa apply {_word(name or 'REPORT.json')} -o again.safetensors"
        )
    if recipe is not None and output not in (None, "-"):
        lines["is all as it was then?"] = f"sewa verify {_word(name or output or '')}"
    facts: dict[str, Cell] = {"made": when(report)}
    facts |= {
        name: getattr(found, name) for name in ("device", "seed", "task") if hasattr(found, name)
    }
    if code := getattr(found, "code", None):
        facts["SHA-256 of the task"] = f"{code[:12]} …"  # the report has all of it
    facts |= report.versions.model_dump()
    parts: list[Part] = [Code(lines), Facts(facts)]
    if files:
        rows: Rows = [{"file": one.path, "bytes": one.size, "SHA-256": one.sha256} for one in files]
        parts.append(Table("What was written", rows, folded=len(rows) > 4))
    if recipe is not None:
        sources: Rows = [
            {
                "step": one.step,
                "weight": one.coefficient,
                "bytes": one.size,
                "file": one.path,
                "SHA-256": one.sha256,
            }
            for one in recipe.sources
        ]
        parts.append(Table(f"The {len(sources)} files that went into it", sources, folded=True))
    settings: Rows = [
        {"setting": key, "value": json.dumps(value, ensure_ascii=False)}
        for key, value in report.config.items()
        if value not in (None, [], {})
    ]
    parts.append(Table("Every setting", settings, folded=True))
    return Section("To do it again", parts)


def when(report: Head) -> str:
    return f"{report.created.replace('T', ' ').removesuffix('+00:00')} UTC"


def _word(text: str) -> str:
    """For a shell, whatever it is; and never a flag."""
    word = shown(text)
    return shlex.quote(f"./{word}" if word.startswith("-") else word)


def standing_of(found: Standing | None) -> list[Section]:
    if found is None:
        return []
    said = [upper(sentence) for sentence in sentences.standing(found)]
    rows = tables.ways(found.motion)
    title = f"{WAYS}, by {found.weights:,} weights of each checkpoint"
    return section("Where the run stands", Words(said), Table(title, rows))


def about(report: Head) -> str:
    return f"sewa {report.kind}, {when(report)}"


def before_colon(sentence: str) -> str:
    """What stands before the colon, as a heading."""
    return upper(sentence.partition(": ")[0])  # a method's options have one without a space


def upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def file_of(path: str | None) -> str | None:
    return None if path in (None, "-") else PurePath(path or "").name


def interval_of(found: Interval | None) -> str:
    return "" if found is None else sentences.ci(found.low, found.high)
