"""Where the run stands: `select` and `compare` say what `inspect` says, and read nothing for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.tiny import Sewa, user_loss
from torch import Tensor

from sewa_cli.present import sentences
from sewa_cli.ranks import ALONE
from sewa_cli.report.shared import Interval
from sewa_cli.report.standing import Fall
from sewa_cli.solvers.aggregate.ladder import fall
from sewa_cli.trajectory import standing
from sewa_cli.trajectory.geometry import Geometry

COMPARED = "--methods", "last,uniform", "--format", "json"


@pytest.mark.usefixtures("run_dir")
def test_select_compare_and_inspect_say_the_same_of_a_run(sewa: Sewa) -> None:
    looked = json.loads(sewa("inspect", "--json").out)
    assert sewa("select", "-o", "mask.safetensors").code == 0
    assert sewa("select", "--K", "auto", "-o", "all.safetensors").code == 0
    compared = sewa("compare", *COMPARED)
    found = [
        json.loads(Path("mask.report.json").read_text()),
        json.loads(Path("all.report.json").read_text()),
        json.loads(compared.out),
    ]
    for content in found:
        standing = content["standing"]
        assert standing["weights"] == looked["parameters"]
        assert standing["verdict"] == looked["verdict"]
        assert standing["explanation"] == looked["explanation"]
        assert standing["motion"]["run"] == pytest.approx(looked["motion"]["run"])
        assert standing["motion"]["radius"] == pytest.approx(looked["motion"]["radius"])
    assert f"the run is {looked['explanation']}" in compared.err
    # only the default runs the quarters; nothing is made up for the others
    assert [content["standing"]["fall"] is not None for content in found] == [False, True, False]


@pytest.mark.usefixtures("run_dir")
def test_the_loss_of_the_last_quarter_is_that_of_a_file_of_it(sewa: Sewa) -> None:
    assert sewa("select", "--K", "auto", "-o", "all.safetensors").code == 0
    found = json.loads(Path("all.report.json").read_text())["standing"]["fall"]
    losses = {}
    for quarter, steps in ((3, (70, 80, 90)), (4, (100, 110, 120))):
        files = [f"ckpts/step-{step}.safetensors" for step in steps]
        assert sewa("average", *files, "-o", f"{quarter}.safetensors").code == 0
        losses[quarter] = user_loss(f"{quarter}.safetensors", "selection_data")
    assert found["since"] == 3
    assert found["loss"] == pytest.approx(losses[4], rel=1e-5)
    assert found["by"] == pytest.approx(losses[3] - losses[4], abs=1e-6)
    assert found["interval"]["low"] < found["by"] < found["interval"]["high"]


@pytest.mark.parametrize(("k", "since"), [(8, 3), (10, 2), (11, None), (12, 3), (13, 3)])
def test_only_quarters_of_as_many_checkpoints_are_compared(k: int, since: int | None) -> None:
    parts: dict[tuple[str, int | None], list[int]] = {}
    for i in range(k):
        parts.setdefault((f"quarter {i * 4 // k + 1}", None), []).append(i)
    losses = {name: torch.full((30,), 1.0 / n) for n, name in enumerate(parts, 1)}
    found = fall(parts, losses, torch.ones(30))
    assert (found and found.since) == since


def noisy(mean: float, rows: int) -> Tensor:
    return mean + torch.randn(rows, generator=torch.Generator().manual_seed(0)).double()


def test_a_loss_that_is_not_finite_and_too_few_rows_decide_nothing() -> None:
    parts: dict[tuple[str, int | None], list[int]] = {(f"{q}", None): [q, q] for q in range(4)}
    losses = {name: noisy(n, 30) for n, name in enumerate(parts)}
    broken = {**losses, ("3", None): noisy(torch.nan, 30)}
    assert fall(parts, broken, torch.ones(30).double()) is None
    few = fall(parts, {name: some[:9] for name, some in losses.items()}, torch.ones(9).double())
    assert few is not None
    assert few.interval is None
    assert sentences._fall(few).startswith("undecided")


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (
            0.01,
            0.03,
            "its loss still falls: on selection data the mean of its last",
        ),
        (-0.03, -0.01, "its loss rises: "),
        (-0.003, 0.004, "its loss has settled, to within 1 %: "),
        (-0.003, 0.2, "undecided whether its loss still falls: "),
    ],
)
def test_the_interval_decides_between_the_words(low: float, high: float, says: str) -> None:
    found = Fall(since=3, loss=1.0, by=(low + high) / 2, interval=Interval(low=low, high=high))
    said = sentences._fall(found)
    assert said.startswith(says)
    assert f"vs that of the third: {'−' if low + high > 0 else '+'}" in said


@pytest.mark.parametrize("way", ["line", "walk", "noise"])
def test_a_sample_says_what_all_weights_say(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Of layers that move very differently, some of them hardly at all."""
    monkeypatch.setattr(standing, "MOST", 40 * 1024)
    generator, k, P = torch.Generator().manual_seed(3), 40, 30_000
    W = torch.randn(k, P, generator=generator)
    W = {"line": W + torch.linspace(0, 30, k)[:, None], "walk": W.cumsum(0), "noise": W}[way]
    W *= torch.tensor([0.01, 1.0, 3.0]).repeat_interleave(P // 3)
    W += 5 * torch.randn(P, generator=generator)
    steps = [100 * i for i in range(k)]
    geometry = Geometry(standing.times_of(steps))
    geometry.add(W.double())
    shape = geometry.measure()
    sample = standing.Sample(k + 1, P)
    sample.keep(0, torch.full((P,), torch.nan))  # a broken one is not among the used
    for i, row in enumerate(W, 1):
        sample.keep(i, row)
    found = sample.standing(range(1, k + 1), steps, ALONE)
    assert found is not None
    assert found.weights == 1024
    assert found.verdict == shape.verdict
    assert found.motion.run.trend == pytest.approx(shape.signs.trend, abs=0.03)
    assert found.motion.radius == pytest.approx(shape.radius, rel=0.1)
    assert found.motion.norm == pytest.approx(shape.norm, rel=0.1)


@pytest.mark.usefixtures("run_dir")
def test_of_four_checkpoints_nothing_is_said(sewa: Sewa) -> None:
    ended = sewa("select", "--last", "4", "--K", "2", "-o", "few.safetensors", "-v")
    assert ended.code == 0, ended.err
    assert json.loads(Path("few.report.json").read_text())["standing"] is None
    assert "the run is" not in ended.err
