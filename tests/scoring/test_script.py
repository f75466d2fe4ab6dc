"""`--score`: a command of the user's judges averages of checkpoints, without a task."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.shells import shell
from helpers.tiny import finding

PYTHON = f"{sys.executable} -SE"
# reads a .pt file without torch, as fast as a process starts; the WER is a distance from a point
DECODE = """
import array, json, os, sys, time, zipfile
path, *rest = sys.argv[1:]
part = int(rest[0]) if rest else 0
with open("calls", "a") as file:
    file.write(f"{path} {part} {os.environ['SEWA_WORKER']}\\n")
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
    flags = ("--workers", 2, "--budget", 30, "--force", "--set")
    contest = contest_of(select(sewa, *flags, "objective.parts=parts.txt", command=command))
    assert (contest["parts"], contest["heldout_parts"]) == (4, 4)
    made = calls()
    assert len(made) == contest["evaluations"] + contest["heldout_evaluations"]
    assert {worker for *_, worker in made} == {"0", "1"}
    assert max(Counter(path for path, *_ in made).values()) > 2
    best, before = OUTPUT.read_bytes(), contest["scores"]
    contest = contest_of(select(sewa, *flags, "objective.parts=0-7", command=command))
    assert (OUTPUT.read_bytes(), contest["scores"]) == (best, before)


@pytest.mark.usefixtures("exp")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit('no GPU\\nout of memory')", "it ended with exit code 1: out of memory"),
        ("os.kill(os.getpid(), 9)", "it was killed (signal 9), perhaps for want of memory, and"),
        ("", "it prints nothing on standard output"),
        ("print('wer 1'); print('wer 2')", "it prints several numbers for wer (1, 2)"),
        ("print('wer nan')", "its wer is nan"),
        ("print('{\"wer\": 1')", "line 1 is no JSON object"),
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
