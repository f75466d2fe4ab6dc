"""The `sewa` command, and `python -m sewa_cli`: a process of our own."""

import gc

from sewa_cli.cli import main


def run() -> int:
    # While modules are imported there is no garbage, but Python looks for it in all that they make,
    # again and again: a fifth of a short command's time. `Talk` lets it look when the work begins.
    gc.disable()
    return main()


if __name__ == "__main__":
    raise SystemExit(run())
