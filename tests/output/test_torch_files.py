"""What a PyTorch file takes along of its sources, whatever a stranger has put into them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


def test_what_cannot_be_written_again_is_one_line(tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    endless = [torch.ones(2)]
    endless.append(endless)
    deep = b"]" * 100_000 + b"a" * 99_999
    for step in (1, 2):
        torch.save({"model": {"w": torch.ones(3)}, "extra": endless}, f"step-{step}.pt")
        with zipfile.ZipFile(f"deep-{step}.pt", "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\x02}X\x01\0\0\0x" + deep + b"s.")
            archive.writestr("a/version", "3\n")
    for name, words in (("step", "nested without end"), ("deep", "no weights in it")):
        ended = sewa("average", f"{name}-1.pt", f"{name}-2.pt", "-o", "out.pt")
        assert ended.code == 3, ended.err
        assert words in ended.error


@dataclass
class Layout:
    """A file of a trainer nobody listed. Every tensor has the value `v`."""

    content: Callable[[Callable[[], torch.Tensor]], dict[str, Any]]
    averaged: str  # ways to what is averaged in the output, or `refused`
    told: str = ""  # ways that a note or warning names
    gone: str = ""  # ways that are not in the output


def _shared(t):
    one = t()
    return {"encoder": {"embed": one}, "decoder": {"embed": one, "out": t()}}


LAYOUTS = {
    "a head": Layout(lambda t: {"model": {"a": t()}, "head": {"b": t()}}, "model.a head.b"),
    "nested": Layout(
        lambda t: {"net": {"enc": {"l": {"w": t()}}, "dec": {"w": t()}}, "epoch": 3},
        "net.enc.l.w net.dec.w",
    ),
    "lists": Layout(
        lambda t: {"models": [{"w": t()}, {"w": t()}], "optimizers": [{"m": t()}], "n": 2},
        "models.0.w models.1.w", told="optimizers", gone="optimizers",
    ),
    "two models": Layout(
        lambda t: {"G": {"w": t()}, "D": {"w": t()},
                   "opt_G": {"state": {0: {"m": t()}}, "param_groups": []}},
        "G.w D.w", told="opt_G", gone="opt_G",
    ),
    "an EMA copy": Layout(
        lambda t: {"net": {"w": t()}, "net_ema": {"decay": 0.9, "shadow": {"w": t()}}},
        "net.w", told="net_ema", gone="net_ema",
    ),
    "shared": Layout(_shared, "encoder.embed decoder.embed decoder.out"),
    "a table": Layout(
        lambda t: {"lm": {"w": t()}, "tokenizer": {"scores": t(), "size": 3},
                   "ids": {"x": torch.tensor([1, 2])}},
        "lm.w", told="tokenizer ids.x",
    ),
    "loose": Layout(
        lambda t: {"model": {"w": t()}, "log_std": t(), "loss": torch.tensor(0.5)},
        "model.w log_std", told="loss",
    ),
    "an agent": Layout(
        lambda t: {"agent": {"pi": {"w": t()}, "bias": t(), "gamma": 0.9, "best_pi": {"w": t()}}},
        "agent.pi.w agent.bias", told="agent.best_pi", gone="agent.best_pi",
    ),
    "no weights": Layout(
        lambda t: {"optimizer": {"m": t()}, "config": {"table": t(), "n": 3}}, "refused"
    ),
}  # fmt: skip


def at(content, way):
    for part in way.split("."):
        content = content[int(part) if isinstance(content, list) else part]
    return content


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_tensor_is_lost_without_a_word(name, tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    layout = LAYOUTS[name]
    for step in (1, 3):
        torch.save(layout.content(lambda: torch.full((3,), float(step))), f"step-{step}.pt")  # noqa: B023
    ended = sewa("average", "step-1.pt", "step-3.pt", "-o", "out.pt", "-v")
    if layout.averaged == "refused":
        assert ended.code == 3
        assert "no weights in it; it holds optimizer, config; name their key" in ended.error
        return
    assert ended.code == 0, ended.err
    found = torch.load("out.pt", weights_only=True)
    for way in layout.averaged.split():
        assert at(found, way).tolist() == [2, 2, 2], way
    for way in layout.told.split():
        assert f"{way}: " in ended.err or f"{way}, " in ended.err
    for way in layout.gone.split():
        with pytest.raises(KeyError):
            at(found, way)
    original = layout.content(lambda: torch.ones(3))
    assert found.keys() - {"sewa"} == original.keys() - set(layout.gone.split())
    assert sewa("average", "step-1.pt", "step-3.pt", "-o", "out.safetensors").code == 0
    assert len(load_file("out.safetensors")) == len(layout.averaged.split())
