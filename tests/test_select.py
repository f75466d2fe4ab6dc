"""The main job, through the real command line on tiny real checkpoints."""

from __future__ import annotations

from pathlib import Path

from conftest import Sewa


def test_select_prints_the_chosen_paths_and_writes_the_average_and_its_report(
    run_dir: Path, sewa: Sewa
) -> None:
    ended = sewa("select", "ckpts/", "--K", 4)
    assert ended.code == 0, ended.err
    chosen = ended.out.splitlines()
    assert len(chosen) == 4
    assert all(Path(path).is_file() for path in chosen)
    assert (run_dir / "averaged.safetensors").is_file()
    assert (run_dir / "averaged.report.json").is_file()
