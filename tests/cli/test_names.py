"""Names from files clear no screen, forge no line and split no path."""

import csv
import io
import os
import re
import sys
from pathlib import Path

import pytest
from helpers.shells import shell
from helpers.tiny import TASK
from safetensors.torch import load_file

from sewa_cli.cli.main import LONGEST
from sewa_cli.text import shown_lines

HOSTILE = [
    "\x1b[2J", "\nerror: forged", "\r", "\u202e", "\x9b31m", "\u2028", "[bold]", "a|b`c",
    "$x_1$ \\frac", "\x7f\t", "\x1b]0;title\x07", "ordinary",
]  # fmt: skip
METRIC = f"\ndef metrics(model):\n    return dict.fromkeys({HOSTILE!r}, 0.5)\n"
NO_WORK = "\ndef build_model(): raise RuntimeError('work was done')\n"
COMMANDS = [
    ["select", "--format", "table"],
    ["inspect", "--plot", "p.svg"],
    ["average", "ckpts", "--format", "table", "-v"],
]
OTHERS = [
    ["select", "--plot", "p.svg", "--format", "markdown"],
    ["select", "--dry-run"],
    ["compare", "--methods", "last,lawa", "--K", "3", "--plot", "p.png"],
    ["evaluate", "ckpts"],
    ["validate", "-v"],
]


@pytest.fixture
def hostile(run_dir):
    """Twelve checkpoints with such names, and a task whose metrics have such names."""
    (run_dir / "task.py").write_text(TASK + METRIC)
    paths = []
    for i, name in enumerate(HOSTILE, 1):
        path = Path("ckpts") / f"{name} step-{10 * i}.safetensors"
        Path(f"ckpts/step-{10 * i}.safetensors").rename(path)
        paths.append(path)
    return paths


def check_safe(text):
    assert text == shown_lines(text)
    assert not any(line.startswith("error: forged") for line in text.splitlines())


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    "command", [*COMMANDS, *(pytest.param(one, marks=pytest.mark.breadth) for one in OTHERS)]
)
def test_no_name_moves_the_cursor_or_begins_a_line(sewa, command):
    ended = sewa(*command)
    assert ended.code == 0, ended.err
    check_safe(ended.err)
    check_safe(ended.out)


def test_a_table_keeps_its_cells_and_data_have_the_names_as_they_are(hostile, sewa):
    ended = sewa("evaluate", "ckpts", "--format", "markdown")
    check_safe(ended.out)
    lines = [line.replace("\\\\", "").replace("\\|", "") for line in ended.out.splitlines()]
    assert len(lines) == 2 + len(HOSTILE)
    assert len({line.count("|") for line in lines}) == 1
    ended = sewa("evaluate", "ckpts", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(ended.out, newline="")))
    assert {row["path"] for row in rows} == {str(path) for path in hostile}
    assert rows[0].keys() >= set(HOSTILE)


@pytest.mark.parametrize("flags", [["--format", "csv"], ["--print0"]])
def test_on_a_terminal_data_move_no_cursor_either(hostile, monkeypatch, sewa, flags):
    stdout = sys.modules["sewa_cli.cli.main"]._Stdout
    monkeypatch.setattr(stdout, "isatty", lambda _: True)
    ended = sewa("average", hostile[0], hostile[4], "-o", "o.safetensors", *flags)
    assert "1b[2J step-10.safetensors" in ended.out
    check_safe(ended.out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["average", "no\nerror: forged\x1b[2J"],
        ["sel\nerror: forged\x1b[2J"],
        ["select", "--no\nerror: forged\x1b[2J", "-v"],
        ["select", "--set", "no\nerror: forged\x1b[2J=1"],
        ["apply", "no\nerror: forged\x1b[2J", "-o", "x", "-v"],
        ["select", "--task", "no\nerror: forged\x1b[2J.py"],
        ["select", "--plot", "no\nerror: forged\x1b[2J"],
    ],
)
@pytest.mark.usefixtures("run_dir")
def test_a_fault_is_one_line_whatever_it_names(sewa, arguments):
    ended = sewa(*arguments)
    assert ended.code in (2, 3, 4)
    check_safe(ended.err)
    assert re.search(r"\\(n|x0a)error: forged\\x1b\[2J", ended.error)  # typer has its own \x0a


def test_the_users_own_frames_move_no_cursor(run_dir, sewa):
    code = "\ndef loss(outputs, batch):\n    raise ValueError('\\x1b[2J')  # \x1b[2J\n"
    (run_dir / "task.py").write_text(TASK + code)
    for flags in ([], ["-v"]):
        ended = sewa("select", *flags)
        check_safe(ended.err)
        assert ended.error == r"loss() raised ValueError: \x1b[2J"
        assert "in loss\n" in ended.err


def test_a_bug_is_one_line(sewa, monkeypatch):
    def broken():
        raise RuntimeError("a\nerror: forged\x1b[2J")

    monkeypatch.setattr(sys.modules["sewa_cli.cli.main"], "_open_closed_streams", broken)
    ended = sewa("--version")
    assert ended.code == 1
    check_safe(ended.err)
    assert ended.error.startswith(r"a bug in sewa: RuntimeError: a error: forged\x1b[2J; -v")


def test_a_long_line_of_an_error_loses_its_middle(sewa):
    ended = sewa("select", "--format", "begin" + 10_000 * "x" + "end")
    assert ended.code == 2
    assert len(ended.error) < LONGEST + 10
    assert ended.error.startswith("--format: must be one of paths, ")
    assert "xxx … xxx" in ended.error
    assert ended.error.endswith("xxxend'")


@pytest.mark.parametrize("command", ["select", "average"])
def test_print0_ends_paths_with_a_nul_byte(hostile, sewa, command):
    ended = sewa(command, "ckpts", "--print0", "-o", "o.safetensors")
    assert ended.code == 0, ended.err
    *paths, end = ended.out.split("\0")
    assert end == ""
    assert {Path(path) for path in paths} <= set(hostile)
    assert len(paths) == (4 if command == "select" else len(hostile))


@pytest.mark.parametrize("command", ["select", "average"])
@pytest.mark.parametrize("name", ["a\nb", "a\u2028b"])
@pytest.mark.usefixtures("run_dir")
def test_without_it_a_path_with_a_line_break_is_refused_before_any_work(sewa, command, name):
    Path("task.py").write_text(TASK + NO_WORK)
    Path("ckpts").rename(name)
    before = sorted(Path().rglob("*"))
    ended = sewa(command, name)
    assert (ended.code, ended.out) == (3, "")
    assert "has a line break in its name" in ended.error
    assert "--print0" in ended.error
    check_safe(ended.err)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("command", ["select", "average"])
@pytest.mark.usefixtures("run_dir")
def test_print0_is_for_paths_only(sewa, command):
    for flags, said in {
        ("--format", "csv"): "--print0 is for paths; leave out --format csv",
        ("--json",): "--print0 is for paths; leave out --json",
        ("-o", "-"): "--print0: with --output - no paths are printed; leave it out",
    }.items():
        ended = sewa(command, "ckpts", "--print0", *flags)
        assert (ended.code, ended.out, ended.error) == (2, "", said)


def test_paths_from_find_print0_go_in_and_come_out(hostile):
    ended = shell(
        "find ckpts -name '*.safetensors' -print0 | sewa average - --print0 -o o.safetensors | "
        "xargs -0 -n 1 sh -c 'test -f \"$0\" && echo found'"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["found"] * len(hostile)
    assert load_file("o.safetensors")


@pytest.mark.parametrize("command", ["init", "demo"])
def test_a_new_folder_with_a_line_break_is_refused_too(tmp_path, monkeypatch, sewa, command):
    monkeypatch.chdir(tmp_path)
    ended = sewa(command, "a\nerror: forged")
    assert (ended.code, ended.out) == (3, "")
    assert ended.error.endswith("paths are printed one per line; choose another name")
    assert not list(tmp_path.iterdir())


def test_a_working_directory_that_is_not_utf8_is_refused_before_the_work(
    run_dir, sewa, monkeypatch
):
    Path("task.py").write_text(TASK + NO_WORK)
    here = Path(os.fsdecode(bytes(run_dir) + b"/w\xff"))
    here.mkdir()
    for name in ("task.py", "sewa.yaml", "ckpts"):
        (here / name).symlink_to(run_dir / name)
    monkeypatch.chdir(here)
    ended = sewa("select", run_dir / "ckpts")
    assert ended.code == 3, ended.err
    assert ended.error.endswith("the working directory is not a UTF-8 name; rename it")
    assert sorted(path.name for path in here.iterdir()) == ["ckpts", "sewa.yaml", "task.py"]
