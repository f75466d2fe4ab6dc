"""Read what the name of a checkpoint says: its step, its naming scheme, whether it is a copy."""

from __future__ import annotations

import re
from pathlib import Path

_NUMBER = r"\d+(?:\.\d+)*(?:e[-+]?\d+)?"
_ASSIGNED = re.compile(rf"([a-z]*)=(-?{_NUMBER})")  # epoch=3, val_loss=0.25
_NUMBERED = re.compile(rf"([a-z]*)[^a-z0-9]*({_NUMBER})([a-z]*)")  # step-900, 8epoch, 7b
_VERSION = re.compile(r"(?<=\d)-v\d+(?=\.\w+$|$)")  # Lightning's, of a name that was taken
_IN_SCHEME = re.compile(
    r"((?<![a-z])(?:run|seed|fold|trial)[^a-z0-9]?\d++(?=.*\d))"
    rf"|(?:(?<==)-)?{_NUMBER}(?:[km](?![a-z]))?",
    re.IGNORECASE,
)
_THOUSANDS = {"k": 1000, "m": 1_000_000}
_STEPS = {"step", "steps", "iter", "iters", "iteration", "it", "update", "updates"}
_EPOCHS = {"epoch", "epochs", "ep"}
_METRIC = re.compile(
    r"[a-z]*(loss|acc|accuracy|wer|cer|ppl|perplexity|bleu|rouge|score|metric|reward|return)"
    r"|nll|ter|per|chrf|auc|map|iou|psnr|ssim|fid|mse|mae|eer|f|top"
)
_COPIES = {"best", "average", "averaged", "ave", "avg", "swa"}
_LAST = {"last", "latest", "final"}


def step_in(path: Path) -> int | None:
    """Return the number after `step`, or else the last that is no metric, version or size."""
    numbers = numbers_in(path)
    steps = [number for word, number in numbers if word in _STEPS]
    found = steps or [number for _, number in numbers]
    return found[-1] if found else None


def numbers_in(path: Path) -> list[tuple[str, int]]:
    """Return the steps and epochs; if there are none, all that may be a step, with their words."""
    # a folder called v1.5-step-900 has no suffix to remove
    text = (path.name if path.is_dir() else path.stem).lower()
    text = _VERSION.sub("", text)
    known = _STEPS | _EPOCHS
    found = [(word, number, "") for word, number in _ASSIGNED.findall(text) if word in known]
    if not found:
        for word, number, unit in _NUMBERED.findall(_ASSIGNED.sub("", text)):
            if not _METRIC.fullmatch(word) and unit not in ("b", "best"):
                found.append((unit if unit in known else word, number, unit))
    whole = [(w, n) for w, number, unit in found if (n := _whole(number, unit)) is not None]
    return [pair for pair in whole if pair[0] in known] or whole


def _whole(number: str, unit: str) -> int | None:
    """Read 900, 1e5, 1.5k and 2M."""
    if number.isdigit() and unit not in _THOUSANDS:
        return int(number)
    is_short = unit in _THOUSANDS or (not unit and re.fullmatch(r"\d+e\+?\d", number))
    if not is_short or number.count(".") > 1:
        return None
    value = float(number) * _THOUSANDS.get(unit, 1)
    return int(value) if value.is_integer() else None


def scheme(path: Path) -> str:
    """Return the name with * for its numbers but a run's: checkpoints of one run share it."""
    text = _VERSION.sub("", path.name)
    return _IN_SCHEME.sub(lambda found: found[1] or "*", text)


def unit(pattern: str) -> str:
    """Return what the numbers of a scheme count: steps, epochs, or nobody knows what."""
    words = re.findall(r"[a-z]+", pattern.lower())
    known = (("step", _STEPS), ("epoch", _EPOCHS))
    return next((name for name, all_words in known if not all_words.isdisjoint(words)), pattern)


def is_copy(path: Path) -> bool:
    """Whether it is called the best, or an average."""
    return not _COPIES.isdisjoint(_words(path))


def is_last(path: Path) -> bool:
    """Whether it is called the last, which may be a copy of the newest."""
    return not _LAST.isdisjoint(_words(path))


def _words(path: Path) -> list[str]:
    return re.findall(r"[a-z]+", path.name.lower())
