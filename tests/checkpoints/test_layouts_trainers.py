"""Run directories as real trainers leave them: every command works, and the result loads."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.frozen import STEPS, heldout_loss, third_party
from safetensors.torch import load_file

SETTINGS = ["--task", "task.py", "--K", 3, "--set", "gumbel.iterations=6", "--device", "cpu"]


@pytest.fixture
def llama(frozen):
    pytest.importorskip("transformers")
    return frozen("transformers")


def snapshot(folder):
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def by_from_pretrained(run, output):
    """Load as transformers does, which must find every tensor it wants and no other."""
    model, about = type(run.task.build_model()).from_pretrained(output, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    return model


def by_load_from_checkpoint(run, output):
    content = torch.load(output, weights_only=True)
    assert not {"optimizer_states", "loops", "callbacks"} & content.keys()
    loaded = run.task.Net.load_from_checkpoint(output, weights_only=True)
    assert loaded.hparams["width"] == 16
    return loaded


def by_load_state_dict(run, output):
    model = run.task.build_model()
    is_torch = output.endswith(".pt")
    model.load_state_dict(torch.load(output)["model"] if is_torch else load_file(output))
    return model


@pytest.mark.parametrize(
    ("name", "output", "load"),
    [
        ("transformers", "out", by_from_pretrained),
        ("sharded", "out", by_from_pretrained),
        ("lightning", "out.ckpt", by_load_from_checkpoint),
        ("lightning", "out.safetensors", by_load_state_dict),
        ("loop", "out.pt", by_load_state_dict),
        ("fsdp", "out.safetensors", by_load_state_dict),
    ],
)
def test_every_command_works_and_the_trainers_own_loader_gets_the_reported_loss(
    frozen, sewa, name, output, load
):
    run = frozen(name)
    before = snapshot(Path("run"))
    averaged = sewa("average", "run", "--method", "lawa", "--K", 3)
    assert len(averaged.out.split()) == 3, averaged.err
    compared = sewa(
        "compare", "run", *SETTINGS, "--methods", "last,uniform", "--output-best",
        output.replace("out", "best"), "--format", "json",
    )  # fmt: skip
    comparison = json.loads(compared.out)
    selected = sewa("select", "run", *SETTINGS, "--json", "-o", output)
    assert selected.code == 0, selected.err
    report = json.loads(selected.out)
    assert [c["step"] for c in report["candidates"]] == STEPS
    evaluated = sewa("evaluate", output, "--task", "task.py", "--format", "json")
    [row] = json.loads(evaluated.out)["files"]
    expected = report["average"]["heldout_loss"]
    assert row["heldout_loss"] == pytest.approx(expected, abs=1e-6)
    best = comparison["rows"][comparison["best"]]["heldout_loss"]
    with third_party():
        for place, loss in ((output, expected), (comparison["output"], best)):
            assert heldout_loss(run.task, load(run, place)) == pytest.approx(loss, abs=1e-5)
    assert snapshot(Path("run")) == before
    of_report = "out/sewa.report.json" if output == "out" else "out.report.json"
    again = output.replace("out", "again")
    assert sewa("apply", of_report, "-o", again).code == 0
    files = sorted(Path(output).glob("model*")) if output == "out" else [Path(output)]
    for file in files:
        assert Path(str(file).replace("out", "again", 1)).read_bytes() == file.read_bytes()
    assert (name == "sharded") == (len(files) > 1)


def test_a_folder_has_a_card_and_what_the_newest_checkpoint_or_else_the_run_has(llama, sewa):
    del llama
    Path("run/tokenizer_config.json").write_text("of the run")
    Path("run/merges.txt").write_text("of the run")
    Path("run/train.py").write_text("a script, not the model's code")
    Path("run/checkpoint-16/merges.txt").write_text("of the newest")
    Path("run/checkpoint-16/modeling_own.py").write_text("the model's code")
    Path("run/checkpoint-14/merges.txt").write_text("of another")
    assert sewa("average", "run", "--last", 2, "-o", "out").code == 0
    found = {p.name: p.read_text() for p in Path("out").iterdir() if p.suffix != ".safetensors"}
    beside = {"tokenizer_config.json", "merges.txt", "modeling_own.py"}
    assert found.keys() == {"README.md", "config.json", "generation_config.json", *beside}
    assert found["tokenizer_config.json"] == "of the run"
    assert found["merges.txt"] == "of the newest"
    card = found["README.md"]
    assert "| steps | 14, 16 |" in card
    assert "$ sewa average run --last 2 -o out" in card


@pytest.mark.parametrize("output", ["run", "run/checkpoint-4", "run/checkpoint-4/new", "."])
def test_an_output_may_not_hold_or_be_in_an_input(llama, sewa, output):
    before = snapshot(llama.folder)
    for force in ([], ["--force"]):
        ended = sewa("average", "run", "-o", output, *force)
        assert ended.code == 3, ended.err
    assert snapshot(llama.folder) == before


def test_another_dtype_is_told_in_the_config(llama, sewa):
    assert sewa("average", "run", "-o", "out", "--output-dtype", "bfloat16").code == 0
    with third_party():
        model = by_from_pretrained(llama, "out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_shards_are_those_of_huggingface_hub(llama, sewa):
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import safe_open

    assert sewa("average", "run", "-o", "whole").code == 0
    assert sewa("average", "run", "-o", "out", "--shard-size", "5KB").code == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    whole = load_file("whole/model.safetensors")
    with safe_open(llama.path / "checkpoint-2/model.safetensors", framework="pt") as file:
        in_order = {name: whole[name] for name in file.keys()}  # noqa: SIM118
    expected = split_torch_state_dict_into_shards(in_order, max_shard_size="5KB")
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"]["total_size"] == expected.metadata["total_size"]


def test_apply_tells_when_a_shard_has_changed(frozen, sewa):
    frozen("sharded")
    assert sewa("average", "run", "-o", "out", "--report", "r.json").code == 0
    recipe = json.loads(Path("r.json").read_text())["recipe"]
    source = Path(recipe["sources"][0]["path"])
    files = " ".join(sorted(p.name for p in source.glob("model*")))
    command = f"sha256sum {files} | sha256sum"
    listed = subprocess.run(
        command, shell=True, cwd=source, capture_output=True, text=True, check=True
    )
    assert listed.stdout.split()[0] == recipe["sources"][0]["sha256"]
    shard = next(source.glob("model-00002-of-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    ended = sewa("apply", "r.json", "-o", "again")
    assert ended.code == 3
    assert f"{source}: has changed since the report: expected SHA-256" in ended.error
