"""The study of interval means, small: the text sample on texts made here, two short runs."""

import importlib
import json
from pathlib import Path

import pytest

QUALITY = Path(__file__).parents[2] / "benchmarks" / "quality"
OPTIONS = {"length": 8, "width": 8, "vocabulary": 100}


@pytest.mark.breadth
def test_the_study_of_interval_means(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(QUALITY)
    means = importlib.import_module("means")
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, rows in (("train", 300), ("test", 80)):
        lines = [f'"{n % 2 + 1}","","{("bad", "good")[n % 2]} film {n % 7}"\n' for n in range(rows)]
        (texts / f"{name}.csv").write_text("".join(lines))
    train = " ".join(f"--{name} {value}" for name, value in {**OPTIONS, "data": texts}.items())
    args = [f"{name}={value}" for name, value in {**OPTIONS, "data": texts}.items()]
    args += ["selection=40", "heldout=60"]

    def setting(steps):
        options = f"--warmup 0 --every {steps} {train}"
        return means.Setting("text_classification", steps, options, tuple(args), strides=(1, 2))

    monkeypatch.setattr(means, "SETTINGS", {"tiny": setting(200)})
    units = tmp_path / "units.json"
    asked = ["--folder", str(tmp_path), "--units", str(units), "--seeds", "3"]
    with monkeypatch.context() as fewer:
        fewer.setattr(means, "SAVES", (5, 10))
        means.main([*asked, "--picture", str(tmp_path / "means.png")])
        known = json.loads(units.read_text())
        for saves in (5, 10):
            either = [known[f"tiny 3 best {source} {saves}"] for source in ("snapshots", "means-1")]
            assert known[f"tiny 3 best both {saves}"] <= min(either)
        assert known["tiny 3 best snapshots 5"] <= known["tiny 3 newest snapshots"]
        assert known["tiny 3 decayed"] != known["tiny 3 newest snapshots"]
        assert "| tiny | 5 |" in capsys.readouterr().out
        assert (tmp_path / "means.png").stat().st_size > 1000
        before = units.stat().st_mtime_ns
        means.main(asked)  # everything is known
        assert units.stat().st_mtime_ns == before

    # the same run with twice as many saves has the weights of every step
    every_step = means.Trained(setting(100), means.train(tmp_path, "every step", setting(100), 3))
    weights = every_step.rows("snapshots")
    run = means.Trained(setting(200), tmp_path / "tiny" / "seed-3")
    expected = weights.view(50, 2, -1).mean(1)
    assert (run.rows("means-1")[:50] - expected).abs().max() < 1e-6
    assert (run.rows("means-2")[:50] == weights[1::2]).all()
    assert (run.rows("snapshots")[:50] == weights[1::2]).all()
