"""The documentation says what the code does."""

import inspect
import os
import re
import shlex
import shutil
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


# ---- the commands of the tutorial and of the how-to pages ----------------------------------------

CONSOLE = re.compile(r"(?:<!-- not run: (.+?) -->\n+)?```console\n(.*?)```", re.DOTALL)
FAST = {"averaging"}  # the commands of the others are breadth


def commands_of_pages():
    for page in sorted([*ROOT.glob("docs/tutorial/*.md"), *ROOT.glob("docs/how-to/*.md")]):
        runs = []
        for reason, block in CONSOLE.findall(page.read_text()):
            commands = re.findall(r"^\$ (.+)$", block, re.MULTILINE)
            if reason:
                skip = pytest.mark.skip(reason=f"{page.name}: {reason}: {commands[0]}")
                yield pytest.param(page, commands, marks=[skip, pytest.mark.breadth])
            else:
                runs += commands
        if runs:
            marks = [] if page.stem in FAST else [pytest.mark.breadth]
            yield pytest.param(page, runs, id=page.stem, marks=marks)


def make_language_model_run(page, frozen):
    """Make what the page starts from: a Trainer's run with its tokenizer, texts and sewa.yaml."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    frozen("transformers")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2")
    tokenizer.save_pretrained("run/checkpoint-16")
    for name, step in (("dev", 3), ("test", 5)):
        rows = [" ".join(f"w{(i + step * n) % 64}" for n in range(8)) for i in range(40)]
        Path(f"{name}.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    [settings] = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    Path("sewa.yaml").write_text(settings)


def write_files_of(page):
    """Write the scripts of a page whose first comment is their name."""
    scripts = r"```(?:python|bash)\n((?:#!.*\n)?# (\w+\.(?:py|sh)).*?)```"
    for text, name in re.findall(scripts, page.read_text(), re.DOTALL):
        Path(name).write_text(text)


@pytest.mark.parametrize(("page", "commands"), list(commands_of_pages()))
def test_the_commands_of_a_page_work(page, commands, request, tmp_path, monkeypatch, sewa):
    """Run all in a demo's folder, but for blocks below `<!-- not run: WHY -->`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if page.stem == "language-models":
        make_language_model_run(page, request.getfixturevalue("frozen"))
    elif page.stem == "speech":
        write_files_of(page)
    elif page.stem != "quickstart":
        shutil.copytree(request.getfixturevalue("demo").folder, tmp_path, dirs_exist_ok=True)
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        elif words[0] == "sewa" and not {"|", ">"} & set(words):
            ended = sewa(*words[1:])
            assert ended.code == 0, (command, ended.err)
        else:
            subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)


def test_every_command_in_the_readme_exists(sewa):
    used = set(re.findall(r"\bsewa ([a-z]+)", (ROOT / "README.md").read_text()))
    listed = set(re.findall(r"^[│|] ([a-z]+)  ", sewa("--help").out, re.MULTILINE))
    assert {"select", "compare", "average", "inspect"} <= used
    assert used - listed <= {"takes", "chose", "says"}, used - listed
