"""The order of checkpoints: what their names say, which take part, whether all are of one model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

from sewa_cli.checkpoints.checkpoint import Checkpoint
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.text import shown

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
_COPIES = {"best", "average", "averaged", "ave", "avg", "swa", "ema"}
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


# ---- all of a run ------------------------------------------------------------------------------


def in_order(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Sort by step. If none of them has a step, they stay in the order given."""
    stepless = [c for c in checkpoints if c.step is None]
    if len(stepless) == len(checkpoints):
        return list(checkpoints)
    if stepless:
        raise CheckpointError(
            f"{stepless[0].path}: no step in its metadata or its name, so it has no place in the "
            "order; rename it or leave it out"
        )
    _check_one_scheme(checkpoints)
    # a mean is of steps before its snapshot
    ordered = sorted(checkpoints, key=lambda c: (c.step or 0, c.mean_steps is None, str(c.path)))
    for before, after in pairwise(ordered):
        is_alike = (before.mean_steps is None) == (after.mean_steps is None)
        if before.step == after.step and is_alike:
            raise CheckpointError(
                f"{after.path}: has step {after.step}, as has {before.path}; leave one out"
            )
    _check_one_order(ordered)
    return ordered


def _check_one_scheme(checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse to sort epochs and steps, or two runs, on one scale."""
    schemes = Counter(c.scheme for c in checkpoints if c.scheme is not None)
    several = [scheme for scheme, count in schemes.items() if count > 1]
    units = {unit(scheme): (scheme, count) for scheme, count in schemes.most_common()[::-1]}
    if len(units) > 1 or len(several) > 1:
        found = units.values() if len(units) > 1 else schemes.most_common()[::-1]
        *_, (two, few), (one, many) = found
        folder = next(c.path.parent for c in checkpoints if c.scheme == one)
        raise CheckpointError(
            f"{folder}: the numbers in {shown(one)} ({many}) and {shown(two)} ({few}) may count "
            f"different things; name those that you mean, such as {shown(folder / one)}"
        )


def _check_one_order(ordered: Sequence[Checkpoint]) -> None:
    """Refuse names with several numbers that may be the step and sort them in different ways."""
    for before, after in pairwise(c for c in ordered if c.scheme is not None):
        pairs = zip(numbers_in(before.path), numbers_in(after.path), strict=False)
        if before.scheme == after.scheme and any(one > two for (_, one), (_, two) in pairs):
            raise CheckpointError(
                f"{after.path}: is it before or after {before.path.name}? The numbers in their "
                "names disagree; name them by their step alone, such as step-100"
            )


def narrow(
    checkpoints: Sequence[Checkpoint],
    last: int | None = None,
    every: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Checkpoint]:
    """First the range of steps, then every n-th counted back from the newest, then the last n.

    A snapshot and a mean of the same step count as one.
    """
    if (from_step is not None or to_step is not None) and checkpoints[0].step is None:
        raise ConfigError("--from-step and --to-step: these checkpoints have no steps; use --last")
    kept = [
        c
        for c in checkpoints
        if (from_step is None or (c.step is not None and c.step >= from_step))
        and (to_step is None or (c.step is not None and c.step <= to_step))
    ]
    if not kept:
        asked = f"{'' if from_step is None else from_step}..{'' if to_step is None else to_step}"
        first, newest = checkpoints[0].step, checkpoints[-1].step
        there = f"the steps are {first}..{newest}"
        raise ConfigError(f"--from-step, --to-step: no checkpoint lies in {asked}; {there}")
    groups = groupby(kept, key=lambda c: str(c.path) if c.step is None else c.step)
    saves = [list(group) for _, group in groups][::-1][::every][:last]
    return [checkpoint for save in saves[::-1] for checkpoint in save]


def check_agreement(checkpoints: Sequence[Checkpoint]) -> None:
    """Names, shapes and dtypes must be those of most checkpoints."""
    usual, _ = Counter(frozenset(c.tensors.items()) for c in checkpoints).most_common(1)[0]
    expected = dict(usual)
    for checkpoint in checkpoints:
        found = checkpoint.tensors
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise CheckpointError(
                    f"{checkpoint.path}: {name}: expected {expected.get(name, 'no such tensor')} "
                    f"as in the other checkpoints, found {found.get(name, 'no such tensor')}"
                )
