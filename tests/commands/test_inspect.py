"""`sewa inspect`: what is there, how the run moved, and a verdict that the geometry supports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.shells import standard_input
from helpers.tiny import Sewa
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sewa_cli.commands import inspect as job
from sewa_cli.commands.inspect import run_inspect
from sewa_cli.config import Config
from sewa_cli.present.plots.inspect import plot
from sewa_cli.report.inspect import Inspection
from sewa_cli.trajectory.geometry import ENOUGH, Geometry, Shape, expect, is_finite

USAGE, FILES = 2, 3


# ---- the naive twin: everything stacked, each formula as it is written ------------------------


def naive(W: np.ndarray[Any, Any], times: list[float]) -> dict[str, Any]:
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


def flat(shape: Shape) -> dict[str, Any]:
    return vars(shape) | vars(shape.signs)


def numbers(values: Any) -> np.ndarray[Any, Any]:
    """None becomes NaN, which equals itself in numpy's comparison."""
    return np.array(values, dtype=np.float64)


def measure(W: torch.Tensor, times: list[float] | None = None) -> Shape:
    geometry = Geometry(times or even(len(W)))
    geometry.add(W.double())
    return geometry.measure()


def even(n: int) -> list[float]:
    return [i / (n - 1) for i in range(n)]


def verdict(W: torch.Tensor, times: list[float] | None = None) -> str:
    return measure(W, times).verdict


# ---- arithmetic ------------------------------------------------------------------------------


@given(
    n=st.integers(1, 9),
    widths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**31),
)
def test_blocks_add_up_to_the_naive_twin(
    n: int, widths: list[int], scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = [scale * torch.randn(n, c, generator=generator, dtype=torch.float64) for c in widths]
    times = torch.rand(n, generator=generator, dtype=torch.float64).sort().values.tolist()
    geometry = Geometry(times)
    for block in blocks:
        geometry.add(block)
    found, wanted = flat(geometry.measure()), naive(torch.cat(blocks, 1).numpy(), times)
    if n == 1:
        wanted["trend"] = None
    for name, value in wanted.items():
        unit = 1.0 if name in ("cosines", "net_to_path", "cosine", "trend") else scale
        np.testing.assert_allclose(
            numbers(found[name]), numbers(value), 1e-9, 1e-9 * unit, err_msg=name
        )


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3))
def test_a_run_looks_the_same_in_other_units_and_from_elsewhere(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(8, 30, generator=generator, dtype=torch.float64)
    here, there = measure(W), measure(scale * W + 5)
    assert vars(there.signs) == pytest.approx(vars(here.signs), abs=1e-7)
    assert there.radius == pytest.approx(scale * here.radius)


def test_backwards_in_time_the_signs_are_the_same() -> None:
    W = walk(12)
    forth, back = measure(W), measure(W.flip(0))
    assert vars(back.signs) == pytest.approx(vars(forth.signs))
    assert back.cosines == pytest.approx(forth.cosines[::-1])


def test_small_motion_far_from_zero_keeps_its_digits() -> None:
    """Squares of the weights themselves would drown a motion of 1e-6 around 1e4."""
    W = 1e-6 * torch.randn(10, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there = 1e4 + W
    exact = there - 1e4  # what of it survived the addition
    assert measure(there).to_mean == pytest.approx(measure(exact).to_mean, rel=1e-6)
    assert measure(there).signs.trend == pytest.approx(measure(exact).signs.trend, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_inf_are_found_and_large_sums_are_not_taken_for_them(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((1000,), 3e4, dtype=dtype))
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.ones(1000, dtype=dtype)
        tensor[7] = bad
        assert not is_finite(tensor)
    both = torch.tensor([float("inf"), -float("inf")], dtype=dtype)
    assert not is_finite(both)
    assert is_finite(torch.full((4,), 3e38))  # the sum overflows float32, no element does
    assert not is_finite(torch.full((4,), 1e300, dtype=torch.float64))  # as in `select`
    assert is_finite(torch.empty(0, dtype=dtype))


# ---- the verdict -----------------------------------------------------------------------------


def randn(n: int, P: int = 2000, seed: int = 0) -> torch.Tensor:
    """Rows of length about 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, P, dtype=torch.float64, generator=generator).mul_(P**-0.5)


def walk(n: int, seed: int = 0) -> torch.Tensor:
    return randn(n, seed=seed).cumsum(0)


def line(n: int, speed: float = 1.0) -> torch.Tensor:
    return speed * torch.arange(n, dtype=torch.float64)[:, None] * randn(1, seed=99)


def home(P: int = 2000) -> torch.Tensor:
    return 10 * randn(1, P, seed=77)


def memory(n: int, phi: float) -> torch.Tensor:
    """Noise around a point that forgets a part 1 − φ of where it was with every checkpoint."""
    noise, rows = randn(n + 200), [torch.zeros(2000, dtype=torch.float64)]
    for kick in noise:
        rows.append(phi * rows[-1] + kick)
    return torch.stack(rows[-n:])


N = pytest.mark.parametrize("n", [ENOUGH, 10, 50])


@N
def test_a_straight_line_is_moving(n: int) -> None:
    assert verdict(line(n) + home()) == "moving"


def test_a_line_under_noise_is_moving_although_its_cosines_look_like_wandering() -> None:
    W = home() + line(60, speed=0.4) + randn(60)
    cosine = measure(W).signs.cosine
    assert cosine is not None
    assert cosine < -0.3
    assert verdict(W) == "moving"


@N
def test_a_random_walk_is_drifting(n: int) -> None:
    words = [verdict(walk(n, seed) + home()) for seed in range(20)]
    assert words.count("drifting") >= 18


@N
def test_noise_around_a_point_is_wandering(n: int) -> None:
    assert {verdict(home() + randn(n, seed=seed)) for seed in range(20)} == {"wandering"}


def test_noise_with_some_memory_is_wandering_too() -> None:
    assert verdict(home() + memory(60, 0.6)) == "wandering"


@N
def test_a_run_that_comes_to_rest_is_settled(n: int) -> None:
    decay = torch.exp(-8 * torch.arange(n, dtype=torch.float64) / n)[:, None]
    assert verdict(home() + decay * randn(1) + 1e-4 * randn(n, seed=3)) == "settled"


def test_a_run_that_hardly_leaves_its_point_is_settled() -> None:
    assert verdict(home() + 1e-3 * randn(30)) == "settled"
    assert verdict(home().expand(30, -1)) == "settled"  # does not move at all


def test_slow_steady_motion_is_moving_however_small_it_is() -> None:
    """A fine-tuned model moves little, and yet it moves."""
    assert verdict(home() + line(30, speed=1e-6)) == "moving"


def test_a_straight_path_that_slows_down_is_moving_and_not_a_random_walk() -> None:
    decay = torch.exp(torch.linspace(0, -4, 40, dtype=torch.float64))[:, None]
    W = home() + decay * randn(1)
    assert (measure(W).signs.trend or 0) < 0.8  # so a line in time alone would not tell
    assert verdict(W) == "moving"


def test_one_jump_at_the_end_is_not_moving() -> None:
    """Net displacement is nearly the whole path, but the steps point nowhere."""
    W = home() + 1e-2 * randn(40)
    W[-1] += 5 * randn(1, seed=5)[0]
    assert (measure(W).signs.net_to_path or 0) > 0.8
    assert verdict(W) == "wandering"


def test_dense_late_checkpoints_of_a_moving_run_do_not_make_it_settled() -> None:
    steps = [0, 1000, 2000, 3000, 3010, 3020, 3030, 3040]
    times = [step / 3040 for step in steps]
    W = home() + torch.tensor(times, dtype=torch.float64)[:, None] * randn(1)
    assert verdict(W, times) == "moving"


def test_too_few_checkpoints_get_no_verdict() -> None:
    assert verdict(line(ENOUGH - 1)) == "unknown"


@pytest.mark.parametrize("times", [even(6), even(40), [0.0, 0.01, 0.03, 0.2, 0.25, 0.9, 1.0]])
def test_what_is_expected_is_what_simulations_show(times: list[float]) -> None:
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


def save_run(
    folder: Path, W: torch.Tensor, dtype: torch.dtype = torch.float32, every: int = 10
) -> list[Path]:
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


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def spoil(path: Path, name: str = "b", value: float = float("nan")) -> None:
    change(path, lambda tensors: tensors[name].view(-1)[3].fill_(value))


def look(folder: Path, **settings: Any) -> Inspection:
    return run_inspect(Config(checkpoints=(folder,), **settings))


def stacked(paths: list[Path]) -> np.ndarray[Any, Any]:
    files = [load_file(path) for path in paths]
    rows = [torch.cat([f["a.weight"].double().view(-1), f["b"].double()]) for f in files]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_bytes", [1, 8 * 9 * 5, 2**25])
def test_files_streamed_in_blocks_agree_with_the_naive_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_bytes: int
) -> None:
    paths = save_run(tmp_path, walk(9)[:, :40] * 10, dtype)
    monkeypatch.setattr(job, "BLOCK_BYTES", block_bytes)
    found, wanted = look(tmp_path), naive(stacked(paths), even(9))
    rows = found.checkpoints
    assert [row.to_last for row in rows] == pytest.approx(wanted["to_last"])
    assert [row.to_mean for row in rows] == pytest.approx(wanted["to_mean"])
    assert [row.length for row in rows[1:]] == pytest.approx(wanted["lengths"])
    assert [row.cosine for row in rows[1:-1]] == pytest.approx(wanted["cosines"])
    assert rows[0].length is rows[0].cosine is rows[-1].cosine is None
    assert found.motion is not None
    assert found.motion.radius == pytest.approx(wanted["radius"])
    assert found.motion.run.trend == pytest.approx(wanted["trend"])
    assert found.motion.net == pytest.approx(wanted["to_last"][0])
    assert found.motion.path == pytest.approx(sum(wanted["lengths"]))


def test_no_more_than_a_block_is_held_and_every_tensor_is_read_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path, walk(7))
    blocks: list[int] = []
    add = Geometry.add

    def watch(self: Geometry, W: torch.Tensor) -> None:
        blocks.append(W.numel() * W.element_size())
        add(self, W)

    monkeypatch.setattr(Geometry, "add", watch)
    monkeypatch.setattr(job, "BLOCK_BYTES", 4096)
    floats, integers = 7 * 4 * 2000, 7 * 8
    assert look(tmp_path).bytes_read == 2 * floats + integers
    assert max(blocks) <= 4096
    assert sum(blocks) == 2 * floats  # as float64

    spoil(tmp_path / "step-30.safetensors")
    assert look(tmp_path).bytes_read == 2 * floats - floats // 7 + integers


def test_it_says_what_is_there(tmp_path: Path) -> None:
    paths = save_run(tmp_path, walk(6)[:, :40])
    found = look(tmp_path)
    assert [row.step for row in found.checkpoints] == [10, 20, 30, 40, 50, 60]
    assert [row.size for row in found.checkpoints] == [path.stat().st_size for path in paths]
    assert (found.tensors, found.parameters, found.dtypes) == (3, 40, {"F32": 40, "I64": 1})
    assert (found.spacing, found.gaps) == (10, [])
    assert not any(row.nonfinite or row.same_as is not None for row in found.checkpoints)


@pytest.mark.parametrize(
    ("steps", "spacing", "gaps"),
    [
        ([10, 20, 30, 60, 70], 10, [(30, 60, 2)]),
        ([10, 20, 30, 35, 45], 10, [(30, 35, None)]),
        ([1, 2, 3, 10**15], 1, [(3, 10**15, 10**15 - 4)]),
        ([1, 2, 4, 8, 16], None, []),  # no usual spacing, so nothing is missing
        ([5], None, []),
        ([], None, []),
    ],
)
def test_gaps_are_where_the_usual_spacing_is_not(
    steps: list[int], spacing: int | None, gaps: list[tuple[int, int, int | None]]
) -> None:
    usual, found = job._gaps(steps)
    assert usual == spacing
    assert [(gap.after, gap.before, gap.missing) for gap in found] == gaps


def test_the_same_tensors_under_other_metadata_are_a_duplicate(tmp_path: Path) -> None:
    paths = save_run(tmp_path, walk(6)[:, :40])
    save_file(load_file(paths[1]), paths[4], metadata={"step": "50", "note": "copied"})
    rows = look(tmp_path).checkpoints
    assert [row.same_as for row in rows] == [None, None, None, None, 1, None]


def test_one_other_bit_is_no_duplicate(tmp_path: Path) -> None:
    paths = save_run(tmp_path, walk(6)[:, :40])
    save_file(load_file(paths[1]), paths[4])
    change(paths[4], lambda tensors: tensors["count"].add_(1))
    assert all(row.same_as is None for row in look(tmp_path).checkpoints)


def test_a_step_of_length_zero_has_no_cosine(tmp_path: Path) -> None:
    paths = save_run(tmp_path, walk(6)[:, :40])
    save_file(load_file(paths[2]), paths[3], metadata={"step": "40"})
    rows = look(tmp_path).checkpoints
    assert rows[3].length == 0
    assert rows[2].cosine is rows[3].cosine is None
    assert rows[1].cosine is not None


@pytest.mark.parametrize("bad", [2, 8])
def test_a_checkpoint_with_nan_takes_no_part_in_distances(tmp_path: Path, bad: int) -> None:
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
    assert found.motion is not None
    assert found.motion.run.trend == pytest.approx(wanted["trend"])
    assert paths[bad].name in found.warnings[0]


def test_where_all_hold_nan_nothing_is_said_of_the_run(tmp_path: Path) -> None:
    for path in save_run(tmp_path, walk(6)[:, :40]):
        spoil(path)
    found = look(tmp_path)
    assert (found.verdict, found.motion) == ("unknown", None)
    assert "every checkpoint holds NaN" in found.explanation


def test_integer_tensors_alone_give_no_verdict(tmp_path: Path) -> None:
    for step in range(6):
        save_file({"count": torch.tensor(step)}, tmp_path / f"{step}.safetensors")
    found = look(tmp_path)
    assert (found.verdict, found.motion, found.parameters) == ("unknown", None, 0)


def test_a_single_checkpoint_is_looked_at_too(tmp_path: Path) -> None:
    save_run(tmp_path, walk(1)[:, :40])
    found = look(tmp_path)
    assert found.checkpoints[0].to_last == found.checkpoints[0].to_mean == 0
    assert found.verdict == "unknown"
    assert "and there is 1" in found.explanation


WAYS = {
    "moving": home() + line(20, 0.5) + 0.3 * randn(20),
    "drifting": home() + walk(20),
    "wandering": home() + randn(20),
    "settled": home() + torch.exp(-torch.arange(20.0) / 2)[:, None] * randn(1),
}


@pytest.mark.parametrize("way", WAYS)
def test_synthetic_runs_on_disk_get_the_right_verdict(tmp_path: Path, way: str) -> None:
    save_run(tmp_path, WAYS[way])
    found = look(tmp_path)
    assert found.verdict == way
    assert way in found.explanation


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture
def ckpts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wandering run of eight in ckpts/; no sewa.yaml, no task."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("ckpts"), home() + randn(8))
    return Path("ckpts")


def test_the_table_tells_everything_on_stdout(ckpts: Path, sewa: Sewa) -> None:
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


def test_json_is_the_whole_inspection(ckpts: Path, sewa: Sewa) -> None:
    ended = sewa("inspect", ckpts, "--json")
    assert ended.code == 0
    printed = Inspection.model_validate_json(ended.out)
    head = {name: getattr(printed, name) for name in ("created", "command", "config")}
    assert printed == look(ckpts).model_copy(update=head)
    assert printed.config["checkpoints"] == [str(ckpts)]
    found = json.loads(ended.out)
    assert found["kind"] == "inspect"
    assert found["motion"]["expected"]["noise"]["cosine"] == -0.5


@pytest.mark.usefixtures("ckpts")
def test_flags_narrow_the_checkpoints_down(sewa: Sewa) -> None:
    def steps(*flags: object) -> list[int]:
        found = json.loads(sewa("inspect", "ckpts", "--json", *flags).out)
        return [row["step"] for row in found["checkpoints"]]

    assert steps("--last", 3) == [60, 70, 80]
    assert steps("--every", 3) == [20, 50, 80]
    assert steps("--from-step", 25, "--to-step", 50) == [30, 40, 50]


def test_sewa_yaml_names_the_checkpoints_and_its_task_is_not_needed(
    run_dir: Path, sewa: Sewa
) -> None:
    (run_dir / "task.py").unlink()
    ended = sewa("inspect")
    assert ended.code == 0, ended.err
    assert "12, steps 10 to 120, every 10" in ended.out


def test_paths_come_from_standard_input(
    ckpts: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"{path}\n" for path in ckpts.iterdir())
    monkeypatch.setattr(sys, "stdin", standard_input(lines))
    assert "8, steps 10 to 80" in sewa("inspect", "-").out


def test_files_without_steps_keep_their_order_and_that_is_said(ckpts: Path, sewa: Sewa) -> None:
    names = ["x", "c", "m", "a", "f", "g"]
    for name, path in zip(names, sorted(ckpts.iterdir()), strict=False):
        path.rename(f"{name}.safetensors")
    ended = sewa("inspect", *(f"{name}.safetensors" for name in names), "--plot", "p.svg")
    assert ended.code == 0
    assert "6, without steps" in ended.out
    assert "in the order given" in ended.err
    assert "checkpoint, by index" in texts("p.svg")


@pytest.mark.usefixtures("ckpts")
def test_quiet_leaves_only_the_data(sewa: Sewa) -> None:
    ended = sewa("inspect", "ckpts", "--quiet", "--plot", "p.png")
    assert ended.err == ""
    assert "wandering" in ended.out


# ---- the picture -----------------------------------------------------------------------------


def texts(path: str) -> str:
    """The words in an SVG: matplotlib draws letters as paths and keeps the text in a comment."""
    return Path(path).read_text()


@pytest.mark.usefixtures("ckpts")
@pytest.mark.parametrize(
    ("name", "magic"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.PDF", b"%PDF")]
)
def test_a_picture_is_drawn_as_its_suffix_says(sewa: Sewa, name: str, magic: bytes) -> None:
    ended = sewa("inspect", "ckpts", "--plot", name)
    assert ended.code == 0, ended.err
    assert Path(name).read_bytes().startswith(magic)
    assert f"wrote {name}" in ended.err


def test_the_picture_names_its_axes_and_marks_what_was_left_out(ckpts: Path, sewa: Sewa) -> None:
    spoil(ckpts / "step-30.safetensors")
    assert sewa("inspect", "ckpts", "--plot", "p.svg").code == 0
    for word in ("from the last", "from the mean", "training step", "L2 distance", "left out"):
        assert word in texts("p.svg")


def test_no_words_of_the_picture_overlap(ckpts: Path) -> None:
    spoil(ckpts / "step-30.safetensors")
    report = look(ckpts)
    rows = [
        row.model_copy(update={"step": 1_000_000 * (row.step or 0)}) for row in report.checkpoints
    ]
    title = "drifting, much like a random walk: or so"
    figure = plot(report.model_copy(update={"checkpoints": rows, "explanation": title}))
    figure.draw_without_rendering()
    words = [
        text
        for axes in figure.axes
        for text in [
            *axes.texts,
            *axes.get_yticklabels(),
            axes.xaxis.label,
            axes.yaxis.label,
            axes.title,
            axes._left_title,  # type: ignore[attr-defined]
            *(axes.legend_.get_texts() if axes.legend_ else []),
        ]
        if text.get_text() and text.get_visible()
    ]
    words += [text for text in figure.axes[1].get_xticklabels() if text.get_text()]
    boxes = [text.get_window_extent() for text in words]
    for i, box in enumerate(boxes):
        for j in range(i):
            assert not box.overlaps(boxes[j]), (words[i].get_text(), words[j].get_text())
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_a_run_of_nothing_but_nan_can_be_drawn(ckpts: Path, sewa: Sewa) -> None:
    for path in ckpts.iterdir():
        spoil(path)
    assert sewa("inspect", "ckpts", "--plot", "p.png").code == 0


@pytest.mark.usefixtures("ckpts")
def test_a_single_checkpoint_can_be_drawn(sewa: Sewa) -> None:
    assert sewa("inspect", "ckpts", "--last", 1, "--plot", "p.png").code == 0


# ---- bad input -------------------------------------------------------------------------------


def test_an_unknown_kind_of_picture_is_refused_before_any_work(
    sewa: Sewa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("p.gif", "p", "-"):
        ended = sewa("inspect", "nowhere", "--plot", name)  # not even looked for
        assert (ended.code, ended.out) == (USAGE, "")
        assert ".png, .svg, .pdf" in ended.error


def test_without_matplotlib_a_picture_is_refused_before_any_work(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = sewa("inspect", "nowhere", "--plot", "p.png")
    assert (ended.code, ended.out) == (USAGE, "")
    assert "pip install 'sewa-cli[plot]'" in ended.error


def test_without_matplotlib_everything_else_works(
    ckpts: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sewa("inspect", ckpts).code == 0


def test_a_picture_replaces_nothing_without_force(ckpts: Path, sewa: Sewa) -> None:
    Path("p.png").write_text("mine")
    ended = sewa("inspect", ckpts, "--plot", "p.png")
    assert (ended.code, ended.out) == (FILES, "")
    assert "p.png: exists; use --force" in ended.error
    assert Path("p.png").read_text() == "mine"
    assert sewa("inspect", ckpts, "--plot", "p.png", "--force").code == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_never_replaces_an_input(ckpts: Path, sewa: Sewa) -> None:
    path = (ckpts / "step-20.safetensors").rename("step-20.png")
    before = path.read_bytes()
    ended = sewa("inspect", ckpts, path, "--plot", path, "--force")
    assert (ended.code, ended.out) == (FILES, "")
    assert "is one of the inputs" in ended.error
    assert path.read_bytes() == before


def test_another_shape_is_an_error_that_names_file_and_tensor(ckpts: Path, sewa: Sewa) -> None:
    change(
        ckpts / "step-40.safetensors", lambda tensors: tensors.update({"a.weight": torch.ones(2)})
    )
    ended = sewa("inspect", ckpts)
    assert (ended.code, ended.out) == (FILES, "")
    assert "step-40.safetensors: a.weight: expected F32 [3, 4]" in ended.error
    assert "found F32 [2]" in ended.error


@pytest.mark.usefixtures("ckpts")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere/"], FILES, "nowhere: No such file"),
        ([], USAGE, "no checkpoints named"),
        (["ckpts", "--last", "0"], USAGE, "--last"),
        (["ckpts", "--every", "x"], USAGE, "--every: must be a whole number"),
        (["ckpts", "--from-step", "900"], USAGE, "no checkpoint lies in 900.."),
        (["ckpts", "--plot", "no/such/p.png"], FILES, "no such folder"),
        (["ckpts", "--config", "no.yaml"], USAGE, "no.yaml"),
    ],
)
def test_bad_input_is_one_line(sewa: Sewa, arguments: list[str], code: int, says: str) -> None:
    ended = sewa("inspect", *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert says in ended.error


def test_a_truncated_file_is_named(ckpts: Path, sewa: Sewa) -> None:
    path = ckpts / "step-50.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    ended = sewa("inspect", ckpts)
    assert (ended.code, ended.out) == (FILES, "")
    assert "step-50.safetensors: not a complete safetensors file" in ended.error
