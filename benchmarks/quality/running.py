"""Runs what is planned, each piece once: what a broken run has left is not done again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plan import Job, Setting

ONE_CORE = {"OMP_NUM_THREADS": "1", "MUJOCO_GL": "disable"}


class Failed(RuntimeError):
    pass


def run_all(folder: Path, asked: Sequence[tuple[Setting, int, Job]], workers: int) -> None:
    """Training runs first, then the jobs over them, `workers` at a time."""
    runs = list(dict.fromkeys((setting, seed) for setting, seed, _ in asked))
    with ThreadPoolExecutor(workers) as pool:
        trained = {run: pool.submit(train, folder, *run) for run in runs}
        ended = [
            pool.submit(_after, trained[setting, seed], folder, setting, seed, job)
            for setting, seed, job in asked
        ]
        for future in ended:
            future.result()


def _after(trained: Any, folder: Path, setting: Setting, seed: int, job: Job) -> None:
    trained.result()
    run(folder, setting, seed, job)


def place(folder: Path, setting: Setting, seed: int) -> Path:
    return folder / setting.name / f"seed-{seed}"


def train(folder: Path, setting: Setting, seed: int) -> None:
    home = place(folder, setting, seed)
    command = ["train.py", "--seed", str(seed), *setting.train]
    done = home / "trained.json"
    if _is_done(done, command):
        return
    if (home / "ckpts").exists():  # half a run, or a run of another plan; our own either way
        shutil.rmtree(home / "ckpts")
    home.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    out = str((home / "ckpts").resolve())
    _call([sys.executable, *command, "--out", out], setting.home)
    _keep(done, {"command": command, "seconds": round(time.perf_counter() - start, 1)})


def run(folder: Path, setting: Setting, seed: int, job: Job) -> None:
    home = place(folder, setting, seed)
    done = home / job.study / f"{job.name}.json"
    command = job.arguments(setting, "ckpts", f"{setting.folder}/sewa.yaml")  # wherever they lie
    if _is_done(done, command):
        return
    done.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    where = str((home / "ckpts").resolve()), str(setting.home.resolve() / "sewa.yaml")
    printed = _call([sys.executable, "-m", "sewa_cli", *job.arguments(setting, *where)], Path.cwd())
    report = json.loads(printed)
    for row in [
        *report.get("rows", []),
        *(r for w in report.get("windows", []) for r in w["rows"]),
    ]:
        del row["coefficients"]  # of a thousand checkpoints; the file is to be read by people too
    report.pop("candidates", None)
    seconds = round(time.perf_counter() - start, 1)
    _keep(done, {"command": command, "seconds": seconds, "report": report})
    print(f"{setting.name} seed {seed}: {job.study} {job.name}: {seconds} s", file=sys.stderr)


def _is_done(path: Path, command: list[str]) -> bool:
    """Done by this very command, not by one of another plan."""
    return path.exists() and json.loads(path.read_text())["command"] == command


def _keep(path: Path, found: dict[str, Any]) -> None:
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(path)


def _call(command: list[str], folder: Path) -> str:
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, **ONE_CORE}, capture_output=True, text=True
    )
    if ended.returncode:
        told = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Failed(f"{' '.join(command[1:4])} …: exit {ended.returncode}: {told[0]}")
    return ended.stdout
