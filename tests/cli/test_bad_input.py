"""Bad input: one line says where, what and what to do; the right exit code; nothing is touched."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest
import torch
from helpers.shells import standard_input
from helpers.tiny import Sewa
from safetensors.torch import load_file, save_file

from sewa_cli.publish import is_temporary

USAGE, FILES, TASK_MODULE = 2, 3, 4


class Refused(Protocol):
    def __call__(self, code: int, *arguments: object) -> str: ...


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too; what Python caches of the user's module does not count."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture
def refused(run_dir: Path, sewa: Sewa) -> Refused:
    """refused(3, "select", …) → the error line; stdout is empty and no file came, went or changed.

    The run is left to the test to spoil first; the folder is compared with its spoiled self.
    """

    def call(code: int, *arguments: object) -> str:
        before = contents(run_dir)
        ended = sewa(*(arguments or ("select",)))
        assert ended.code == code, ended.err
        assert ended.out == ""
        assert contents(run_dir) == before
        assert "Traceback" not in ended.err
        return ended.error

    return call


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["average", f"{LONG}.pt"],
        ["average", "ckpts", "-o", f"{LONG}.pt"],
        ["average", "ckpts", "-o", "a.pt", "--report", f"{LONG}/a.json"],
        ["inspect", "ckpts", "--html", f"{LONG}.html"],
        ["inspect", "ckpts", "--log", f"tensorboard:{LONG}"],
        ["verify", f"{LONG}.json"],
        ["init", LONG],
        ["demo", LONG],
    ],
)
def test_a_name_that_is_too_long_is_one_line(refused: Refused, arguments: list[str]) -> None:
    assert "File name too long" in refused(FILES, *arguments)


@pytest.mark.parametrize("name", ["q.nemo", "out.onnx", "out.json"])
def test_an_output_in_a_format_that_cannot_be_written_is_refused(
    refused: Refused, name: str
) -> None:
    line = refused(USAGE, "average", "ckpts", "-o", name)
    assert f"{name}: sewa cannot write .{name.partition('.')[2]} files; end the name with" in line
    assert ".safetensors, .pt, .pth, .bin, .ckpt, or use --set output_format=dcp" in line


@pytest.mark.usefixtures("run_dir")
def test_without_posix_fadvise_commands_work(sewa: Sewa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")  # macOS has none
    assert sewa("select", "--dry-run").code == 0
    assert sewa("average", "ckpts", "-o", "mean.safetensors").code == 0


def checkpoint(run_dir: Path, step: int = 60) -> Path:
    return run_dir / "ckpts" / f"step-{step}.safetensors"


def resave(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def spoil(path: Path, value: float = float("nan")) -> None:
    """One value of one tensor."""
    tensors = load_file(path)
    tensors["2.weight"][1, 3] = value
    save_file(tensors, path)


def keep_only(run_dir: Path, count: int) -> None:
    for path in sorted((run_dir / "ckpts").iterdir())[count:]:
        path.unlink()


def in_task(run_dir: Path, code: str) -> None:
    """Later definitions win, so the spoiled function is simply added."""
    with (run_dir / "task.py").open("a") as file:
        file.write("\n" + code + "\n")


def in_yaml(run_dir: Path, text: str) -> None:
    with (run_dir / "sewa.yaml").open("a") as file:
        file.write(text + "\n")


def check_says(error: str, *parts: str) -> None:
    missing = [part for part in parts if part not in error]
    assert not missing, f"{missing} not in: {error}"


# ---- checkpoints: exit 3 ---------------------------------------------------------------------


def test_an_empty_folder_is_named(run_dir: Path, refused: Refused) -> None:
    (run_dir / "none").mkdir()
    check_says(refused(FILES, "select", "none/"), "none: ", "holds no *.safetensors files")


def test_a_missing_folder_is_named(refused: Refused) -> None:
    check_says(refused(FILES, "select", "nowhere/"), "nowhere: ", "No such file")


def test_a_truncated_file_is_named(run_dir: Path, refused: Refused) -> None:
    path = checkpoint(run_dir)
    path.write_bytes(path.read_bytes()[:-40])
    check_says(
        refused(FILES), "ckpts/step-60.safetensors: ", "not a complete safetensors", "remove it"
    )


def test_a_text_file_named_safetensors_is_named(run_dir: Path, refused: Refused) -> None:
    checkpoint(run_dir).write_text("these are not the weights you are looking for\n")
    check_says(
        refused(FILES), "ckpts/step-60.safetensors: ", "not a complete safetensors", "remove it"
    )


def test_a_header_longer_than_the_file_is_told(run_dir: Path, refused: Refused) -> None:
    path = checkpoint(run_dir)
    path.write_bytes(struct.pack("<Q", 10_000) + path.read_bytes()[8:])
    check_says(
        refused(FILES), "ckpts/step-60.safetensors: ", "not a complete safetensors", "remove it"
    )


def test_an_empty_file_is_named(run_dir: Path, refused: Refused) -> None:
    checkpoint(run_dir).write_bytes(b"")
    check_says(refused(FILES), "ckpts/step-60.safetensors: ", "remove it")


def test_a_file_without_tensors_is_named(run_dir: Path, refused: Refused) -> None:
    save_file({}, checkpoint(run_dir))
    check_says(refused(FILES), "ckpts/step-60.safetensors: ", "holds no tensors")


def test_a_shape_mismatch_tells_file_tensor_expected_and_found(
    run_dir: Path, refused: Refused
) -> None:
    resave(checkpoint(run_dir), lambda t: t.update({"2.weight": torch.zeros(3, 16)}))
    check_says(
        refused(FILES),
        "ckpts/step-60.safetensors: 2.weight: ",
        "expected F32 [2, 16]",
        "found F32 [3, 16]",
    )


def test_a_dtype_mismatch_tells_file_tensor_expected_and_found(
    run_dir: Path, refused: Refused
) -> None:
    resave(checkpoint(run_dir), lambda t: t.update({"0.bias": t["0.bias"].bfloat16()}))
    check_says(
        refused(FILES),
        "ckpts/step-60.safetensors: 0.bias: ",
        "expected F32 [16]",
        "found BF16 [16]",
    )


def test_a_missing_tensor_is_named_with_its_file(run_dir: Path, refused: Refused) -> None:
    resave(checkpoint(run_dir), lambda t: t.pop("2.bias"))
    check_says(
        refused(FILES),
        "ckpts/step-60.safetensors: 2.bias: ",
        "expected F32 [2]",
        "found no such tensor",
    )


def test_an_extra_tensor_is_named_with_its_file(run_dir: Path, refused: Refused) -> None:
    resave(checkpoint(run_dir), lambda t: t.update({"optimizer.m": torch.zeros(5)}))
    check_says(
        refused(FILES),
        "ckpts/step-60.safetensors: optimizer.m: ",
        "expected no such tensor",
        "found F32 [5]",
    )


def test_checkpoints_of_another_model_list_names_on_each_side(
    run_dir: Path, refused: Refused
) -> None:
    in_task(run_dir, "def build_model(): return nn.Sequential(nn.ReLU(), nn.Linear(6, 2))")
    check_says(
        refused(FILES),
        "does not fit the model that build_model() returns",
        "missing from the checkpoint: 1.weight, 1.bias",
        "not in the model: 0.bias, 0.weight, 2.bias and 1 more",
    )


def test_a_model_of_another_width_is_told_with_both_shapes(run_dir: Path, refused: Refused) -> None:
    in_task(
        run_dir,
        "def build_model(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))",
    )
    check_says(refused(FILES), "0.weight: ", "shape [8, 6] as in the model", "found F32 [16, 6]")


def test_one_checkpoint_only_leaves_none_to_choose(run_dir: Path, refused: Refused) -> None:
    keep_only(run_dir, 1)
    check_says(
        refused(FILES, "select", "--K", 1),
        "ckpts/step-10.safetensors: ",
        "is the only checkpoint",
        "nothing to choose",
    )


def test_a_checkpoint_named_twice_is_told(refused: Refused) -> None:
    check_says(
        refused(FILES, "select", "ckpts/", "ckpts/step-60.safetensors"),
        "step-60.safetensors: is given twice",
        "give each checkpoint once",
    )


def test_two_checkpoints_of_one_step_are_told(run_dir: Path, refused: Refused) -> None:
    again = run_dir / "ckpts" / "again-60.safetensors"
    save_file(load_file(checkpoint(run_dir)), again, {"step": "60"})
    check_says(
        refused(FILES), "again-60.safetensors", "step-60.safetensors", "step 60", "leave one out"
    )


def test_a_dash_with_nothing_on_stdin_is_told(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", standard_input("\n\n"))
    check_says(refused(FILES, "select", "-"), "-: no paths arrived on standard input")


def test_a_path_on_stdin_that_is_not_there_is_named(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", standard_input("ckpts/step-10.safetensors\nckpts/typo-20\n"))
    check_says(refused(FILES, "select", "-"), "ckpts/typo-20: No such file")


# ---- NaN -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_nan_checkpoint_is_left_out_with_a_warning_that_names_it(
    run_dir: Path, sewa: Sewa, value: float
) -> None:
    spoil(checkpoint(run_dir, 120), value)
    ended = sewa("select", "--json")
    assert ended.code == 0, ended.err
    warnings = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    named = [line for line in warnings if "ckpts/step-120.safetensors" in line]
    assert len(named) == 1
    check_says(named[0], "left out", "2.weight holds NaN or Inf")
    report = json.loads(ended.out)
    assert report["k"] == 11
    assert [left["step"] for left in report["left_out"]] == [120]
    assert 120 not in [candidate["step"] for candidate in report["candidates"]]
    assert named[0].removeprefix("warning: ") in report["warnings"]


def test_nonfinite_error_stops_at_a_nan_checkpoint(run_dir: Path, refused: Refused) -> None:
    spoil(checkpoint(run_dir))
    check_says(
        refused(FILES, "select", "--set", "nonfinite=error"),
        "ckpts/step-60.safetensors: ",
        "2.weight holds NaN or Inf",
        "--set nonfinite=skip",
    )


def test_all_checkpoints_nan_leaves_none(run_dir: Path, refused: Refused) -> None:
    for path in (run_dir / "ckpts").iterdir():
        spoil(path)
    check_says(refused(FILES), "all 12 checkpoints hold NaN or Inf", "none is left")


def test_dropped_nan_checkpoints_count_against_K(run_dir: Path, refused: Refused) -> None:
    for step in range(10, 90, 10):  # four remain, and K is 4
        spoil(checkpoint(run_dir, step))
    check_says(refused(USAGE), "K: 4 of 4 checkpoints", "K must be at most 3")


def test_validate_does_not_blame_the_loss_for_a_nan_checkpoint(run_dir: Path, sewa: Sewa) -> None:
    spoil(checkpoint(run_dir, 120))
    ended = sewa("validate")
    assert ended.code in (0, FILES), ended.err  # as `nonfinite` says, but never the user's module
    assert "step-120.safetensors" in ended.err
    assert "loss()" not in ended.err


# ---- flags and sewa.yaml: exit 2 ---------------------------------------------------------------


def test_K_zero_is_told_with_its_bound(run_dir: Path, refused: Refused) -> None:
    check_says(
        refused(USAGE, "select", "--K", 0), "--K: ", "greater than or equal to 1", "found '0'"
    )
    (run_dir / "sewa.yaml").write_text("task: ./task.py\ncheckpoints: ckpts/\nK: 0\n")
    check_says(refused(USAGE, "select"), "sewa.yaml: K: ", "greater than or equal to 1", "found 0")


@pytest.mark.parametrize("K", [12, 13, 1000])
def test_K_of_k_or_more_is_told_with_the_largest_that_works(refused: Refused, K: int) -> None:
    check_says(
        refused(USAGE, "select", "--K", K),
        f"K: {K} of 12 checkpoints leaves nothing to choose",
        "K must be at most 11",
    )


def test_K_is_held_against_what_the_narrowing_flags_leave(refused: Refused) -> None:
    check_says(
        refused(USAGE, "select", "--last", 3), "K: 4 of 3 checkpoints", "K must be at most 2"
    )


@pytest.mark.parametrize("K", ["ten", "2.5", "", "nan"])
def test_K_that_is_no_number_is_told(refused: Refused, K: str) -> None:
    check_says(refused(USAGE, "select", "--K", K), f"--K: must be a whole number, found {K!r}")


@pytest.mark.parametrize(("text", "found"), [("true", "true"), ("yes", "true"), ("off", "false")])
def test_K_as_a_yaml_boolean_is_not_taken_as_1(
    run_dir: Path, refused: Refused, text: str, found: str
) -> None:
    (run_dir / "sewa.yaml").write_text(f"task: ./task.py\ncheckpoints: ckpts/\nK: {text}\n")
    check_says(refused(USAGE), "sewa.yaml: K: must be a number", f"found {found}")


def test_a_bare_yaml_off_is_the_word_off(run_dir: Path, sewa: Sewa) -> None:
    in_yaml(run_dir, "bn: off")
    ended = sewa("select", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["config"]["bn"] == "off"


def test_bn_on_without_batchnorm_is_told(run_dir: Path, refused: Refused) -> None:
    in_yaml(run_dir, "bn: on")
    check_says(refused(USAGE), "bn: on", "no BatchNorm layer")


def test_an_unknown_yaml_key_is_told_with_the_likely_one(run_dir: Path, refused: Refused) -> None:
    in_yaml(run_dir, "outptu: best.safetensors")
    check_says(refused(USAGE), "sewa.yaml: outptu: unknown key", "did you mean output?")


def test_an_unknown_key_in_set_is_blamed_on_set_and_not_on_the_yaml(refused: Refused) -> None:
    error = refused(USAGE, "select", "--set", "gumble.lr=0.1")
    check_says(error, "--set gumble", "unknown key", "did you mean gumbel?")
    assert "sewa.yaml" not in error


def test_a_yaml_key_given_twice_is_told_with_its_line(run_dir: Path, refused: Refused) -> None:
    in_yaml(run_dir, "K: 5")
    last = len((run_dir / "sewa.yaml").read_text().splitlines())
    check_says(refused(USAGE), f"sewa.yaml:{last}:1: ", "'K' is given twice")


def test_a_yaml_syntax_error_is_told_with_its_line(run_dir: Path, refused: Refused) -> None:
    (run_dir / "sewa.yaml").write_text("task: ./task.py\nK: [4\ndevice: cpu\n")
    check_says(refused(USAGE), "sewa.yaml:3:", "fix the YAML")


def test_a_template_left_in_the_yaml_is_no_bug_of_ours(run_dir: Path, refused: Refused) -> None:
    """{{ K }} is, to YAML, a mapping with a mapping as its key."""
    (run_dir / "sewa.yaml").write_text("task: ./task.py\nK: {{ K }}\n")
    check_says(refused(USAGE), "sewa.yaml:2:", "fix the YAML")


def test_a_yaml_list_is_told_for_what_it_is(run_dir: Path, refused: Refused) -> None:
    (run_dir / "sewa.yaml").write_text("- task: ./task.py\n")
    check_says(refused(USAGE), "sewa.yaml: ", "`key: value`", "found a list")


def test_a_section_given_as_one_value_is_refused(run_dir: Path, refused: Refused) -> None:
    (run_dir / "sewa.yaml").write_text("task: ./task.py\ncheckpoints: ckpts/\ngumbel: fast\n")
    check_says(refused(USAGE), "sewa.yaml: gumbel: ", "found 'fast'")


def test_a_config_that_is_not_there_is_named(refused: Refused) -> None:
    check_says(
        refused(USAGE, "select", "--config", "other.yaml"), "other.yaml: No such", "check --config"
    )


def test_without_a_task_the_way_to_one_is_told(run_dir: Path, refused: Refused) -> None:
    (run_dir / "sewa.yaml").unlink()
    check_says(refused(USAGE, "select", "ckpts/", "--K", 3), "no task", "--task", "sewa init")


def test_without_checkpoints_the_way_to_name_them_is_told(run_dir: Path, refused: Refused) -> None:
    (run_dir / "sewa.yaml").write_text("task: ./task.py\n")
    check_says(refused(USAGE), "no checkpoints named", "`checkpoints:`")


def test_an_empty_step_range_is_told_with_the_steps_there_are(refused: Refused) -> None:
    check_says(
        refused(USAGE, "select", "--from-step", 500),
        "--from-step",
        "no checkpoint lies in 500..",
        "the steps are 10..120",
    )
    check_says(
        refused(USAGE, "select", "--to-step", 0),
        "--to-step",
        "no checkpoint lies in ..0;",
        "the steps are 10..120",
    )


def test_a_step_range_over_files_without_steps_is_told(run_dir: Path, refused: Refused) -> None:
    for letter, path in zip("abcdefghijkl", sorted((run_dir / "ckpts").iterdir()), strict=True):
        path.rename(path.with_name(f"{letter}.safetensors"))
    check_says(refused(USAGE, "select", "--to-step", 50), "--to-step", "have no steps")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x"])
def test_an_unknown_device_is_told(refused: Refused, device: str) -> None:
    check_says(
        refused(USAGE, "select", "--device", device), "device: ", repr(device), "cannot be used"
    )


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--last", "0"], ["--last: ", "greater than or equal to 1"]),
        (["--every", "x"], ["--every: ", "must be a whole number", "found 'x'"]),
        (["--set", "nonfinite=maybe"], ["--set nonfinite: ", "'skip' or 'error'", "found 'maybe'"]),
        (["--set", "bn=sometimes"], ["--set bn: ", "'auto', 'on' or 'off'", "found 'sometimes'"]),
        (["--output-dtype", "int8"], ["--output-dtype: ", "'float16'", "found 'int8'"]),
        (["--seed", "-1"], ["--seed: ", "greater than or equal to 0"]),
        (
            ["--set", "gumbel.iterations=0"],
            ["gumbel.iterations: ", "greater than or equal"],
        ),
        (["--set", "gumbel.temperature=.inf"], ["--set gumbel.temperature: ", "finite"]),
        (["--set", "gumbel.lr=0"], ["--set gumbel.lr: ", "greater than 0"]),
        (["--set", "K"], ["--set K: ", "key=value"]),
        (["--set", "K.deep=3"], ["--set K.deep=3: ", "K is a single value"]),
        (["--json", "--output", "-"], ["--json", "--output -", "use --report"]),
    ],
)
def test_a_bad_flag_is_told_by_its_own_name(
    refused: Refused, flags: list[str], parts: list[str]
) -> None:
    check_says(refused(USAGE, "select", *flags), *parts)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["select", "--frobnicate"], "--frobnicate"),
        (["select", "--K"], "--K"),
        (["selekt"], "selekt"),
        (["apply", "-o", "again.safetensors"], "report"),
    ],
)
@pytest.mark.usefixtures("run_dir")
def test_a_usage_error_is_one_line(sewa: Sewa, arguments: list[str], named: str) -> None:
    ended = sewa(*arguments)
    assert ended.code == USAGE
    assert ended.out == ""
    assert len(ended.err.splitlines()) == 1
    check_says(ended.error.lower(), named.lower(), "`sewa --help`")


def test_an_args_key_that_no_function_takes_is_told(run_dir: Path, refused: Refused) -> None:
    in_yaml(run_dir, "args: {widht: 16}")
    check_says(refused(USAGE), "args.widht: ", "no function in task.py takes it")


def test_strict_without_heldout_data_is_told_before_any_work(
    run_dir: Path, refused: Refused
) -> None:
    in_task(run_dir, "del heldout_data")
    check_says(refused(USAGE, "select", "--strict"), "--strict", "heldout_data", "task.py")


# ---- the user's module: exit 4 -----------------------------------------------------------------


def test_a_missing_task_file_is_told_with_the_way_to_one(run_dir: Path, refused: Refused) -> None:
    (run_dir / "task.py").unlink()
    check_says(refused(TASK_MODULE), "task.py: no such task file", "sewa init")


def test_a_missing_task_module_is_told_with_the_way_to_name_a_file(refused: Refused) -> None:
    check_says(
        refused(TASK_MODULE, "select", "--task", "my_lost_task"),
        "my_lost_task: no such module",
        "./my_lost_task.py",
    )


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("loss", "loss(outputs, batch)"),
        ("build_model", "build_model(**args)"),
        ("selection_data", "selection_data(**args)"),
    ],
)
def test_a_task_without_a_required_function_is_told_its_signature(
    run_dir: Path, refused: Refused, name: str, signature: str
) -> None:
    in_task(run_dir, f"del {name}")
    check_says(refused(TASK_MODULE), f"task.py lacks {signature}: ")


def test_a_task_function_that_is_no_function_is_told(run_dir: Path, refused: Refused) -> None:
    in_task(run_dir, "selection_data = [1, 2]")
    check_says(refused(TASK_MODULE), "task.py: selection_data must be a function")


def test_a_loss_that_returns_a_vector_is_told_with_its_shape(
    run_dir: Path, refused: Refused
) -> None:
    in_task(
        run_dir,
        "def loss(outputs, batch):\n"
        "    return F.cross_entropy(outputs, batch[1], reduction='none')",
    )
    check_says(refused(TASK_MODULE), "loss() must return one number", "the mean", "shape [128]")


def test_a_loss_that_returns_a_float_is_told(run_dir: Path, refused: Refused) -> None:
    in_task(run_dir, "def loss(outputs, batch): return 0.5")
    check_says(refused(TASK_MODULE), "loss() must return a tensor", "found float")


def test_a_loss_without_gradient_is_told(run_dir: Path, refused: Refused) -> None:
    in_task(
        run_dir,
        "def loss(outputs, batch): return F.cross_entropy(outputs.detach(), batch[1])",
    )
    check_says(refused(TASK_MODULE), "loss() has no gradient", ".detach()")


def test_a_loss_that_is_nan_is_told(run_dir: Path, refused: Refused) -> None:
    in_task(run_dir, "def loss(outputs, batch): return (outputs * float('nan')).mean()")
    check_says(refused(TASK_MODULE), "loss() is NaN or Inf on the selection data")


def test_validate_finds_a_nan_loss(run_dir: Path, refused: Refused) -> None:
    in_task(run_dir, "def loss(outputs, batch): return (outputs * float('nan')).mean()")
    check_says(refused(TASK_MODULE, "validate"), "loss() is nan", "step-120.safetensors")


@pytest.mark.parametrize("command", ["select", "validate"])
@pytest.mark.parametrize("body", ["return []", "yield from ()"])
def test_empty_selection_data_is_told(
    run_dir: Path, refused: Refused, command: str, body: str
) -> None:
    in_task(run_dir, f"def selection_data():\n    {body}")
    check_says(refused(TASK_MODULE, command), "selection_data(): ", "there are no ")


def test_empty_heldout_data_is_told(run_dir: Path, refused: Refused) -> None:
    in_task(run_dir, "def heldout_data(): return []")
    check_says(refused(TASK_MODULE), "heldout_data(): ", "there are no ")


def test_selection_data_that_cannot_be_iterated_over_is_told(
    run_dir: Path, refused: Refused
) -> None:
    in_task(run_dir, "def selection_data(): return 7")
    check_says(refused(TASK_MODULE), "selection_data() must return batches", "found int")


def test_metrics_that_return_no_dict_are_told(run_dir: Path, refused: Refused) -> None:
    in_task(run_dir, "def metrics(model): return 0.93")
    check_says(
        refused(TASK_MODULE), "metrics() must return a dict", '{"accuracy": 0.93}', "found float"
    )


def test_a_build_model_that_returns_no_module_is_told(run_dir: Path, refused: Refused) -> None:
    in_task(run_dir, "def build_model(): return {'weights': 1}")
    check_says(refused(TASK_MODULE), "build_model() must return an nn.Module", "found dict")


def test_an_exception_in_user_code_shows_the_users_frames_only(run_dir: Path, sewa: Sewa) -> None:
    (run_dir / "broken_helper.py").write_text("def divide(a, b):\n    return a / b\n")
    in_task(
        run_dir,
        "from broken_helper import divide\ndef loss(outputs, batch):\n    return divide(1, 0)",
    )
    before = contents(run_dir)
    ended = sewa("select")
    assert ended.code == TASK_MODULE
    assert ended.out == ""
    assert contents(run_dir) == before
    assert ended.error == "loss() raised ZeroDivisionError: division by zero"
    check_says(
        ended.err,
        f'File "{run_dir / "task.py"}", line ',
        "in loss\n    return divide(1, 0)",
        f'File "{run_dir / "broken_helper.py"}", line 2, in divide\n    return a / b',
    )
    assert "sewa_cli" not in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def build_model(): raise OSError('no weights')", "build_model() raised OSError: no w"),
        ("def selection_data(): return {}['x']", "selection_data() raised KeyError: 'x'"),
        (
            "def selection_data():\n    yield from data(1)\n    raise EOFError('torn')",
            "selection_data() raised EOFError: torn",
        ),
        ("def predict(model, batch): return model(batch[9])", "predict() raised IndexError: "),
        ("def metrics(model): return {'a': float('x')}", "metrics() raised ValueError: "),
        ("def loss(outputs, batch): exit(7)", "loss() raised SystemExit: 7"),
        ("raise LookupError('at import')", "task.py: cannot be imported: LookupError: at import"),
    ],
)
def test_an_exception_anywhere_in_user_code_names_the_function_and_the_frame(
    run_dir: Path, sewa: Sewa, code: str, error: str
) -> None:
    in_task(run_dir, code)
    ended = sewa("select")
    assert ended.code == TASK_MODULE, ended.err
    assert ended.out == ""
    check_says(ended.error, error)
    assert f'File "{run_dir / "task.py"}", line ' in ended.err
    assert "sewa_cli" not in ended.err


def test_a_syntax_error_in_the_task_is_told_with_its_line(run_dir: Path, refused: Refused) -> None:
    (run_dir / "task.py").write_text("import torch\n\ndef loss(outputs, batch:\n    pass\n")
    check_says(refused(TASK_MODULE), "task.py: cannot be imported: SyntaxError", "task.py, line 3")


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('first line\\nsecond line')",
        "def loss(outputs, batch): raise RuntimeError('first line\\nsecond line')",
    ],
)
def test_an_exception_with_a_long_message_is_still_one_line(
    run_dir: Path, refused: Refused, code: str
) -> None:
    in_task(run_dir, code)
    check_says(refused(TASK_MODULE), "RuntimeError: first line second line")


# ---- outputs: exit 3 ---------------------------------------------------------------------------


def test_an_output_that_exists_is_not_overwritten(run_dir: Path, refused: Refused) -> None:
    (run_dir / "best.safetensors").write_text("precious")
    error = refused(FILES, "select", "-o", "best.safetensors")
    check_says(error, "best.safetensors: exists", "--force", "another name")


def test_an_output_named_in_the_yaml_that_exists_is_not_overwritten(
    run_dir: Path, refused: Refused
) -> None:
    (run_dir / "best.safetensors").write_text("precious")
    in_yaml(run_dir, "output: best.safetensors")
    check_says(refused(FILES), "best.safetensors: exists", "--force")


def test_a_report_that_exists_is_not_overwritten(run_dir: Path, refused: Refused) -> None:
    (run_dir / "best.report.json").write_text("precious")
    check_says(
        refused(FILES, "select", "-o", "best.safetensors"), "best.report.json: exists", "--force"
    )


def test_an_output_folder_that_is_not_there_is_named(refused: Refused) -> None:
    check_says(
        refused(FILES, "select", "-o", "later/best.safetensors"),
        "later: no such folder",
        "make it first",
    )


def test_an_output_that_is_a_folder_is_told(refused: Refused) -> None:
    check_says(
        refused(FILES, "select", "-o", "ckpts", "--force"), "ckpts: is a folder", "name a file"
    )


def test_an_output_folder_that_is_not_writable_is_told_before_any_work(
    run_dir: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "locked").mkdir()
    in_task(run_dir, "def loss(outputs, batch): raise RuntimeError('work was done')")
    real = os.access

    def no_writing(path: str | os.PathLike[str], mode: int) -> bool:  # root may write anywhere
        return not (Path(path).name == "locked" and mode & os.W_OK) and real(path, mode)

    monkeypatch.setattr(os, "access", no_writing)
    check_says(
        refused(FILES, "select", "-o", "locked/best.safetensors"),
        "locked: is not writable",
        "--output",
    )


def test_an_output_that_is_an_input_is_refused_even_with_force(refused: Refused) -> None:
    check_says(
        refused(FILES, "select", "-o", "ckpts/../ckpts/step-60.safetensors", "--force"),
        "step-60.safetensors: is one of the inputs",
        "never overwritten",
    )
    check_says(
        refused(FILES, "select", "--report", "ckpts/step-60.safetensors", "--force"),
        "step-60.safetensors: is one of the inputs",
    )


def test_a_checkpoint_that_was_narrowed_away_is_still_an_input(refused: Refused) -> None:
    check_says(
        refused(FILES, "select", "--last", 6, "-o", "ckpts/step-10.safetensors", "--force"),
        "step-10.safetensors: is one of the inputs",
    )


@pytest.mark.parametrize("report", ["best.safetensors", "ckpts/../best.safetensors"])
def test_a_report_path_equal_to_the_output_path_is_told(refused: Refused, report: str) -> None:
    check_says(
        refused(USAGE, "select", "-o", "best.safetensors", "--report", report),
        "best.safetensors: ",
        "--report and --output name the same file",
    )


class FullDisk(io.FileIO):
    """A file on a disk that has no bytes left."""

    def write(self, _: object, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(monkeypatch: pytest.MonkeyPatch, nth: int = 1) -> None:
    """The n-th file that is written meets a full disk; buffered, as real files are."""
    real, written = Path.open, iter(range(1, 100))

    def opened(self: Path, mode: str = "r", *rest: object, **options: object) -> object:
        if is_temporary(self.name) and "w" in mode and next(written) == nth:
            return io.BufferedWriter(FullDisk(self, "w"))
        return real(self, mode, *rest, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize(("nth", "suffix"), [(1, ".safetensors"), (2, ".report.json")])
def test_a_full_disk_leaves_nothing_behind(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, nth: int, suffix: str
) -> None:
    fill_disk(monkeypatch, nth)
    check_says(
        refused(FILES, "select", "-o", "best.safetensors"),
        f"best{suffix}: cannot be written: No space left on device",
    )


def test_a_full_disk_keeps_the_older_output_that_force_would_replace(
    run_dir: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "best.safetensors").write_text("precious")
    fill_disk(monkeypatch)
    check_says(
        refused(FILES, "select", "-o", "best.safetensors", "--force"),
        "best.safetensors: cannot be written",
    )


def test_a_full_disk_under_a_pytorch_file_is_no_bug_of_ours(
    run_dir: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (1, 2):  # larger than what is buffered
        save_file({"w": torch.full([10_000], float(n))}, run_dir / f"large-{n}.safetensors")
    fill_disk(monkeypatch)
    check_says(
        refused(FILES, "average", "large-1.safetensors", "large-2.safetensors", "-o", "best.pt"),
        "best.pt: cannot be written: No space left on device",
    )


@pytest.mark.parametrize("failing", [1, 2])
def test_a_disk_that_turns_out_full_at_the_last_moment_leaves_nothing_behind(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A network disk tells so at fsync only: for the average, or for the report after it."""
    real, calls = os.fsync, iter(range(1, 100))

    def full(descriptor: int) -> None:
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    check_says(refused(FILES, "select", "-o", "best.safetensors"), "No space left on device")


def test_a_report_that_appears_meanwhile_is_kept_and_no_average_is_left_alone(
    run_dir: Path, sewa: Sewa
) -> None:
    in_task(
        run_dir,
        "def metrics(model):\n"
        "    with open('best.report.json', 'w') as file: file.write('precious')\n"
        "    return {}",
    )
    before = contents(run_dir)
    ended = sewa("select", "-o", "best.safetensors")
    assert ended.code == FILES
    assert ended.out == ""
    check_says(ended.error, "best.report.json: exists; use --force")
    assert contents(run_dir) == {**before, "best.report.json": b"precious"}


@contextmanager
def stdout_to(path: str) -> Iterator[None]:
    kept, target = os.dup(1), os.open(path, os.O_WRONLY)
    os.dup2(target, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(target)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [["-o", "-"], ["--json"], []])
@pytest.mark.usefixtures("run_dir")
def test_a_standard_output_that_is_full_is_no_bug_of_ours(sewa: Sewa, flags: list[str]) -> None:
    with stdout_to("/dev/full"):
        ended = sewa("select", *flags)
    assert ended.code == FILES, ended.err
    check_says(ended.error, "standard output", "No space left on device")
