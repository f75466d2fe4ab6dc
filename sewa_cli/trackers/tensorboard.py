"""Write a report with TensorBoard's own writer: numbers, curves, tables, pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.present import say, show
from sewa_cli.present.page import has_pictures
from sewa_cli.publish import as_output_error
from sewa_cli.text import markdown
from sewa_cli.trackers import charts, curves, names, numbers

if TYPE_CHECKING:
    from sewa_cli.report.shared import ReportHead


def check(where: str) -> str:
    """Return the folder, wherever the task may go; refuse what is none."""
    if not where:
        raise ConfigError("--log: name a folder, tensorboard:DIR")
    if Path(where).exists() and not Path(where).is_dir():
        raise OutputError(f"{where}: is not a folder; name one for TensorBoard")
    try:
        from torch.utils import tensorboard  # noqa: F401
    except ImportError:
        raise ConfigError("--log: needs tensorboard: pip install tensorboard") from None
    return str(Path(where).absolute())


def log(report: ReportHead, where: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with as_output_error(where), SummaryWriter(where, filename_suffix=f".{report.kind}") as writer:
        for name, value in numbers(report).items():
            writer.add_scalar(name, value)
        for name, points in curves(report).items():
            for at, value in points:
                writer.add_scalar(name, value, at)
        for name, text in names(report).items():
            writer.add_text(name, markdown(text))
        writer.add_text(f"sewa/{report.kind}/table", show(report, "markdown"))
        writer.add_text(f"sewa/{report.kind}/says", "\n\n".join(map(markdown, say(report))))
        if has_pictures():
            for place, image in enumerate(_images(report), 1):
                writer.add_image(f"sewa/{report.kind}/picture_{place}", image, dataformats="HWC")


def _images(report: ReportHead) -> Iterator[Any]:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from sewa_cli.present.figures import figure_of

    for chart in charts(report):
        canvas: Any = FigureCanvasAgg(figure_of(chart))
        canvas.draw()
        yield np.asarray(canvas.buffer_rgba())[..., :3]
