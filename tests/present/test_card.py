"""The model card: what a folder's README.md says can be said from its report alone."""

from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

from sewa_cli.present.card import model_card
from sewa_cli.present.terminal import render
from sewa_cli.text import shown_lines


@pytest.fixture
def folders(run_dir):
    """The run's checkpoints as Hugging Face folders."""
    for path in (run_dir / "ckpts").iterdir():
        folder = run_dir / "run" / path.stem.replace("step", "checkpoint")
        folder.mkdir(parents=True)
        save_file(load_file(path), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("command", "table"),
    [
        (["average", "run", "--method", "ema", "-o", "out"], ""),
        (["select", "run", "-o", "out"], "| average | selection loss (300) |"),
        (["compare", "run", "--methods", "last,lawa", "--output-best", "out"], "| method | K |"),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_the_card_in_a_folder_has_the_scores_and_the_command(sewa, command, table):
    assert sewa(*command).code == 0
    written = Path("out/README.md").read_text()
    assert f"sewa {' '.join(command)}" in written
    assert "| method | `" in written
    assert ("| ---: |" in written) == bool(table)
    assert table in written
    assert "seconds" not in written  # the same command gives the same bytes


HOSTILE = ["a|b", "a`b", "a\nb", "\\", "<img src=x>", "![x](http://a.b)", "\x1b[2J\u202e", "```\n"]


def test_no_name_breaks_out_of_the_card():
    """Names come from folders, reports that others made, and arguments."""
    for name in HOSTILE:
        card = model_card(
            {"sewa_version": name, "sewa_method": name, "sewa_K": name, "sewa_steps": name},
            [name, "checkpoint-10"],
            scores=render([{"average": name, name: 1.0}], "markdown"),
            command=f"sewa average '{name}' -o out",
        )
        assert card == shown_lines(card)
        body = card.split("---\n", 2)[2]
        tokens = MarkdownIt("commonmark").enable("table").parse(body)
        kinds = [token.type for token in tokens]
        assert kinds.count("table_open") == 2
        assert kinds.count("td_open") == 5 * 2 + 2
        assert kinds.count("fence") == 1
        assert kinds.count("heading_open") == 1
        inside = {child.type for token in tokens for child in token.children or []}
        assert inside.isdisjoint({"html_inline", "link_open", "image"})
