"""The study of methods as a picture: loss and metric over K, a line a method."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from tables import Results, estimate

# Okabe and Ito's colours, which colour-blind readers can distinguish
LINES = {
    "sewa": "#D55E00",
    "sewa linear": "#E69F00",
    "lawa": "#0072B2",
    "random": "#56B4E9",
    "latest": "#009E73",
    "topk": "#CC79A7",
}
LEVELS = {"last": (":", "#000000"), "uniform": ("--", "#777777"), "greedy": ("-.", "#AA3377")}
ACROSS = 4  # settings in a row; more would be too small on a page
WHAT = {"heldout_loss": "held-out loss", "metric": ""}


def draw(results: Results, path: Path) -> None:
    settings = [setting for setting in results.settings if results.methods(setting)]
    columns = min(ACROSS, len(settings))
    bands = ceil(len(settings) / columns)
    size = (3.6 * columns, 6.2 * bands)
    figure, axes = plt.subplots(2 * bands, columns, figsize=size, squeeze=False)
    for place in range(len(settings), columns * bands):  # left over
        for row in (0, 1):
            axes[2 * (place // columns) + row][place % columns].set_axis_off()
    for place, setting in enumerate(settings):
        for row, (what, label) in enumerate(WHAT.items()):
            axis = axes[2 * (place // columns) + row][place % columns]
            for method, colour in LINES.items():
                points = {K: results.runs(setting, method, K, what) for K in setting.budgets}
                known = {K: estimate(list(runs.values())) for K, runs in points.items() if runs}
                if known:
                    shift = 1 + 0.03 * (list(LINES).index(method) - 2.5)  # bars side by side
                    axis.errorbar(
                        [K * shift for K in known],
                        [e.mean for e in known.values()],
                        yerr=[e.half or 0.0 for e in known.values()],
                        color=colour,
                        label=method,
                        marker="o",
                        markersize=4,
                        linewidth=1.5,
                        elinewidth=0.7,
                        capsize=2,
                    )
            for method, (style, colour) in LEVELS.items():
                runs = results.runs(setting, method, None, what)
                if runs:
                    mean = estimate(list(runs.values())).mean
                    axis.axhline(mean, linestyle=style, color=colour, label=method, linewidth=1.2)
            axis.set_xscale("log")
            axis.set_xticks(setting.budgets, [str(K) for K in setting.budgets])
            axis.minorticks_off()
            axis.set_ylabel(label or setting.metric)
            if row == 0:
                axis.set_title(f"{setting.name} (k={setting.k})", fontsize=10)
            else:
                axis.set_xlabel("K")
            axis.spines[["top", "right"]].set_visible(False)
    _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes[0][0].get_legend_handles_labels()
    across = min(len(labels), 4 * len(axes[0]))
    figure.legend(handles, labels, loc="lower center", ncols=across, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.5 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
