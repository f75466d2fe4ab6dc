"""Figures of reports, a module for each kind; here is what they share.

matplotlib is optional, so it is imported inside the functions. Figures are made without pyplot and
under the house's own settings: the user's matplotlibrc changes nothing, and the same report gives
the same figure. `plot(report)` is the figure of `--plot`; `pictures(report)` are the same panels,
and some more, one by one, each for its place on a page.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from sewa_cli.text import number, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

WIDE: Final = 8.0  # inches of a panel that stands alone
LOG_ABOVE: Final = 8.0  # losses further apart than this factor get a logarithmic axis
EXACT: Final = 2**53  # a step that a float cannot hold is a date or a hash in a file's name
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


@dataclass(frozen=True)
class Picture:
    """A figure for a place on a page."""

    title: str
    alt: str  # what it shows, for whoever does not see it
    draw: Callable[[], Figure]


class Hint(NamedTuple):
    """What a point is, for whoever points at it. Without a `y`: all that is above and below."""

    x: float
    y: float | None
    text: str


_hints: WeakKeyDictionary[Any, list[Hint]] = WeakKeyDictionary()  # by axes


def hint(axes: Axes, x: float, y: float | None, *said: object) -> None:
    _hints.setdefault(axes, []).append(Hint(x, y, ", ".join(str(part) for part in said if part)))


def hints(axes: Axes) -> Sequence[Hint]:
    return _hints.get(axes, ())


@contextmanager
def house() -> Iterator[None]:
    """matplotlib's defaults with our few changes, whatever the user's matplotlibrc says."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        # a name in a script that the font lacks is drawn as boxes; no need to talk about it
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # nor of names so long that they leave no room for what they name
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        # nor of numbers that no axis can hold
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def label(name: str, width: int = 30) -> str:
    """A user's word as a label: wrapped, no `$` taken for a formula, no `_` for "keep it out"."""
    marked = re.sub(r"([,:;/])(?=\S)", "\\1\0 ", shown(name))  # good places to break a line
    lines = "\n".join(wrap(marked, width))
    text = lines.replace("\0 ", "").replace("\0", "").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def panels(*draws: Callable[[Axes], None], height: float = 2.9, width: float = WIDE) -> Figure:
    """A figure of these panels, one below the other, over the same x."""
    from matplotlib.figure import Figure

    with house():
        figure = Figure(figsize=(width, height * (1 + 0.62 * (len(draws) - 1))))
        set_margins(figure)
        ratios = [3] + [2] * (len(draws) - 1)
        all_axes = figure.subplots(len(draws), 1, sharex=True, squeeze=False, height_ratios=ratios)
        for draw, axes in zip(draws, all_axes[:, 0], strict=True):
            draw(axes)
        for axes in all_axes[:-1, 0]:
            axes.set_xlabel("")
    return figure


def drawable(value: float | None) -> float:
    """NaN, which leaves a gap, in the place of what cannot be drawn."""
    return value if value is not None and isfinite(value) else nan


def places_of(steps: Sequence[int | None]) -> tuple[list[float], bool]:
    """Where checkpoints stand on the x axis, and whether that is by step; else it is by index."""
    known = [float(step) for step in steps if step is not None and abs(step) < EXACT]
    by_step = len(set(known)) == len(steps)
    return (known if by_step else [float(i) for i in range(len(steps))]), by_step


def name_of(step: int | None, index: int, path: str = "") -> str:
    """A checkpoint, as a hint calls it."""
    return f"step {step:,}" if step is not None else path or f"checkpoint {index}"


def draw_weights(
    axes: Axes, steps: Sequence[int | None], weights: Sequence[float], text: str = ""
) -> None:
    """A line up for each checkpoint."""
    places, by_step = places_of(steps)
    heights = [weight if isfinite(weight) else 0.0 for weight in weights]
    axes.vlines(places, 0, heights, color="black", lw=1.4, label=text or "_")
    for i, (x, step, weight) in enumerate(zip(places, steps, weights, strict=True)):
        hint(axes, x, None, name_of(step, i), f"weight {number(weight)}")
    axes.set_ylim(min(0.0, *heights) if heights else 0, None)
    name_steps(axes, by_step)
    axes.set_ylabel("weight")


def losses_of(logged: Sequence[Mapping[str, float] | None]) -> list[str]:
    """What the trainer called its losses."""
    return list(dict.fromkeys(name for one in logged for name in one or {} if "loss" in name))


def draw_logged(
    axes: Axes, steps: Sequence[int | None], logged: Sequence[Mapping[str, float] | None]
) -> None:
    """The losses that the trainer logged, a line each."""
    places, by_step = places_of(steps)
    for name, style in zip(losses_of(logged), ("-", "--", ":", "-."), strict=False):
        values = [drawable((one or {}).get(name)) for one in logged]
        axes.plot(places, values, style, color="0.4", lw=1.2, label=label(name))
    for i, (x, one) in enumerate(zip(places, logged, strict=True)):
        said = [f"{name} {number(value)}" for name, value in (one or {}).items() if "loss" in name]
        hint(axes, x, None, name_of(steps[i], i), *said)
    name_steps(axes, by_step)
    axes.set_ylabel("logged loss")
    legend_above(axes)


def name_steps(axes: Axes, by_step: bool) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("training step" if by_step else "checkpoint, by index")


def name_level(axes: Axes, text: str, level: float) -> Annotation:
    """Beside the right end of a line across."""
    return axes.annotate(
        text,
        (1, level),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def legend_above(axes: Axes) -> None:
    """On the left, where a narrow screen begins; on the right of a title."""
    at = 1 if axes.get_title("left") else 0
    axes.legend(loc="lower right" if at else "lower left", bbox_to_anchor=(at, 1), ncols=3)


def legend_beside(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=3)


def set_margins(figure: Figure, inches: float = 0.1) -> None:
    """Room around the panels and between them, for a figure with a constrained layout."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=inches, h_pad=inches))


def fit_losses(axes: Axes, values: Sequence[float], ratio: float = LOG_ABOVE) -> None:
    """The y axis around `values`: logarithmic where they are positive and span more than `ratio`.

    Ticks are plain numbers, without a factor or an offset to add in the head.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, ScalarFormatter

    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high / low > ratio:
        pad = (high / low) ** 0.07
        axes.set_yscale("log")
        axes.set_ylim(low / pad, high * pad)
        digits = (1, 2, 3, 4, 5, 6, 8) if high / low < 20 else (1, 2, 5)
        axes.yaxis.set_major_locator(LogLocator(subs=digits if high / low < 1000 else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        pad = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - pad, high + pad)
        axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
