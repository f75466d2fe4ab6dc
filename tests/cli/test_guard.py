"""What would end a process without a word, a file cut short or no room: one line, exit code 3."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.shells import environment, shell
from helpers.tiny import Sewa
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="no SIGBUS here")

CUT = "was cut short while it was being read; try again when nothing writes to it"
READ = {
    "the GIL held": "mapped[2_000_000]",
    "NumPy": "array.sum()",
    "NumPy's threads": "[t.start() for t in (Thread(target=array.sum), Thread(target=array.max))]",
    "BLAS": "array.reshape(1000, 1000) @ array.reshape(1000, 1000)",
    "a hash": "hashlib.sha256(array.data).digest()",
    "torch's threads": "torch.set_num_threads(2); (torch.from_numpy(array) * 2).sum()",
}
MAPPED = """
import hashlib, mmap, os, sys, time
from threading import Thread
import numpy as np
from sewa_cli.cli.guard import says_what_was_cut

path = sys.argv[1]
with open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
array = np.frombuffer(mapped, np.float32)
{more}
with says_what_was_cut():
    os.truncate(path, 4096)
    {read}
    time.sleep(10)
"""


def read_cut(path: Path, read: str, first: str = "") -> subprocess.CompletedProcess[str]:
    path.write_bytes(bytes(4_000_000))
    more = "import torch" if "torch" in read else ""
    return started("-c", first + MAPPED.replace("{read}", read).replace("{more}", more), path)


def started(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=cwd,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("reader", READ)
def test_whoever_reads_it_the_file_is_named(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "a b"
    done = read_cut(path, READ[reader])
    assert done.returncode == 3, done.stderr
    assert done.stderr == f"error: {path}: {CUT}\n"


def test_without_proc_it_is_one_line_all_the_same(tmp_path: Path) -> None:
    hidden = "import sewa_cli.cli.guard as guard; guard.MAPS = '/nowhere'"
    done = read_cut(tmp_path / "a", READ["NumPy"], hidden)
    assert done.returncode == 3
    assert done.stderr.startswith("error: a file was cut short while it was being read")
    assert len(done.stderr.splitlines()) == 1


def test_afterwards_a_bus_error_is_what_it_was(tmp_path: Path) -> None:
    """Whoever calls us from their own program has their own handlers back."""
    once = "with says_what_was_cut(): pass\nos.truncate(path, 4096); mapped[2_000_000]"
    code = MAPPED.partition("with says_what_was_cut")[0].replace("{more}", "") + once
    (tmp_path / "a").write_bytes(bytes(4_000_000))
    assert started("-c", code, tmp_path / "a").returncode == -signal.SIGBUS


TASK = """
import torch
from torch import nn

def build_model():
    return nn.Linear(40_000, 2, bias=False)

def selection_data():
    return [(torch.ones(4, 40_000), torch.ones(4, 2))]

def loss(outputs, batch):
    return ((outputs - batch[1]) ** 2).mean()
"""
# cuts a file just after it was mapped to be read, which is after all headers were
CUTS = """
import os, sys
from sewa_cli.checkpoints import {where} as module
from sewa_cli.cli import main

kept = module.{name}
def cut(path, *args, **options):
    found = kept(path, *args, **options)
    if str(path).endswith("step-2.safetensors") and options.get("framework", "pt") == "pt":
        os.truncate({path!r}, 4096)
    return found
module.{name} = cut
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("where", "name", "command"),
    [
        ("mapped", "mapped_bytes", ["average", "ckpts", "-o", "out.safetensors"]),
        ("safetensors", "safe_open", ["inspect", "ckpts"]),
        ("safetensors", "safe_open", ["select", "ckpts", "--K", "2", "-o", "out.safetensors"]),
    ],
)
def test_a_command_ends_with_one_line_and_leaves_nothing(
    tmp_path: Path, where: str, name: str, command: list[str]
) -> None:
    (tmp_path / "ckpts").mkdir()
    paths = [tmp_path / f"ckpts/step-{step}.safetensors" for step in range(4)]
    for step, path in enumerate(paths):
        save_file({"weight": torch.full((2, 40_000), float(step))}, path)  # several pages
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "sewa.yaml").write_text("task: ./task.py\ndevice: cpu\n")
    before = {path.name for path in tmp_path.iterdir()}
    code = CUTS.format(where=where, name=name, path=str(paths[2]))
    done = started("-c", code, *command, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {paths[2]}: {CUT}"]
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before


@pytest.mark.parametrize("command", ["average", "inspect"])
def test_too_little_address_space_is_one_line(tmp_path: Path, command: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(2)}, path)
    output = f"-o {tmp_path / 'o.safetensors'}" if command == "average" else ""
    done = shell(f"ulimit -v 120000; sewa {command} {path} {output}")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: `ulimit -v` leaves 117.2 MiB of address space")
    assert len(done.stderr.splitlines()) == 1


def test_out_of_memory_is_no_bug_of_ours(
    tmp_path: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("sewa_cli.commands.inspect.run_inspect", fail)
    ended = sewa("inspect", tmp_path)
    assert ended.code == 3
    assert ended.error.startswith("there is not enough memory")
