"""Make the data to clone, as D4RL's hdf5 files in sample_configs/data/: `make data`, or run this.

Hopper: a linear policy learned by Augmented Random Search (Mania, Guy and Recht, 2018; V2-t), which
takes minutes on a processor. `medium` is the first policy on the way that is good for a third of
the full return, as in D4RL; `expert` is the end. LunarLander: the controller that comes with
gymnasium, as it is, and weakened. All act with some noise, as D4RL's policies do, so that states
off the beaten track are seen too.
"""

import argparse
import os
import sys
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import gymnasium
import h5py
import numpy as np

DATA = Path(__file__).resolve().parent.parent / "data"
TRANSITIONS = 60_000
NOISE = {"hopper": 0.1, "lunarlander": 0.1}  # standard deviation, of actions in [-1, 1]


@cache
def environment(name):
    """One for each process."""
    if name == "hopper":
        return gymnasium.make("Hopper-v5")
    return gymnasium.make("LunarLander-v3", continuous=True)


class Linear:
    """Actions of normalised observations by a matrix."""

    def __init__(self, weights, mean, std):
        self.weights, self.mean, self.std = weights, mean, std

    def __call__(self, env, observation):  # noqa: ARG002
        return self.weights @ ((observation - self.mean) / self.std)


class Lander:
    """gymnasium's own controller, with less thrust than it asks for."""

    def __init__(self, lacking):
        self.lacking = lacking

    def __call__(self, env, observation):
        from gymnasium.envs.box2d.lunar_lander import heuristic

        thrust, side = heuristic(env.unwrapped, observation)
        return np.array([thrust - self.lacking, side])


def play(name, policy, seed, noise=0.0):
    """One episode, as D4RL's columns."""
    env, random = environment(name), np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    observations, actions, rewards = [], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        action = policy(env, observation)
        action = np.clip(action + noise * random.standard_normal(len(action)), -1, 1)
        action = action.astype(np.float32)
        observations.append(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        rewards.append(reward)
    ends = np.zeros(len(rewards), dtype=bool)
    ends[-1] = True
    return {
        "observations": np.array(observations, dtype=np.float32),
        "actions": np.array(actions, dtype=np.float32),
        "rewards": np.array(rewards, dtype=np.float32),
        "terminals": ends & terminated,
        "timeouts": ends & (not terminated),
    }


def score(policy, seed):
    """A step of the search asks this of Hopper: return, less 1 a step for being alive; states."""
    episode = play("hopper", policy, seed)
    seen = episode["observations"].astype(np.float64)
    moments = len(seen), seen.sum(0), (seen**2).sum(0)
    return float((episode["rewards"] - 1.0).sum()), moments


def returns(episodes):
    return np.array([episode["rewards"].sum(dtype=np.float64) for episode in episodes])


def learn_to_hop(pool, seed, iterations, size=0.01, spread=0.025, directions=8, best=4):
    """Medium and expert: policies whose return passes a third of the full one, and the full one.

    The same numbers come out however many processes there are.
    """
    random = np.random.default_rng(seed)
    weights = np.zeros((3, 11))
    count, total, squares = 0, np.zeros(11), np.zeros(11)
    medium, expert, reached = None, None, -np.inf
    for iteration in range(1, iterations + 1):
        mean = total / max(count, 1)
        std = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0)) if count else np.ones(11)
        std = np.where(std < 1e-7, 1.0, std)
        noises = random.standard_normal((directions, *weights.shape))
        jobs = [
            (Linear(weights + sign * spread * noise, mean, std), iteration * directions + number)
            for number, noise in enumerate(noises)
            for sign in (1, -1)
        ]
        answers = pool.starmap(score, jobs)
        pairs = np.array([answer for answer, _ in answers]).reshape(-1, 2)
        chosen = np.argsort(-pairs.max(1), kind="stable")[:best]
        change = np.tensordot(pairs[chosen, 0] - pairs[chosen, 1], noises[chosen], 1)
        weights = weights + size / (best * (pairs[chosen].std() + 1e-6)) * change
        for _, (rows, sums, sums_of_squares) in answers:
            count, total, squares = count + rows, total + sums, squares + sums_of_squares
        if iteration % 10 == 0:
            policy = Linear(weights, mean, std)
            tries = [("hopper", policy, 900_000 + n, NOISE["hopper"]) for n in range(10)]
            found = returns(pool.starmap(play, tries)).mean()
            print(f"hopper, iteration {iteration}: return {found:.0f}", file=sys.stderr)
            if medium is None and found > 1200:
                medium = policy
            if found > reached:
                expert, reached = policy, found
            if reached > 3200:
                break
    return medium or expert, expert


def record(pool, name, policy, transitions, seed):
    """Whole episodes, until there are enough transitions."""
    episodes = []
    while sum(len(episode["rewards"]) for episode in episodes) < transitions:
        first = seed + len(episodes)
        jobs = [(name, policy, number, NOISE[name]) for number in range(first, first + 10)]
        episodes += pool.starmap(play, jobs)
    return episodes


def save(path, episodes, about):
    """Written under another name first: whole, or not at all. What is there stays."""
    if path.exists():
        print(f"{path}: already there")
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with h5py.File(temporary, "w") as file:
        for column in episodes[0]:
            rows = np.concatenate([episode[column] for episode in episodes])
            file.create_dataset(column, data=rows, compression="gzip", compression_opts=1)
        for key, value in about.items():
            file[f"metadata/{key}"] = value
    temporary.replace(path)
    found = returns(episodes)
    rows = sum(len(episode["rewards"]) for episode in episodes)
    print(f"{path}: {rows} transitions, {len(found)} episodes, mean return {found.mean():.0f}")


def make_hopper(pool, folder, seed):
    medium, expert = learn_to_hop(pool, seed, iterations=300)
    parts = {}
    for number, (name, policy) in enumerate({"medium": medium, "expert": expert}.items(), 1):
        parts[name] = record(pool, "hopper", policy, TRANSITIONS, number * 1_000_000)
        about = {"algorithm": "ARS V2-t", "policy/weights": policy.weights}
        about |= {"policy/mean": policy.mean, "policy/std": policy.std}
        save(folder / f"hopper-{name}.hdf5", parts[name], about)
    both = parts["medium"] + parts["expert"]
    save(folder / "hopper-medium-expert.hdf5", both, {"algorithm": "ARS V2-t"})


def make_lander(pool, folder, transitions):
    for number, (name, lacking) in enumerate({"medium": 0.3, "expert": 0.0}.items(), 1):
        episodes = record(pool, "lunarlander", Lander(lacking), transitions, number * 1_000_000)
        about = {"algorithm": "gymnasium's heuristic", "policy/lacking": lacking}
        save(folder / f"lunarlander-{name}.hdf5", episodes, about)


def main():
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--out", type=Path, default=DATA)
    asked.add_argument("--seed", type=int, default=1, help="of Hopper; not with all it learns")
    asked.add_argument("--processes", type=int, default=os.cpu_count())
    asked.add_argument("--quick", action="store_true", help="a little of LunarLander, no Hopper")
    args = asked.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = {"lunarlander": ["medium", "expert"], "hopper": ["medium", "expert", "medium-expert"]}
    if args.quick:
        del wanted["hopper"]
    with get_context("spawn").Pool(args.processes) as pool:
        for name, kinds in wanted.items():
            paths = [args.out / f"{name}-{kind}.hdf5" for kind in kinds]
            if all(path.exists() for path in paths):
                for path in paths:
                    print(f"{path}: already there")
            elif name == "hopper":
                make_hopper(pool, args.out, args.seed)
            else:
                make_lander(pool, args.out, 2000 if args.quick else TRANSITIONS)


if __name__ == "__main__":
    main()
