"""The `sewa` command, and `python -m sewa_cli`, as a process."""

import atexit
import gc

from sewa_cli import interrupts


def run() -> int:
    interrupts.catch()  # before the imports, which take longer than some people wait
    atexit.register(interrupts.ignore)  # the first to be registered, so the last to be called
    # While modules are imported there is no garbage, but Python looks for it in all that they make,
    # again and again: a fifth of a short command's time. `ConsoleEvents` turns it on for the work.
    gc.disable()
    from sewa_cli.cli import main

    return main()


if __name__ == "__main__":
    raise SystemExit(run())
