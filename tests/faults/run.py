"""Every fault at every point of every case: `make faults`.

It prints a table of docs/development/reliability.md.

PYTHONPATH=tests python -m faults.run [WORD ...]   only cases that have all of these words
"""

from __future__ import annotations

import errno
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from faults.cases import Case, Stage
from faults.driver import Driver
from faults.pairs import collide, kinds
from faults.sweep import Tally, all_cases, errors, interrupts, kills

SWEEPS: dict[str, Callable[[Stage, Case], Tally]] = {
    "kill": kills,
    "interrupt": interrupts,
    "full disk": lambda stage, case: errors(stage, case, errno.ENOSPC, for_good=True),
    "I/O error": lambda stage, case: errors(stage, case, errno.EIO, for_good=False),
}
SEEDS = [*range(8), *[None] * 8]  # of each kind of pair; 200 in all
FIGURES = ("points", "runs", "mixtures", "litter", "other")


def main(words: list[str]) -> int:
    totals = {name: dict.fromkeys(FIGURES, 0) for name in SWEEPS}
    print(row("case", "fault", *FIGURES), row(*["---"] * (2 + len(FIGURES))), sep="\n")
    with tempfile.TemporaryDirectory() as root, Driver() as driver:
        stage = Stage(Path(root) / "stage", driver)
        for case in all_cases():
            if not all(word in str(case) for word in words):
                continue
            for name, sweep in SWEEPS.items():
                add(totals[name], str(case), name, sweep(stage, case))
        totals["pair"] = dict.fromkeys(FIGURES, 0)
        for pair in kinds():
            if not all(word in f"pair: {pair.name}" for word in words):
                continue
            add(totals["pair"], f"pair: {pair.name}", "pair", collide(stage, pair, SEEDS))
    for name, total in totals.items():
        print(row("all", name, *total.values()))
    return any(total[kind] for total in totals.values() for kind in FIGURES[2:])


def add(total: dict[str, int], case: str, name: str, tally: Tally) -> None:
    found = tally.figures()
    print(row(case, name, *found.values()), flush=True)
    for fault in tally.faults:
        print(f"{case}: {fault}", file=sys.stderr)
    for figure, count in found.items():
        total[figure] += count


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
