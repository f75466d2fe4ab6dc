"""Toolkits whose runs hold more than checkpoints: which files count, and where steps are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Toolkit:
    name: str
    files: str  # pattern of the names of checkpoints; others in their folder are none
    keys: tuple[str, ...] = ()  # that each of them has
    step: tuple[str | int, ...] = ()  # the way to the step in a file; else its name has it
    kept: tuple[str, ...] = ()  # state of the training that loading a model needs


TOOLKITS = (
    Toolkit(
        "fairseq",
        r"checkpoint(_\d+_)?\d+\.pt",
        ("model", "optimizer_history", "extra_state"),
        step=("optimizer_history", -1, "num_updates"),
        kept=("optimizer_history",),
    ),
    Toolkit(
        "icefall",
        r"(epoch|checkpoint)-\d+\.pt",
        ("model", "sampler", "batch_idx_train"),
        step=("batch_idx_train",),
    ),
    Toolkit("ESPnet", r"\d+epoch\.pth"),
    Toolkit("OpenNMT-py", r".*_step_\d+\.pt", ("model", "generator", "vocab", "opt")),
)


def of_run(files: Sequence[Path], mentions: Callable[[Path, str], bool]) -> Toolkit | None:
    """Return the toolkit that left these files; mentions: whether a file has a key."""
    for toolkit in TOOLKITS:
        own = [path for path in files if re.fullmatch(toolkit.files, path.name)]
        if own and all(mentions(own[-1], key) for key in toolkit.keys):
            return toolkit
    return None


def of_content(content: Mapping[Any, Any]) -> Toolkit | None:
    """Return the toolkit that wrote what a file holds."""
    return next((t for t in TOOLKITS if t.keys and content.keys() >= {*t.keys}), None)


def step_of(content: Mapping[Any, Any]) -> int | None:
    """Return the step where the toolkit records it."""
    toolkit = of_content(content)
    found: Any = content if toolkit and toolkit.step else None
    for key in toolkit.step if toolkit else ():
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            return None
    return found if type(found) is int else None
