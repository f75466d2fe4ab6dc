"""What is in this directory? Checkpoints found as trainers leave them; faults named before work."""

import json

import pytest
import torch
from helpers import toolkit_runs
from helpers.saved import save_distributed
from safetensors.torch import save_file

from sewa_cli import checkpoints as library
from sewa_cli.checkpoints import Reads
from sewa_cli.errors import CheckpointError, ConfigError


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def folder(path, step=None, **logged):
    """A checkpoint as the Hugging Face Trainer leaves it."""
    path.mkdir(parents=True)
    save_file(weights(len(list(path.parent.iterdir()))), path / "model.safetensors")
    (path / "config.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (path / name).write_bytes(b"never to be opened")
    if step is not None:
        state = {"global_step": step, "log_history": [{"step": 1, "loss": 9.0}]}
        state["log_history"].append({"step": step, "epoch": 0.5, **logged})
        (path / "trainer_state.json").write_text(json.dumps(state))
    return path


def sharded(path):
    path.mkdir(parents=True)
    files = {}
    for n, (name, tensor) in enumerate(weights().items(), 1):
        files[name] = f"model-{n:05d}-of-00002.safetensors"
        save_file({name: tensor}, path / files[name])
    index = {"metadata": {"total_size": 68}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def opened(path, **settings):
    return library.in_order(library.open_all([path], Reads(), **settings))


def names(found):
    return [checkpoint.path.name for checkpoint in found]


# ---- found -----------------------------------------------------------------------------------


def test_folders_of_the_hugging_face_trainer_are_found_with_step_and_metrics(tmp_path):
    for step in (1000, 900, 20):
        folder(tmp_path / f"checkpoint-{step}", step, loss=step / 10)
    save_file(weights(), tmp_path / "model.safetensors")  # Trainer.save_model at the end
    (tmp_path / "training_args.bin").write_bytes(b"")
    (tmp_path / "runs").mkdir()  # of TensorBoard
    notes = []
    found = opened(tmp_path, note=notes.append)
    assert names(found) == ["checkpoint-20", "checkpoint-900", "checkpoint-1000"]
    assert found[0].metrics == {"loss": 2.0, "epoch": 0.5}
    assert "3 Hugging Face checkpoints (checkpoint-20 … checkpoint-1000)" in notes
    assert any("model.safetensors: left out; the checkpoints are" in note for note in notes)


@pytest.mark.parametrize("shards", [1, 2])
def test_older_pytorch_model_bin_is_read_too(tmp_path, shards):
    inside = tmp_path / "checkpoint-3"
    inside.mkdir()
    expected = weights()
    if shards == 1:
        torch.save(expected, inside / "pytorch_model.bin")
    else:
        files = {n: f"pytorch_model-{i:05d}-of-00002.bin" for i, n in enumerate(expected, 1)}
        for name, file in files.items():
            torch.save({name: expected[name]}, inside / file)
        (inside / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    (inside / "training_args.bin").write_bytes(b"never to be opened")
    [found] = opened(tmp_path)
    assert (found.kind, found.step) == ("folder", 3)
    for name, tensor in expected.items():
        assert torch.equal(found.read(name), tensor)


def test_lightnings_own_folders_are_looked_into(tmp_path):
    inside = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    inside.mkdir(parents=True)
    torch.save({"state_dict": weights()}, inside / "epoch=0-step=4.ckpt")
    assert names(opened(tmp_path)) == ["epoch=0-step=4.ckpt"]
    other = tmp_path / "lightning_logs" / "version_1" / "checkpoints"
    other.mkdir(parents=True)
    torch.save({"state_dict": weights()}, other / "epoch=0-step=4.ckpt")
    with pytest.raises(CheckpointError, match=r"version_0.*as does .*version_1.*name one"):
        opened(tmp_path)


def test_the_optimizers_files_are_no_checkpoints(tmp_path):
    for step in (1, 2):
        torch.save(weights(), tmp_path / f"step-{step}.pt")
    for name in ("optimizer.pt", "optimizer_3.pt", "rng_state_0.pth", "scheduler.pt", "scaler.pt"):
        (tmp_path / name).write_bytes(b"never to be opened")
    assert names(opened(tmp_path)) == ["step-1.pt", "step-2.pt"]


def test_last_ckpt_gives_way_to_the_numbered_one(tmp_path):
    for name, step in (("step=4", 4), ("step=8", 8), ("last", 8)):
        torch.save({"state_dict": weights(), "global_step": step}, tmp_path / f"{name}.ckpt")
    notes = []
    assert names(opened(tmp_path, note=notes.append)) == ["step=4.ckpt", "step=8.ckpt"]
    assert any("last.ckpt: left out; step=8.ckpt has the same step" in note for note in notes)


# ---- bad input -------------------------------------------------------------------------------


def test_mixed_layouts_are_refused_with_both_named(tmp_path):
    folder(tmp_path / "checkpoint-1")
    save_file(weights(), tmp_path / "step-5.safetensors")
    with pytest.raises(CheckpointError, match=r"mixes .*checkpoint-1\) .*step-5.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "..\\x", 7, None]
)
def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path, name):
    save_file(weights(), tmp_path / "model.safetensors")
    index = sharded(tmp_path / "checkpoint-1") / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["a"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"index.json: names .*not a file in its own folder"):
        library.open_checkpoint(index.parent, Reads())


def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(tmp_path):
    inside = sharded(tmp_path / "checkpoint-1")
    shard = inside / "model-00001-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors: is a link out of"):
        library.open_checkpoint(inside, Reads())


def test_an_index_that_does_not_fit_its_shards_is_told(tmp_path):
    inside = sharded(tmp_path / "checkpoint-1")
    save_file({"other": torch.zeros(1)}, inside / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*do not belong together"):
        library.open_checkpoint(inside, Reads())


def test_shards_without_an_index_are_told(tmp_path):
    inside = sharded(tmp_path / "checkpoint-1")
    (inside / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*index .* is missing"):
        library.find([inside])


# ---- half-written ----------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def run_of_folders(tmp_path):
    return [folder(tmp_path / f"checkpoint-{step}", step) for step in (8, 9, 10)]


@pytest.mark.parametrize("fault", ["cut", "no weights", "empty folder", "no shard", "no index"])
def test_a_half_written_newest_checkpoint_is_left_out_with_a_warning(tmp_path, fault):
    *_, newest = run_of_folders(tmp_path)
    model = newest / "model.safetensors"
    if fault == "cut":
        cut(model)
    elif fault == "no weights":
        model.unlink()
    else:
        for file in newest.iterdir():
            file.unlink()
        newest.rmdir()
        if fault == "empty folder":
            newest.mkdir()
        else:
            sharded(newest)
            lost = {"no shard": "model-00001-of-00002.safetensors"}
            (newest / lost.get(fault, "model.safetensors.index.json")).unlink()
    warnings = []
    assert [c.step for c in opened(tmp_path, warn=warnings.append)] == [8, 9]
    assert len(warnings) == 1
    assert "checkpoint-10: left out as half-written" in warnings[0]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_half_written_newest_file_is_left_out_with_a_warning(tmp_path, suffix):
    for step in (9, 10, 11):
        path = tmp_path / f"step-{step}.{suffix}"
        save_file(weights(step), path) if suffix == "safetensors" else torch.save(
            weights(step), path
        )
    cut(path)
    warnings = []
    assert [c.step for c in opened(tmp_path, warn=warnings.append)] == [9, 10]
    assert f"step-11.{suffix}: left out as half-written" in warnings[0]


def test_an_archive_is_half_written_where_one_inside_it_is_whole(tmp_path):
    toolkit_runs.stable_baselines3(tmp_path)
    data = (tmp_path / "rl_model_600_steps.zip").read_bytes()
    cut_short = data[: data.index(b"policy.pth")]  # after pytorch_variables.pth, an archive too
    (tmp_path / "rl_model_700_steps.zip").write_bytes(cut_short)
    warnings = []
    assert [c.step for c in opened(tmp_path, warn=warnings.append)][-1] == 600
    assert "rl_model_700_steps.zip: left out as half-written" in warnings[0]


def test_links_to_one_file_elsewhere_count_once(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    for step, names in ((9, ["step-9.pt"]), (10, ["last.pt", "step-10.pt"])):
        torch.save(weights(step), tmp_path / "disk" / f"{step}.pt")
        for name in names:
            (tmp_path / "run" / name).symlink_to(f"../disk/{step}.pt")
    notes = []
    found = opened(tmp_path / "run", note=notes.append)
    assert [c.path.name for c in found] == ["step-9.pt", "step-10.pt"]
    assert "last.pt: left out; it is the same file as step-10.pt" in notes[0]


def test_what_the_user_named_is_never_left_out_silently(tmp_path):
    paths = run_of_folders(tmp_path)
    cut(paths[-1] / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint-10/model.safetensors: not a complete"):
        library.open_all(paths, Reads())


def test_an_output_folder_of_ours_in_the_run_is_not_a_checkpoint(tmp_path, monkeypatch, sewa):
    monkeypatch.chdir(tmp_path)
    run_of_folders(tmp_path / "run")
    assert sewa("average", "run", "-o", "run/averaged-30").code == 0
    again = sewa("average", "run", "-o", "second")
    assert again.out.split() == [f"run/checkpoint-{step}" for step in (8, 9, 10)]


@pytest.mark.parametrize("nested", [True, False])
def test_a_pytorch_file_of_ours_in_the_run_is_not_a_checkpoint(tmp_path, nested, sewa):
    for step in (1, 2, 3):
        torch.save({"model": weights(step)} if nested else weights(step), tmp_path / f"c{step}.pt")
    assert sewa("average", tmp_path, "-o", tmp_path / "c4.pt").code == 0
    assert names(opened(tmp_path)) == ["c1.pt", "c2.pt", "c3.pt"]
    if not nested:
        content = torch.load(tmp_path / "c4.pt", weights_only=True)
        assert content.keys() == weights().keys()


def test_a_sharded_model_of_accelerates_fsdp_is_found_inside_its_checkpoint(tmp_path):
    for step in (2, 10):
        inside = tmp_path / f"checkpoint-{step}"
        inside.mkdir()
        (inside / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        save_distributed({"model": weights()}, inside / "pytorch_model_fsdp_0")
    found = opened(tmp_path)
    assert [(c.path.name, c.step) for c in found] == [("checkpoint-2", 2), ("checkpoint-10", 10)]
    assert torch.equal(found[0].read("a"), weights()["a"])
    assert names(opened(tmp_path / "checkpoint-2")) == ["checkpoint-2"]


def test_the_parent_of_a_run_is_not_a_run(tmp_path):
    run_of_folders(tmp_path / "llama")
    save_file(weights(), tmp_path / "llama" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds no checkpoints itself; name .*llama"):
        opened(tmp_path)


def test_a_state_key_for_safetensors_is_refused(tmp_path):
    run_of_folders(tmp_path)
    with pytest.raises(ConfigError, match=r"--state-key: .* is safetensors, which has no keys"):
        opened(tmp_path, state_key="model")


# ---- one run, once ---------------------------------------------------------------------------


def epochs(folder, *numbers, name="epoch-{}.pt"):
    for number in numbers:
        torch.save(weights(number), folder / name.format(number))


def test_epochs_and_steps_are_not_sorted_on_one_scale(tmp_path, sewa):
    epochs(tmp_path, *range(1, 11))
    epochs(tmp_path, 2000, 4000, name="checkpoint-{}.pt")
    for given in ([tmp_path], sorted(tmp_path.iterdir())):
        ended = sewa("average", *given, "-o", tmp_path / "out.pt")
        assert ended.code == 3
        assert "epoch-*.pt (10) and checkpoint-*.pt (2) may count different things" in ended.error
        assert ended.error.endswith(f"such as {tmp_path}/epoch-*.pt")
    assert sewa("average", *tmp_path.glob("epoch-*.pt"), "-o", tmp_path / "out.pt").code == 0


def test_patterns_name_and_exclude_checkpoints(tmp_path, sewa):
    epochs(tmp_path, 1, 2, 3)
    epochs(tmp_path, 2000, 4000, name="checkpoint-{}.pt")
    ended = sewa("average", tmp_path, "--exclude", "epoch-*", "-o", tmp_path / "a.safetensors")
    chosen = [f"{tmp_path}/checkpoint-{step}.pt" for step in (2000, 4000)]
    assert ended.out.split() == chosen, ended.err
    settings = tmp_path / "sewa.yaml"
    for text in ("[check*-2000.pt, check*-4*.pt]", '"check*"'):
        settings.write_text(f"checkpoints: {text}\nexclude: [tmp*, epoch-1.pt]\n")
        ended = sewa("average", "-c", settings, "-o", tmp_path / "a.safetensors", "--force")
        assert ended.out.split() == chosen, ended.err
    ended = sewa("inspect", f"{tmp_path}/step-*.pt")
    assert (ended.code, ended.error) == (
        3,
        f"{tmp_path}/step-*.pt: matches no file or folder; check the pattern",
    )


@pytest.mark.parametrize(
    ("named", "refusal"),
    [
        (["model-100-f1-80", "model-200-f1-85", "model-300-f1-82"], "numbers in their names"),
        (["2024-01-01_23", "2024-01-02_1"], "numbers in their names"),
        (
            [f"seed{n}-step{n}0{i}" for n in (1, 2) for i in (1, 2)],
            r"seed1-step\*.pt \(2\) and seed2",
        ),
        (
            [f"run{r}-step{n}" for r, n in ("a1", "b2", "a3", "b4")],
            r"runa-step\*.pt \(2\) and runb",
        ),
    ],
)
def test_an_order_that_names_leave_open_is_refused(tmp_path, named, refusal):
    for seed, name in enumerate(named):
        torch.save(weights(seed), tmp_path / f"{name}.pt")
    with pytest.raises(CheckpointError, match=refusal):
        library.in_order(opened(tmp_path))


@pytest.mark.parametrize("way", ["copy", "hard link", "named"])
def test_files_of_the_same_bytes_count_once(tmp_path, way):
    epochs(tmp_path, 1, 2, 3)
    copy, original = tmp_path / "epoch-4.pt", tmp_path / "epoch-2.pt"
    if way == "hard link":
        copy.hardlink_to(original)
    else:
        copy.write_bytes(original.read_bytes())
    told = []
    given = sorted(tmp_path.iterdir()) if way == "named" else [tmp_path]
    found = library.open_all(given, Reads(), warn=told.append)
    assert names(found) == ["epoch-1.pt", "epoch-2.pt", "epoch-3.pt"]
    assert told == [f"{copy}: left out; it has the same bytes as epoch-2.pt"]


@pytest.mark.parametrize(
    ("numbered", "others"),
    [
        ("{}epoch.pth", ["valid.acc.ave_5best.pth", "valid.acc.best.pth", "checkpoint.pth"]),
        ("checkpoint{}.pt", ["checkpoint.best_loss_4.12.pt", "checkpoint_last.pt"]),
        ("epoch-{}.pt", ["best-valid-loss.pt", "averaged-10.pt", "final.pt"]),
        ("asr--epoch={}.ckpt", ["asr--epoch=8-EMA.ckpt", "asr.nemo"]),
        ("model--val_wer=0.{}12-epoch={}.ckpt", ["model--val_wer=0.2-epoch=8-last.ckpt"]),
    ],
)
def test_copies_by_name_are_left_out_with_a_note(tmp_path, numbered, others):
    for number in range(1, 9):
        torch.save(weights(number), tmp_path / numbered.format(number, number))
    for seed, name in enumerate(others, 100):
        torch.save(weights(seed), tmp_path / name)
    notes = []
    found = opened(tmp_path, note=notes.append, warn=notes.append)
    assert [c.step for c in found] == list(range(1, 9))
    for name in others:
        assert any("left out" in note and name in note for note in notes)
