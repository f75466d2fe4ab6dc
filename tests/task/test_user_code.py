"""Whatever the user's code does to the model, the data, the process: right numbers or an error."""

import os
from pathlib import Path

import pytest
import torch
from helpers.shells import shell
from helpers.tiny import TASK, report_of
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("run_dir")


def write_task(extra, *replaced):
    text = TASK
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    Path("task.py").write_text(text + "\n" + extra)


@pytest.mark.parametrize(
    "extra",
    [
        "def predict(m, b):\n    return m(b[0].mul_(1.5))",
        "def loss(o, b):\n    return nn.functional.cross_entropy(o, b[1].mul_(0))",
    ],
)
def test_a_batch_changed_in_place_is_reported(sewa, extra):
    """Later passes would see other data."""
    write_task(extra)
    ended = sewa("select")
    assert ended.code == 4
    assert "changes the batch in place" in ended.error


def test_targets_that_are_wrong_in_a_later_batch_are_one_error(sewa):
    write_task("def targets(b):\n    return b[1] if len(b[1]) == 128 else 1 - b[1]")
    ended = sewa("select")
    assert ended.code == 4
    assert "targets(): their cross-entropies sum up to" in ended.error
    assert "in one of the batches, and the same in others" in ended.error


def test_labels_may_be_popped_from_a_dict_batch(sewa):
    assert sewa("select").code == 0
    plain = report_of()
    write_task(
        "def predict(m, b):\n    return m(b['x'])",
        ("return list(zip(", "return [{'x': a, 'labels': b} for a, b in zip("),
        ("y.split(128)))", "y.split(128))]"),
        ("batch[1]", "batch.pop('labels')"),
    )
    assert sewa("select", "-o", "averaged.safetensors", "--force").code == 0
    assert report_of()["candidates"] == plain["candidates"]
    assert report_of()["average"] == plain["average"]


def test_random_numbers_drawn_while_importing_are_seeded(sewa):
    write_task("", ("def data(", "SHUFFLE = torch.randn(300, 6)\n\ndef data("), (
        "generator=generator)\n", "generator=generator) + SHUFFLE\n"))  # fmt: skip
    outputs = []
    for name in ("one", "two"):
        torch.rand(7)  # the caller's own state is another each time
        assert sewa("select", "-o", f"{name}.safetensors").code == 0
        outputs.append(report_of(f"{name}.report.json"))
    assert outputs[0]["average"] == outputs[1]["average"]
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()


def test_a_function_that_leaves_another_folder_behind_is_refused(sewa):
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
    assert "selection_data(): changes the working directory" in ended.error


def test_when_nobody_reads_stderr_the_work_is_still_done():
    write_task("def metrics(m):\n    print('x' * 100, flush=True)\n    return {'a': 1}")
    ended = shell("sewa select -v -o out.safetensors 2> >(head -1 > /dev/null) | wc -l")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "4"
    assert Path("out.safetensors").is_file()
    assert Path("out.report.json").is_file()


def test_metrics_that_cast_the_weights_are_refused(sewa):
    write_task("def metrics(m):\n    m.double(); m.float()\n    return {'x': 1}")
    ended = sewa("select")
    assert ended.code == 4
    assert "metrics(): 0.weight was moved, cast or replaced" in ended.error


@pytest.mark.parametrize(
    "extra",
    [
        "torch.set_default_dtype(torch.float64)\ndef predict(m, b):\n    return m(b[0].double())",
        pytest.param("torch.set_grad_enabled(False)", marks=pytest.mark.breadth),
    ],
)
def test_global_switches_of_torch_in_the_task_do_no_harm(sewa, extra):
    assert sewa("select").code == 0
    plain = report_of()["average"]["heldout_loss"]
    write_task(extra, ("torch.randn(rows, 6,", "torch.randn(rows, 6, dtype=torch.float32,"))
    try:
        ended = sewa("select", "-o", "averaged.safetensors", "--force")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert ended.code == 0, ended.err
    assert report_of()["average"]["heldout_loss"] == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("solver", ["gumbel", pytest.param("linear", marks=pytest.mark.breadth)])
def test_a_task_may_change_the_working_directory_when_it_is_imported(sewa, tmp_path, solver):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.txt").write_text("300")
    write_task(
        "def metrics(m):\n    return {'rows': int(Path('rows.txt').read_text())}",
        ("import torch\n", "import os, torch\nfrom pathlib import Path\nos.chdir('elsewhere')\n"),
    )
    ended = sewa("select", "--solver", solver, "-o", "averaged.safetensors", "--html", "page.html")
    os.chdir(tmp_path)
    assert ended.code == 0, ended.err
    assert report_of()["average"]["metrics"] == {"rows": 300}
    assert Path("averaged.safetensors").is_file()
    assert Path("page.html").is_file()
    assert [p.name for p in Path("elsewhere").iterdir()] == ["rows.txt"]


@pytest.mark.parametrize("name", ["step-:smile:3", "step-[bold]3"])
def test_a_path_in_a_warning_is_shown_as_it_is(sewa, name):
    broken = load_file("ckpts/step-10.safetensors")
    broken["0.bias"][0] = float("nan")
    save_file(broken, f"{name}.safetensors")
    ended = sewa("select", *sorted(Path("ckpts").iterdir()), f"{name}.safetensors")
    assert ended.code == 0, ended.err
    assert f"{name}.safetensors" in next(
        line for line in ended.err.splitlines() if line.startswith("warning: ")
    )


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sewa average - -o x.safetensors <&-", "-: standard input has no paths"),
        ("sewa select >&-", "standard output: is closed"),
        ("sewa select -o $'caf\\xe9.safetensors'", "is not a UTF-8 name"),
    ],
)
def test_unusual_streams_and_names_get_one_line(script, words):
    ended = shell(script)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (3, 1), ended.stderr
    assert words in ended.stderr


@pytest.mark.breadth
@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_a_closed_descriptor_is_not_taken_by_a_checkpoint(sewa, closed):
    """Prints to a number that the averaged file had got would stand in its middle."""
    write_task("import os\ndef metrics(m):\n    os.system('echo noise >&2')\n    return {'a': 1}")
    assert sewa("select", "-o", "whole.safetensors").code == 0
    ended = shell(f"sewa select -o out.safetensors {closed}")
    assert ended.returncode == 0, ended.stderr
    assert Path("out.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()
