"""A report for TensorBoard, by its own writer: history, weights, tables, pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.output.place import as_output_error
from sewa_cli.present import curves, numbers, pictures, say, show
from sewa_cli.present.page import has_pictures
from sewa_cli.text import markdown

if TYPE_CHECKING:
    from sewa_cli.report.shared import Head


def check(where: str) -> None:
    if not where:
        raise ConfigError("--log: name a folder, tensorboard:DIR")
    if Path(where).exists() and not Path(where).is_dir():
        raise OutputError(f"{where}: is not a folder; name one for TensorBoard")
    try:
        from torch.utils import tensorboard  # noqa: F401
    except ImportError:
        raise ConfigError("--log: needs tensorboard: pip install 'sewa-cli[tensorboard]'") from None


def log(report: Head, where: str) -> None:
    """In a file of its own, as TensorBoard's writer always does."""
    from torch.utils.tensorboard import SummaryWriter

    with as_output_error(where), SummaryWriter(where, filename_suffix=f".{report.kind}") as writer:
        for name, value in numbers(report).items():
            writer.add_scalar(f"{report.kind}/{name}", value)
        for name, points in curves(report).items():
            for at, value in points:
                writer.add_scalar(f"{report.kind}/{name}", value, at)
        writer.add_text(f"{report.kind}/table", show(report, "markdown"))
        writer.add_text(f"{report.kind}/says", "\n\n".join(map(markdown, say(report))))
        if has_pictures():
            for name, image in _images(report):
                writer.add_image(f"{report.kind}/{name}", image, dataformats="HWC")


def _images(report: Head) -> Iterator[tuple[str, Any]]:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for name, picture in pictures(report):
        canvas: Any = FigureCanvasAgg(picture.draw())
        canvas.draw()
        yield f"{name}/{picture.title}", np.asarray(canvas.buffer_rgba())[..., :3]
