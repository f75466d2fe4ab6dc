"""Which checkpoints take part, in which order, and whether they are all of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from sewa_cli.checkpoints.checkpoint import Checkpoint
from sewa_cli.checkpoints.naming import numbers_in, unit
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.text import shown


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
    ordered = sorted(checkpoints, key=lambda c: (c.step or 0, str(c.path)))
    for before, after in pairwise(ordered):
        if before.step == after.step:
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
    """First the range of steps, then every n-th counted back from the newest, then the last n."""
    if (from_step is not None or to_step is not None) and checkpoints[0].step is None:
        raise ConfigError("--from-step and --to-step: these checkpoints have no steps")
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
    if every is not None:
        kept = kept[::-1][::every][::-1]
    return kept[-last:] if last is not None else kept


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
