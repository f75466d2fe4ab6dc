"""What a run leaves in a folder: nothing of what it replaces, and a report that describes it."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Two checkpoints of three tensors."""
    monkeypatch.chdir(tmp_path)
    Path("ckpts").mkdir()
    for n in (1, 2):
        tensors = {name: torch.full([64], float(n)) for name in "abc"}
        save_file(tensors, f"ckpts/step-{n}.safetensors")


@pytest.fixture
def run():
    """A Hugging Face run, as far as averaging goes."""
    for n in (1, 2):
        folder = Path(f"run/checkpoint-{n}")
        folder.mkdir(parents=True)
        save_file({"a": torch.full([64], float(n))}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"torch_dtype": "float32"}')
        (folder / "vocab.txt").write_text("words")
    return Path("run")


def there():
    """All but the inputs, hidden or not."""
    inputs = ("ckpts", "run")
    return {p.as_posix() for p in Path().rglob("*") if p.is_file() and p.parts[0] not in inputs}


def check_report(path):
    """It has the hashes of all that is there but itself."""
    report = json.loads(Path(path).read_text())
    listed = {file["path"]: (file["size"], file["sha256"]) for file in report["files"]}
    found = {
        name: (Path(name).stat().st_size, hashlib.sha256(Path(name).read_bytes()).hexdigest())
        for name in there() - {path}
    }
    assert listed == found
    return report


ONE = {"out.safetensors"}


def test_a_report_does_not_outlive_the_average_that_it_describes(sewa):
    assert (
        sewa("average", "ckpts", "-o", "out.safetensors", "--report", "out.report.json").code == 0
    )
    assert sewa("average", "ckpts", "-o", "out.safetensors", "--force", "--last", 1).code == 0
    assert there() == ONE


def test_a_report_is_kept_where_another_average_of_its_stem_is_written(sewa):
    average = "average", "ckpts", "-o"
    assert sewa(*average, "out.safetensors", "--report", "out.report.json").code == 0
    assert sewa(*average, "out.pt", "--report", "second.json", "--force").code == 0
    assert there() == {"out.pt", "out.safetensors", "out.report.json", "second.json"}


def test_a_report_whose_average_is_gone_is_not_put_beside_another(sewa):
    assert (
        sewa("average", "ckpts", "-o", "out.safetensors", "--report", "out.report.json").code == 0
    )
    Path("out.safetensors").unlink()
    ended = sewa("average", "ckpts", "-o", "out.safetensors", "--last", 1)
    assert ended.code == 3
    assert "out.report.json: describes another average of this name; use --force" in ended.error
    assert there() == {"out.report.json"}
    # but the one that it does describe may come back
    assert sewa("apply", "out.report.json", "-o", "out.safetensors").code == 0
    check_report("out.report.json")
    assert sewa("apply", "out.report.json", "-o", "out.safetensors", "--force").code == 0
    check_report("out.report.json")


def test_somebody_elses_file_of_a_reports_name_is_left_alone(sewa):
    Path("out.report.json").write_text('{"mine": true}')
    assert sewa("average", "ckpts", "-o", "out.safetensors", "--force").code == 0
    assert Path("out.report.json").read_text() == '{"mine": true}'


@pytest.mark.parametrize("report", ["o/sewa.report.json", "o.report.json"])
def test_a_folder_and_its_report_are_replaced_together(sewa, run, report):
    for flags in ([], ["--last", 1, "--force"]):
        ended = sewa("average", run, "-o", "o", "--report", report, *flags)
        assert ended.code == 0, ended.err
        check_report(report)
    expected = {"README.md", "config.json", "model.safetensors", "vocab.txt"}
    assert there() == {report} | {f"o/{name}" for name in expected}
    assert load_file("o/model.safetensors")["a"][0] == 2


@pytest.mark.parametrize("mine", ["notes.txt", "eval/scores.json", "other.safetensors"])
def test_a_folder_with_anything_of_yours_in_it_is_not_replaced(sewa, run, mine):
    assert sewa("average", run, "-o", "o").code == 0
    (Path("o") / mine).parent.mkdir(exist_ok=True)
    if mine.endswith(".safetensors"):
        save_file({"mine": torch.ones(2)}, Path("o") / mine)
    else:
        (Path("o") / mine).write_text("mine")
    before = there()
    ended = sewa("average", run, "-o", "o", "--force")
    assert ended.code == 3
    assert "o: has files in it that sewa did not write" in ended.error
    assert there() == before


def test_a_report_in_the_folder_that_is_written_is_refused(sewa, run):
    for flags in ([], ["--force"]):
        ended = sewa("average", run, "-o", "o", "--report", "o/report.json", *flags)
        assert ended.code == 2
        assert "the report in a folder has the name sewa.report.json" in ended.error
        assert sewa("average", run, "-o", "o", "--force").code == 0


def test_files_that_are_links_into_the_hubs_cache_are_copied(sewa, run):
    Path("hub/blobs").mkdir(parents=True)
    Path("hub/snapshots").mkdir()
    for n in (1, 2):
        shutil.move(run / f"checkpoint-{n}", f"hub/snapshots/{n}")
        for name in ("model.safetensors", "config.json", "vocab.txt"):
            place = Path(f"hub/snapshots/{n}/{name}")
            place.rename(f"hub/blobs/{n}{name}")
            place.symlink_to(f"../../blobs/{n}{name}")
    ended = sewa("average", "hub/snapshots/1", "hub/snapshots/2", "-o", "o")
    assert ended.code == 0, ended.err
    assert Path("o/vocab.txt").read_text() == "words"


@pytest.mark.parametrize("where", ["run/checkpoint-2", "run"])
def test_a_link_out_of_the_run_is_not_copied_into_the_output(sewa, run, where):
    Path("secret.txt").write_text("mine")
    link = Path(where) / "vocab_more.txt"
    link.symlink_to(Path("secret.txt").resolve())
    ended = sewa("average", run, "-o", "o")
    assert ended.code == 3
    assert f"{link.name}: is a link out of its run" in ended.error
    assert there() == {"secret.txt"}


@pytest.mark.parametrize("content", ["{", "[" * 100_000])
def test_a_broken_config_is_told_before_anything_is_averaged(sewa, run, content, monkeypatch):
    from sewa_cli.output.average import Average

    monkeypatch.setattr(Average, "pieces", None)  # calling it would be an error: too late
    (run / "checkpoint-2" / "config.json").write_bytes(content.encode("latin-1"))
    ended = sewa("average", run, "-o", "o", "--output-dtype", "bfloat16")
    assert ended.code == 3, ended.err
    assert re.search("config.json: (not a complete JSON object|is nested more)", ended.error)
    assert there() == set()


@pytest.mark.parametrize("name", ["averaged.safetensors", "averaged"])
def test_a_name_that_is_taken_while_the_run_works_is_no_reason_to_fail(sewa, name, monkeypatch):
    """Nobody asked for `averaged`, so the next free one is as good; the report follows."""
    from sewa_cli.output.average import Average

    real = Average.recipe

    def other_run(average, *arguments):
        Path(name).write_text("of another run")
        return real(average, *arguments)

    monkeypatch.setattr(Average, "recipe", other_run)
    shards = [] if name.endswith(".safetensors") else ["--shard-size", "400"]
    ended = sewa("average", "ckpts", "--report", "r.json", *shards)
    assert ended.code == 0, ended.err
    assert Path(name).read_text() == "of another run"
    Path(name).unlink()
    report = check_report("r.json")
    assert report["output"] == name.replace("averaged", "averaged-2")
    assert f"wrote {report['output']}" in ended.err
