"""The documentation says what the code does."""

import inspect
import re
import subprocess
import sys
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


def test_messages_that_troubleshooting_quotes_are_in_the_code():
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page.split("what you see")[1], re.MULTILINE)
    code = "\n".join(path.read_text() for path in (ROOT / "sewa_cli").rglob("*.py"))
    assert len(quoted) >= 5
    assert [message for message in quoted if message not in code] == []


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for page, known in (("settings", "gumbel.lr"), ("commands", "--from-step")):
        assert known in (tmp_path / "reference" / page / "index.html").read_text()


@pytest.mark.breadth
def test_the_commands_of_the_quickstart_work(tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "tutorial" / "quickstart.md").read_text()
    for line in re.findall(r"^\$ (.+)$", page, re.MULTILINE):
        first, *rest = line.split()
        if first == "cd":
            monkeypatch.chdir(tmp_path / rest[0])
        elif first == "cmp":
            assert Path(rest[0]).read_bytes() == Path(rest[1]).read_bytes()
        else:
            assert first == "sewa"
            ended = sewa(*rest)
            assert ended.code == 0, (line, ended.err)


def test_every_command_in_the_readme_exists(sewa):
    used = set(re.findall(r"\bsewa ([a-z]+)", (ROOT / "README.md").read_text()))
    listed = set(re.findall(r"^[│|] ([a-z]+)  ", sewa("--help").out, re.MULTILINE))
    assert {"select", "compare", "average", "inspect"} <= used
    assert used - listed <= {"takes", "chose", "says"}, used - listed
