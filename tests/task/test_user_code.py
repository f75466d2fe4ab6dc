"""Whatever the user's code does to the model, the data, the process: right numbers or an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.shells import SLOW_WRITE, environment, shell, wait_for
from helpers.tiny import TASK, Sewa
from safetensors.torch import load_file, save_file


def write_task(extra: str, *replaced: tuple[str, str]) -> None:
    text = TASK
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    Path("task.py").write_text(text + "\n" + extra)


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("averaged.report.json").read_text())
    return found


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    "body", ["m.double(); m.float()", "m[0].weight = torch.nn.Parameter(torch.zeros(16, 6))"]
)
def test_metrics_that_cast_or_replace_the_weights_are_told(sewa: Sewa, body: str) -> None:
    write_task(f"def metrics(m):\n    {body}\n    return {{'x': 1}}")
    ended = sewa("select")
    assert ended.code == 4
    assert "metrics(): 0.weight was moved, cast or replaced" in ended.error


@pytest.mark.usefixtures("run_dir")
def test_a_zero_grad_in_the_users_code_does_not_cut_the_gradient(sewa: Sewa) -> None:
    assert sewa("select").code == 0
    plain = report()["candidates"]
    write_task("def metrics(m):\n    m.zero_grad()\n    return {'x': 1}")
    assert sewa("select", "-o", "averaged.safetensors", "--force").code == 0
    assert report()["candidates"] == plain


@pytest.mark.usefixtures("run_dir")
def test_a_batch_changed_in_place_is_told(sewa: Sewa) -> None:
    write_task("def predict(m, b):\n    return m(b[0].mul_(1.5))")
    ended = sewa("select")
    assert ended.code == 4
    assert "changes the batch in place" in ended.error


@pytest.mark.usefixtures("run_dir")
def test_labels_may_be_popped_from_a_dict_batch(sewa: Sewa) -> None:
    assert sewa("select").code == 0
    plain = report()
    write_task(
        "def predict(m, b):\n    return m(b['x'])",
        ("return list(zip(", "return [{'x': a, 'labels': b} for a, b in zip("),
        ("y.split(128)))", "y.split(128))]"),
        ("batch[1]", "batch.pop('labels')"),
    )
    assert sewa("select", "-o", "averaged.safetensors", "--force").code == 0
    assert report()["candidates"] == plain["candidates"]
    assert report()["average"] == plain["average"]


@pytest.mark.usefixtures("run_dir")
def test_a_tensor_of_extra_state_is_refused(sewa: Sewa) -> None:
    write_task(
        "class Net(nn.Sequential):\n"
        "    def get_extra_state(self):\n        return torch.ones(2)\n"
        "    def set_extra_state(self, state):\n        pass\n"
        "def build_model():\n"
        "    return Net(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))\n"
    )
    ended = sewa("select")
    assert ended.code == 4
    assert "build_model(): _extra_state in its state_dict() is a copy or extra state" in ended.error


@pytest.mark.usefixtures("run_dir")
def test_random_numbers_drawn_while_importing_are_seeded(sewa: Sewa) -> None:
    write_task("", ("def data(", "SHUFFLE = torch.randn(300, 6)\n\ndef data("), (
        "generator=generator)\n", "generator=generator) + SHUFFLE\n"))  # fmt: skip
    outputs = []
    for name in ("one", "two"):
        torch.rand(7)  # the caller's own state is another each time
        assert sewa("select", "-o", f"{name}.safetensors").code == 0
        outputs.append(json.loads(Path(f"{name}.report.json").read_text()))
    assert outputs[0]["average"] == outputs[1]["average"]
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    "extra",
    [
        "torch.set_default_dtype(torch.float64)\ndef predict(m, b):\n    return m(b[0].double())",
        "torch.set_grad_enabled(False)",
    ],
)
def test_global_switches_of_torch_in_the_task_do_no_harm(sewa: Sewa, extra: str) -> None:
    assert sewa("select").code == 0
    plain = report()["candidates"]
    write_task(extra, ("torch.randn(rows, 6,", "torch.randn(rows, 6, dtype=torch.float32,"))
    try:
        ended = sewa("select", "-o", "averaged.safetensors", "--force")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert ended.code == 0, ended.err
    assert [c["probability"] for c in report()["candidates"]] == pytest.approx(
        [c["probability"] for c in plain], abs=1e-4
    )


def as_family(family: str) -> None:
    """The checkpoints of ./ckpts in another layout."""
    for path in sorted(Path("ckpts").iterdir()):
        state = load_file(path)
        path.unlink()
        stem = path.with_suffix("")
        if family == "torch":
            torch.save(state, stem.with_suffix(".pt"))
        elif family == "distributed":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group
                dcp.save(state, checkpoint_id=stem, no_dist=True)  # type: ignore[attr-defined]
        elif family == "folder":
            stem.mkdir()
            save_file(state, stem / "model.safetensors")
        else:
            save_file(state, path)


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("solver", ["gumbel", "linear"])
@pytest.mark.parametrize("family", ["file", "folder", "torch", "distributed"])
def test_a_task_may_go_to_another_folder_while_it_is_imported(
    sewa: Sewa, tmp_path: Path, solver: str, family: str
) -> None:
    as_family(family)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.txt").write_text("300")
    write_task(
        "def metrics(m):\n    return {'rows': int(Path('rows.txt').read_text())}",
        ("import torch\n", "import os, torch\nfrom pathlib import Path\nos.chdir('elsewhere')\n"),
    )
    flags = ("-o", "averaged.safetensors", "--html", "page.html")
    ended = sewa("select", "--solver", solver, *flags)
    os.chdir(tmp_path)
    assert ended.code == 0, ended.err
    assert report()["average"]["metrics"] == {"rows": 300}
    assert Path("averaged.safetensors").is_file()
    assert Path("page.html").is_file()
    assert [p.name for p in Path("elsewhere").iterdir()] == ["rows.txt"]
    assert all(line.startswith(f"{tmp_path}/ckpts/") for line in ended.out.split())


@pytest.mark.usefixtures("run_dir")
def test_a_function_that_leaves_another_folder_behind_is_refused(sewa: Sewa) -> None:
    Path("elsewhere").mkdir()
    write_task(
        "",
        ("def selection_data():\n", "def selection_data():\n    os.chdir('elsewhere')\n"),
        ("import torch\n", "import os, torch\n"),
    )
    here = Path.cwd()
    ended = sewa("select")
    os.chdir(here)
    assert ended.code == 4
    assert "selection_data(): leaves another working directory behind" in ended.error


@pytest.mark.usefixtures("run_dir")
def test_a_loss_that_is_infinite_once_leaves_a_readable_report(sewa: Sewa) -> None:
    count = (
        "CALLS.append(torch.is_grad_enabled())\n    "
        "extra = float('inf') if CALLS[-1] and sum(CALLS) == 5 else 0.0\n    "
    )
    write_task(
        "",
        ("def loss(", "CALLS = []\n\ndef loss("),
        ("return F.cross", f"{count}return extra + F.cross"),
    )
    ended = sewa("select")
    assert ended.code == 0, ended.err
    assert report()["history"].count(None) == 1
    assert sewa("apply", "averaged.report.json", "-o", "again.safetensors").code == 0


@pytest.mark.usefixtures("run_dir")
def test_a_metrics_name_is_shown_as_it_is(sewa: Sewa) -> None:
    write_task("def metrics(m):\n    return {'acc[/all]': 1, 'f1[macro]': 2}")
    ended = sewa("select")
    assert ended.code == 0, ended.err
    assert "acc[/all]" in ended.err
    assert "f1[macro]" in ended.err


@pytest.mark.usefixtures("run_dir")
def test_float8_checkpoints_are_averaged_in_float32(sewa: Sewa) -> None:
    for path in Path("ckpts").iterdir():
        save_file({n: t.to(torch.float8_e4m3fn) for n, t in load_file(path).items()}, path)
    ended = sewa("select")
    assert ended.code == 0, ended.err
    sources = [load_file(path) for path in ended.out.split()]
    for name, tensor in load_file("averaged.safetensors").items():
        mean = torch.stack([s[name].float() for s in sources]).mean(0)
        assert torch.equal(tensor.float(), mean.to(torch.float8_e4m3fn).float())


@pytest.mark.usefixtures("run_dir")
def test_a_very_cold_mask_of_one_is_no_fault_of_the_loss(sewa: Sewa) -> None:
    settings = ["--set", "gumbel.temperature=1e-4", "--set", "gumbel.iterations=50"]
    assert sewa("select", "--K", 1, *settings).code == 0


@pytest.mark.usefixtures("run_dir")
def test_when_nobody_reads_stderr_the_work_is_still_done() -> None:
    write_task("def metrics(m):\n    print('x' * 100, flush=True)\n    return {'a': 1}")
    ended = shell("sewa select -v -o out.safetensors 2> >(head -1 > /dev/null) | wc -l")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "4"
    assert Path("out.safetensors").is_file()
    assert Path("out.report.json").is_file()


@pytest.mark.usefixtures("run_dir")
def test_a_full_disk_behind_stderr_does_not_stop_the_work() -> None:
    write_task(
        "def metrics(m):\n    print('x', flush=True)\n    print('y', file=sys.stderr, flush=True)\n"
        "    return {'a': 1}",
        ("import torch\n", "import sys\nimport torch\n"),
    )
    ended = shell("sewa select -v -o out.safetensors 2> /dev/full")
    assert ended.returncode == 0
    assert len(ended.stdout.split()) == 4
    assert Path("out.report.json").is_file()
    assert len(load_file("out.safetensors")) == 4


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("average ckpts/ -o out.safetensors", 0),
        ("average ckpts/ -o out.safetensors -v", 0),
        ("average nowhere/ -o out.safetensors", 3),
        ("select --no-such-flag", 2),
        ("select --K many", 2),
    ],
)
def test_a_full_disk_behind_stderr_leaves_the_exit_code(command: str, code: int) -> None:
    assert shell(f"sewa {command} 2> /dev/full").returncode == code
    assert Path("out.safetensors").exists() == (code == 0)


@pytest.mark.usefixtures("run_dir")
def test_prints_of_the_users_code_go_to_a_stream_with_all_its_parts() -> None:
    write_task(
        "import sys\nsys.stdout.reconfigure(line_buffering=True)\n"
        "sys.stdout.buffer.write(b'raw\\n')\n"
    )
    ended = shell("sewa validate")
    assert ended.returncode == 0, ended.stderr
    assert "raw" in ended.stderr


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("name", ["a:smile:3", "a[bold]3"])
def test_a_path_in_a_warning_is_shown_as_it_is(sewa: Sewa, name: str) -> None:
    broken = load_file("ckpts/step-10.safetensors")
    broken["0.bias"][0] = float("nan")
    save_file(broken, f"ckpts/{name}.safetensors")
    ended = sewa("select")
    assert ended.code == 0, ended.err
    assert f"{name}.safetensors" in next(
        line for line in ended.err.splitlines() if line.startswith("warning: ")
    )


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_a_closed_descriptor_is_not_taken_by_a_checkpoint(sewa: Sewa, closed: str) -> None:
    """Prints to a number that the averaged file had got would stand in its middle."""
    write_task("import os\ndef metrics(m):\n    os.system('echo noise >&2')\n    return {'a': 1}")
    whole = sewa("select", "-o", "whole.safetensors")
    ended = shell(f"sewa select -o out.safetensors {closed}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == whole.out
    assert Path("out.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()


@pytest.mark.usefixtures("run_dir")
def test_garbage_is_collected_while_the_users_code_runs() -> None:
    """It is off while modules are imported; a task that leaves cycles must not fill the memory."""
    write_task("import gc\ndef metrics(m):\n    return {'on': int(gc.isenabled())}")
    ended = shell("sewa select --json -o out.safetensors ")
    assert json.loads(ended.stdout)["average"]["metrics"]["on"] == 1


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("sewa schema > /dev/full", 3, "standard output: cannot be written: No space left"),
        ("sewa --version > /dev/full", 3, "standard output: cannot be written: No space left"),
        ("sewa --help > /dev/full", 3, "standard output: cannot be written: No space left"),
        ("sewa average - -o x.safetensors <&-", 3, "-: no paths arrived on standard input"),
        ("sewa select >&-", 3, "standard output: is closed"),
        ("PYTHONIOENCODING=ascii sewa select --help > /dev/null", 0, ""),
        ("sewa select -o $'caf\\xe9.safetensors'", 3, "is not a UTF-8 name"),
    ],
)
def test_odd_surroundings_get_one_clear_line(script: str, code: int, words: str) -> None:
    ended = shell(script)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert "bug in sewa" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("name", [".", "/", "x" * 300 + ".safetensors"])
def test_an_output_that_cannot_be_a_file_is_refused(sewa: Sewa, name: str) -> None:
    assert sewa("select", "-o", name).code == 3


def test_force_spares_the_config_and_the_report_that_is_read(run_dir: Path, sewa: Sewa) -> None:
    config = (run_dir / "sewa.yaml").read_bytes()
    ended = sewa("select", "--report", "sewa.yaml", "--force")
    assert ended.code == 3
    assert (run_dir / "sewa.yaml").read_bytes() == config
    assert sewa("select").code == 0
    content = (run_dir / "averaged.report.json").read_bytes()
    assert sewa("apply", "averaged.report.json", "-o", "averaged.report.json", "-f").code == 2
    assert (run_dir / "averaged.report.json").read_bytes() == content


@pytest.mark.usefixtures("run_dir")
def test_a_date_that_is_none_in_the_yaml_is_a_fault_of_the_yaml(sewa: Sewa) -> None:
    Path("sewa.yaml").write_text("task: ./task.py\nfrom_step: 2024-13-45\n")
    ended = sewa("select")
    assert ended.code == 2
    assert "sewa.yaml" in ended.error


@pytest.mark.usefixtures("run_dir")
def test_a_section_left_empty_is_as_good_as_absent(sewa: Sewa) -> None:
    with Path("sewa.yaml").open("a") as file:
        file.write("args:\n")
    assert sewa("validate").code == 0


@pytest.mark.usefixtures("run_dir")
def test_a_lost_terminal_leaves_no_temporary_file() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITE], stderr=subprocess.PIPE, env=environment()
    )
    wait_for(Path("started"))
    os.kill(process.pid, signal.SIGHUP)
    process.communicate(timeout=60)
    assert not list(Path().glob(".averaged*"))
    assert not list(Path().glob("averaged*"))


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(("key", "value"), [("sources", []), ("dtype", "foo")])
def test_apply_refuses_a_recipe_that_makes_no_sense(sewa: Sewa, key: str, value: object) -> None:
    assert sewa("select").code == 0
    changed = report()
    changed["recipe"][key] = value
    Path("odd.json").write_text(json.dumps(changed))
    ended = sewa("apply", "odd.json", "-o", "again.safetensors")
    assert ended.code == 3
    assert f"recipe.{key}" in ended.error
