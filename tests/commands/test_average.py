"""`sewa average` and `sewa evaluate`: no learning, same reader, same writer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Lock

import pytest
import torch
from helpers.memory import peaks
from helpers.tiny import TASK, train_tiny, user_loss
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sewa_cli.output import safetensors as writer


@pytest.fixture
def ckpts(tmp_path, monkeypatch):
    """Checkpoints alone: no sewa.yaml, no task."""
    monkeypatch.chdir(tmp_path)
    return [path.relative_to(tmp_path) for path in train_tiny(tmp_path / "ckpts")]


def mean(paths, weights=None):
    states = [load_file(path) for path in paths]
    weights = weights or [1 / len(paths)] * len(paths)
    return {
        n: torch.stack([w * s[n].double() for w, s in zip(weights, states, strict=True)]).sum(0)
        for n in states[0]
    }


def assert_equal(path, expected):
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)


def test_a_folder_is_averaged_by_a_method_without_a_task(ckpts, sewa):
    output = ["-o", "out.safetensors", "--report", "out.report.json"]
    ended = sewa("average", "ckpts/", "--method", "lawa", "--K", 3, *output)
    assert ended.code == 0, ended.err
    chosen = [ckpts[3], ckpts[7], ckpts[11]]
    assert ended.out.split() == [str(path) for path in chosen]
    assert_equal("out.safetensors", mean(chosen))
    with safe_open("out.safetensors", framework="pt") as file:
        assert file.metadata()["sewa_method"] == "lawa"
        assert file.metadata()["sewa_steps"] == "40,80,120"
    assert sewa("apply", "out.report.json", "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path("out.safetensors").read_bytes()


def test_explicit_weights_go_by_the_order_given(ckpts, sewa):
    pair = [ckpts[9], ckpts[2]]  # not by step
    ended = sewa("average", *pair, "--weights", "0.7,0.3", "-o", "out.safetensors")
    assert ended.code == 0, ended.err
    assert_equal("out.safetensors", mean(pair, [0.7, 0.3]))
    with safe_open("out.safetensors", framework="pt") as file:
        assert file.metadata()["sewa_coefficients"] == "0.3,0.7"  # in step order


def test_an_ema_of_bf16_checkpoints_is_summed_in_float32(ckpts, sewa):
    train_tiny(Path("ckpts"), dtype=torch.bfloat16)
    ended = sewa("average", "ckpts", "--method", "ema:decay=0.5", "--output-dtype", "float32")
    assert ended.code == 0, ended.err
    weights = [0.5 ** (len(ckpts) - i) for i in range(len(ckpts))]
    weights[0] = 0.5 ** (len(ckpts) - 1)
    assert_equal("averaged.safetensors", mean(ckpts, weights))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ckpts", "--method", "sewa"], 2, "sewa needs a loss, so a model and data; use `sewa sel"),
        (["ckpts", "--method", "nope"], 2, "--method: unknown method 'nope'"),
        (["ckpts", "--method", "lawa", "--K", "13"], 2, "--K 13: there are 12"),
        (["ckpts", "--weights", "1"], 2, "--weights: 1 coefficients for 12"),
        (["ckpts", "--weights", "a,b"], 2, "--weights: must be numbers"),
        (["ckpts/step-10.safetensors", "--weights", "2"], 2, "must sum to 1, and sum to 2"),
        (["ckpts", "-o", "ckpts/step-10.safetensors", "-f"], 3, "is one of the inputs"),
        (["ckpts", "--method", "lawa", "--K", "auto"], 2, "K: auto needs a model and data to lea"),
        (["nowhere"], 3, "nowhere"),
        ([], 2, "no checkpoints named"),
    ],
)
@pytest.mark.usefixtures("ckpts")
def test_bad_input_to_average(sewa, arguments, code, words):
    ended = sewa("average", *arguments)
    assert ended.code == code, ended.err
    assert words in ended.error
    assert not list(Path().glob("averaged*"))


@pytest.mark.usefixtures("run_dir")
def test_evaluate_gives_the_losses_of_any_files(sewa):
    assert sewa("average", "ckpts", "--output-dtype", "bfloat16").code == 0
    Path("task.py").write_text(TASK + "\ndef metrics(model):\n    return {'one': 1}\n")
    files = ["averaged.safetensors", "ckpts/step-120.safetensors"]
    ended = sewa("evaluate", *files, "--format", "json")
    assert ended.code == 0, ended.err
    rows = json.loads(ended.out)["files"]
    assert [row["path"] for row in rows] == files
    for row in rows:
        for data, key in (("selection_data", "selection_loss"), ("heldout_data", "heldout_loss")):
            assert row[key] == pytest.approx(user_loss(row["path"], data), rel=1e-6)
        assert row["metrics"]["one"] == 1
    table = sewa("evaluate", *files).out.splitlines()
    assert " ".join(table[0].split()) == "path step selection loss held-out loss one"
    assert len(table) == 3


@pytest.mark.usefixtures("run_dir")
def test_evaluate_checks_all_files_before_the_first(sewa):
    save_file({"other": torch.ones(2)}, "odd.safetensors")
    ended = sewa("evaluate", "ckpts/step-10.safetensors", "odd.safetensors")
    assert ended.code == 3
    assert "odd.safetensors: does not fit the model" in ended.error
    assert ended.out == ""


def write_into(path):
    """Its last four bytes, in place, as another number."""
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")


def before_call(monkeypatch, module, name, number, do):
    """Do something just before the call of this number (from 0); how many calls there were."""
    real, count, lock = getattr(module, name), [0], Lock()

    def wrapped(*arguments):
        with lock:
            if count[0] == number:
                do()
            count[0] += 1
        return real(*arguments)

    monkeypatch.setattr(module, name, wrapped)
    return lambda: count[0]


def everything():
    """But for what the test itself takes away."""
    found = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    return {path for path in found if path.parent != Path("ckpts")}


CHANGED = "changed while it was being read; try again when nothing writes to it"


@pytest.mark.parametrize(
    "command",
    [
        ["average", "ckpts", "-o", "new.safetensors", "--report", "new.json"],
        ["select", "-o", "new.safetensors"],
        ["compare", "--methods", "last,uniform", "--output-best", "new.safetensors"],
        ["apply", "old.json", "-o", "new.safetensors"],
    ],
    ids=lambda command: " ".join(command[:1] + command[-1:]),
)
@pytest.mark.usefixtures("run_dir")
def test_no_command_writes_an_average_of_files_that_change_meanwhile(sewa, monkeypatch, command):
    assert sewa("average", "ckpts", "-o", "old.safetensors", "--report", "old.json").code == 0
    before = everything()

    def change():
        for path in sorted(Path("ckpts").iterdir()):
            write_into(path)

    calls = before_call(monkeypatch, writer.np, "ascontiguousarray", 2, change)
    ended = sewa(*command)
    assert calls() > 2
    assert ended.code == 3, ended.err
    assert ended.error.startswith("ckpts/")
    assert ended.error.endswith(f": {CHANGED}")
    assert everything() == before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_averaging_holds_a_few_blocks_in_memory_however_many_files(tmp_path):
    """Files of 24 MB: the peak of anonymous memory stays below two of them, for 10 and for 50."""
    for step in range(10):
        state = {f"w{i}": torch.full((500_000,), float(step)) for i in range(12)}
        save_file(state, tmp_path / f"step-{step}.safetensors")
    command = f"average {tmp_path} -o {tmp_path}/out.safetensors -q --force"
    [few] = peaks([command])
    assert load_file(tmp_path / "out.safetensors")["w3"][0] == pytest.approx(4.5)
    for step in range(10, 50):
        os.link(tmp_path / f"step-{step % 10}.safetensors", tmp_path / f"step-{step}.safetensors")
    [many] = peaks([command])
    assert max(few, many) < 48e6
    assert abs(many - few) < 20e6


IMPORTED = """
import sys
from sewa_cli.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "rich.console", "yaml", "sewa_cli.report.select"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)
"""


def test_average_and_apply_import_neither_torch_nor_what_else_is_slow(ckpts):
    train_tiny(Path("ckpts"), dtype=torch.bfloat16)
    for arguments in (
        ["average", *map(str, ckpts[:2]), "--weights", "0.3,0.7", "--output-dtype", "float16"],
        ["average", "ckpts", "--method", "lawa", "-K", "3", "-o", "2", "--report", "report.json"],
        ["apply", "report.json", "-o", "again.safetensors"],
        ["verify", "report.json"],
    ):
        command = [sys.executable, "-c", IMPORTED, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.splitlines()[-1] == "[]", arguments
