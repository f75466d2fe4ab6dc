"""`sewa inspect`: what is there, how the run moved, and a verdict that the geometry supports."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tensors import change
from safetensors.torch import load_file, save_file

from sewa_cli.commands import inspect as job
from sewa_cli.commands.inspect import run_inspect
from sewa_cli.config import Config
from sewa_cli.trajectory.geometry import ENOUGH, Geometry, expect

USAGE, FILES = 2, 3


# ---- the naive twin: everything stacked, each formula as it is written ------------------------


def naive(W, times):
    """W [n, P] float64."""
    n, mean = len(W), W.mean(0)
    lengths = [float(np.linalg.norm(b - a)) for a, b in pairwise(W)]
    cosines = []
    for i in range(1, n - 1):
        one, two = W[i] - W[i - 1], W[i + 1] - W[i]
        product = float(np.linalg.norm(one) * np.linalg.norm(two))
        cosines.append(float(one @ two) / product if product else None)
    t = np.array(times) - np.mean(times)
    fitted = mean + np.outer(t, t @ (W - mean) / (t @ t)) if n > 1 else W
    spread = float(((W - mean) ** 2).sum())
    late = W[n // 2 :]
    defined = [c for c in cosines if c is not None]
    return {
        "to_last": [float(np.linalg.norm(w - W[-1])) for w in W],
        "to_mean": [float(np.linalg.norm(w - mean)) for w in W],
        "lengths": lengths,
        "cosines": cosines,
        "norm": float(np.linalg.norm(mean)),
        "radius": (spread / n) ** 0.5,
        "late_radius": float((((late - late.mean(0)) ** 2).sum() / len(late)) ** 0.5),
        "net_to_path": float(np.linalg.norm(W[-1] - W[0])) / sum(lengths) if sum(lengths) else None,
        "cosine": float(np.mean(defined)) if defined else None,
        "trend": float(((fitted - mean) ** 2).sum()) / spread if spread else None,
    }


def measure(W, times=None):
    geometry = Geometry(times or even(len(W)))
    geometry.add(W.double())
    return geometry.measure()


def even(n):
    return [i / (n - 1) for i in range(n)]


def verdict(W, times=None):
    return measure(W, times).verdict


# ---- the verdict -----------------------------------------------------------------------------


def randn(n, P=2000, seed=0):
    """Rows of length about 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, P, dtype=torch.float64, generator=generator).mul_(P**-0.5)


def walk(n, seed=0):
    return randn(n, seed=seed).cumsum(0)


def line(n, speed=1.0):
    return speed * torch.arange(n, dtype=torch.float64)[:, None] * randn(1, seed=99)


def home(P=2000):
    return 10 * randn(1, P, seed=77)


def memory(n, phi):
    """Noise around a point that forgets a part 1 − φ of where it was with every checkpoint."""
    noise, rows = randn(n + 200), [torch.zeros(2000, dtype=torch.float64)]
    for kick in noise:
        rows.append(phi * rows[-1] + kick)
    return torch.stack(rows[-n:])


def decay(n, to):
    return torch.exp(torch.linspace(0, to, n, dtype=torch.float64))[:, None]


def jump():
    """Net displacement is nearly the whole path, but the steps point nowhere."""
    W = 1e-2 * randn(40)
    W[-1] += 5 * randn(1, seed=5)[0]
    return W


RUNS = {
    "a line": (lambda: line(10), "moving"),
    "a line under noise": (lambda: line(60, speed=0.4) + randn(60), "moving"),
    "slow steady motion": (lambda: line(30, speed=1e-6), "moving"),
    "a straight path that slows down": (lambda: decay(40, -4) * randn(1), "moving"),
    "a walk": (lambda: walk(50), "drifting"),
    "noise": (lambda: randn(50), "wandering"),
    "noise with some memory": (lambda: memory(60, 0.6), "wandering"),
    "one jump at the end": (jump, "wandering"),
    "coming to rest": (lambda: decay(50, -8) * randn(1) + 1e-4 * randn(50, seed=3), "settled"),
    "hardly leaving a point": (lambda: 1e-3 * randn(30), "settled"),
    "no motion": (lambda: torch.zeros(30, 2000), "settled"),
    "too few": (lambda: line(ENOUGH - 1), "unknown"),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_gets_the_verdict_that_its_geometry_supports(run):
    make, expected = RUNS[run]
    assert verdict(make() + home()) == expected


@pytest.mark.parametrize("n", [ENOUGH, 10, 50])
def test_the_verdict_on_a_walk_and_on_noise_hardly_depends_on_chance(n):
    walks = [verdict(walk(n, seed) + home()) for seed in range(20)]
    assert walks.count("drifting") >= 18
    assert {verdict(home() + randn(n, seed=seed)) for seed in range(20)} == {"wandering"}


def test_dense_late_checkpoints_of_a_moving_run_do_not_make_it_settled():
    times = [step / 3040 for step in (0, 1000, 2000, 3000, 3010, 3020, 3030, 3040)]
    W = home() + torch.tensor(times, dtype=torch.float64)[:, None] * randn(1)
    assert verdict(W, times) == "moving"


@pytest.mark.parametrize("times", [even(6), even(40), [0.0, 0.01, 0.03, 0.2, 0.25, 0.9, 1.0]])
def test_what_is_expected_is_what_simulations_show(times):
    n = len(times)
    waits = torch.tensor([after - before for before, after in pairwise(times)])
    kicks = randn(n - 1, P=40_000) * waits.double().sqrt()[:, None]
    start = torch.zeros(1, 40_000, dtype=torch.float64)
    ways = {
        "line": torch.tensor(times, dtype=torch.float64)[:, None] * randn(1),
        "walk": torch.cat([start, kicks.cumsum(0)]),
        "noise": randn(n, P=40_000),
    }
    for name, signs in expect(times).items():
        assert vars(measure(ways[name], times).signs) == pytest.approx(vars(signs), abs=0.02), name


# ---- files -----------------------------------------------------------------------------------


def save_run(folder, W, dtype=torch.float32, every=10):
    """Rows of W [n, ≥ 20] as checkpoints: two float tensors and an integer one."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, row in enumerate(W, 1):
        paths.append(folder / f"step-{i * every}.safetensors")
        tensors = {
            "a.weight": row[:12].reshape(3, 4).to(dtype),
            "b": row[12:].clone().to(dtype),
            "count": torch.tensor(i),
        }
        save_file(tensors, paths[-1])
    return paths


def spoil(path, name="b", value=float("nan")):
    change(path, lambda tensors: tensors[name].view(-1)[3].fill_(value))


def look(folder, **settings):
    return run_inspect(Config(checkpoints=(folder,), **settings))


def stacked(paths):
    files = [load_file(path) for path in paths]
    rows = [torch.cat([f["a.weight"].double().view(-1), f["b"].double()]) for f in files]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(
    ("dtype", "block_bytes"),
    [(torch.float64, 1), (torch.bfloat16, 8 * 9 * 5), (torch.float32, 2**25)],
)
def test_files_streamed_in_blocks_agree_with_the_naive_twin(
    tmp_path, monkeypatch, dtype, block_bytes
):
    paths = save_run(tmp_path, walk(9)[:, :40] * 10, dtype)
    monkeypatch.setattr(job, "BLOCK_BYTES", block_bytes)
    found, wanted = look(tmp_path), naive(stacked(paths), even(9))
    rows = found.checkpoints
    assert [row.to_last for row in rows] == pytest.approx(wanted["to_last"])
    assert [row.to_mean for row in rows] == pytest.approx(wanted["to_mean"])
    assert [row.length for row in rows[1:]] == pytest.approx(wanted["lengths"])
    assert [row.cosine for row in rows[1:-1]] == pytest.approx(wanted["cosines"])
    assert rows[0].length is rows[0].cosine is rows[-1].cosine is None
    assert found.motion.radius == pytest.approx(wanted["radius"])
    assert found.motion.run.trend == pytest.approx(wanted["trend"])
    assert found.motion.net == pytest.approx(wanted["to_last"][0])
    assert found.motion.path == pytest.approx(sum(wanted["lengths"]))


@pytest.mark.parametrize("bad", [2, 8])
def test_a_checkpoint_with_nan_takes_no_part_in_distances(tmp_path, bad):
    """Also the newest: the others are then measured from the newest finite one."""
    paths = save_run(tmp_path, walk(9)[:, :40])
    for name in ("b", "a.weight"):
        spoil(paths[bad], name, float("inf"))
    found = look(tmp_path)
    kept = [i for i in range(9) if i != bad]
    wanted = naive(stacked([paths[i] for i in kept]), [float(i) for i in kept])
    row = found.checkpoints[bad]
    assert row.nonfinite == ["a.weight", "b"]
    assert row.to_last is row.to_mean is row.length is row.cosine is None
    assert [found.checkpoints[i].to_last for i in kept] == pytest.approx(wanted["to_last"])
    assert [found.checkpoints[i].to_mean for i in kept] == pytest.approx(wanted["to_mean"])
    assert found.motion.run.trend == pytest.approx(wanted["trend"])
    assert paths[bad].name in found.warnings[0]


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture
def ckpts(tmp_path, monkeypatch):
    """A wandering run of eight in ckpts/; no sewa.yaml, no task."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("ckpts"), home() + randn(8))
    return Path("ckpts")


def test_the_table_tells_everything_on_stdout(ckpts, sewa):
    spoil(ckpts / "step-30.safetensors")
    (ckpts / "step-60.safetensors").unlink()
    copied = load_file(ckpts / "step-10.safetensors")
    save_file(copied, ckpts / "step-20.safetensors", metadata={"step": "20"})
    ended = sewa("inspect", "ckpts/")
    assert ended.code == 0, ended.err
    for part in (
        "7, steps 10 to 80, every 10",
        "50 to 70 (1 missing)",
        "F32 (2,000), I64 (1)",
        "same as step 10",
        "NaN or Inf in b",
        "random walk",
        "wandering around a point",
    ):
        assert part in ended.out
    assert "step-30.safetensors: takes no part in distances: b holds NaN or Inf" in ended.err
