"""Episodes of D4RL and Minari, read with h5py alone, and split by whole episodes."""

from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from sewa_cli.errors import TaskError

DATA = Path(__file__).resolve().parent.parent / "data"


def find(name):
    """A file of D4RL or a folder of Minari: a name in sample_configs/data/, or any path."""
    for path in (DATA / f"{name}.hdf5", DATA / name, Path(name)):
        if path.exists():
            return path
    raise TaskError(f"{name}: no such data; `make data` at the root of sewa makes hopper-medium")


def read(path):
    """A list of (observations [T, n], actions [T, m]), float32, one pair for each episode."""
    path = Path(path)
    file = path / "data" / "main_data.hdf5" if path.is_dir() else path
    if not file.exists():
        raise TaskError(f"{path}: is no folder of Minari, as it has no data/{file.name}")
    try:
        with h5py.File(file) as opened:
            episodes = list((read_minari if path.is_dir() else read_d4rl)(opened))
    except (OSError, RuntimeError, ValueError) as error:  # h5py's, of broken files, and ours
        raise TaskError(f"{file}: {' '.join(str(error).split())}") from error
    if not episodes:
        raise TaskError(f"{file}: has no episodes")
    return episodes


def column(group, name, dimensions):
    """A column of numbers as an array of this many dimensions."""
    where = f"{group.name.strip('/')} {name}".strip()
    if name not in group:
        raise ValueError(f"{where}: is missing; found {', '.join(group) or 'nothing'}")
    if not isinstance(group[name], h5py.Dataset):
        raise ValueError(f"{where}: is a group, but only plain arrays can be read")
    values = group[name][()]
    if np.ndim(values) != dimensions or values.dtype.kind not in "fiub":
        found = f"{values.dtype} {list(np.shape(values))}"
        raise ValueError(f"{where}: must be {dimensions}-dimensional numbers, found {found}")
    return values


def read_d4rl(file):
    """One table of all transitions; an episode ends with a terminal or a timeout."""
    observations, actions = column(file, "observations", 2), column(file, "actions", 2)
    ends = column(file, "terminals", 1).astype(bool), column(file, "timeouts", 1).astype(bool)
    lengths = [len(values) for values in (observations, actions, *ends)]
    if len(set(lengths)) > 1:
        raise ValueError(f"observations, actions, terminals, timeouts differ in length: {lengths}")
    bounds = [0, *np.flatnonzero(ends[0] | ends[1]) + 1, len(actions)]
    for first, last in pairwise(bounds):
        if last > first:
            yield checked("", observations[first:last], actions[first:last])


def read_minari(file):
    """A group for each episode, with one more observation than actions."""
    names = [name for name in file if name.startswith("episode_")]
    for name in sorted(names, key=lambda name: int(name.removeprefix("episode_"))):
        observations, actions = (column(file[name], key, 2) for key in ("observations", "actions"))
        if len(observations) != len(actions) + 1:
            counts = f"{len(observations)} observations, {len(actions)} actions"
            raise ValueError(f"{name}: must have one observation more than actions, found {counts}")
        if len(actions):
            yield checked(f"{name} ", observations[:-1], actions)


def checked(where, observations, actions):
    """Finite, and within reach of a Tanh."""
    pair = observations.astype(np.float32), actions.astype(np.float32)
    if not all(np.isfinite(values).all() for values in pair):
        raise ValueError(f"{where}observations or actions: have NaN or infinite values")
    if np.abs(pair[1]).max() > 1.0001:
        largest = np.abs(pair[1]).max()
        raise ValueError(f"{where}actions: must be within [-1, 1], found {largest:.3g}")
    return pair


def split(episodes, fraction=0.1):
    """Three tables (observations, actions): training, selection, heldout; rows in no order.

    Whole episodes go to one side, as neighbouring transitions are nearly the same. The split
    depends on nothing but the data.
    """
    random = np.random.default_rng(0)
    shuffled = [episodes[index] for index in random.permutation(len(episodes))]
    enough = fraction * sum(len(actions) for _, actions in episodes)
    tables = {}
    for name in ("heldout", "selection"):
        taken = []
        while shuffled and sum(len(actions) for _, actions in taken) < enough:
            taken.append(shuffled.pop())
        tables[name] = taken
    tables["training"] = shuffled
    if not all(tables.values()):
        raise TaskError(f"{len(episodes)} episodes are too few to be split in three")
    return {name: stack(random, taken) for name, taken in tables.items()}


def stack(random, episodes):
    columns = [np.concatenate(parts) for parts in zip(*episodes, strict=True)]
    order = random.permutation(len(columns[0]))
    return tuple(values[order] for values in columns)
