"""Every way to average, behind one registry: from a run of k checkpoints to coefficients.

A method is a small function of a `Run`, of a budget `K` if it has one, and of its options, which
are keyword-only arguments with defaults. It returns k coefficients in step order that sum to one
(or several such lists, if it draws at random):

    @method()
    def latest(run: Run, K: int) -> list[float]:
        '''The last K checkpoints, equally. c_i = 1/K for i > k − K.'''
        return mean_of(range(run.k - K, run.k), run.k)

A user's own methods are registered the same way, from a Python file (`compare.methods_from`) or
from an entry point in the group `sewa.methods`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from sewa_cli.errors import ConfigError
from sewa_cli.text import did_you_mean

Coefficients = list[float]
REGISTRY: dict[str, Method] = {}


def _no_loss(*_: object) -> Any:
    raise ValueError("needs a loss, and there is none here")


@dataclass(frozen=True)
class Run:
    """A run as a method sees it: its length, its steps and, with a task, a loss.

    `loss(c)` is the selection loss of the average with coefficients c. `gradient(c)` is a loss on
    the next selection batch and its gradient in c. `learn(K)` asks the configured solver,
    `contest(name, K)` one that chooses by a metric.
    """

    k: int
    steps: Sequence[int] | None = None
    seed: int = 0
    loss: Callable[[Sequence[float]], float] = _no_loss
    gradient: Callable[[Sequence[float]], tuple[float, list[float]]] = _no_loss
    learn: Callable[[int], Coefficients] = _no_loss
    contest: Callable[[str, int], Coefficients] = _no_loss
    counts: Sequence[int] = ()  # the steps that each is the mean of, if some are interval means

    @classmethod
    def at(cls, steps: Sequence[int | None], seed: int, **loss: Any) -> Run:
        """Make the run of checkpoints at these steps; if one has none, no step is known."""
        known = [step for step in steps if step is not None]
        return cls(len(steps), known if len(known) == len(steps) else None, seed, **loss)

    def check(self, K: int) -> None:
        if not 0 < K <= self.k:
            raise ValueError(f"cannot take {K} of {self.k} checkpoints")


@dataclass(frozen=True)
class Method:
    name: str
    function: Callable[..., Any]
    needs_loss: bool
    has_budget: bool
    options: Mapping[str, Any]  # name → default
    needs_metric: bool = False

    @property
    def line(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


@dataclass(frozen=True)
class MethodCall:
    """A method with the options it was asked for. `label` is what the user wrote."""

    label: str
    method: Method
    options: Mapping[str, Any]

    def __call__(self, run: Run, K: int | None) -> list[Coefficients]:
        """Coefficients, one list a draw. K is ignored by methods that take none."""
        budget = {"K": K} if self.method.has_budget else {}
        found = self.method.function(run, **budget, **self.options)
        found = found.tolist() if hasattr(found, "tolist") else list(found)  # arrays, tensors
        draws = [x.tolist() if hasattr(x, "tolist") else x for x in found]
        draws = draws if draws and isinstance(draws[0], list | tuple) else [draws]
        found = [checked(coefficients, run.k, self.label) for coefficients in draws]
        if self.method.needs_loss or not run.counts:
            return found
        return [by_steps(c, run.counts) for c in found]


def method(
    name: str | None = None, *, needs_loss: bool = False, needs_metric: bool = False
) -> Callable[[Any], Any]:
    """Register a function under its own name, or another."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        own = name or function.__name__.replace("_", "-")
        if own in REGISTRY and REGISTRY[own].function.__module__ != function.__module__:
            raise ValueError(f"there is a method named {own} already; rename yours")
        parameters = inspect.signature(function).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        if missing := [key for key, default in options.items() if default is inspect._empty]:
            raise ValueError(f"{own}: the option {missing[0]} needs a default")
        for key, default in options.items():
            if not isinstance(default, bool | int | float | str):
                raise ValueError(f"{own}: the default of {key} must be text, a number or a bool")
        has_budget = any(p.name == "K" for p in parameters)
        REGISTRY[own] = Method(own, function, needs_loss, has_budget, options, needs_metric)
        return function

    return register


def parse(specs: str | Sequence[str]) -> list[MethodCall]:
    """`lawa,ema:decay=0.5` → calls; all faults at once."""
    calls: list[MethodCall] = []
    faults: list[str] = []
    for spec in specs.split(",") if isinstance(specs, str) else specs:
        try:
            if spec.strip():
                calls.append(parse_one(spec.strip()))
        except ConfigError as error:
            faults += error.faults
    if faults or not calls:
        raise ConfigError(*(faults or ["methods: none named; `sewa methods` lists them"]))
    return calls


def parse_one(spec: str, given_by: str = "methods") -> MethodCall:
    """`name` or `name:option=value:option=value`; `given_by`: the flag or key to blame."""
    name, *settings = spec.split(":")
    if name not in REGISTRY:
        hint = did_you_mean(name, REGISTRY, "see `sewa methods`")
        raise ConfigError(f"{given_by}: unknown method {name!r}; {hint}")
    found = REGISTRY[name]
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in found.options:
            known = ", ".join(found.options) or "none"
            raise ConfigError(f"{given_by}: {name} has no option {key!r}; it has: {known}")
        if not equals:
            raise ConfigError(f"{given_by}: {name}: write {key}=value")
        if key in options:
            raise ConfigError(f"{given_by}: {name}: {key} is given twice; give it once")
        kind = type(found.options[key])
        try:
            options[key] = {"true": True, "false": False}[value] if kind is bool else kind(value)
        except (KeyError, ValueError):
            what = {"int": "a whole number", "float": "a number", "bool": "true or false"}
            must = f"must be {what[kind.__name__]}, found {value!r}"
            raise ConfigError(f"{given_by}: {name}: {key} {must}") from None
    return MethodCall(spec, found, options)


def check_K(K: int, k: int, most: int) -> None:
    if most < K:
        raise ConfigError(f"--K {K}: there are {k} checkpoints; K is at most {most}")


def mean_of(indices: Iterable[int], k: int) -> Coefficients:
    """Equal weights on `indices`, zero elsewhere."""
    chosen = set(indices)
    if not chosen or min(chosen) < 0 or max(chosen) >= k:
        raise ValueError(f"indices must lie between 0 and {k - 1}, found {sorted(chosen)}")
    return [1.0 / len(chosen) if i in chosen else 0.0 for i in range(k)]


def by_steps(coefficients: Coefficients, counts: Sequence[int]) -> Coefficients:
    """Multiply by the number of steps: equal weights become the mean over all these steps."""
    if len({n for c, n in zip(coefficients, counts, strict=False) if c}) < 2:
        return coefficients
    weighed = [c * n for c, n in zip(coefficients, counts, strict=True)]
    return [c / sum(weighed) for c in weighed]


def checked(coefficients: Sequence[float], k: int, name: str) -> Coefficients:
    values = [float(c) for c in coefficients]
    if len(values) != k:
        raise ValueError(f"{name} gave {len(values)} coefficients for {k} checkpoints")
    if not all(isfinite(c) for c in values) or abs(sum(values) - 1) > 1e-6:
        raise ValueError(f"{name} gave coefficients that sum to {sum(values):.6g} instead of 1")
    return values


def _register_ours() -> None:
    from sewa_cli.methods import fixed, searched  # noqa: F401 - importing registers


_register_ours()
