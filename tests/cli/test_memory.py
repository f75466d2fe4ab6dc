"""Too little memory or address space is one line and exit code 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.shells import shell
from helpers.tiny import Sewa
from safetensors.torch import save_file


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
