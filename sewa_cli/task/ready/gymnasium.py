"""`task: gymnasium`: a policy, scored by its return in an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.settings import Count, Settings, WholeNumber
from sewa_cli.task.fence import user_code
from sewa_cli.task.ready import Newest, Ready, import_library
from sewa_cli.task.ready.args import ModelFunction, find_function, parse
from sewa_cli.task.ready.episodes import Kind, Player, Policy
from sewa_cli.text import one_line

MOST = 1_000_000  # episodes of each part; those of the held-out begin so much later
Episodes = Annotated[Count, Field(le=MOST)]
Reading = Callable[[Any], NDArray[Any]]


class EnvArgs(Settings):
    """An environment, and which episodes of it are played."""

    env: str
    env_args: dict[str, Any] = Field(default_factory=dict)
    episodes: Episodes = 500
    heldout: Episodes = 100
    seed0: Annotated[WholeNumber, Field(ge=0, le=2_000_000_000)] = 0  # + 2 · MOST: still 31 bits
    max_steps: Count | None = None

    def parts(self) -> dict[str, Callable[[], range]]:
        """Return the functions that name the seeds of episodes."""
        start = self.seed0
        return {
            "score_parts": lambda: range(start, start + self.episodes),
            "heldout_parts": lambda: range(start + MOST, start + MOST + self.heldout),
        }


class GymnasiumArgs(EnvArgs):
    """All keys of `args`."""

    model: ModelFunction
    model_args: dict[str, Any] = Field(default_factory=dict)
    policy: Literal["auto", "continuous", "argmax", "sample"] = "auto"
    output: WholeNumber | str | None = None
    stretch: bool = False
    flatten: bool = False


def make(args: Mapping[str, Any], newest: Newest | None = None) -> Ready:
    del newest  # the model is the user's function
    settings = parse(GymnasiumArgs, args)
    build = find_function(settings.model)  # it may register an environment
    make_one = partial(make_env, settings, import_library("task: gymnasium", "gymnasium"))
    first = make_one()
    policy = _policy(settings, first.action_space)
    read, blank = _reading(settings, first.observation_space)
    player = Player(make_one, read, blank, policy, [first])
    functions: dict[str, Callable[..., Any]] = {
        "build_model": lambda: build(**settings.model_args),
        "scores": player.play,
        **settings.parts(),
    }
    notes = []
    if first.spec is not None and first.spec.max_episode_steps is None:
        notes.append(
            f"{settings.env}: has no limit of steps that gymnasium knows; if an episode may "
            "never end, set args.max_steps"
        )
    return Ready(functions, (), tuple(notes))


def make_env(args: EnvArgs, library: Any) -> Any:
    options = dict(args.env_args)
    if args.max_steps is not None:
        options["max_episode_steps"] = args.max_steps
    with user_code("gymnasium.make"):
        try:
            return library.make(args.env, disable_env_checker=True, **options)
        except library.error.Error as error:  # names what is near, or what is to be installed
            raise TaskError(f"args.env: {args.env}: {one_line(error)}") from error


def _policy(args: GymnasiumArgs, space: Any) -> Policy:
    """Return how actions are made; ConfigError if the space does not allow it."""
    from gymnasium import spaces

    fits: tuple[Kind, ...]
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        fits, size = ("continuous",), int(np.prod(space.shape))
    elif isinstance(space, spaces.Discrete):
        fits, size = ("argmax", "sample"), int(space.n)
    else:
        raise TaskError(
            f"{args.env}: actions of {one_line(space)} have no ready-made policy; write a task.py"
        )
    kind = fits[0] if args.policy == "auto" else args.policy
    if kind not in fits:
        raise ConfigError(
            f"args.policy: {args.env} has actions of {one_line(space)}, so it must be "
            f"{' or '.join(fits)}, found {kind}"
        )
    if kind != "continuous":
        if args.stretch:
            raise ConfigError(
                f"args.stretch: {args.env} has no bounds, but {size} actions; leave it out"
            )
        return Policy(args.env, kind, size, output=args.output, start=int(space.start))
    low, high = (x.reshape(-1).astype(np.float32) for x in (space.low, space.high))
    if args.stretch and not np.isfinite([low, high]).all():
        raise ConfigError(
            f"args.stretch: {args.env} has actions without bounds, {one_line(space)}; leave it out"
        )
    return Policy(
        *(args.env, kind, size, space.shape, args.output), low=low, high=high, stretch=args.stretch
    )


def _reading(args: GymnasiumArgs, space: Any) -> tuple[Reading, NDArray[Any]]:
    """Return how an observation is read for the model, and a blank one."""
    from gymnasium import spaces

    if args.flatten:
        size = spaces.flatdim(space)
        return lambda seen: spaces.flatten(space, seen), np.zeros(size, np.float32)
    if isinstance(space, spaces.Discrete):
        return np.asarray, np.zeros((), np.int64)
    if isinstance(space, spaces.Box):
        return np.asarray, np.zeros(space.shape, np.float32)
    raise ConfigError(
        f"args.flatten: {args.env} has observations of {one_line(space)}; "
        "flatten: true makes one vector of each"
    )
