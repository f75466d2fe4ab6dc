"""Episodes of a gymnasium environment, played side by side by one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sewa_cli.errors import TaskError
from sewa_cli.text import one_line

SIDE_BY_SIDE = 8  # parts of one call; a forward pass always has this many rows
Kind = Literal["continuous", "argmax", "sample"]


@dataclass(frozen=True)
class Policy:
    """How a model's outputs become one action for each observation.

    size: numbers that the model gives for each; output: which of several outputs they are;
    low, high [size]: bounds of a continuous action.
    """

    name: str
    kind: Kind
    size: int
    shape: tuple[int, ...] = ()
    output: int | str | None = None
    start: int = 0  # the first of the discrete actions
    low: NDArray[Any] | None = None
    high: NDArray[Any] | None = None
    stretch: bool = False

    def outputs(self, model: nn.Module, observations: Tensor) -> Tensor:
        """Return [n, size] for observations [n, …]."""
        try:
            found = model(observations)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shape, dtype = list(observations.shape), str(observations.dtype).removeprefix("torch.")
            raise TaskError(
                f"{self.name}: the model does not take its observations, {dtype} {shape}: "
                f"{one_line(error)}"
            ) from error
        outputs = self._named(found)
        rows = len(observations)
        if outputs.ndim == 0 or outputs.shape[0] != rows or outputs.numel() != rows * self.size:
            raise TaskError(
                f"{self.name}: the model must give {[rows, self.size]}, {self._what} for each "
                f"observation; found {list(outputs.shape)}"
            )
        outputs = outputs.reshape(rows, self.size)
        if not self.stretch:
            return outputs
        low, high = (torch.as_tensor(x).to(outputs) for x in (self.low, self.high))
        return low + (outputs + 1) * (high - low) / 2

    @property
    def _what(self) -> str:
        return "an action" if self.kind == "continuous" else "a number for each action"

    def _named(self, found: Any) -> Tensor:
        """Return the named output of a model that has several."""
        if self.output is not None:
            by_name = isinstance(self.output, str) and not isinstance(found, dict)
            try:
                found = getattr(found, str(self.output)) if by_name else found[self.output]
            except (AttributeError, IndexError, KeyError, TypeError):
                raise TaskError(
                    f"args.output: the model has no output {self.output!r}, {_several(found)}"
                ) from None
        if not isinstance(found, Tensor):
            raise TaskError(
                f"{self.name}: the model must give one tensor, {_several(found)}; "
                "name one of several: args.output"
            )
        return found

    def actions(self, outputs: Tensor, draws: NDArray[Any]) -> list[Any]:
        """Return an action for each row; draws [n] are numbers in [0, 1) to sample by."""
        if self.kind == "continuous":
            values = np.clip(outputs.float().cpu().numpy(), self.low, self.high)
            return list(values.reshape(-1, *self.shape))
        if self.kind == "argmax":
            return [self.start + action for action in outputs.argmax(1).tolist()]
        below = outputs.double().softmax(1).cumsum(1).cpu().numpy() <= draws[:, None]
        return [self.start + min(n, self.size - 1) for n in below.sum(1).tolist()]


def _several(found: Any) -> str:
    if isinstance(found, dict):
        return f"found a dict of {', '.join(map(repr, found))}"
    several = isinstance(found, tuple | list)
    return f"found {type(found).__name__}{f' of {len(found)}' if several else ''}"


@dataclass
class _Episode:
    seed: int
    random: np.random.Generator
    earned: float = 0.0
    length: int = 0


@dataclass
class Player:
    """Environments are made when they are first needed, and kept.

    read: an observation as the model sees it; blank: one of the same shape and dtype.
    """

    make: Callable[[], Any]
    read: Callable[[Any], NDArray[Any]]
    blank: NDArray[Any]
    policy: Policy
    games: list[Any]

    @torch.inference_mode()
    def play(self, model: nn.Module, seeds: Sequence[int]) -> list[dict[str, float]]:
        """Return the `return` and `length` of the episodes that begin with these seeds.

        One forward pass makes a step of all that are being played, and always has SIDE_BY_SIDE
        rows: their number changes how each is rounded, and what an episode earns must not depend
        on those next to it, nor on how many processes share them.
        """
        while len(self.games) < min(SIDE_BY_SIDE, len(seeds)):
            self.games.append(self.make())
        device = next((x.device for x in model.parameters()), torch.device("cpu"))
        # not what the environment draws from
        episodes = [_Episode(int(seed), np.random.default_rng([int(seed), 1])) for seed in seeds]
        waiting, running = episodes[::-1], dict[int, _Episode]()
        observations, draws = np.stack([self.blank] * SIDE_BY_SIDE), np.zeros(SIDE_BY_SIDE)
        while waiting or running:
            for number in range(len(self.games)):
                if number not in running and waiting:
                    running[number] = waiting.pop()
                    seen, _ = self.games[number].reset(seed=running[number].seed)
                    observations[number] = self.read(seen)
            outputs = self.policy.outputs(model, torch.tensor(observations, device=device))
            self._check(outputs, running)
            for number, episode in running.items():
                draws[number] = episode.random.random()
            actions = self.policy.actions(outputs, draws)
            for number, episode in list(running.items()):
                seen, reward, terminated, truncated, _ = self.games[number].step(actions[number])
                observations[number] = self.read(seen)
                episode.earned += float(reward)
                episode.length += 1
                if terminated or truncated:
                    del running[number]
        return [{"return": episode.earned, "length": episode.length} for episode in episodes]

    def _check(self, outputs: Tensor, running: dict[int, _Episode]) -> None:
        """Check the rows of episodes that have not ended."""
        # a discrete action may be ruled out by -inf
        values = outputs.abs() if self.policy.kind == "continuous" else outputs
        finite = values.amax(1).isfinite().tolist()
        for number, episode in running.items():
            if not finite[number]:
                # of this average alone: others may well play
                raise FloatingPointError(
                    f"{self.policy.name}: seed {episode.seed}, step {episode.length + 1}: the "
                    "model's output is NaN or infinite: no action"
                )
