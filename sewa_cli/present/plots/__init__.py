"""Pictures of reports: a figure for each kind, and one way to save them.

matplotlib is optional, so it is imported inside the functions. Figures are made without pyplot and
under the house's own settings: the user's matplotlibrc changes nothing, and the same report gives
the same bytes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.errors import ConfigError
from sewa_cli.output.atomic import check_free, publish_together, staged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# suffix → what not to write into the file: the time of day
_METADATA: Final[dict[str, dict[str, Any]]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
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


def check_plot(path: Path) -> None:
    """Refuse, before any work is done, a format we cannot draw or a missing matplotlib."""
    if path.suffix.lower() not in _METADATA:
        known = ", ".join(_METADATA)
        raise ConfigError(f"{path}: unknown kind of picture {path.suffix!r}; name it {known}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'sewa-cli[plot]'") from None


def save_figure(figure: Figure, path: Path, force: bool = False) -> None:
    """Write the figure in the format that the suffix names, whole or not at all."""
    check_plot(path)
    check_free(path, force)
    suffix = path.suffix.lower()
    with house(), staged(path, force) as stage:
        figure.savefig(stage.file, format=suffix[1:], metadata=_METADATA[suffix])
        publish_together([stage])


@contextmanager
def house() -> Iterator[None]:
    """matplotlib's defaults with our few changes, whatever the user's matplotlibrc says."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        # a name in a script that the font lacks is drawn as boxes; no need to talk about it
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def label(name: str, width: int = 30) -> str:
    """A user's word as a label: wrapped, no `$` taken for a formula, no `_` for "keep it out"."""
    marked = re.sub(r"([,:;/])(?=\S)", "\\1\0 ", name)  # good places to break a line
    lines = "\n".join(wrap(marked, width))
    text = lines.replace("\0 ", "").replace("\0", "").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def set_margins(figure: Figure, inches: float = 0.1) -> None:
    """Room around the panels and between them, for a figure with a constrained layout."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=inches, h_pad=inches))


def fit_losses(axes: Axes, values: Sequence[float], ratio: float) -> None:
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
