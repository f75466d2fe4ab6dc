"""Pictures and pages: refused before the work if they could not be written, and written whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.files import real

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES: Final[dict[str, dict[str, None]]] = {  # suffix → what to keep out: the time of day
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
PAGES: Final = (".html", ".htm")


def check_places(
    plot: Path | None,
    html: Path | None,
    others: Iterable[Path | str | None],
    inputs: Iterable[Path | str],
    force: bool,
) -> None:
    """Refuse, before any work, a picture or a page that could not be written in the end."""
    read = {real(Path(path)) for path in inputs}
    taken = {real(Path(path)) for path in others if path is not None}
    for flag, path in (("--plot", plot), ("--html", html)):
        if path is None:
            continue
        if real(path) in read:
            raise OutputError(f"{path}: is one of the inputs, which are never overwritten")
        if real(path) in taken:
            raise ConfigError(f"{path}: {flag} must name another file than the others")
        taken.add(real(path))
    if plot is not None:
        check_plot(plot, force)
    if html is not None:
        check_page(html, force)


def check_page(path: Path, force: bool) -> None:
    """Refuse, before any work, a page that could not be written in the end."""
    if path.suffix.lower() not in PAGES:
        raise ConfigError(f"{path}: a page is HTML; name it .html")
    from sewa_cli.publish import check_free

    check_free(path, force)


def save_page(text: str, path: Path, force: bool = False) -> None:
    """Write the page, whole or not at all."""
    from sewa_cli.publish import new_output

    with new_output(path, force) as file:
        file.write(text.encode())


def check_plot(path: Path, force: bool) -> None:
    """Refuse, before any work, a picture that could not be drawn or written in the end."""
    if path.suffix.lower() not in PICTURES:
        known = ", ".join(PICTURES)
        raise ConfigError(f"{path}: unknown kind of picture {path.suffix!r}; name it {known}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from None
    from sewa_cli.publish import check_free

    check_free(path, force)


def save_figure(figure: Figure, path: Path, force: bool = False) -> None:
    """Write the figure in the format that the suffix names, whole or not at all."""
    from sewa_cli.present.figures import own_style
    from sewa_cli.publish import new_output

    check_plot(path, force)
    suffix = path.suffix.lower()
    with own_style(), new_output(path, force) as file:
        figure.savefig(file, format=suffix[1:], metadata=PICTURES[suffix])
