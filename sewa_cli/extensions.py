"""Methods and solvers of the user's own: from a Python file, or from installed packages."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sewa_cli import solvers
from sewa_cli.config import AUTO, Config, load_config
from sewa_cli.config.loading import Sections
from sewa_cli.errors import ConfigError, SewaError
from sewa_cli.events import Events
from sewa_cli.methods import REGISTRY, Coefficients, MethodCall, Run, checked, method
from sewa_cli.report.findings import Finding, as_stored
from sewa_cli.solvers import Choice, Plan, Problem, Sizes, Solver
from sewa_cli.task import import_user_module, user_code


def load_settings(
    path: Path | None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
    dashes: str = "--",
    *,
    with_solver: bool = True,
    masks: bool = False,
) -> Config:
    """Load the config, with the chosen solver's section in it, checked and complete.

    `with_solver=False`: for commands that choose nothing. No solver is imported, nor torch.
    `masks`: for commands that ask the solver for some K, whatever K is in the config.
    """
    return load_config(path, flags, sets, dashes, partial(_sections, with_solver, masks))


def _sections(looks: bool, masks: bool, settings: Mapping[str, Any]) -> Sections:
    """Register the solvers that these settings name; return all names and the wanted settings.

    `looks`: a solver is to be chosen. Else none is imported.
    """
    file, chosen, known = settings.get("solver_from"), settings.get("solver"), list[str]()
    wanted = {name for name in settings if name not in Config.model_fields}
    wanted |= {chosen} if isinstance(chosen, str) else set()
    if file is not None and looks:
        import_user_module(str(file))
    elif file is not None:  # a name in there may be any
        known = [name for name in wanted if isinstance(settings.get(name), dict)]
        known += [chosen] if isinstance(chosen, str) else []
    if not wanted <= {*solvers.names()} and looks:
        _register_installed("sewa.solvers", solvers.names(), solvers.register)
    elif not wanted <= {*solvers.names()}:
        from importlib.metadata import entry_points

        known += [entry.name for entry in entry_points(group="sewa.solvers")]
    known = list(dict.fromkeys([*known, *solvers.names()]))
    if taken := [name for name in solvers.REGISTRY if name in Config.model_fields]:
        del solvers.REGISTRY[taken[0]]
        raise ConfigError(f"solver_from: {taken[0]!r} is a key of sewa.yaml; choose another name")
    if looks and not chosen:
        is_auto = settings.get("K") in (None, "auto") and not masks
        objective = settings.get("objective")
        metric = isinstance(objective, dict) and objective.get("metric") is not None
        K = AUTO if is_auto else 1
        wanted.add(solvers.default_for(K, bool(settings.get("sparse")), metric and not masks))
    models = {n: solvers.find(n).Settings if looks else None for n in known if n in wanted}
    return Sections(known, models)


def list_solvers(config: Config) -> dict[str, str]:
    """Return each solver's name and what it does, with the user's own and installed ones."""
    if config.solver_from is not None:
        import_user_module(str(config.solver_from))
    _register_installed("sewa.solvers", solvers.names(), solvers.register)
    return {name: solvers.line_of(solvers.find(name)) for name in solvers.names()}


def solver_for(config: Config, K: int) -> str:
    metric = config.objective.metric is not None
    return config.solver or solvers.default_for(K, config.sparse, metric)


def make_solver(config: Config, name: str) -> Solver:
    found = solvers.find(name)
    settings = found.Settings.model_validate(config.solvers.get(name, {}))
    return found(settings) if found.__module__.startswith("sewa_cli.") else _Fenced(found, settings)


def solvers_that_serve(config: Config) -> list[str]:
    """Return the solvers that can choose by this objective with this K."""
    by_metric, is_auto = config.objective.metric is not None, config.K == AUTO

    def serves(solver: type[Solver]) -> bool:
        has_k = solver.finds_k if is_auto else solver.takes_k
        makes_masks = solver.takes_k or not config.sparse
        return ("parts" in solver.needs) == by_metric and has_k and makes_masks

    return [name for name in solvers.names() if serves(solvers.find(name))]


def chosen_solver(config: Config) -> Solver:
    """Return the solver with its settings; refuse now what it cannot do."""
    name = solver_for(config, config.K)
    solver = make_solver(config, name)
    metric = config.objective.metric
    if ("parts" in solver.needs) != (metric is not None):
        raise ConfigError(
            f"solver: {name} chooses by a metric; name one: --metric NAME"
            if metric is None
            else f"solver: {name} chooses by the loss, not by --metric {metric}; "
            f"{_others(config)} would do"
        )
    if config.K == AUTO and not solver.finds_k:
        raise ConfigError(f"K: auto needs a solver that finds K: {_others(config)}; or name a K")
    if config.K != AUTO and not solver.takes_k:
        raise ConfigError(f"K: {config.K}, but {name} weighs all checkpoints; leave out --K")
    if config.sparse and metric is not None:
        raise ConfigError("sparse: is for a choice by the loss; by a metric, name a K: --K 10")
    if config.sparse and config.K != AUTO:
        raise ConfigError(f"sparse: finds K itself, and K is {config.K}; leave out one of them")
    if config.sparse and not solver.takes_k:
        raise ConfigError(f"sparse: {name} weighs all checkpoints; leave out --solver {name}")
    return solver


def _others(config: Config) -> str:
    return " or ".join(f"--solver {name}" for name in solvers_that_serve(config))


class _Fenced(Solver):
    """A solver of the user's own: its faults are reported like any in the user's code."""

    def __init__(self, kind: type[Solver], settings: Any) -> None:
        self._name = kind.__name__
        with user_code(self._name):
            self._own = kind(settings)
        for name in ("needs", "reading", "finds_k", "takes_k"):
            setattr(self, name, getattr(kind, name))

    @property
    def vectors(self) -> int:
        with user_code(f"{self._name}.vectors"):
            return int(self._own.vectors)

    def prepare(self, problem: Problem) -> None:
        with user_code(f"{self._name}.prepare"):
            self._own.prepare(problem)

    def plan(self, sizes: Sizes) -> Plan | None:
        with user_code(f"{self._name}.plan"):
            return self._own.plan(sizes)

    def choose(self, problem: Problem, K: int) -> Choice:
        with user_code(f"{self._name}.choose"):
            choice, k = self._own.choose(problem, K), problem.trajectory.k
            if not isinstance(choice, Choice):
                raise TypeError(f"must return a Choice, found {type(choice).__name__}")
            findings = [_stored(one, k) for one in choice.findings]
            weights = checked([float(c) for c in choice.coefficients], k, self._name)
            return replace(choice, coefficients=weights, findings=findings)


def _stored(found: object, k: int) -> object:
    """Refuse now a finding that the report could not hold."""
    if type(found).__module__.startswith("sewa_cli.solvers"):  # between solvers and commands
        return found
    if not isinstance(found, Finding):
        what = "must be a Finding of sewa_cli.report.findings, or a subclass"
        raise TypeError(f"a finding {what}; found {type(found).__name__}")
    for fault in found.misfits(k):
        raise ValueError(fault)
    stored = as_stored(found)
    json.dumps(stored.model_dump())
    return stored


def register_methods(
    config: Config, events: Events | None = None, wanted: str | None = None
) -> None:
    """Register methods of installed packages and of the user's own file.

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


def propose(call: MethodCall, run: Run, K: int | None) -> list[Coefficients]:
    """Ask a method; a fault in a user's own is reported like any in the user's code."""
    if not call.method.function.__module__.startswith("sewa_cli."):
        with user_code(call.label):
            return call(run, K)
    try:
        return call(run, K)
    except ValueError as error:
        raise ConfigError(f"methods: {call.label}: {error}") from error
