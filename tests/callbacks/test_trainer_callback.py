"""The callback of transformers.Trainer leaves what `sewa select` needs."""

import json
import logging

import pytest
import torch
from helpers.hf_runs import build, text_rows, write_model, write_rows
from helpers.saved import assert_mean, assert_means, metadata, steps
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file

# of the trainer itself
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


def trainer(folder, ckpts, output, save_steps=100, **when):
    import transformers

    from sewa_cli.callbacks.huggingface import MeansForSewa, SaveForSewa

    words = transformers.AutoTokenizer.from_pretrained(folder / "model")

    def encoded(rows):
        texts = [row["text"] for row in rows]
        ids = words(texts, truncation=True, max_length=32)["input_ids"]
        return [{"input_ids": one} for one in ids]

    settings = {
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.03,
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_steps": save_steps,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    torch.manual_seed(0)
    return transformers.Trainer(
        model=build("causal-lm", folder / "model"),
        args=transformers.TrainingArguments(str(output), **settings),
        train_dataset=encoded(text_rows()[100:200]),
        eval_dataset=encoded(text_rows()[200:210]),
        data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
        callbacks=[SaveForSewa(ckpts, **when), MeansForSewa(), keeper()],
    )


def keeper():
    """Return a callback that keeps the weights of all steps in `states`."""
    import transformers

    class Keeper(transformers.TrainerCallback):
        def __init__(self):
            self.states = {}

        def on_step_end(self, *given, model, **_):
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            self.states[given[1].global_step] = weights

    return Keeper()


def states_of(made):
    kept = [c.states for c in made.callback_handler.callbacks if hasattr(c, "states")]
    return kept[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of transformers.Trainer with the callback, and the YAML for it."""
    folder = tmp_path_factory.mktemp("trained")
    write_model(folder / "model", "causal-lm")
    for part, rows in (("selection", text_rows()[:40]), ("heldout", text_rows()[40:80])):
        write_rows(folder / "data" / f"{part}.jsonl", rows)
    made = trainer(folder, folder / "ckpts", folder / "out", every=2, start=0.5, means=True)
    made.train()
    torch.save(states_of(made), folder / "states.pt")
    torch.save(made.model.state_dict(), folder / "last.pt")
    (folder / "sewa.yaml").write_text(
        "task: huggingface\n"
        "args: {kind: causal-lm, model: model, selection: data/selection.jsonl, "
        "heldout: data/heldout.jsonl}\n"
        "checkpoints: ckpts\nK: 3\ndevice: cpu\ngumbel: {iterations: 4}\n"
    )
    return folder


def test_a_trainers_run_is_saved_in_its_last_part_with_step_and_metrics(trained):
    assert steps(trained / "ckpts") == [10, 12, 14, 16, 18, 20]  # optimizer steps, not batches
    last = torch.load(trained / "last.pt")
    path = trained / "ckpts" / "step-20.safetensors"
    found = load_file(path)
    assert set(last) - set(found) == {"lm_head.weight"}  # tied
    assert all(torch.equal(found[name], last[name]) for name in found)
    assert metadata(path)["step"] == "20"
    metrics = json.loads(metadata(path)["metrics"])
    assert {"loss", "eval_loss", "learning_rate", "epoch"} <= set(metrics)
    first = json.loads(metadata(trained / "ckpts" / "step-10.safetensors")["metrics"])
    assert "eval_loss" not in first  # evaluated after it was saved
    assert first["loss"] != metrics["loss"]


def test_each_file_has_its_interval_mean_the_first_too(trained):
    states = torch.load(trained / "states.pt")
    expected = {step: [states[step - 1], states[step]] for step in range(10, 21, 2)}
    assert_means(trained / "ckpts", expected)


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_mean_that_a_resumed_run_has_cut_is_said_and_has_the_steps_after_it(
    trained, tmp_path, caplog
):
    def run():
        places = (tmp_path / "ckpts", tmp_path / "trainer")
        return trainer(trained, *places, save_steps=14, every=4, start=0.0, means=True)

    run().train()
    resumed = run()
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-14"))
    said = "resumed at step 14: the next interval mean has only the steps after it"
    assert caplog.text.count(said) == 1
    states = states_of(resumed)
    for path in (tmp_path / "ckpts").glob("step-?.*"):
        path.unlink()
    (tmp_path / "ckpts" / "step-12.safetensors").unlink()
    (tmp_path / "ckpts" / "step-12.mean.safetensors").unlink()
    assert_means(
        tmp_path / "ckpts",
        {16: [states[15], states[16]], 20: [states[step] for step in range(17, 21)]},
    )
    own = tmp_path / "trainer" / "checkpoint-20" / "mean.safetensors"
    assert load_file(own).keys() == load_file(own.with_name("model.safetensors")).keys()
    assert_mean(own, [states[step] for step in range(15, 21)])
    assert metadata(own)["sewa_mean_steps"] == "6"


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_resumed_run_goes_on_where_it_was_and_replaces_its_own_later_steps(
    trained, tmp_path, caplog
):
    def run():
        places = (tmp_path / "ckpts", tmp_path / "trainer")
        return trainer(trained, *places, save_steps=14, every=2, start=0.5)

    run().train()
    whole = {path.name: load_bytes(path.read_bytes()) for path in (tmp_path / "ckpts").iterdir()}
    (tmp_path / "ckpts" / "step-16.safetensors").write_bytes(b"to be replaced")
    (tmp_path / "ckpts" / "step-20.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        run().train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-14"))
    assert "2 checkpoints of steps after 14 are replaced as the run reaches them" in caplog.text
    assert steps(tmp_path / "ckpts") == [10, 12, 14, 16, 18, 20]
    for name, tensors in whole.items():
        found = load_file(tmp_path / "ckpts" / name)
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    metrics = json.loads(metadata(tmp_path / "ckpts" / "step-16.safetensors")["metrics"])
    assert "eval_loss" in metrics  # of step 10, before it was resumed


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_means_in_the_trainers_own_checkpoints_are_selected_from_after_a_kill(
    trained, tmp_path, sewa, monkeypatch
):
    import transformers

    class Killed(transformers.TrainerCallback):
        def on_step_end(self, *given, **_):
            if given[1].global_step == 14:
                raise KeyboardInterrupt

    def run():
        return trainer(trained, tmp_path / "ckpts", tmp_path / "run", save_steps=4, every=20)

    killed, resumed = run(), run()
    killed.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed.train(resume_from_checkpoint=True)
    states = states_of(killed) | states_of(resumed)
    for step in (4, 8, 12, 16, 20):
        file = tmp_path / "run" / f"checkpoint-{step}" / "mean.safetensors"
        assert_mean(file, [states[step - n] for n in range(4)])
    monkeypatch.chdir(trained)
    text = (trained / "sewa.yaml").read_text().replace("ckpts\nK: 3", f"{tmp_path / 'run'}")
    (trained / "means.yaml").write_text(text)
    out = tmp_path / "averaged"
    ended = sewa("select", "--config", "means.yaml", "-o", out)
    assert ended.code == 0, ended.err
    assert "using 5 interval means, of 4 steps each" in ended.err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in found.items())
    assert transformers.AutoTokenizer.from_pretrained(out)("a")["input_ids"]
    report = json.loads((out / "sewa.report.json").read_text())
    assert report["config"]["source"] == "means"
    assert sewa("verify", out).code == 0
