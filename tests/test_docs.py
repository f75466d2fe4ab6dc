"""The documentation says what the code does."""

import inspect
import re
from pathlib import Path

import pytest
from helpers.tiny import train_tiny

from sewa_cli.methods import REGISTRY

ROOT = Path(__file__).parent.parent


def test_the_table_of_methods_is_that_of_the_docstrings():
    text = (ROOT / "docs" / "reference" / "methods.md").read_text()
    for name, method in REGISTRY.items():
        what, _, formula = (inspect.getdoc(method.function) or "").partition("\n\n")
        options = ", ".join(f"`{k}={v}`" for k, v in method.options.items()) or "–"
        flags = ["yes" if flag else "no" for flag in (method.has_budget, method.needs_loss)]
        row = [f"`{name}`", what, " ".join(formula.split()), *flags, options]
        assert "| " + " | ".join(row) + " |" in text


@pytest.mark.usefixtures("own_registry")
def test_the_example_of_an_own_method_works(tmp_path, monkeypatch, sewa):
    text = (ROOT / "docs" / "reference" / "methods.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    train_tiny(Path("ckpts"))
    Path("own.py").write_text(example)
    own = ["--set", "compare.methods_from=own.py"]
    ended = sewa("average", "ckpts/", "--method", "halves", "--K", 3, *own)
    assert ended.code == 0, ended.err
    assert len(ended.out.split()) == 3


PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("sample_configs/**/*.md")]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_files_of_the_repository_that_a_page_names_are_there(page):
    named = re.findall(r"\b(?:tests|benchmarks|sewa_cli|docs)/[\w./-]+\.\w+", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_in_the_readme_exists(sewa):
    used = set(re.findall(r"\bsewa ([a-z]+)", (ROOT / "README.md").read_text()))
    listed = set(re.findall(r"^[│|] ([a-z]+)  ", sewa("--help").out, re.MULTILINE))
    assert {"select", "compare", "average", "inspect"} <= used
    assert used - listed <= {"takes", "chose", "says"}, used - listed
