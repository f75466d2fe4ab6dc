"""Reports of tiny real runs for pages, and a page read back."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from helpers.tiny import TASK, finding, train_tiny
from sewa_cli.commands.compare import run_compare
from sewa_cli.commands.evaluate import run_evaluate
from sewa_cli.commands.inspect import run_inspect
from sewa_cli.commands.select import run_select
from sewa_cli.events import Events
from sewa_cli.extensions import load_settings
from sewa_cli.present.page import page
from sewa_cli.report import model_of
from sewa_cli.report.shared import ReportHead, to_json
from sewa_cli.task import load_task

EVIL = "<script>alert(1)</script>\"'&`$x_1$`<img src=x onerror=alert(2)>\u202e\n{{7*7}}"


SELECTIONS: dict[str, dict[str, Any]] = {
    "select": {},
    "mask": {"K": 4},
    "sparse": {"sparse": True},
    "seed1": {"K": 4, "seed": 1},
    "seed2": {"K": 4, "seed": 2},
}


@cache
def _made(name: str) -> str:
    """The JSON of a real run: `select` is the default's, `mask` and `sparse` are of few."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        paths = train_tiny(folder / "ckpts")
        (folder / "task.py").write_text(TASK)
        task = load_task(str(folder / "task.py"), {})

        def config(**flags: object) -> Any:
            small = {"gumbel": {"iterations": 8}}
            flags = {"checkpoints": (folder / "ckpts",), "device": "cpu", **small, **flags}
            return load_settings(None, flags, dashes="")

        few = {"methods": ["sewa", "lawa", "last", "uniform"], "K": [2, 4]}
        found: ReportHead
        if name in SELECTIONS:
            output = str(folder / f"{name}.safetensors")
            found = run_select(config(**SELECTIONS[name], output=output), task).report
        elif name == "compare":
            found = run_compare(config(compare=few), task, Events())
        elif name == "inspect":
            found = run_inspect(config())
        else:
            found = run_evaluate(config(checkpoints=tuple(paths[:3])), task, Events())
        return to_json(found).replace(place, "/runs")  # the same for all


# the last ones draw much the same as the others once more
NAMES = [
    *("select", "compare", "inspect"),
    *(pytest.param(name, marks=pytest.mark.breadth) for name in ("mask", "sparse")),
    "evaluate",
]


@cache
def plain_page(name: str) -> str:
    return page(report(raw(name)), f"{name}.report.json")


def raw(name: str) -> dict[str, Any]:
    return json.loads(_made(name))


def report(content: dict[str, Any]) -> ReportHead:
    return model_of(content["kind"]).model_validate(content)


def evil(content: Any, key: str = "") -> Any:
    """Return the report with a hostile name in every place that a name can come from."""
    fixed = {"kind", "mark", "sha256", "created", "unit", "by", "measure", "verdict", "labels"}
    fixed |= {"mode", "dtype", "data", "lora", "replaced", "bn", "expected", "written"}
    names = {"references", "metrics", "logged", "config", "tensors", "metadata", "details", "args"}
    if isinstance(content, dict):
        return {
            (f"{k}{EVIL}" if key in names and k != "last" else k): evil(
                v, k if k not in fixed else "fixed"
            )
            for k, v in content.items()
        }
    if isinstance(content, list):
        return [evil(one, key) for one in content]
    is_free = isinstance(content, str) and key != "fixed" and content != "last"
    return f"{content}{EVIL}" if is_free else content


def many_checkpoints(k: int = 1000) -> dict[str, Any]:
    """Return a selection of k checkpoints, all averaged, each with two logged losses."""
    found, chance = raw("select"), random.Random(0)
    weights = [chance.random() ** 3 for _ in range(k)]
    weights = [weight / sum(weights) for weight in weights]
    paths = [f"runs/model/checkpoint-{10000 + 50 * i}.safetensors" for i in range(k)]
    found["candidates"] = [
        {"index": i, "path": path, "step": 10000 + 50 * i, "weight": weights[i]}
        | {"logged": {"loss": 2 + chance.random(), "eval_loss": 2 + chance.random()}}
        for i, path in enumerate(paths)
    ]
    found |= {"k": k, "K": k, "selected": list(range(k)), "selected_paths": paths}
    found["selected_steps"] = [one["step"] for one in found["candidates"]]
    finding(found, "blend")["weights"] = [1 / k] * k
    found["recipe"]["sources"] = [
        {"path": path, "coefficient": weights[i], "size": 10**9 + i, "sha256": f"{i:064x}"}
        for i, path in enumerate(paths)
    ]
    return found


class Page(HTMLParser):
    """A parsed page: elements, attributes, words, numbers."""

    VOID = ("meta", "img", "br", "input", "link", "path", "use", "circle", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.values: list[tuple[float, str]] = []  # exact, and as it is shown
        self.words = ""
        self.meta: list[dict[str, str | None]] = []
        self.labels: list[str] = []
        self._open: list[tuple[str, float | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags[tag] += 1
        self.attributes.update(list(found))
        if tag == "meta":
            self.meta.append(found)
        if found.get("role") == "img":
            self.labels.append(found.get("aria-label") or "")
        exact = found.get("data-value")
        self._open.append((tag, None if exact is None else float(exact)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, exact = self._open[-1] if self._open else ("", None)
        if tag not in ("style", "script"):
            self.words += data
        if exact is not None and data.strip():
            self.values.append((exact, data.strip()))


def numbers(content: Any) -> Iterator[float]:
    """Every number of a report, and how many there are of whatever it lists."""
    if isinstance(content, dict | list):
        yield len(content)
        for one in content.values() if isinstance(content, dict) else content:
            yield from numbers(one)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield float(content)
