"""sewa: learn which checkpoints of a training run to average.

from sewa_cli import select
"""

from __future__ import annotations

TYPE_CHECKING = False  # to import `typing` takes time in which `__main__` hears no Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from sewa_cli.api import select
    from sewa_cli.commands.select import Selection

__all__ = ["Selection", "select"]
__version__ = "0.1.0"  # pyproject.toml has it from here: asking the installation takes 30 ms


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `sewa --help` must not wait for it
    if name == "select":
        from sewa_cli.api import select

        return select
    if name == "Selection":
        from sewa_cli.commands.select import Selection

        return Selection
    raise AttributeError(f"module 'sewa_cli' has no attribute {name!r}")
