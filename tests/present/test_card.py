"""The model card: what a folder's README.md says can be said from its report alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny import Sewa
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

from sewa_cli.present.card import card_of, model_card
from sewa_cli.report.average import AverageReport
from sewa_cli.report.compare import Comparison
from sewa_cli.report.part import Part
from sewa_cli.report.select import Report
from sewa_cli.report.shared import Scores
from sewa_cli.text import shown_lines


@pytest.fixture
def folders(run_dir: Path) -> None:
    """The run's checkpoints as Hugging Face folders."""
    for path in (run_dir / "ckpts").iterdir():
        folder = run_dir / "run" / path.stem.replace("step", "checkpoint")
        folder.mkdir(parents=True)
        save_file(load_file(path), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("command", "model"),
    [
        (["average", "run", "--method", "ema", "-o", "out"], AverageReport),
        (["select", "run", "-o", "out"], Report),
        (["compare", "run", "--methods", "last,lawa", "--output-best", "out"], Comparison),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_the_card_in_a_folder_is_the_one_that_its_report_gives(
    sewa: Sewa, command: list[str], model: type[Part]
) -> None:
    ended = sewa(*command, "--report", "out.json")
    assert ended.code == 0, ended.err
    written = Path("out/README.md").read_text()
    report = model.model_validate_json(Path("out.json").read_text())
    without_command = written[: written.rindex("\n```console")]
    assert isinstance(report, AverageReport | Report | Comparison)
    assert card_of(report) == without_command
    assert ("| average | selection loss |" in written) == (command[0] != "average")


@pytest.mark.usefixtures("folders")
def test_the_report_of_an_average_says_what_was_run(sewa: Sewa) -> None:
    assert sewa("average", "run", "--method", "lawa", "--K", 3, "--report", "out.json").code == 0
    report = json.loads(Path("out.json").read_text())
    assert report["kind"] == "average"
    assert report["output"] == "averaged"
    assert report["versions"].keys() == {"sewa", "python", "torch", "safetensors"}
    assert [Path(s["path"]).name for s in report["recipe"]["sources"]] == [
        "checkpoint-40", "checkpoint-80", "checkpoint-120",
    ]  # fmt: skip
    assert report["warnings"] == []


HOSTILE = ["a|b", "a`b", "a\nb", "\\", "<img src=x>", "![x](http://a.b)", "\x1b[2J\u202e", "```\n"]


def test_no_name_breaks_out_of_the_card() -> None:
    """Names come from folders, reports that others made, and arguments."""
    for name in HOSTILE:
        card = model_card(
            {"sewa_version": name, "sewa_method": name, "sewa_K": name, "sewa_steps": name},
            [name, "checkpoint-10"],
            scores={name: Scores(selection_loss=0.5, metrics={name: 1.0})},
            command=f"sewa average '{name}' -o out",
        )
        assert card == shown_lines(card)
        body = card.split("---\n", 2)[2]
        tokens = MarkdownIt("commonmark").enable("table").parse(body)
        kinds = [token.type for token in tokens]
        assert kinds.count("table_open") == 2
        assert kinds.count("td_open") == 5 * 2 + 1 * 4
        assert kinds.count("fence") == 1
        assert kinds.count("heading_open") == 1
        inside = {child.type for token in tokens for child in token.children or []}
        assert inside.isdisjoint({"html_inline", "link_open", "image"})
