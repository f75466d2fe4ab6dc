"""What a PyTorch file takes along of its sources, whatever a stranger has put into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import Sewa


def doubled(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found, found, [found]]
    return found


@pytest.mark.parametrize(
    ("extra", "is_kept"), [(doubled(60), False), (doubled(4), True), ([{"lr": 0.1}], True)]
)
def test_what_is_nested_without_end_is_left_behind(
    extra: list[Any], is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        state = {"w": torch.full((3,), float(step))}
        content = {"model": state, "extra": extra, "epoch": 7, "optimizer": {"m": state["w"]}}
        torch.save(content, f"step-{step}.pt")
    ended = sewa("average", "step-1.pt", "step-2.pt", "-o", "out.pt")
    assert ended.code == 0, ended.err
    found = torch.load("out.pt", weights_only=True)
    assert found["model"]["w"].tolist() == [1.5, 1.5, 1.5]
    assert found["epoch"] == 7
    assert "optimizer" not in found
    assert ("extra" in found) == is_kept


def test_a_list_within_itself_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    endless: list[Any] = []
    endless.append(endless)
    for step in (1, 2):
        torch.save({"model": {"w": torch.ones(3)}, "extra": endless}, f"step-{step}.pt")
    assert sewa("average", "step-1.pt", "step-2.pt", "-o", "out.pt").code == 0
    assert torch.load("out.pt", weights_only=True)["model"]["w"].tolist() == [1, 1, 1]
