"""Of files: checkpoints and how they lie to each other, what is verified, what is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sewa_cli.present.sheet import Rows, Sheet, beside, sized
from sewa_cli.text import few, size

if TYPE_CHECKING:
    from sewa_cli.report.average import AverageReport
    from sewa_cli.report.inspect import Found, Inspection
    from sewa_cli.report.standing import Motion
    from sewa_cli.report.verify import Verification


def inspect(report: Inspection) -> Sheet:
    """The facts, a row for each checkpoint, the run beside three simple ways of moving."""
    found = report.checkpoints
    losses = dict.fromkeys(name for one in found for name in one.logged if "loss" in name)
    rows: Rows = []
    seen: Rows = []
    for one in found:
        twin = None if one.same_as is None else found[one.same_as]
        cells = one.model_dump(exclude={"logged", "nonfinite", "same_as"})
        cells |= {"nonfinite": len(one.nonfinite), "same_as": twin and twin.path}
        rows.append({**cells, **beside(one.logged, cells)})
        notes = [f"NaN or Inf in {few(one.nonfinite, 2)}"] if one.nonfinite else []
        notes += [f"same as {_name(twin)}"] if twin else []
        seen.append(
            {
                "step": one.step,
                **{name: one.logged.get(name) for name in losses},
                "from last": one.to_last,
                "from mean": one.to_mean,
                "moved": one.length,
                "cosine": None if one.cosine is None else round(one.cosine, 3),
                "size": sized(one.size),
                "file": one.path,
                "note": "; ".join(notes),
            }
        )
    moved = [] if report.motion is None else [("", ways(report.motion))]
    facts = ("", _facts_of_run(report))
    return Sheet(rows, [facts, ("", seen), *moved, ("", report.explanation)])


def _facts_of_run(report: Inspection) -> dict[str, str]:
    found = report.checkpoints
    first, last = found[0].step, found[-1].step
    if first is None:
        steps = "without steps"
    elif first == last:
        steps = f"step {first}"
    else:
        spacing = f"every {report.spacing}" if report.spacing else "unevenly spaced"
        steps = f"steps {first} to {last}, {spacing}"
    sizes = [one.size for one in found]
    each = " to ".join(dict.fromkeys([size(min(sizes)), size(max(sizes))]))
    gaps = [
        f"{gap.after} to {gap.before}" + (f" ({gap.missing} missing)" if gap.missing else "")
        for gap in report.gaps
    ]
    return {
        "checkpoints": f"{len(found)}, {steps}",
        "gaps": few(gaps, 5) or "none",
        "size": f"{size(sum(sizes))}, {each} each",
        "tensors": f"{report.tensors:,}",
        "parameters": f"{report.parameters:,}",
        "dtypes": ", ".join(f"{word} ({n:,})" for word, n in report.dtypes.items()),
        "duplicates": few([_name(one) for one in found if one.same_as is not None], 5) or "none",
        "NaN or Inf": few([_name(one) for one in found if one.nonfinite], 5) or "none",
    }


def ways(motion: Motion) -> Rows:
    """The run beside three simple ways of moving."""
    titles = {"line": "straight line", "walk": "random walk", "noise": "noise around a point"}
    every = {"this run": motion.run}
    every |= {titles[name]: signs for name, signs in (motion.expected or {}).items()}
    return [
        {
            "motion": "net displacement / path",
            **{way: signs.net_to_path for way, signs in every.items()},
        },
        {"motion": "mean cosine of steps", **{way: signs.cosine for way, signs in every.items()}},
        {"motion": "explained by a line", **{way: signs.trend for way, signs in every.items()}},
    ]


def _name(one: Found) -> str:
    return one.path if one.step is None else f"step {one.step}"


def average(report: AverageReport) -> Sheet:
    """A row for each checkpoint that has a weight."""
    return weighed((one.path, one.step, one.coefficient) for one in report.recipe.sources)


def weighed(sources: Iterable[tuple[object, int | None, float]]) -> Sheet:
    return Sheet([{"path": str(path), "step": step, "weight": w} for path, step, w in sources])


def verify(report: Verification) -> Sheet:
    """A row for each file."""
    rows: Rows = [one.model_dump(include={"path", "role", "ok", "fault"}) for one in report.files]
    read: Rows = [
        {"role": one.role, "found": one.fault or "as it was", "path": one.path}
        for one in report.files
    ]
    return Sheet(rows, [("", read)])
