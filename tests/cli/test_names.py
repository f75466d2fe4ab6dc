"""Names that want to be more than names: they clear no screen, forge no line and split no path."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.shells import environment, shell, standard_input
from helpers.tiny import TASK, Sewa
from safetensors.torch import load_file, save_file

from sewa_cli.cli.console import SECONDS, Talk
from sewa_cli.cli.main import LONGEST
from sewa_cli.text import shown_lines

HOSTILE = [
    "\x1b[2J", "\nerror: forged", "\r", "\u202e", "\x9b31m", "\u2028", "[bold]", "a|b`c",
    "$x_1$ \\frac", "\x7f\t", "\x1b]0;title\x07", "ordinary",
]  # fmt: skip
METRIC = f"\ndef metrics(model):\n    return dict.fromkeys({HOSTILE!r}, 0.5)\n"
FORMS = ("table", "markdown")
COMMANDS = {
    "select": ["select", "--plot", "p.svg", "--print0"],
    "select in a table": ["select", "--format", "table"],
    "dry run": ["select", "--dry-run"],
    "compare": ["compare", "--methods", "last,lawa", "--K", "3", "--plot", "p.png"],
    "evaluate": ["evaluate", "ckpts"],
    "inspect": ["inspect", "--plot", "p.svg"],
    "validate": ["validate", "-v"],
    "average": ["average", "ckpts", "--format", "table", "-v"],
}


@pytest.fixture
def hostile(run_dir: Path) -> list[Path]:
    """Twelve checkpoints with such names, one of them with NaN, and a task whose metrics have."""
    (run_dir / "task.py").write_text(TASK + METRIC)
    paths = []
    for i, name in enumerate(HOSTILE, 1):
        path = Path("ckpts") / f"{name} step-{10 * i}.safetensors"
        Path(f"ckpts/step-{10 * i}.safetensors").rename(path)
        paths.append(path)
    return paths


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints of a model whose tensors have such names, and a trainer's losses too."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3):
        folder = Path(f"odd/checkpoint-{step}")
        folder.mkdir(parents=True)
        tensors = {name: torch.full((2,), float(step)) for name in HOSTILE}
        if step == 2:
            tensors[HOSTILE[1]] *= torch.nan
        save_file(tensors, folder / "model.safetensors", {"format": "pt", "a\x1b[2J": "b\x1b[2J"})
        logged = {"step": step, **{f"loss{name}": 0.5 for name in HOSTILE}}
        state = {"global_step": step, "log_history": [logged]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    return tmp_path


def check_safe(text: str) -> None:
    assert text == shown_lines(text)
    assert not any(line.startswith("error: forged") for line in text.splitlines())


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_name_moves_the_cursor_or_begins_a_line(sewa: Sewa, name: str) -> None:
    ended = sewa(*COMMANDS[name])
    assert ended.code == 0, ended.err
    check_safe(ended.err)
    if "--print0" not in COMMANDS[name]:
        check_safe(ended.out)


@pytest.mark.parametrize("form", FORMS)
def test_no_tensor_and_no_logged_metric_does_either(odd: Path, sewa: Sewa, form: str) -> None:
    ended = sewa("inspect", "odd", "--format", form, "--plot", odd / "p.svg")
    assert ended.code == 0, ended.err
    check_safe(ended.out)
    check_safe(ended.err)
    assert "error: forged holds NaN" in ended.err
    refused = sewa("average", "odd", "-v")
    assert refused.code == 3
    check_safe(refused.err)
    assert [line for line in refused.err.splitlines() if line.startswith("error: ")] == [
        "error: odd/checkpoint-2: \\nerror: forged holds NaN or Inf; leave it out"
    ]


@pytest.mark.usefixtures("hostile")
def test_a_table_in_markdown_has_as_many_cells_in_each_row(sewa: Sewa) -> None:
    ended = sewa("evaluate", "ckpts", "--format", "markdown")
    check_safe(ended.out)
    rows = [line.replace("\\\\", "").replace("\\|", "") for line in ended.out.splitlines()]
    assert len(rows) == 2 + len(HOSTILE)
    assert len({row.count("|") for row in rows}) == 1


def test_data_for_programs_have_the_names_as_they_are(hostile: list[Path], sewa: Sewa) -> None:
    ended = sewa("evaluate", "ckpts", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(ended.out, newline="")))
    assert {row["path"] for row in rows} == {str(path) for path in hostile}
    assert rows[0].keys() >= set(HOSTILE)
    ended = sewa("evaluate", "ckpts", "--format", "jsonl")
    lines = [json.loads(line) for line in ended.out.removesuffix("\n").split("\n")]
    assert {line["path"] for line in lines} == {str(path) for path in hostile}
    assert lines[0].keys() >= set(HOSTILE)


@pytest.mark.parametrize("flags", [["--format", "csv"], ["--format", "jsonl"], ["--print0"]])
def test_on_a_terminal_data_move_no_cursor_either(hostile: list[Path], flags: list[str]) -> None:
    terminal, stdout = pty.openpty()
    command = ["sewa", "average", str(hostile[0]), str(hostile[4]), "-o", "o.safetensors", *flags]
    ended = subprocess.run(command, stdout=stdout, env=environment(), check=False)
    os.close(stdout)
    assert ended.returncode == 0
    printed = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert "1b[2J step-10.safetensors" in printed
    check_safe(printed.replace("\r\n", "\n"))


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["average", "no\nerror: forged\x1b[2J"],
        ["sel\nerror: forged\x1b[2J"],
        ["select", "--no\nerror: forged\x1b[2J"],
        ["select", "--set", "no\nerror: forged\x1b[2J=1"],
        ["apply", "no\nerror: forged\x1b[2J", "-o", "x"],
        ["select", "--task", "no\nerror: forged\x1b[2J.py"],
        ["select", "--plot", "no\nerror: forged\x1b[2J"],
    ],
)
@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.usefixtures("run_dir")
def test_a_fault_is_one_line_whatever_it_names(
    sewa: Sewa, arguments: list[str], verbose: bool
) -> None:
    ended = sewa(*arguments, *(["-v"] if verbose else []))
    assert ended.code in (2, 3, 4)
    check_safe(ended.err)
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(r"\\(n|x0a)error: forged\\x1b\[2J", errors[0])  # typer has its own \x0a


def test_the_users_own_frames_move_no_cursor(run_dir: Path, sewa: Sewa) -> None:
    code = "\ndef loss(outputs, batch):\n    raise ValueError('\\x1b[2J')  # \x1b[2J\n"
    (run_dir / "task.py").write_text(TASK + code)
    for flags in ([], ["-v"]):
        ended = sewa("select", *flags)
        assert ended.code == 4
        check_safe(ended.err)
        assert ended.error == r"loss() raised ValueError: \x1b[2J"
        assert "in loss\n" in ended.err


def test_the_line_of_a_bug_is_one_line(sewa: Sewa, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a\nerror: forged\x1b[2J")

    monkeypatch.setattr(sys.modules["sewa_cli.cli.main"], "_open_closed_streams", broken)
    ended = sewa("--version")
    assert ended.code == 1
    check_safe(ended.err)
    assert ended.error.startswith(r"a bug in sewa: RuntimeError: a error: forged\x1b[2J; -v")


def test_a_long_line_of_an_error_loses_its_middle(sewa: Sewa) -> None:
    ended = sewa("select", "--format", "begin" + 10_000 * "x" + "end")
    assert ended.code == 2
    assert len(f"error: {ended.error}\n") < LONGEST + 10
    assert ended.error.startswith("--format: must be one of paths, ")
    assert "xxx … xxx" in ended.error
    assert ended.error.endswith("xxxend'")


def test_several_faults_of_a_task_are_a_line_each(run_dir: Path, sewa: Sewa) -> None:
    (run_dir / "task.py").write_text("loss = 7\n")
    ended = sewa("select")
    assert ended.code == 4
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3


def test_progress_warnings_and_notes_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(quiet=False, verbose=True)
    talk.note("a\nerror: forged [bold]x[/bold]\x1b[2J")
    talk.warn("b\nerror: forged\r")
    talk.say("c\nerror: forged\u202e", "d")
    talk._last_line -= SECONDS
    talk.progress("e\x1b[2J", 1, 2)
    err = capsys.readouterr().err
    check_safe(err)
    assert err.splitlines() == [
        r"a\nerror: forged [bold]x[/bold]\x1b[2J",
        r"warning: b\nerror: forged\r",
        r"c\nerror: forged\u202e",
        "d",
        r"e\x1b[2J 1/2, 0.0 s so far",
    ]


# ---- paths on standard output and input --------------------------------------------------------


@pytest.mark.parametrize("command", ["select", "average"])
def test_print0_ends_paths_with_a_nul_byte(hostile: list[Path], sewa: Sewa, command: str) -> None:
    ended = sewa(command, "ckpts", "--print0", "-o", "o.safetensors")
    assert ended.code == 0, ended.err
    *paths, end = ended.out.split("\0")
    assert end == ""
    assert {Path(path) for path in paths} <= set(hostile)
    assert len(paths) == (4 if command == "select" else len(hostile))


@pytest.mark.parametrize("command", ["select", "average"])
@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x0bb", "a\x85b", "a\u2028b", "a\n"])
@pytest.mark.usefixtures("run_dir")
def test_without_it_a_path_with_a_line_break_is_refused_before_any_work(
    sewa: Sewa, command: str, name: str
) -> None:
    Path("task.py").write_text(TASK + "\ndef build_model(): raise RuntimeError('work was done')\n")
    folder = Path(name)
    Path("ckpts").rename(folder)
    before = sorted(Path().rglob("*"))
    ended = sewa(command, folder)
    assert (ended.code, ended.out) == (3, "")
    assert "has a line break in its name" in ended.error
    assert "--print0" in ended.error
    check_safe(ended.err)
    assert sorted(Path().rglob("*")) == before


def test_where_no_paths_are_printed_such_a_path_does_no_harm(hostile: list[Path]) -> None:
    for flags in (["-o", "-"], ["--json"], ["--format", "csv"]):
        command = ["sewa", "average", str(hostile[1]), str(hostile[2]), *flags]
        ended = subprocess.run(command, capture_output=True, env=environment(), check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("command", ["select", "average"])
@pytest.mark.usefixtures("run_dir")
def test_print0_is_for_paths_only(sewa: Sewa, command: str) -> None:
    for flags, said in {
        ("--format", "csv"): "--print0 is for paths; leave out --format csv",
        ("--json",): "--print0 is for paths; leave out --json",
        ("-o", "-"): "--print0: with --output - no paths are printed; leave it out",
    }.items():
        ended = sewa(command, "ckpts", "--print0", *flags)
        assert (ended.code, ended.out, ended.error) == (2, "", said)


def test_paths_from_find_print0_go_in_and_come_out(hostile: list[Path]) -> None:
    ended = shell(
        "find ckpts -name '*.safetensors' -print0 | sewa average - --print0 -o o.safetensors | "
        "xargs -0 -n 1 sh -c 'test -f \"$0\" && echo found'"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["found"] * len(hostile)
    assert load_file("o.safetensors")


def test_a_nul_byte_on_standard_input_ends_a_path_and_spaces_are_kept(
    hostile: list[Path], sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ckpts").rename(" a\n")
    paths = [f" a\n/{path.name}" for path in hostile[:3]]
    monkeypatch.setattr("sys.stdin", standard_input("\0".join(paths)))
    ended = sewa("average", "-", "--print0", "-o", "o.safetensors")
    assert ended.code == 0, ended.err
    assert ended.out.split("\0")[:-1] == paths


@pytest.mark.parametrize("command", ["init", "demo"])
def test_a_new_folder_with_a_line_break_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = sewa(command, "a\nerror: forged")
    assert (ended.code, ended.out) == (3, "")
    assert ended.error.endswith("paths are printed one a line; choose another name")
    check_safe(ended.err)
    assert not list(tmp_path.iterdir())


def test_what_was_written_is_named_on_one_line(hostile: list[Path], sewa: Sewa) -> None:
    ended = sewa("average", hostile[0], "-o", "out\nerror: forged.safetensors")
    assert ended.code == 0, ended.err
    assert ended.err == "wrote out\\nerror: forged.safetensors: uniform of 1 checkpoint\n"


# ---- what no report could hold is told before the work ------------------------------------------


@pytest.fixture
def no_work(run_dir: Path) -> Path:
    """A run whose task must not be called."""
    Path("task.py").write_text(TASK + "\ndef build_model(): raise RuntimeError('work was done')\n")
    return run_dir


@pytest.mark.parametrize("command", [["select"], ["average", "--report", "r.json", "-o", "a"]])
def test_a_working_directory_that_is_not_utf8_is_told_before_the_work(
    no_work: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    here = Path(os.fsdecode(bytes(no_work) + b"/w\xff"))
    here.mkdir()
    for name in ("task.py", "sewa.yaml", "ckpts"):
        (here / name).symlink_to(no_work / name)
    monkeypatch.chdir(here)
    ended = sewa(*command, no_work / "ckpts")
    assert ended.code == 3, ended.err
    assert ended.error.endswith("the working directory is not a UTF-8 name; rename it")
    assert sorted(path.name for path in here.iterdir()) == ["ckpts", "sewa.yaml", "task.py"]


def test_a_working_directory_that_is_gone_is_told(
    run_dir: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = run_dir / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    options = ["-o", run_dir / "a.safetensors", "--report", run_dir / "a.report.json"]
    ended = sewa("average", run_dir / "ckpts", *options)
    monkeypatch.chdir(run_dir)
    assert ended.code == 3, ended.err
    assert ended.error.startswith("the working directory: No such file or directory")
    assert not Path("a.safetensors").exists()


@pytest.mark.usefixtures("no_work")
def test_a_task_that_is_not_utf8_is_told_before_the_work(sewa: Sewa) -> None:
    odd = os.fsdecode(b"t\xff.py")
    Path("task.py").rename(odd)
    ended = sewa("select", "--task", odd)
    assert ended.code == 4, ended.err
    assert ended.error.endswith("is not a UTF-8 name; rename it")


@pytest.mark.parametrize("kind", ["Is a directory", "symbolic links"])
def test_a_sewa_yaml_that_is_no_file_is_not_passed_over(
    run_dir: Path, sewa: Sewa, kind: str
) -> None:
    path = run_dir / "sewa.yaml"
    path.unlink()
    if kind == "Is a directory":
        path.mkdir()
    else:
        path.symlink_to(path.name)
    ended = sewa("average", "ckpts", "-o", "a.safetensors")
    assert ended.code == 2, ended.err
    assert ended.error.startswith("sewa.yaml: ")
    assert kind in ended.error
