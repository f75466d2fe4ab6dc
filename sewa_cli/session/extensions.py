"""Methods and solvers of the user's own: from a Python file, or from installed packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sewa_cli import solvers
from sewa_cli.config import Config, load_config
from sewa_cli.errors import ConfigError, SewaError
from sewa_cli.events import Events
from sewa_cli.methods import REGISTRY, Call, Coefficients, Run, checked, method
from sewa_cli.solvers import Choice, Problem, Solver
from sewa_cli.task import import_user_module, user_code


def load_settings(
    path: Path | None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
    dashes: str = "--",
    *,
    with_solver: bool = True,
) -> Config:
    """The config, with the chosen solver's section in it, checked and complete.

    `with_solver=False`: for commands that choose nothing. No solver is imported, nor torch.
    """
    return load_config(path, flags, sets, dashes, _Sections(with_solver))


class _Sections:
    """The solvers' sections of sewa.yaml."""

    def __init__(self, with_solver: bool) -> None:
        self.default = solvers.DEFAULT if with_solver else None
        self._looks = with_solver
        self._all_pass = False

    def register(self, settings: Mapping[str, Any]) -> None:
        file = settings.get("solver_from")
        if not self._looks:
            self._all_pass = file is not None
            return
        if file is not None:
            import_user_module(str(file))
        wanted = {name for name in settings if name not in Config.model_fields}
        if not {*wanted, settings.get("solver", self.default)} <= {*solvers.names()}:
            _register_installed("sewa.solvers", solvers.names(), solvers.register)

    def models(self, wanted: Collection[str]) -> Mapping[str, type[BaseModel] | None]:
        if not self._looks:
            known = wanted if self._all_pass else set(wanted) & {*solvers.names()}
            return dict.fromkeys(known)
        known = [name for name in solvers.names() if name in wanted]
        return {name: solvers.find(name).Settings for name in known}

    def having(self, key: str | None) -> list[str]:
        if key is None:
            return solvers.names() if self._looks else []
        known = {name: solvers.find(name) for name in solvers.names()}
        return [name for name, solver in known.items() if key in solver.Settings.model_fields]


def list_solvers(config: Config) -> dict[str, str]:
    """Name → what it does; the user's own and those of installed packages among them."""
    if config.solver_from is not None:
        import_user_module(str(config.solver_from))
    _register_installed("sewa.solvers", solvers.names(), solvers.register)
    return {name: solvers.line_of(solvers.find(name)) for name in solvers.names()}


def make_solver(config: Config, name: str | None = None) -> Solver:
    """The chosen solver with its settings; or another, by name."""
    name = name or config.solver or solvers.DEFAULT
    found = solvers.find(name)
    return found(found.Settings.model_validate(config.solvers.get(name, {})))


def ask(solver: Solver, problem: Problem, K: int) -> Choice:
    """Its choice; a fault in a user's own solver is reported like any in the user's code."""
    if type(solver).__module__.startswith("sewa_cli."):
        return solver.choose(problem, K)
    with user_code(f"{type(solver).__name__}.choose"):
        choice = solver.choose(problem, K)
        checked(choice.coefficients, problem.trajectory.k, type(solver).__name__)
        return choice


def register_methods(
    config: Config, events: Events | None = None, wanted: str | None = None
) -> None:
    """Methods of installed packages and of the user's own file join ours.

    To ask every installed package takes time: not done for the sake of one of ours.
    """
    if config.compare.methods_from is not None:
        import_user_module(str(config.compare.methods_from))
    if wanted is None or wanted.partition(":")[0] not in REGISTRY:
        _register_installed(
            "sewa.methods", list(REGISTRY), lambda name, found: method(name)(found), events
        )


def _register_installed(
    group: str,
    known: Collection[str],
    register: Callable[[str, Any], Any],
    events: Events | None = None,
) -> None:
    from importlib.metadata import entry_points

    for entry in entry_points(group=group):
        if entry.name in known:
            continue
        try:
            with user_code(f"entry point {entry.name}"):
                found = entry.load()
                if not any(one.function is found for one in REGISTRY.values()):
                    register(entry.name, found)
        except SewaError as error:  # somebody else's package is no reason to stop
            (events or Events()).warn(f"{group}: {entry.name} is not available: {error}")


def propose(call: Call, run: Run, K: int | None) -> list[Coefficients]:
    """Ask a method; a fault in a user's own is reported like any in the user's code."""
    if not call.method.function.__module__.startswith("sewa_cli."):
        with user_code(call.label):
            return call(run, K)
    try:
        return call(run, K)
    except ValueError as error:
        raise ConfigError(f"methods: {call.label}: {error}") from error
