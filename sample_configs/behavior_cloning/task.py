"""Behaviour cloning: actions of recorded episodes are learned from observations, by squared error.

The metric is what counts: the mean return of the policy in its environment.
"""

from functools import cache
from pathlib import Path

import episodes as recorded
import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sewa_cli.errors import TaskError

ENVIRONMENTS = {  # what a data set's name has in it
    "hopper": "Hopper-v5",
    "walker2d": "Walker2d-v5",
    "halfcheetah": "HalfCheetah-v5",
    "lunarlander": "LunarLander-v3",
}
SIDE_BY_SIDE = 8  # episodes: as many as sewa asks for at once


class Policy(nn.Module):
    """Four layers of ReLU, dropout and linear, and a Tanh; observations are normalised before."""

    def __init__(self, observations, actions, width, dropout):
        super().__init__()
        layers = [nn.Linear(observations, width)]
        for outputs in (width, width, width, actions):
            layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, outputs)]
        self.layers, self.dropout = nn.Sequential(*layers, nn.Tanh()), dropout
        self.linear = tuple(layers[::3])
        self.register_buffer("mean", torch.zeros(observations))
        self.register_buffer("std", torch.ones(observations))

    def forward(self, observations):
        """Return what `layers` give, without a call of each: for few rows, calls take most time."""
        values = (observations - self.mean) / self.std
        for layer in self.linear[:-1]:
            values = F.relu(F.linear(values, layer.weight, layer.bias))
            values = F.dropout(values, self.dropout) if self.training else values
        return torch.tanh(F.linear(values, self.linear[-1].weight, self.linear[-1].bias))


def build_model(data="hopper-medium", width=128, dropout=0.1, env=None, episodes=20):
    if episodes < 1:
        raise TaskError(f"args.episodes: must be 1 or more, found {episodes}")
    observations, actions = tables(data)["training"]
    model = Policy(observations.shape[1], actions.shape[1], width, dropout)
    model.mean.copy_(observations.mean(0))
    model.std.copy_(observations.std(0) + 1e-3)
    model.env, model.episodes = env or environment_of(data), episodes  # for metrics
    return model


@cache
def tables(data):
    """training, selection and heldout: observations and actions of each."""
    parts = recorded.split(recorded.read(recorded.find(data)))
    return {name: tuple(map(torch.from_numpy, pair)) for name, pair in parts.items()}


def rows(data, part, count=None, skip=0, batch=1000):
    """Return `count` rows of a table, which is in no order, after the first `skip`, as batches."""
    last = None if count is None else skip + count
    pairs = (values[skip:last].split(batch) for values in tables(data)[part])
    return list(zip(*pairs, strict=True))


def training_data(data="hopper-medium"):
    return rows(data, "training")


def selection_data(data="hopper-medium", selection=1000, selection_from="fresh", selection_skip=0):
    parts = {"fresh": "selection", "training": "training"}
    if selection_from not in parts:
        raise TaskError(f"args.selection_from: must be fresh or training, found {selection_from}")
    part = parts[selection_from]
    if selection_skip < 0:
        raise TaskError(f"args.selection_skip: must be 0 or more rows, found {selection_skip}")
    most = len(tables(data)[part][0]) - selection_skip
    if not 1 <= selection <= most:
        raise TaskError(f"args.selection: must be 1 to {most} rows of {data}, found {selection}")
    return rows(data, part, selection, selection_skip)


def heldout_data(data="hopper-medium", heldout=4000):
    """Return this many rows at most: small files have fewer."""
    if heldout < 1:
        raise TaskError(f"args.heldout: must be 1 or more rows, found {heldout}")
    return rows(data, "heldout", heldout)


def loss(outputs, batch):
    return F.mse_loss(outputs, batch[1])


def metrics(model):
    """The mean return over episodes that begin alike for every model."""
    played = play(model, model.env, range(model.episodes))
    return {"return": sum(episode["return"] for episode in played) / model.episodes}


# to choose by return: a part is an episode, named by the seed that it begins with


def score_parts(score_episodes=500):
    return seeds_from(1_000_000, score_episodes, "score_episodes")


def heldout_parts(heldout_episodes=100):
    return seeds_from(2_000_000, heldout_episodes, "heldout_episodes")


def seeds_from(first, count, name):
    """Return seeds; `metrics`, `score_parts` and `heldout_parts` have none in common."""
    if not 1 <= count <= 1_000_000:
        raise TaskError(f"args.{name}: must be 1 to 1,000,000, found {count}")
    return range(first, first + count)


def scores(model, parts):
    return play(model, model.env, parts)


@torch.inference_mode()
def play(model, env, seeds):
    """The return and length of each episode, several played side by side.

    One forward pass makes a step of all. It always has SIDE_BY_SIDE rows, as each is rounded in
    another way if their number changes: what an episode earns is not to depend on its neighbours.
    """
    games = [environment(env, number) for number in range(min(SIDE_BY_SIDE, len(seeds)))]
    seen, learned = games[0].observation_space.shape, tuple(model.mean.shape)
    if seen != learned:
        raise TaskError(f"{env}: has observations of shape {seen}, the data have {learned}")
    was_training = model.training
    model.eval()
    observations = np.zeros((SIDE_BY_SIDE, *seen), np.float32)
    played = [{"return": 0.0, "length": 0} for _ in seeds]
    waiting, running = list(enumerate(seeds))[::-1], {}
    while waiting or running:
        for number, game in enumerate(games):
            if number not in running and waiting:
                episode, seed = waiting.pop()
                running[number] = played[episode]
                observations[number], _ = game.reset(seed=seed)
        actions = model(torch.tensor(observations, device=model.mean.device)).cpu().numpy()
        for number, episode in list(running.items()):
            step = games[number].step(actions[number])
            observations[number], reward, terminated, truncated, _ = step
            episode["return"] += float(reward)
            episode["length"] += 1
            if terminated or truncated:
                del running[number]
    model.train(was_training)
    return played


@cache
def environment(name, _number):
    """Made once: there are as many as are played side by side."""
    options = {"continuous": True} if name.startswith("LunarLander") else {}
    return gymnasium.make(name, disable_env_checker=True, **options)


def environment_of(data):
    """Name it by the file's name, else by the nearest folder's: hopper/medium-v0."""
    for component in reversed(Path(data).parts):
        found = [name for part, name in ENVIRONMENTS.items() if part in component.lower()]
        if len(found) == 1:
            return found[0]
        if found:
            several = " or ".join(found)
            raise TaskError(f"{data}: is {several}; name it in args: env: {found[0]}")
    raise TaskError(f"{data}: its environment is not known; name it in args: env: Hopper-v5")
