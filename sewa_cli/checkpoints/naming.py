"""Read what the name of a checkpoint says: its step, its naming scheme, whether it is a copy."""

from __future__ import annotations

import re
from pathlib import Path

_NUMBER = r"\d+(?:\.\d+)*(?:e[-+]?\d+)?"
_ASSIGNED = re.compile(rf"([a-z]*)=(-?{_NUMBER})")  # epoch=3, val_loss=0.25
_NUMBERED = re.compile(rf"([a-z]*)[^a-z0-9]*({_NUMBER})([a-z]*)")  # step-900, 8epoch, 7b
_VERSION = re.compile(r"(?<=\d)-v\d+(?=\.\w+$|$)")  # Lightning's, of a name that was taken
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
    # a folder called v1.5-step-900 has no suffix to remove
    text = (path.name if path.is_dir() else path.stem).lower()
    text = _VERSION.sub("", text)
    found = [pair for pair in _ASSIGNED.findall(text) if pair[0] in _STEPS | _EPOCHS]
    if not found:
        for word, number, unit in _NUMBERED.findall(_ASSIGNED.sub("", text)):
            if not _METRIC.fullmatch(word) and unit not in ("b", "best"):
                found.append((unit if unit in _STEPS else word, number))
    whole = [(word in _STEPS, int(number)) for word, number in found if number.isdigit()]
    steps = [number for is_step, number in whole if is_step]
    numbers = steps or [number for _, number in whole]
    return numbers[-1] if numbers else None


def scheme(path: Path) -> str:
    """Return the name with * for its numbers: checkpoints of one run share it."""
    return re.sub(_NUMBER, "*", _VERSION.sub("", path.name))


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
