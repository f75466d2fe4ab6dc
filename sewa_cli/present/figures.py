"""Draw charts with matplotlib, which is optional and imported when a figure is drawn.

Figures are made without pyplot and with fixed settings: the user's matplotlibrc changes nothing,
and the same report gives the same figure.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite, nan
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, Literal

from sewa_cli.present.charts import Chart, Panel, Series
from sewa_cli.text import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_ABOVE: Final = 5.0  # values further apart than this factor get a logarithmic axis
WIDTH: Final = 8.0  # inches
_ROW_NAMES: Final = 34  # letters in a line of a row's name
_LEVELS: Final[list[dict[str, Any]]] = [
    {"ls": dashes, "lw": 1.1, "color": "black"}
    for dashes in ("-", ":", "--", "-.", (0, (8, 2)), (0, (1, 4)))
]
_STYLE: Final[dict[Any, Any]] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
    "svg.hashsalt": "sewa",
}


@contextmanager
def own_style() -> Iterator[None]:
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        # a name in a script that the font lacks is drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # a long name may leave no space for the panel
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        # an axis may not hold a number such as 1e300
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def figure_of(chart: Chart, hint_prefix: str | None = None) -> Figure:
    """Draw a chart; with a prefix, invisible points carry its hints (see `svg`)."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels, layout = chart.panels, ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    heights = [panel.height for panel in panels]
    shares_x = len({panel.x_label for panel in panels}) == 1
    with own_style():
        figure = Figure(figsize=(WIDTH, sum(heights)), layout=layout)
        every = figure.subplots(len(panels), squeeze=False, height_ratios=heights, sharex=shares_x)[
            :, 0
        ]
        for n, (axes, panel) in enumerate(zip(every, panels, strict=True)):
            _draw(axes, panel)
            if hint_prefix is not None:
                _draw_hints(axes, panel, f"{hint_prefix}{n}")
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    for series in panel.series:
        _draw_series(axes, series, bool(panel.rows))
    for n, level in enumerate(panel.levels.values()):
        axes.axhline(level, **_LEVELS[n % len(_LEVELS)])
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _place_x(axes, panel)
    if panel.rows:
        axes.set_ylim(len(panel.rows) - 0.5, -0.5)
        names = [label(name, _ROW_NAMES) for name in panel.rows]
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", left=False)
        axes.spines["left"].set_visible(False)
        _fit(axes, "x", _values(panel))
    elif panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    else:
        _fit(axes, "y", _values(panel))
    _draw_legend(axes, panel)


def _draw_series(axes: Axes, series: Series, is_row: bool) -> None:
    x, y = list(series.x), list(series.y)
    for at, height, ends in zip(x, y, series.intervals, strict=False):
        if ends is not None and all(map(isfinite, ends)):
            across = ([*ends], [height] * 2) if is_row else ([at] * 2, [*ends])
            axes.plot(*across, color=series.color, lw=1.0, marker="_|"[is_row], ms=5, zorder=2)
    if series.is_stem:
        feet = zip(x, y, strict=True)
        x, y = [at for at in x for _ in range(3)], [end for _, h in feet for end in (0.0, h, nan)]
    axes.plot(x, y, zorder=3, clip_on=False, **_look(series))


def _place_x(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    if panel.x_names:
        axes.set_xticks(list(panel.x_names), list(panel.x_names.values()))
    elif not panel.rows:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_legend(axes: Axes, panel: Panel) -> None:
    """Draw it above the panel; next to it if there are many names."""
    from matplotlib.lines import Line2D

    looks = {one.name: _look(one) for one in panel.series if one.name}
    looks |= {name: _LEVELS[n % len(_LEVELS)] for n, name in enumerate(panel.levels)}
    handles = [Line2D([], [], **look, label=label(name)) for name, look in looks.items()]
    if len(handles) > 3:
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=3)
    elif handles:
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _look(series: Series) -> dict[str, Any]:
    return {
        "color": series.color,
        "lw": series.width,
        "ls": "-" if series.is_stem else series.line or "none",
        "marker": series.marker or "none",
        "ms": series.size,
        "mfc": "white" if series.is_hollow else series.color,
    }


def _values(panel: Panel) -> list[float]:
    found = [*panel.levels.values()]
    for series in panel.series:
        found += series.x if panel.rows else series.y
        found += [end for ends in series.intervals if ends is not None for end in ends]
    return [value for value in found if isfinite(value)]


def _fit(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Fit an axis to values, logarithmic if they span much, with plain numbers as ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = getattr(axes, f"{which}axis")
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high / low > LOG_ABOVE:
        pad, ratio = (high / low) ** 0.07, high / low
        getattr(axes, f"set_{which}scale")("log")
        getattr(axes, f"set_{which}lim")(low / pad, high * pad)
        digits = (1, 2, 3, 4, 5, 6, 8) if ratio < 20 else (1, 2, 5) if ratio < 1000 else (1,)
        axis.set_major_locator(LogLocator(subs=digits))
        axis.set_minor_locator(NullLocator())
    else:
        pad = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
        getattr(axes, f"set_{which}lim")(low - pad, high + pad)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))


def _draw_hints(axes: Axes, panel: Panel, gid: str) -> None:
    found = list(hints_of(panel))
    x, y = [at for at, _, _ in found], [height for _, height, _ in found]
    axes.plot(x, y, "o", ms=9, color="black", ls="none", gid=gid, zorder=9, clip_on=False)


def hints_of(panel: Panel) -> Iterator[tuple[float, float, str]]:
    for series in panel.series:
        for x, y, text in zip(series.x, series.y, series.hints, strict=False):
            if text and isfinite(x) and isfinite(y):
                yield x, y, text


def label(name: str, width: int = 30) -> str:
    """Wrap a user's word; keep matplotlib from reading `$` as a formula and `_` as "no label"."""
    marked = re.sub(r"([,:;/])(?=\S)", "\\1\0 ", shown(name))  # good places to break a line
    lines = "\n".join(wrap(marked, width))
    text = lines.replace("\0 ", "").replace("\0", "").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
