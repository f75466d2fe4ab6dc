"""Solvers: from a Problem to a Choice. They never see a path, a config or a command.

A solver of ours is a module here and a line in BUILTIN. A user's own is registered the same way,
from a Python file (`solver_from`) or an entry point in the group `sewa.solvers`:
docs/explanation/solvers.md.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from sewa_cli import settings
from sewa_cli.errors import ConfigError
from sewa_cli.methods import mean_of

if TYPE_CHECKING:
    from sewa_cli.events import Events
    from sewa_cli.methods.fixed import Name
    from sewa_cli.objective.objective import Data, Objective
    from sewa_cli.solvers.board import Board
    from sewa_cli.trajectory import Trajectory

F = TypeVar("F")
BACK = 2  # forward passes that take as long as a backward pass
LEARNED = "learned"  # the name of a choice that no simple average would have made
BUILTIN = {
    "aggregate": "sewa_cli.solvers.aggregate",
    "gumbel": "sewa_cli.solvers.gumbel",
    "linear": "sewa_cli.solvers.linear",
    "race": "sewa_cli.solvers.race",
    "reinforce": "sewa_cli.solvers.reinforce",
}
WEIGHING = "aggregate"  # for K auto
PREDICTING = "linear"  # for `compare --fast`
REGISTRY: dict[str, type[Solver]] = {}


def default_for(K: int, sparse: bool, metric: bool = False) -> str:
    """Name the solver where the user names none."""
    if metric:
        return "race"
    if K != settings.AUTO:
        return "gumbel"
    return "linear" if sparse else WEIGHING


@dataclass(frozen=True, eq=False)
class Problem:
    """All that a solver may know."""

    objective: Objective
    trajectory: Trajectory
    memory_left: int  # bytes it may allocate next to W and its own vectors
    seed: int
    events: Events
    one_of_many: bool = False  # other K and methods follow: keep what they can use, skip the rest
    steps: Sequence[int | None] = ()  # of the checkpoints, where they are known
    counts: Sequence[int] = ()  # the steps that each is the mean of, if some are interval means
    kept: dict[str, Any] = field(default_factory=dict)  # by `prepare`, for every K
    board: Board | None = None  # where a metric is to be chosen by
    incumbent: tuple[Name, list[float]] | None = None  # named by the user, to be beaten
    by_loss: Callable[[int], Choice] | None = None  # what would be chosen without it

    def name_of(self, *places: int) -> str:
        """Return checkpoints by their steps, or by their places where these are not known."""
        k, known = self.trajectory.k, {step for step in self.steps if step is not None}
        if len(known) == k:
            kind, names = "step", [str(self.steps[i]) for i in places]
        else:
            kind, names = "checkpoint", [str(i + 1) for i in places]
            names[-1] += f" of {k}"
        return f"{kind}{'s' * (len(names) > 1)} {'–'.join(names)}"


@dataclass(frozen=True)
class Choice:
    """The coefficients of the average, and records of what was found on the way."""

    coefficients: list[float]
    method: str = LEARNED  # or the baseline that was found to be better
    findings: Sequence[object] = ()  # those of `report.findings` are reported

    @classmethod
    def of(cls, chosen: Iterable[int], k: int, *findings: object) -> Choice:
        """Put equal coefficients on the chosen."""
        return cls(mean_of(chosen, k), findings=findings)

    @property
    def selected(self) -> list[int]:
        return [i for i, c in enumerate(self.coefficients) if c != 0]

    def find(self, kind: type[F]) -> F | None:
        return next((one for one in self.findings if isinstance(one, kind)), None)

    def having(self, *findings: object) -> Choice:
        """Add findings that are not None, each in place of one of the same kind."""
        kinds = tuple(map(type, findings))
        rest = (one for one in self.findings if not isinstance(one, kinds))
        return replace(self, findings=(*rest, *(one for one in findings if one is not None)))


@dataclass(frozen=True)
class Ground:
    """The losses of baselines, and the examples that took part, where the solver settled these."""

    losses: dict[Name, float]
    examples: Data


@dataclass(frozen=True)
class Sizes:
    """The sizes that a plan depends on."""

    k: int
    K: int  # or settings.AUTO
    batches: int  # of the selection data
    memory_left: int  # bytes that the solver may allocate
    vector: int  # bytes of the model's weights in float32
    numbers: int = 0  # in the model's outputs for all selection data
    targets: int = 0  # of all selection data, where the task has targets()
    classes: float = 0  # of each target

    @property
    def at_once(self) -> int:
        """Return how many averages are mixed in one product with W."""
        return max(1, self.memory_left // 8 // self.vector)  # a product has copies of its own


@dataclass(frozen=True)
class Stage:
    """A part of a command, under the name that it reports its progress by."""

    name: str
    passes: float = 0  # over the selection data
    backward: float = 0
    heldout: float = 0  # passes over the held-out data
    training: float = 0  # passes over the data for BatchNorm
    reads: float = 0  # of every checkpoint, where W is not held
    products: int = 0  # with the whole of W
    at_least: float = 1.0  # share of the stage that every run needs


@dataclass(frozen=True)
class Plan:
    """The work of choosing, stage by stage.

    `bytes`: held next to W. `share`: of the selection data, that there is room for.
    """

    stages: Sequence[Stage]
    bytes: int = 0
    share: float = 1.0


class Solver(ABC):
    """One line that says what it does: `sewa solvers` shows it."""

    class Settings(settings.Settings):
        """Keys of its section in sewa.yaml."""

    needs: ClassVar[frozenset[str]] = frozenset({"value"})  # of `Objective.offers`
    reading: ClassVar[Literal["held", "streamed"]] = "held"  # W in memory, or passed over
    finds_k: ClassVar[bool] = False  # whether K may be auto
    takes_k: ClassVar[bool] = True  # whether it may be a number

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = self.Settings() if settings is None else settings

    @property
    def vectors(self) -> int:
        """float32 vectors of the model's size that it allocates."""
        return 4

    def prepare(self, problem: Problem) -> None:  # noqa: B027 - most have nothing to prepare
        """Do what every K shares; `compare` charges it to each row that asks."""

    @abstractmethod
    def choose(self, problem: Problem, K: int) -> Choice:
        """Choose an average of K checkpoints; K is AUTO only where `finds_k`."""

    def plan(self, sizes: Sizes) -> Plan | None:  # noqa: ARG002
        """Declare the stages of `choose`, for --dry-run and progress; None: nothing is known."""
        return None


def register(name: str, solver: type[Solver]) -> type[Solver]:
    if name in BUILTIN and not solver.__module__.startswith("sewa_cli."):
        raise ValueError(f"there is a solver named {name} already; rename yours")
    if not (inspect.isclass(solver) and issubclass(solver, Solver)):
        raise ValueError(f"{name}: a solver is a subclass of sewa_cli.solvers.Solver")
    if inspect.isabstract(solver):
        raise ValueError(f"{name}: has no choose(self, problem, K)")
    if not (inspect.isclass(solver.Settings) and issubclass(solver.Settings, settings.Settings)):
        raise ValueError(f"{name}: its Settings must be a subclass of Solver.Settings")
    REGISTRY[name] = solver
    return solver


def names() -> list[str]:
    return [*BUILTIN, *(name for name in REGISTRY if name not in BUILTIN)]


def find(name: str) -> type[Solver]:
    """Imported when it is first asked for: whoever only averages does not wait for torch."""
    if name not in REGISTRY and name in BUILTIN:
        import_module(BUILTIN[name])
    if name not in REGISTRY:
        raise ConfigError(f"solver: unknown solver {name!r}; there are {', '.join(names())}")
    return REGISTRY[name]


def line_of(solver: type[Solver]) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(solver) or "").partition("\n")[0]
