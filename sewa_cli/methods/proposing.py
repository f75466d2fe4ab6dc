"""Methods, ours and the user's: registered, named, asked for coefficients."""

from __future__ import annotations

from collections.abc import Sequence

from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, SewaError
from sewa_cli.events import Listener
from sewa_cli.methods import REGISTRY, Call, Coefficients, Run, method, parse_one
from sewa_cli.task import import_user_module, user_code


def register_methods(
    config: Config, listener: Listener | None = None, wanted: str | None = None
) -> None:
    """Methods of installed packages and of the user's own file join ours.

    To ask every installed package takes time: not done for the sake of one of ours.
    """
    if config.compare.methods_from is not None:
        import_user_module(str(config.compare.methods_from))
    if wanted is not None and wanted.partition(":")[0] in REGISTRY:
        return

    from importlib.metadata import entry_points

    for entry in entry_points(group="sewa.methods"):
        if entry.name in REGISTRY:
            continue
        try:
            with user_code(f"entry point {entry.name}"):
                found = entry.load()
                if not any(known.function is found for known in REGISTRY.values()):
                    method(entry.name)(found)
        except SewaError as error:  # somebody else's package is no reason to stop
            (listener or Listener()).warn(f"the method {entry.name} is not available: {error}")


def parse_methods(specs: Sequence[str]) -> list[Call]:
    """All faults at once."""
    calls, faults = [], []
    for spec in specs:
        try:
            if spec:
                calls.append(parse_one(spec))
        except ValueError as error:
            faults.append(f"methods: {error}")
    if faults or not calls:
        raise ConfigError(*(faults or ["methods: none named; `sewa methods` lists them"]))
    return calls


def propose(call: Call, run: Run, K: int | None) -> list[Coefficients]:
    """Ask a method; a fault in a user's own is told like any of the user's code."""
    if not call.method.function.__module__.startswith("sewa_cli."):
        with user_code(call.label):
            return call(run, K)
    try:
        return call(run, K)
    except ValueError as error:
        raise ConfigError(f"methods: {call.label}: {error}") from error
