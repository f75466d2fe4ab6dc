"""`task: stable-baselines3`: a run's policies, scored by their return in their environment.

The policy is built from what the newest zip says of it. The pickles in the zip name its class and
arguments: they are read as stand-ins, and only classes of the libraries are looked up.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from torch import nn
from torch.optim import Optimizer

from sewa_cli.checkpoints import archives, inert
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.files import open_regular
from sewa_cli.task.ready import Newest, Ready, import_library
from sewa_cli.task.ready.args import parse
from sewa_cli.task.ready.gymnasium import EnvArgs, make_env
from sewa_cli.text import shown

_LIBRARIES = ("stable_baselines3", "sb3_contrib", "torch")
_MOST_LINE = 10_000


class StableBaselines3Args(EnvArgs):
    """All keys of `args`."""

    deterministic: bool = True


def make(args: Mapping[str, Any], newest: Newest | None = None) -> Ready:
    import_library("task: stable-baselines3", "stable_baselines3")
    if newest is None:
        raise ConfigError("task: stable-baselines3 builds the policy of a checkpoint; name a run")
    path = newest().path
    if "env" not in args:
        args = {**args, "env": _find_env(path)}
    settings = parse(StableBaselines3Args, args)
    env = make_env(settings, import_library("task: stable-baselines3", "gymnasium"))

    def scores(model: nn.Module, seeds: Sequence[int]) -> list[dict[str, float]]:
        return [_play(model, env, int(seed), settings.deterministic) for seed in seeds]

    functions: dict[str, Callable[..., Any]] = {
        "build_model": lambda: _build(path, env),
        "scores": scores,
        **settings.parts(),
    }
    return Ready(functions, (), (f"{path.name}: plays {settings.env}",))


def _find_env(path: Path) -> str:
    """Return what stable-baselines3's Monitor has noted next to the checkpoints."""
    for monitor in sorted(path.parent.glob("*monitor.csv")):
        try:
            with open_regular(monitor) as file:
                found = json.loads(file.readline(_MOST_LINE).removeprefix(b"#"))["env_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(found, str) and found != "None":
            return found
    raise ConfigError(
        f"args.env: {path.parent} has no monitor.csv that names the environment; name it: "
        "--set args.env=CartPole-v1"
    )


def _build(path: Path, env: Any) -> nn.Module:
    try:
        about = json.loads(archives.read_member(path, "data"))
        policy = _unpacked(path, about["policy_class"])
        options = dict(_unpacked(path, about["policy_kwargs"]))
    except (ValueError, KeyError, TypeError, OSError, BadZipFile) as error:
        raise TaskError(
            f"{path}: does not say what its policy is; save it by PPO.save, or write a task.py"
        ) from error
    if about.get("use_sde") and "use_sde" in signature(policy).parameters:
        options["use_sde"] = True
    model: nn.Module = policy(env.observation_space, env.action_space, lambda _: 0.0, **options)
    return model


def _unpacked(path: Path, value: Any) -> Any:
    """Return a value of `data`: JSON, or a pickle of plain values and classes of the libraries."""
    if not isinstance(value, dict) or ":serialized:" not in value:
        return value
    data = base64.b64decode(value[":serialized:"], validate=True)
    try:
        return _resolved(inert.load(data, _is_of_library))
    except Exception as error:  # a torn pickle fails in many ways
        raise TaskError(
            f"{path}: its policy needs {shown(error, 100)}, which could run code; write a task.py"
        ) from None


def _is_of_library(module: str, _: str = "") -> bool:
    return module.split(".")[0] in _LIBRARIES


def _resolved(value: Any) -> Any:
    """Put classes of the libraries in the place of their stand-ins."""
    if isinstance(value, dict):
        return {key: _resolved(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_resolved, value))
    if isinstance(value, type) and _is_of_library(value.__module__):
        found = getattr(import_module(value.__module__), value.__qualname__)
        if issubclass(found, nn.Module | Optimizer):
            return found
    elif isinstance(value, str | int | float | bool | None):
        return value
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _play(model: Any, env: Any, seed: int, deterministic: bool) -> dict[str, float]:
    """Play one episode as `evaluate_policy` does."""
    seen, _ = env.reset(seed=seed)
    earned, length, state, is_first, is_over = 0.0, 0, None, True, False
    while not is_over:
        action, state = model.predict(seen, state, [is_first], deterministic)
        seen, reward, terminated, truncated, _ = env.step(action)
        earned, length, is_first = earned + float(reward), length + 1, False
        is_over = terminated or truncated
    return {"return": earned, "length": length}
