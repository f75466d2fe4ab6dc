"""Runs what is planned, each piece once: what a broken run has left is not done again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any

from plan import Job, Setting

ONE_CORE = {"OMP_NUM_THREADS": "1", "MUJOCO_GL": "disable"}


class Failed(RuntimeError):
    pass


def run_all(folder: Path, asked: Sequence[tuple[Setting, int, Job]], workers: int) -> None:
    """Training runs first, then the jobs over them, `workers` at a time."""
    runs = list(dict.fromkeys((setting, seed) for setting, seed, _ in asked))
    pool, stopped = ThreadPoolExecutor(workers), Event()
    try:
        trained = {run: pool.submit(train, folder, *run) for run in runs}
        ended = [
            pool.submit(_after, trained[setting, seed], stopped, folder, setting, seed, job)
            for setting, seed, job in asked
        ]
        for future in as_completed(ended):
            future.result()
    finally:  # after a fault or an interrupt nothing new begins
        stopped.set()
        pool.shutdown(cancel_futures=True)


def _after(
    trained: Any, stopped: Event, folder: Path, setting: Setting, seed: int, job: Job
) -> None:
    if stopped.is_set():
        return
    try:
        trained.result()
        run(folder, setting, seed, job)
    except BaseException:
        stopped.set()
        raise


def place(folder: Path, setting: Setting, seed: int) -> Path:
    return folder / setting.name / f"seed-{seed}"


def train(folder: Path, setting: Setting, seed: int) -> None:
    home = place(folder, setting, seed)
    command = _training(setting, seed)
    if left_by(home / "trained.json", command) is not None:
        return
    if home.exists():  # half a run, or one of another plan with all that was found on it
        shutil.rmtree(home)
    home.mkdir(parents=True)
    start = time.perf_counter()
    out = str((home / "ckpts").resolve())
    call([sys.executable, *command, "--out", out], setting.home)
    seconds = round(time.perf_counter() - start, 1)
    keep(home / "trained.json", {"command": command, "seconds": seconds})


def _training(setting: Setting, seed: int) -> list[str]:
    return ["train.py", "--seed", str(seed), *setting.train]


def run(folder: Path, setting: Setting, seed: int, job: Job) -> None:
    if finished(folder, setting, seed, job) is not None:
        return
    home = place(folder, setting, seed)
    done = home / job.study / f"{job.name}.json"
    done.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    where = str((home / "ckpts").resolve()), str(setting.home.resolve() / "sewa.yaml")
    printed = call([sys.executable, "-m", "sewa_cli", *job.arguments(setting, *where)], Path.cwd())
    report = json.loads(printed)
    for row in report.get("rows", []):
        del row["coefficients"]  # of a thousand checkpoints; the file is to be read by people too
    report.pop("candidates", None)
    seconds = round(time.perf_counter() - start, 1)
    keep(done, {"command": _asked(setting, job), "seconds": seconds, "report": report})
    print(f"{setting.name} seed {seed}: {job.study} {job.name}: {seconds} s", file=sys.stderr)


def _asked(setting: Setting, job: Job) -> list[str]:
    """The command, wherever the folders lie."""
    return job.arguments(setting, "ckpts", f"{setting.folder}/sewa.yaml")


def finished(folder: Path, setting: Setting, seed: int, job: Job) -> dict[str, Any] | None:
    """The report of a job, if it was this very one, over checkpoints of this very training."""
    home = place(folder, setting, seed)
    if left_by(home / "trained.json", _training(setting, seed)) is None:
        return None
    kept = left_by(home / job.study / f"{job.name}.json", _asked(setting, job))
    report: dict[str, Any] | None = kept["report"] if kept else None
    return report


def left_by(path: Path, command: list[str]) -> dict[str, Any] | None:
    """Return what that command has left, or None if it was another."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return kept if kept.get("command") == command else None


def keep(path: Path, found: Any) -> None:
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(path)


def call(command: list[str], folder: Path) -> str:
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, **ONE_CORE}, capture_output=True, text=True
    )
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Failed(f"{' '.join(command[1:4])} …: exit {ended.returncode}: {last[0]}")
    return ended.stdout
