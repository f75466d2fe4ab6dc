"""The two products with W, from memory and from files: `python benchmarks/products.py`.

Times are in plain reads of W by as many threads (`limit`): mixing and pulling back by tiles, with M
samples, and by one call of torch's BLAS over 50 rows. From files in the page cache, they are in raw
reads of the mapped bytes; `rows` copies whole rows, as for files that cannot be mapped. Then come
averages of 16-bit numbers, and mixing from files that are not in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import torch
from common import finish, processor, race
from safetensors.torch import save_file
from torch import Tensor, nn

from sewa_cli.dtypes import Array, as_array
from sewa_cli.events import Events
from sewa_cli.extensions import load_settings
from sewa_cli.objective.model import FlatModel
from sewa_cli.opening import open_session
from sewa_cli.output.mean import Room, in_order, pieces, weighted_mean
from sewa_cli.placing import CheckpointRows
from sewa_cli.task import make_task
from sewa_cli.trajectory import Layout, Trajectory
from sewa_cli.trajectory.tiers import Deltas, Dense, Streamed

SIZES = ((100, 2 * 10**6), (1000, 10**5), (10, 10**7), (100, 10**5))
SAMPLES = (1, 2, 4, 8)
FILES = (60, 2 * 10**6)
ROWS = 50
Contestants = dict[str, Callable[[], object]]


def both(W: Trajectory, M: int) -> tuple[Callable[[], object], Callable[[], object]]:
    a, G = torch.rand(M, W.k), torch.randn(M, W.layout.size)
    out = torch.empty(M, W.layout.size)
    return lambda: W.mix(a, out=out), lambda: W.pull_back(G)


def by_one_call(W: Tensor, M: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """50 rows at a time, threads left to BLAS."""
    k, P = W.shape
    a, G, out = torch.rand(M, k), torch.randn(M, P), torch.empty(M, P)

    def mix() -> None:
        torch.mm(a[:, :ROWS], W[:ROWS], out=out)
        for at in range(ROWS, k, ROWS):
            out.addmm_(a[:, at : at + ROWS], W[at : at + ROWS])

    def pull_back() -> None:
        for at in range(0, k, ROWS):
            G @ W[at : at + ROWS].T

    return mix, pull_back


def read_by_threads(parts: list[np.ndarray[tuple[int, ...], np.dtype[np.uint64]]]) -> None:
    """Every byte once, into registers."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.max, parts))


def in_memory(rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for k, P in SIZES:
        held = Dense(torch.randn(k, P), layout_of(P))
        flat = held.W.reshape(-1).numpy().view(np.uint64)
        pieces = [flat[at : at + 2**18] for at in range(0, flat.size, 2**18)]
        contestants: Contestants = {"limit": partial(read_by_threads, pieces)}
        for M in SAMPLES:
            ways = {"tiles": both(held, M), "one call": by_one_call(held.W, M)}
            for name, (mix, pull) in ways.items():
                contestants[f"{name} mix {M}"], contestants[f"{name} pull {M}"] = mix, pull
        best = race(contestants, rounds)
        for M in SAMPLES:
            row: dict[str, object] = {"k": k, "P": f"{P:.0e}", "M": M}
            row["GB/s of the limit"] = 4 * k * P / best["limit"] / 1e9
            for name in ("tiles", "one call"):
                for what in ("mix", "pull"):
                    row[f"{name}: {what}"] = best[f"{name} {what} {M}"] / best["limit"]
            pair, alone = (
                sum(best[f"tiles {what} {m}"] for what in ("mix", "pull")) for m in (M, 1)
            )
            row["step / two reads"] = pair / best["limit"] / 2
            row["step / M=1"] = pair / alone
            rows.append(row)
    return rows


def layout_of(P: int) -> Layout:
    return FlatModel(nn.Linear(P, 1, bias=False), torch.device("cpu")).layout


def make_files(folder: Path, k: int, P: int, dtype: torch.dtype) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    base = torch.randn(P) * 0.05
    for step in range(k):
        state = {"weight": (base + 0.01 * torch.randn(P))[None].to(dtype)}
        save_file(state, folder / f"step-{step:03}.safetensors")


def open_rows(folder: Path, P: int) -> CheckpointRows:
    x = torch.zeros(2, P)
    functions = {
        "build_model": lambda: nn.Linear(P, 1, bias=False),
        "selection_data": lambda: [(x, x[:, :1])],
        "loss": lambda outputs, batch: ((outputs - batch[1]) ** 2).mean(),
    }
    config = load_settings(None, {"checkpoints": (folder,), "device": "cpu", "K": 2})
    return CheckpointRows(
        open_session(config, make_task(functions, source="here", args={}), Events())
    )


class WholeColumns(Streamed):
    """Read whole rows, as for files that cannot be mapped."""

    has_tiles = False


def from_files(rounds: int, folder: Path) -> list[dict[str, object]]:
    k, P = FILES
    rows: list[dict[str, object]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        make_files(folder / name, k, P, dtype)
        source = open_rows(folder / name, P)
        files = sorted((folder / name).iterdir())
        mapped = [np.memmap(file, np.uint8, "r") for file in files]
        words = [m[len(m) % 8 :].view(np.uint64) for m in mapped]
        stream, whole = Streamed.read(source, 1), WholeColumns.read(source, 8)
        contestants: Contestants = {"limit": partial(read_by_threads, words)}
        for way, W in {"tiles": stream, "rows": whole}.items():
            contestants[f"{way} mix"], contestants[f"{way} pull"] = both(W, 2)
        if dtype == torch.float32:
            kept: Trajectory = Deltas.read(source)
            contestants["bf16 tier mix"], contestants["bf16 tier pull"] = both(kept, 2)
        best = race(contestants, rounds)
        limit = best.pop("limit")
        row: dict[str, object] = {"files": f"{k} × {P:.0e} {name}", "M": 2}
        row["GB/s of the raw read"] = sum(len(m) for m in mapped) / limit / 1e9
        for way in ("tiles", "rows", "bf16 tier"):
            for what in ("mix", "pull"):
                seconds = best.get(f"{way} {what}")
                row[f"{way}: {what}"] = "" if seconds is None else seconds / limit
        rows.append(row)
    return rows


def from_disk(rounds: int, folder: Path) -> list[dict[str, object]]:
    k, P = FILES
    files = sorted((folder / "float32").iterdir())
    os.sync()
    a, out = torch.rand(2, k), torch.empty(2, P)

    def forget() -> None:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def plain() -> None:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.read(2**20):
                    pass

    best: dict[str, float] = {}
    for _ in range(rounds):
        for name in ("plain", "tiles", "rows"):
            source = open_rows(folder / "float32", P)  # what is mapped is not forgotten
            forget()
            start = time.perf_counter()
            if name == "plain":
                plain()
            else:
                kind = Streamed if name == "tiles" else WholeColumns
                kind(source, 8, list(range(k))).mix(a, out=out)
            best[name] = min(best.get(name, inf), time.perf_counter() - start)
            del source
            gc.collect()
    size = sum(file.stat().st_size for file in files)
    row: dict[str, object] = {"files, not cached": f"{k} × {P:.0e} float32"}
    row["GB/s of the plain read"] = size / best["plain"] / 1e9
    row |= {f"{name}: mix": best[name] / best["plain"] for name in ("tiles", "rows")}
    return [row]


def averages(rounds: int) -> list[dict[str, object]]:
    """Time the mean of 20 arrays of 10⁷ numbers of 16 bits."""
    base = torch.randn(10**7) * 0.05
    weights = [1 / 20] * 20

    def mean_of(dtype: torch.dtype) -> Callable[[], object]:
        source = as_array(base.to(dtype))
        parts = [pieces(source.copy()) for _ in range(20)]

        def work() -> None:
            for _ in in_order(partial(one, piece) for piece in zip(*parts, strict=True)):
                pass

        return work

    def one(piece: Sequence[Array], memory_left: Room) -> Array:
        return weighted_mean(piece, weights, None, memory_left)

    best = race({"bfloat16": mean_of(torch.bfloat16), "float16": mean_of(torch.float16)}, rounds)
    return [
        {"mean of 20": name, "ms": 1e3 * seconds, "/ bfloat16": seconds / best["bfloat16"]}
        for name, seconds in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("memory", "averages", "files"))
    given = parser.parse_args()
    print(f"{processor()}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    if given.only in (None, "memory"):
        finish("products in memory", in_memory(given.rounds), None)
        print()
    if given.only in (None, "averages"):
        finish("averages of 16 bits", averages(given.rounds), None)
        print()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.only in (None, "files"):
            finish("products from files", from_files(given.rounds, folder), None)
            print()
            finish("products from disk", from_disk(given.rounds, folder), None)
            print()


if __name__ == "__main__":
    main()
