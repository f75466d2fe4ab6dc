"""Read the scores that a command prints: JSON, JSON Lines, `name value`, or a bare number."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

from sewa_cli.text import few

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
ALONE = re.compile(rf"({NUMBER})\s*%?", re.IGNORECASE)
COLOR = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
END = re.compile(r"\s*?(?:\n|\Z)")


class Record(NamedTuple):
    """Scores of an utterance, a document or, without an id, of everything."""

    id: str | None
    scores: dict[str, float]
    weight: float = 1.0


def read_printed(text: str, metric: str, regex: re.Pattern[str] | None = None) -> list[Record]:
    """Return one record without an id, or one for each JSON line that has one.

    Raises ValueError where the metric has no number, two, or none that is finite.
    """
    text = COLOR.sub("", text)
    if regex is not None:
        found = [match[1] if regex.groups else match[0] for match in regex.finditer(text)]
        return [_one(metric, found, f"nothing matches {regex.pattern}")]
    if not text.strip():
        raise ValueError("it prints nothing on standard output")
    if objects := list(_objects(text)):
        records = [_record(one, metric) for one in objects]
        units = [record for record in records if record.id is not None]
        if not any(record.weight for record in units or records):
            raise ValueError("all weights are 0")
        if units:
            return _distinct(units)
        if len({record.scores[metric] for record in records}) > 1:
            raise ValueError(f"it prints {len(records)} objects without an id, with other {metric}")
        return records[:1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    between = r"(?:[ \t]*[:=][ \t]*|[ \t]+)"
    here = rf"(?<![\w.])%?{re.escape(metric)}{between}({NUMBER})(?![\w./]|,\d)"
    if named := re.findall(here, text, re.IGNORECASE):
        return [_one(metric, named, "")]
    numbers = [match[1] for line in lines if (match := ALONE.fullmatch(line))]
    return [
        _one(
            metric, numbers, f"it prints no number named {metric}; its last line: {lines[-1]:.200}"
        )
    ]


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects that begin on a line of their own, on one line or several."""
    end, decode = 0, json.JSONDecoder().raw_decode
    for found in re.finditer(r"^[^\S\n]*(\{.*)", text, re.MULTILINE):
        if found.start() < end:
            continue  # inside the one before
        try:
            one, end = decode(text, found.start(1))
        except (ValueError, RecursionError):
            one = None
        if one is None or not END.match(text, end):
            number = text.count("\n", 0, found.start()) + 1
            raise ValueError(f"line {number} is not a JSON object: {found[1]:.80}")
        yield one


def _record(found: Mapping[str, Any], metric: str) -> Record:
    try:
        scores = {
            str(name): float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
    except OverflowError as error:
        raise ValueError(f"it prints {error}") from error
    weight = scores.pop("weight", nan if "weight" in found else 1.0)
    name = found.get("id")
    scores.pop("id", None)
    given = [one for one in scores if one.lower() == metric.lower()]
    if not given:
        raise ValueError(f"it prints {few(sorted(scores), 6) or 'no number'}, not {metric}")
    scores[metric] = scores.pop(given[0])
    if not isfinite(scores[metric]) or not (isfinite(weight) and weight >= 0):
        where = "" if name is None else f" of {name}"
        raise ValueError(f"the {metric} or weight{where} is {scores[metric]}, {weight}")
    return Record(None if name is None else str(name), scores, weight)


def _distinct(records: list[Record]) -> list[Record]:
    found: dict[str | None, Record] = {}
    for record in records:
        if found.setdefault(record.id, record) != record:
            raise ValueError(f"it prints two records of {record.id} that differ")
    return list(found.values())


def mean_scores(records: Sequence[Record]) -> dict[str, float]:
    """Return weighted means of what all records have."""
    names = [name for name in records[0].scores if all(name in one.scores for one in records)]
    weight = sum(one.weight for one in records)
    return {name: sum(one.weight * one.scores[name] for one in records) / weight for name in names}


def _one(metric: str, found: list[str], nothing: str) -> Record:
    try:
        values = {float(one) for one in found}
    except ValueError:
        raise ValueError(f"{found[0]!r} is not a number") from None
    if not values:
        raise ValueError(nothing)
    if len(values) > 1:
        some = few(list(dict.fromkeys(found)), 4)
        raise ValueError(
            f"it prints several numbers for {metric} ({some}); print one, or name it with "
            "score_regex"
        )
    (value,) = values
    if not isfinite(value):
        raise ValueError(f"its {metric} is {value}")
    return Record(None, {metric: value})
