"""`sewa verify` finds every byte that is not as the report says, and looks nowhere else."""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.tiny import train_tiny


def change(report, edit):
    found = json.loads(Path(report).read_text())
    edit(found)
    Path(report).write_text(json.dumps(found))


def flip(path, at=-1):
    content = bytearray(Path(path).read_bytes())
    content[at] ^= 1
    Path(path).write_bytes(content)


def faults(err):
    return [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working directory of a user, with three checkpoints."""
    folder = tmp_path / "run"
    train_tiny(folder / "ckpts", k=3)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def one(work, sewa):
    """avg.safetensors of three checkpoints, and its report."""
    options = ["-o", "avg.safetensors", "--report", "avg.report.json"]
    assert sewa("average", "ckpts", *options).code == 0
    return work


@pytest.fixture
def sharded(work, sewa):
    """The same in several files, with the report inside."""
    options = ["--shard-size", "300", "--report", "avg/sewa.report.json"]
    assert sewa("average", "ckpts", "-o", "avg", *options).code == 0
    return work


@pytest.fixture
def folder(work, sewa):
    """The average of Hugging Face folders: out/ and out.report.json."""
    for path in sorted(Path("ckpts").iterdir()):
        step = path.stem.removeprefix("step-")
        checkpoint = Path("hf") / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        path.rename(checkpoint / "model.safetensors")
        (checkpoint / "config.json").write_text('{"model_type": "tiny"}\n')
        (checkpoint / "trainer_state.json").write_text(f'{{"global_step": {step}}}\n')
    ended = sewa("average", "hf", "-o", "out", "--report", "out.report.json")
    assert ended.code == 0, ended.err
    return work


# ---- all is right ------------------------------------------------------------------------------


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("target", ["avg.report.json", "avg.safetensors"])
def test_an_output_and_its_sources_are_as_the_report_says(sewa, target):
    ended = sewa("verify", target)
    assert ended.code == 0, ended.err
    assert "all 4 files are as the report says" in ended.err
    assert "not checked" not in ended.err
    assert ended.out.count("as it was") == 4


def test_a_run_that_was_moved_with_its_folder_is_verified_and_rebuilt(sharded, sewa, monkeypatch):
    moved = sharded.rename(sharded.with_name("moved"))
    monkeypatch.chdir(moved / "avg")
    for target in ("sewa.report.json", "."):
        assert sewa("verify", target).code == 0
    assert sewa("apply", "sewa.report.json", "-o", "../again").code == 0
    for file in Path().glob("model*"):
        assert file.read_bytes() == (Path("../again") / file).read_bytes()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("target", ["out.report.json", "out", "out/"])
def test_a_folder_is_verified_file_by_file(sewa, target):
    ended = sewa("verify", target, "--json")
    assert ended.code == 0, ended.err
    rows = json.loads(ended.out)["files"]
    assert [row["path"] for row in rows if row["role"] == "output"] == [
        "out/README.md",
        "out/config.json",
        "out/model.safetensors",
    ]
    assert [row["path"] for row in rows if row["role"] == "source"] == [
        f"hf/checkpoint-{step}" for step in (10, 20, 30)
    ]


# ---- something is not --------------------------------------------------------------------------


@pytest.mark.usefixtures("one")
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("victim", ["avg.safetensors", "ckpts/step-20.safetensors"])
def test_one_flipped_bit_is_found(sewa, victim, at):
    flip(victim, at)
    ended = sewa("verify", "avg.report.json")
    assert ended.code == 3
    assert ended.error.startswith(f"{victim}: has changed since the report: expected SHA-256")
    assert "1 of 4 files is not as the report says" in ended.err


@pytest.mark.usefixtures("one")
def test_all_faults_are_told_not_only_the_first(sewa):
    flip("avg.safetensors")
    Path("ckpts/step-10.safetensors").unlink()
    flip("ckpts/step-30.safetensors")
    ended = sewa("verify", "avg.report.json", "--json")
    assert ended.code == 3
    assert [line.split(":")[0] for line in faults(ended.err)] == [
        "avg.safetensors",
        "ckpts/step-10.safetensors",
        "ckpts/step-30.safetensors",
    ]
    # a program gets the same as data
    rows = json.loads(ended.out)["files"]
    assert [row["ok"] for row in rows] == [False, False, True, False]
    assert "not found" in rows[1]["fault"]


@pytest.mark.usefixtures("one")
def test_without_the_checkpoints_the_output_alone_is_verified(sewa):
    shutil.rmtree("ckpts")
    ended = sewa("verify", "avg.safetensors")
    assert ended.code == 3
    assert all("not found" in fault for fault in faults(ended.err))
    ended = sewa("verify", "avg.safetensors", "--output-only")
    assert ended.code == 0, ended.err
    assert "the file is as the report says" in ended.err
    assert "not checked: the checkpoints (--output-only)" in ended.err


@pytest.mark.usefixtures("folder")
def test_a_link_out_of_an_averaged_folder_is_a_fault(sewa):
    Path("out/model.safetensors").rename("elsewhere.safetensors")
    Path("out/model.safetensors").symlink_to("../elsewhere.safetensors")
    ended = sewa("verify", "out")
    assert ended.code == 3
    assert ended.error.startswith("out/model.safetensors: leads out of out")


@pytest.mark.usefixtures("work")
def test_what_went_to_standard_output_has_its_sources_verified(sewa):
    assert sewa("average", "ckpts", "-o", "-", "--report", "r.json").code == 0
    ended = sewa("verify", "r.json")
    assert ended.code == 0, ended.err
    assert "the 3 files checked are as the report says" in ended.err
    assert "not checked: the output, which went to standard output" in ended.err
    assert " all " not in ended.err
    assert ended.out.count("as it was") == 3
    ended = sewa("verify", "r.json", "--output-only")
    assert ended.code == 3
    assert "has no hash of its output" in ended.error


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin", "modeling_tiny.py"])
def test_what_a_loader_would_find_in_a_folder_beside_the_weights_is_a_fault(sewa, name):
    Path("out", name).write_text("{}")
    ended = sewa("verify", "out")
    assert ended.code == 3
    assert ended.error == f"out/{name}: is not in the report"


# ---- where it looks ----------------------------------------------------------------------------


def test_files_of_the_working_directory_are_not_taken_for_those_of_a_report(
    one, tmp_path, sewa, monkeypatch
):
    """Nor are those above the report."""
    (tmp_path / "a/b").mkdir(parents=True)
    shutil.copy("avg.report.json", tmp_path / "a/b/r.json")
    shutil.copytree("ckpts", tmp_path / "other/ckpts")
    shutil.copytree("ckpts", tmp_path / "a/ckpts")
    shutil.rmtree(one)
    monkeypatch.chdir(tmp_path / "other")
    for command in (["verify"], ["apply", "-o", "again.safetensors"]):
        ended = sewa(*command, tmp_path / "a/b/r.json")
        assert ended.code == 3
        assert all("not found" in fault for fault in faults(ended.err))
        assert "--root DIR" in ended.err
    assert sewa("apply", tmp_path / "a/b/r.json", "--root", ".", "-o", "x.safetensors").code == 0


@pytest.mark.parametrize("command", [["verify"], ["apply", "-o", "again.safetensors"]])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_out_of_the_root_is_refused(one, tmp_path, sewa, command, kind):
    root = tmp_path / "root"
    shutil.copytree("ckpts", root / "ckpts")
    shutil.copy("avg.safetensors", root)
    place = root / "ckpts" / ("step-20.safetensors" if kind == "file" else "")
    shutil.rmtree(place) if kind == "folder" else place.unlink()
    place.symlink_to(one / place.relative_to(root))
    ended = sewa(*command, "avg.report.json", "--root", root)
    assert ended.code == 3
    assert all(f"leads out of {root}" in fault for fault in faults(ended.err))
    assert not Path("again.safetensors").exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../secret", ".", ".."])
@pytest.mark.usefixtures("one")
def test_a_report_cannot_have_files_looked_at_outside_of_the_outputs_folder(sewa, path):
    change("avg.report.json", lambda report: report["files"][0].update(path=path))
    ended = sewa("verify", "avg.report.json")
    assert ended.code == 3
    assert "is not in the output's folder; the report may be corrupted" in faults(ended.err)[0]


# ---- what is no report -------------------------------------------------------------------------


@pytest.mark.usefixtures("one")
def test_an_output_without_a_report_is_told_with_a_hint(sewa):
    for target in ("ckpts/step-10.safetensors", "ckpts", "nowhere.safetensors"):
        ended = sewa("verify", target)
        assert ended.code == 3
        where = f"{Path(target).stem}.report.json next to it"
        where = "sewa.report.json inside" if target == "ckpts" else where
        assert ended.error == f"{target}: has no report {where}; name its report"


@pytest.mark.parametrize("command", [["verify"], ["apply", "-o", "again.safetensors"]])
@pytest.mark.usefixtures("one")
def test_a_pipe_or_a_device_as_a_report_is_refused_at_once(sewa, command):
    os.mkfifo("fifo.json")
    Path("zero.json").symlink_to("/dev/zero")
    Path("loop.json").symlink_to("loop.json")
    Path("sparse.json").touch()
    os.truncate("sparse.json", 2**40)
    for name, said in (
        ("fifo.json", "is a pipe"),
        ("zero.json", "is a device"),
        ("loop.json", "symbolic links"),
        ("sparse.json", "larger than 64.0 MiB"),
        ("ckpts.json", "No such file"),
    ):
        ended = sewa(*command, name)
        assert ended.code == 3
        assert said in ended.error
