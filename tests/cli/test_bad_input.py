"""Bad input: one line says where, what and what to do; the right exit code; nothing is touched."""

import errno
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.shells import standard_input
from helpers.tensors import change
from helpers.tiny import files_in
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("run_dir")

USAGE, FILES, TASK_MODULE = 2, 3, 4
CHECKPOINT = "ckpts/step-60.safetensors"


@pytest.fixture
def refused(run_dir, sewa):
    """Check one error line with these parts; stdout is empty, and no file came, went or changed."""

    def call(code, arguments, parts):
        before = files_in(run_dir)
        ended = sewa(*arguments)
        assert ended.code == code, ended.err
        assert ended.out == ""
        assert files_in(run_dir) == before
        assert "Traceback" not in ended.err
        missing = [part for part in parts if part not in ended.error]
        assert not missing, ended.error

    return call


def in_task(code):
    """Add definitions, which win over the earlier ones."""
    with Path("task.py").open("a") as file:
        file.write(f"\n{code}\n")


# ---- flags: exit 2, files that are named on the command line: exit 3 -----------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--K", "0"], ["--K: ", "greater than or equal to 1", "found '0'"]),
        (["--K", "12"], ["--K 12: there are 12 checkpoints; K is at most 11"]),
        (["--K", "ten"], ["--K: must be a whole number, found 'ten'"]),
        (["--last", "3"], ["--K 4: there are 3 checkpoints; K is at most 2"]),
        (["--from-step", "500"], ["no checkpoint lies in 500..", "the steps are 10..120"]),
        (["--device", "cuda:99"], ["device: ", "'cuda:99'", "cannot be used"]),
        (["--output-dtype", "int8"], ["--output-dtype: ", "'float16'", "found 'int8'"]),
        (["--set", "gumble.lr=0.1"], ["--set gumble", "unknown key", "did you mean gumbel?"]),
        (["--set", "gumbel.lr=0"], ["--set gumbel.lr: ", "greater than 0"]),
        (["--set", "K"], ["--set K: ", "key=value"]),
        (["--json", "--output", "-"], ["--json", "--output -", "use --report"]),
        (["--config", "other.yaml"], ["other.yaml: No such", "check --config"]),
        (["-o", "best.safetensors", "--report", "ckpts/../best.safetensors"],
         ["best.safetensors: ", "--report and --output name the same file"]),
    ],
)  # fmt: skip
def test_a_bad_flag_is_named(refused, flags, parts):
    refused(USAGE, ["select", *flags], parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["select", "--htlm"], ["No such option: --htlm", "See `sewa select --help`"]),
        (["select", "--K"], ["--K"]),
        (["selekt"], ["'selekt'", "Did you mean 'select'? See `sewa --help`"]),
        (["apply", "-o", "again.safetensors"], ["REPORT"]),
        (["average", "ckpts", "-o", "q.nemo"], ["q.nemo: sewa cannot write .nemo files"]),
        (["average", "ckpts", "-o", "out.json"], [".safetensors, .pt, .pth, .bin, .ckpt, or use"]),
    ],
)
def test_a_usage_error_is_one_line(refused, arguments, parts):
    refused(USAGE, arguments, parts)


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["average", f"{LONG}.pt"],
        ["inspect", "/".join(["x" * 200] * 30)],
        ["average", "ckpts", "-o", f"{LONG}.pt"],
        ["inspect", "ckpts", "--html", f"{LONG}.html"],
        ["init", LONG],
    ],
)
def test_a_name_that_is_too_long_is_one_line(refused, arguments):
    refused(FILES, arguments, ["File name too long"])


# ---- sewa.yaml: exit 2 ---------------------------------------------------------------------------

HEAD = "task: ./task.py\ncheckpoints: ckpts/\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (HEAD + "K: yes\n", ["sewa.yaml: K: must be a number", "found true"]),
        ("task: ./task.py\nK: [4\ndevice: cpu\n", ["sewa.yaml:3:", "fix the YAML"]),
        ("- task: ./task.py\n", ["sewa.yaml: ", "`key: value`", "found a list"]),
        (HEAD + "gumbel: fast\n", ["sewa.yaml: gumbel: ", "found 'fast'"]),
        (HEAD + "K: 4\nbn: on\n", ["bn: on", "no BatchNorm layer"]),
        (HEAD + "args: {widht: 16}\n", ["args.widht: ", "no function in task.py takes it"]),
        ("checkpoints: ckpts/\n", ["no task", "--task", "sewa init"]),
        ("task: ./task.py\n", ["no checkpoints named", "`checkpoints:`"]),
    ],
)  # fmt: skip
def test_a_fault_in_the_yaml_is_told_with_its_place(refused, text, parts):
    Path("sewa.yaml").write_text(text)
    refused(USAGE, ["select"], parts)


def test_a_bare_yaml_off_is_the_word_off(run_dir, sewa):
    (run_dir / "sewa.yaml").write_text(f"{HEAD}bn: off\n")
    ended = sewa("select", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["config"]["bn"] == "off"


# ---- checkpoints: exit 3 -------------------------------------------------------------------------


def spoil(step=60, value=float("nan")):
    change(f"ckpts/step-{step}.safetensors", lambda t: t["2.weight"][1, 3].fill_(value))


BROKEN = [f"{CHECKPOINT}: ", "not a complete safetensors", "remove it"]


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), BROKEN),
        (lambda path: path.write_text("not the weights you are looking for\n"), BROKEN),
        (lambda path: save_file({}, path), [f"{CHECKPOINT}: ", "holds no tensors"]),
        (lambda path: change(path, lambda t: t.update({"2.weight": torch.zeros(3, 16)})),
         [f"{CHECKPOINT}: 2.weight: ", "expected F32 [2, 16]", "found F32 [3, 16]"]),
        (lambda path: change(path, lambda t: t.pop("2.bias")),
         [f"{CHECKPOINT}: 2.bias: ", "expected F32 [2]", "found no such tensor"]),
        (lambda path: save_file(load_file(path), "ckpts/again-60.safetensors", {"step": "60"}),
         ["again-60.safetensors", "step-60.safetensors", "step 60", "leave one out"]),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_named(refused, damage, parts):
    damage(Path(CHECKPOINT))
    refused(FILES, ["select"], parts)


@pytest.mark.parametrize(
    ("arguments", "stdin", "parts"),
    [
        (["ckpt/"], "", ["ckpt: no such file or folder; did you mean ckpts?"]),
        (["none/"], "", ["none: ", "holds no *.safetensors files"]),
        (["two/"], "", ["two: holds no checkpoints itself; name a folder that does: two/a, two/b"]),
        (["--config", "typo.yaml"], "", ["ckpt (from checkpoints: in typo.yaml): no such file"]),
        (["ckpts/", CHECKPOINT], "", ["step-60.safetensors: is given twice"]),
        ([CHECKPOINT, "--K", "1"], "", ["is the only checkpoint", "name several"]),
        (["-"], "\n\n", ["-: standard input has no paths"]),
        (["-"], f"{CHECKPOINT}\nckpts/typo-20\n", ["ckpts/typo-20: No such file"]),
    ],
)  # fmt: skip
def test_checkpoints_that_are_not_there_are_named(refused, monkeypatch, arguments, stdin, parts):
    Path("none").mkdir()
    for name in "ab":
        shutil.copytree("ckpts", f"two/{name}")
    Path("typo.yaml").write_text("{task: ./task.py, checkpoints: ckpt}")
    monkeypatch.setattr(sys, "stdin", standard_input(stdin))
    refused(FILES, ["select", *arguments], parts)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("nn.ReLU(), nn.Linear(6, 2)",
         ["does not fit the model that build_model() returns",
          "missing from the checkpoint: 1.weight, 1.bias",
          "not in the model: 0.bias, 0.weight, 2.bias and 1 more"]),
        ("nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)",
         ["0.weight: ", "shape [8, 6] as in the model", "found F32 [16, 6]"]),
    ],
)  # fmt: skip
def test_checkpoints_of_another_model_are_told_with_both_sides(refused, model, parts):
    in_task(f"def build_model(): return nn.Sequential({model})")
    refused(FILES, ["select"], parts)


def test_a_step_range_over_files_without_steps_is_told(refused):
    for letter, path in zip("abcdefghijkl", sorted(Path("ckpts").iterdir()), strict=True):
        path.rename(path.with_name(f"{letter}.safetensors"))
    refused(USAGE, ["select", "--to-step", "50"], ["--to-step", "have no steps"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_checkpoint_is_left_out_with_a_warning(sewa, value):
    spoil(120, value)
    ended = sewa("select", "--json")
    assert ended.code == 0, ended.err
    [warning] = [line for line in ended.err.splitlines() if "ckpts/step-120.safetensors" in line]
    assert warning.startswith("warning: ")
    assert "2.weight holds NaN or Inf" in warning
    report = json.loads(ended.out)
    assert [left["step"] for left in report["left_out"]] == [120]
    assert 120 not in [candidate["step"] for candidate in report["candidates"]]
    assert warning.removeprefix("warning: ") in report["warnings"]


def test_too_many_nan_checkpoints_end_the_run(refused):
    spoil()
    parts = [f"{CHECKPOINT}: ", "2.weight holds NaN or Inf", "--set nonfinite=skip"]
    refused(FILES, ["select", "--set", "nonfinite=error"], parts)
    for step in range(10, 90, 10):  # four remain, and K is 4
        spoil(step)
    refused(USAGE, ["select"], ["--K 4: there are 4 checkpoints; K is at most 3"])
    for step in range(10, 130, 10):
        spoil(step)
    refused(FILES, ["select"], ["all 12 checkpoints hold NaN or Inf", "none is left"])


# ---- the user's module: exit 4 -------------------------------------------------------------------

NAN = "def loss(outputs, batch): return (outputs * float('nan')).mean()"


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("del loss", ["task.py lacks loss(outputs, batch): "]),
        ("del selection_data", ["task.py lacks selection_data(**args): "]),
        ("selection_data = [1, 2]", ["task.py: selection_data must be a function"]),
        ("def selection_data(): return 7", ["selection_data() must return batches"]),
        ("def selection_data(): return []", ["selection_data() gives no examples"]),
        ("def heldout_data(): return []", ["heldout_data() gives no examples"]),
        ("def loss(outputs, batch): return outputs.sum(1)",
         ["loss() must return one number", "the mean", "shape [128]"]),
        ("def loss(outputs, batch): return 0.5", ["loss() must return a tensor"]),
        ("def loss(outputs, batch): return outputs.detach().mean()",
         ["loss() has no gradient", ".detach()"]),
        (NAN, ["loss() is NaN or Inf for every average", "sewa validate"]),
        ("def metrics(model): return 0.93",
         ["metrics() must return a dict", '{"accuracy": 0.93}', "found float"]),
        ("def build_model(): return {'w': 1}", ["build_model() must return an nn.Module"]),
        ("def loss(outputs, batch: pass", ["imported: SyntaxError", "task.py, line "]),
        ("raise RuntimeError('one\\ntwo')", ["RuntimeError: one two"]),
    ],
)  # fmt: skip
def test_a_fault_in_the_task_is_told_with_what_is_wanted(refused, code, parts):
    in_task(code)
    refused(TASK_MODULE, ["select"], parts)


def test_a_loss_that_is_a_sum_is_warned_of(sewa):
    in_task("mean = loss\ndef loss(outputs, batch): return mean(outputs, batch) * len(outputs)")
    for command in ("validate", "select"):
        assert "loss() looks like a sum over the batch's examples" in sewa(command).err


def test_validate_does_not_blame_the_loss_for_a_nan_checkpoint(sewa):
    spoil(120)
    ended = sewa("validate")
    assert ended.code in (0, FILES), ended.err  # as `nonfinite` says, but never the user's module
    assert "step-120.safetensors" in ended.err
    assert "loss()" not in ended.err


def test_a_task_that_is_not_there_is_told_with_the_way_to_one(refused):
    wanted = ["my_lost_task: no such module", "./my_lost_task.py"]
    refused(TASK_MODULE, ["select", "--task", "my_lost_task"], wanted)
    Path("task.py").unlink()
    refused(TASK_MODULE, ["select"], ["task.py: no such task file", "sewa init"])


def test_strict_without_heldout_data_is_refused_before_any_work(refused):
    in_task("del heldout_data")
    refused(USAGE, ["select", "--strict"], ["--strict", "heldout_data", "task.py"])


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def build_model(): raise OSError('torn')", "build_model() raised OSError: torn"),
        ("def loss(outputs, batch): exit(7)", "loss() raised SystemExit: 7"),
        ("raise LookupError('at import')",
         "task.py: cannot be imported: LookupError: at import"),
    ],
)  # fmt: skip
def test_an_exception_in_user_code_names_the_function_and_shows_the_users_frames(
    run_dir, sewa, code, error
):
    in_task(code)
    ended = sewa("select")
    assert ended.code == TASK_MODULE, ended.err
    assert ended.out == ""
    assert error in ended.error
    assert f'File "{run_dir / "task.py"}", line ' in ended.err
    assert "sewa_cli" not in ended.err
    assert "Traceback" not in ended.err


def test_frames_go_through_the_users_other_modules(run_dir, sewa):
    (run_dir / "broken_helper.py").write_text("def divide(a, b):\n    return a / b\n")
    in_task("from broken_helper import divide\ndef loss(outputs, batch):\n    return divide(1, 0)")
    ended = sewa("select")
    assert ended.error == "loss() raised ZeroDivisionError: division by zero"
    assert "in loss\n    return divide(1, 0)" in ended.err
    helper = f'File "{run_dir / "broken_helper.py"}", line 2, in divide\n    return a / b'
    assert helper in ended.err


# ---- outputs: exit 3 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-o", "best.safetensors"], ["best.safetensors: exists", "--force", "another name"]),
        (["-o", "new.safetensors"], ["new.report.json: exists; the report of new", "--report"]),
        (["-o", "later/best.safetensors"], ["later: no such folder", "make it first"]),
        (["-o", "ckpts", "--force"], ["ckpts: is a folder", "name a file"]),
        (["-o", f"ckpts/../{CHECKPOINT}", "--force"], ["one of the inputs, never overwritten"]),
        (["--report", CHECKPOINT, "--force"], ["step-60.safetensors: is one of the inputs"]),
        (["--last", "6", "-o", "ckpts/step-10.safetensors", "--force"],
         ["step-10.safetensors: is one of the inputs"]),
    ],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused(refused, arguments, parts):
    Path("best.safetensors").write_text("precious")
    Path("new.report.json").write_text("precious")
    refused(FILES, ["select", *arguments], parts)


@pytest.mark.parametrize("failing", [1, 2])  # the average, or the report after it
def test_a_full_disk_leaves_nothing_behind(refused, monkeypatch, failing):
    real, calls = os.fsync, iter(range(1, 100))

    def full(descriptor):
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    refused(FILES, ["select", "-o", "best.safetensors"], ["No space left on device"])


@contextmanager
def stdout_to(path):
    kept, target = os.dup(1), os.open(path, os.O_WRONLY)
    os.dup2(target, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(target)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [["-o", "-"], ["--json"]])
def test_a_standard_output_that_is_full_is_an_error_of_files(sewa, flags):
    with stdout_to("/dev/full"):
        ended = sewa("select", *flags)
    assert ended.code == FILES, ended.err
    assert "standard output" in ended.error
    assert "No space left on device" in ended.error


def test_without_posix_fadvise_commands_work(sewa, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")  # macOS has none
    assert sewa("select", "--dry-run").code == 0
    assert sewa("average", "ckpts", "-o", "mean.safetensors").code == 0
