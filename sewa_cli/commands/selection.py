"""The result of `select`, as it is shown in Python and in notebooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from sewa_cli.config import STDOUT
from sewa_cli.output.average import Average
from sewa_cli.present import draw, html, show, summary
from sewa_cli.report.findings import Mask
from sewa_cli.report.select import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Selection:
    """Which checkpoints were chosen, how good their average is, and the average."""

    report: Report
    average: Average = field(repr=False)

    @property
    def selected(self) -> list[int]:
        """Return indices into `report.candidates`, ascending."""
        return self.report.selected

    @property
    def paths(self) -> list[Path]:
        return [Path(path) for path in self.report.selected_paths]

    @property
    def steps(self) -> list[int | None]:
        return self.report.selected_steps

    @property
    def probabilities(self) -> list[float]:
        mask = self.report.find(Mask)
        return mask.probabilities if mask else [0.0] * self.report.k

    @property
    def output(self) -> Path | None:
        named = self.report.output
        return Path(named) if named not in (None, STDOUT) else None

    def summary(self) -> str:
        """Return what the command line prints: losses, the best baseline, the verdict."""
        return summary(self.report)

    def table(self, form: str = "table") -> str:
        """Return the scores alone, also as markdown, csv or jsonl; or the report as json."""
        return show(self.report, form)

    def plot(self) -> Figure:
        """Draw the weights and the losses; needs matplotlib."""
        return draw(self.report)

    def _repr_html_(self) -> str:
        """Show the core of the page in a notebook."""
        return html(self.report)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights by the model's names; a tied tensor has one of its names."""
        return dict(self.average.tensors())
