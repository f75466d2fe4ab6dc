"""`--score`: a command of the user's judges averages of checkpoints, without a task."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.shells import BIN, environment, shell, wait_for
from helpers.tiny import finding

from sewa_cli.config import load_config
from sewa_cli.errors import ConfigError
from sewa_cli.opening import peak_memory
from sewa_cli.scoring.script import parts_of

PYTHON = f"{sys.executable} -SE"
# reads a .pt file without torch, as fast as a process starts; the WER is a distance from a point
DECODE = """
import array, json, os, sys, time, zipfile
path, *rest = sys.argv[1:]
part = int(rest[0]) if rest else 0
with open("calls", "a") as file:
    file.write(f"{path} {part} {os.environ['SEWA_WORKER']}\\n")
with open("written", "a") as file:
    file.write(f"{len(os.listdir(os.path.dirname(os.path.dirname(os.path.abspath(path)))))}\\n")
with zipfile.ZipFile(path) as file:
    name = next(name for name in file.namelist() if name.endswith("/data/0"))
    w = array.array("f", file.read(name))
errors = [abs(x - 1) for x in w]
wer = round(100 * sum(errors) / len(errors) + part, 3)
"""
OUTPUT, REPORT = Path("best.pt"), Path("best.report.json")


@pytest.fixture
def exp(tmp_path, monkeypatch):
    """A toolkit's run: the model under `model`, next to what the training needs."""
    monkeypatch.chdir(tmp_path)
    Path("exp").mkdir()
    generator = torch.Generator().manual_seed(0)
    for epoch in range(1, 25):
        noise = 0.3 * torch.randn(60, generator=generator)
        weight = 1 - torch.full((60,), 2.0 / epoch) + noise
        state = {"encoder.weight": weight.view(6, 10), "steps": torch.tensor(epoch)}
        content = {"model": state, "optimizer": {"lr": 0.1}, "epoch": epoch}
        torch.save(content, f"exp/checkpoint_{epoch}.pt")
    script('print(f"WER {wer} %")')
    return tmp_path


def script(body):
    Path("decode.py").write_text(DECODE + body)


def select(sewa, *flags, command=f"{PYTHON} decode.py {{checkpoint}}"):
    return sewa("select", "exp/", "--score", command, "--metric", "-wer", "-o", OUTPUT, *flags)


def calls():
    return [line.split() for line in Path("calls").read_text().splitlines()]


def contest_of(ended):
    assert ended.code == 0, ended.err
    return finding(json.loads(REPORT.read_text()), "contest")


@pytest.mark.usefixtures("exp")
def test_the_command_says_of_the_output_what_the_report_says(sewa):
    contest = contest_of(ended := select(sewa, "--budget", 12))
    best = next(iter(contest["scores"].values()))["selection"]
    made = calls()
    assert len(made) == contest["evaluations"] <= 12
    assert len({path for path, *_ in made}) == len(made)
    assert not any(Path(path).exists() for path, *_ in made)  # each was removed
    assert max(map(int, Path("written").read_text().split())) <= 2
    assert best < contest["scores"]["last"]["selection"]
    assert shell(f"SEWA_WORKER=0 {PYTHON} decode.py best.pt").stdout == f"WER {best} %\n"
    content = torch.load(OUTPUT)
    assert content["model"].keys() == {"encoder.weight", "steps"}
    assert (contest["confirmed"], contest["heldout_parts"]) == (None, None)
    assert "not confirmed" in ended.err
    assert "no held-out data" in json.loads(REPORT.read_text())["verdict"]["kind"]
    assert sewa("verify", OUTPUT).code == 0
    found = sewa(
        "evaluate",
        OUTPUT,
        "--score",
        f"{PYTHON} decode.py {{checkpoint}}",
        "--metric",
        "-wer",
        "--json",
    )
    assert json.loads(found.out)["files"][0]["metrics"] == {"wer": best}


@pytest.mark.parametrize(
    ("run", "output", "inside"),
    [
        ("loop", "best.safetensors", ""),
        ("transformers", "best", "/model.safetensors"),
        pytest.param("sharded", "best", "", marks=pytest.mark.breadth),
        pytest.param("peft", "best", "", marks=pytest.mark.breadth),
        pytest.param("fsdp", "best", "", marks=pytest.mark.breadth),
        pytest.param("lightning", "best.ckpt", "", marks=pytest.mark.breadth),
    ],
)
def test_what_is_scored_has_the_bytes_of_what_is_written(frozen, sewa, run, output, inside):
    """In each form: file, folder, shards, adapter, what a trainer loads."""
    frozen(run)
    Path("see.py").write_text(
        "import hashlib, pathlib, sys\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "files = [path] if path.is_file() else sorted(path.rglob('*'))\n"
        "files = [one for one in files if one.is_file() and one.suffix not in ('.md', '.json')]\n"
        "found = hashlib.sha256(b''.join(one.read_bytes() for one in files)).hexdigest()\n"
        "print('size', int(found[:6], 16))\n"
    )
    command = f"{PYTHON} see.py {{checkpoint}}{inside}"
    flags = ("--score", command, "--metric", "-size")
    ended = sewa("select", "run", *flags, "--budget", 6, "-o", output)
    assert ended.code == 0, ended.err
    report = Path(output, "sewa.report.json")
    report = report if report.exists() else Path(output).with_suffix(".report.json")
    contest = finding(json.loads(report.read_text()), "contest")
    best = next(iter(contest["scores"].values()))["selection"]
    [again] = json.loads(sewa("evaluate", output, *flags, "--json").out)["files"]
    assert again["metrics"] == {"size": best}


@pytest.mark.usefixtures("exp")
def test_records_are_units_that_are_held_back(sewa):
    """All of a call's records are known after it: held-out scores cost no further calls."""
    script('for n, e in enumerate(errors): print(json.dumps({"id": n, "wer": 100 * e}))')
    contest = contest_of(select(sewa, "--budget", 10))
    assert (contest["parts"], contest["heldout_parts"]) == (30, 30)
    assert len(calls()) == contest["evaluations"] <= 10
    assert contest["heldout_evaluations"] == 0
    written = next(iter(contest["scores"].values()))
    assert written["interval"]["low"] < written["heldout"] < written["interval"]["high"]
    assert contest["confirmed"] is not None


@pytest.mark.usefixtures("exp")
def test_parts_split_what_one_call_evaluates_and_an_average_is_written_once(sewa):
    script("print(wer)")
    Path("parts.txt").write_text("\n".join(map(str, range(8))))
    command = f"{PYTHON} decode.py {{checkpoint}} {{part}}"
    flags = ("--workers", 2, "--budget", 16, "--set", "objective.parts=parts.txt")
    contest = contest_of(select(sewa, *flags, command=command))
    assert (contest["parts"], contest["heldout_parts"]) == (4, 4)
    made = calls()
    assert len(made) == contest["evaluations"] + contest["heldout_evaluations"]
    assert {worker for *_, worker in made} == {"0", "1"}
    assert max(Counter(path for path, *_ in made).values()) > 2


def test_parts_are_a_list_a_range_or_a_file(tmp_path):
    def parts(given):
        return parts_of(load_config(None, {"objective.metric": "wer", "objective.parts": given}))

    (tmp_path / "parts").write_text("a b\n\nc\n")
    assert parts(["x", 7]) == ["x", "7"]
    assert parts("8-11") == ["8", "9", "10", "11"]
    assert parts(str(tmp_path / "parts")) == ["a b", "c"]
    for given in ("9-3", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"objective\.parts"):
            parts(given)


@pytest.mark.usefixtures("exp")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit('no GPU\\nout of memory')", "it ended with exit code 1: out of memory"),
        ("os.kill(os.getpid(), 9)", "it was killed (signal 9), perhaps for want of memory, and"),
        ("", "it prints nothing on standard output"),
        ("print('wer 1'); print('wer 2')", "it prints several numbers for wer (1, 2)"),
        ("print('wer nan')", "its wer is nan"),
        ("print('{\"wer\": 1')", "line 1 is not a JSON object"),
        ("time.sleep(60)", "took longer than 0.3 s"),
        (
            "os.fork() or time.sleep(60); print('wer 1'); os._exit(2)",
            "it ended with exit code 2, and nothing on standard error",
        ),
    ],
)
def test_a_command_that_always_fails_ends_the_search_in_one_line(sewa, body, words):
    script(body)
    ended = select(
        sewa, "--set", "objective.part_timeout=0.3s" if "sleep(60)" in body[:20] else "seed=0"
    )
    assert (ended.code, words in ended.error) == (4, True), ended.err
    assert ended.err.count(words) == 1
    assert len(calls()) == 5  # checkpoints from all over the run
    assert not OUTPUT.exists()
    assert ended.out == ""


@pytest.mark.usefixtures("exp")
def test_gigabytes_on_standard_error_are_read_and_not_kept(sewa):
    script("for _ in range(200): os.write(2, b'x' * 10**6 + b'\\n')\nsys.exit('the end')")
    before = peak_memory()
    ended = select(sewa, "--budget", 1)
    assert "it ended with exit code 1: the end" in ended.error
    assert peak_memory() - before < 100 * 10**6


@pytest.mark.usefixtures("exp")
def test_five_failures_in_a_row_stop_a_search_and_the_best_so_far_is_written(sewa):
    script("os.path.getsize('calls') > 4 * len(path) and sys.exit('disk full'); print(wer)")
    contest = contest_of(ended := select(sewa, "--budget", 40))
    why = "5 evaluations in a row have failed: it ended with exit code 1: disk full"
    assert contest["unspent"] == why
    assert f"stopped: {why}" in ended.err
    assert contest["evaluations"] < 40
    assert all(one["state"] == "failed" for one in contest["entries"] if one["score"] is None)


@pytest.mark.usefixtures("exp")
def test_a_checkpoint_that_the_command_cannot_read_costs_evaluations_only(sewa):
    """The newest one: the others say what is printed."""
    script("wer > 10**6 and sys.exit('diverged'); print(wer)")
    content = torch.load("exp/checkpoint_24.pt")
    content["model"]["encoder.weight"].fill_(1e9)
    torch.save(content, "exp/checkpoint_24.pt")
    contest = contest_of(ended := select(sewa, "--budget", 30))
    assert "evaluation 1 has failed: it ended with exit code 1: diverged" in ended.err
    assert contest["scores"]["last"]["selection"] is None
    assert next(iter(contest["scores"].values()))["selection"] < 30
    assert len(calls()) == contest["evaluations"] == 30


@pytest.mark.usefixtures("exp")
def test_a_killed_search_goes_on_and_repeats_no_evaluation(sewa):
    flags = ("--cache", "kept", "--budget", 10)
    script(
        "if not os.path.exists('again') and len(open('calls').readlines()) == 7:\n"
        "    os.kill(os.getppid(), 9)\n"
        "print(wer)"
    )
    command = f"--score '{PYTHON} decode.py {{checkpoint}}' --metric -wer -o best.pt"
    ended = shell(f"sewa select exp/ {command} {' '.join(map(str, flags))}")
    assert ended.returncode != 0
    assert not OUTPUT.exists()
    Path("again").touch()
    contest = contest_of(ended := select(sewa, *flags))
    assert len(calls()) == contest["evaluations"] + 1  # the one that was under way
    assert "6 results recalled from --cache" in ended.err


@pytest.mark.usefixtures("exp")
def test_ctrl_c_ends_the_command_with_all_that_it_has_started(sewa):
    """What was found until then is written."""
    del sewa
    script(
        "if len(open('calls').readlines()) == 4:\n"
        "    import signal\n"
        "    signal.signal(signal.SIGTERM, lambda *_: open('tidy', 'w') and sys.exit(1))\n"
        "    if not os.fork(): open('child', 'w').write(str(os.getpid())); time.sleep(60)\n"
        "    time.sleep(60)\n"
        "print(wer)"
    )
    command = f"{PYTHON} decode.py {{checkpoint}}"
    flags = ["exp/", "--score", command, "--metric", "-wer", "-o", "best.pt"]
    process = subprocess.Popen(
        [BIN / "sewa", "select", *flags], stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for(Path("child"))
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert "interrupted: the choice uses the 3 evaluations so far" in said
    assert OUTPUT.exists()
    assert Path("tidy").exists()  # it could remove its files
    about = Path("/proc", Path("child").read_text(), "stat")
    assert not about.exists() or ") Z " in about.read_text()


@pytest.mark.usefixtures("exp")
@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("./none.sh {checkpoint}", (), "score: ./none.sh: no such command"),
        ("exp/checkpoint_1.pt", (), "is not executable; chmod +x exp/checkpoint_1.pt"),
        ("echo 'x", (), "No closing quotation"),
        ("", (), "the command is empty"),
        ("echo {part}", (), "score: has {part}, and there are none; list them"),
        ("echo 1", ("--scratch", "none"), "scratch: none: no such folder"),
        ("echo 1", ("--solver", "gumbel"), "--solver race would do"),
        ("echo 1", ("--set", "objective.parts=none"), "is neither a list, a range"),
        ("echo 1", ("--set", "objective.score_regex=("), "is not a regular expression"),
        ("echo 1", ("--guard", 0.2), "--guard needs units"),
        ("echo 1", ("--fallback",), "a choice by a metric needs none"),
    ],
)
def test_what_is_refused(sewa, command, flags, words):
    ended = select(sewa, *flags, command=command)
    assert (ended.code, words in ended.error) == (2, True), ended.err
    assert not OUTPUT.exists()


@pytest.mark.usefixtures("exp")
def test_without_a_metrics_name_nothing_is_assumed(sewa):
    ended = sewa("select", "exp/", "--score", "echo 1")
    assert (ended.code, "error: --score: needs --metric" in ended.err) == (2, True), ended.err
    ended = sewa("compare", "exp/", "--set", "score=echo 1", "--metric", "-wer")
    assert (ended.code, "give --task here" in ended.error) == (2, True), ended.err


@pytest.mark.usefixtures("exp")
def test_a_yaml_names_the_command_next_to_it_and_there_is_no_shell(sewa, monkeypatch):
    Path("a b").mkdir()
    Path("a b/decode.sh").write_text(
        f'#!/bin/sh\ntest "$2" = "$HOME;*" || exit 3\nexec {PYTHON} decode.py "$1"\n'
    )
    Path("a b/decode.sh").chmod(0o755)
    Path("a b/sewa.yaml").write_text(
        "checkpoints: ../exp\nscore: ./decode.sh {checkpoint} '$HOME;*'\noutput: ../best.pt\n"
        "objective: {metric: -wer, budget: 2}\n"
    )
    monkeypatch.setenv("HOME", "elsewhere")
    ended = sewa("select", "--config", "a b/sewa.yaml")
    assert (ended.code, "exit code 3" in ended.error) == (4, True), ended.err
