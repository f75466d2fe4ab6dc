"""What every report begins with."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from sewa_cli import __version__
from sewa_cli.config import Config
from sewa_cli.report.shared import Versions


def heading(
    config: Config, warnings: Sequence[str], *, task: str | None = None, device: object = None
) -> dict[str, Any]:
    """Values for `Head`; with a task and its device, for `TaskHead`."""
    head: dict[str, Any] = {
        "versions": Versions(
            sewa=__version__,
            python=platform.python_version(),
            torch=version("torch"),  # without importing it: `average` goes without
            safetensors=version("safetensors"),
        ),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config.model_dump(mode="json"),
        "warnings": list(warnings),
    }
    if task is None:
        return head
    return {**head, "task": task, "device": str(device), "seed": config.seed}
