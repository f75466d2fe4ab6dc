"""`task: huggingface` without `model`: all from the newest checkpoint; adapters on their base."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers.frozen import third_party
from helpers.hf_runs import LLAMA, naive_examples, naive_loss, text_rows, tokenizer, write_rows
from safetensors.torch import load_file, save_file

peft = pytest.importorskip("peft")

YAML = """\
task: huggingface
args: {kind: causal-lm, selection: data/dev.jsonl, heldout: data/heldout.jsonl}
checkpoints: run
K: 3
device: cpu
gumbel: {iterations: 4}
"""


def steps(model, save):
    """A few noisy steps; what is saved after each of them."""
    rows = [{"text": row["text"]} for row in text_rows()]
    words = tokenizer(brackets=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for step in range(1, 6):
        ids = words(rows[step]["text"], return_tensors="pt")["input_ids"][:, :32]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        save(step)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """run/: checkpoints of a Trainer's layout; lora/: adapters of base/; data/ and sewa.yaml."""
    folder = tmp_path_factory.mktemp("newest")
    rows = [{"text": row["text"]} for row in text_rows()]
    write_rows(folder / "data" / "dev.jsonl", rows[:40])
    write_rows(folder / "data" / "heldout.jsonl", rows[40:80])
    with third_party():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
        model.save_pretrained(folder / "base")

        def save(step):
            model.save_pretrained(folder / "run" / f"checkpoint-{step}")
            tokenizer(brackets=False).save_pretrained(folder / "run" / f"checkpoint-{step}")

        steps(model, save)
        base = transformers.LlamaForCausalLM.from_pretrained(folder / "base")
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(base, settings)
        adapted.peft_config["default"].base_model_name_or_path = "base"

        def save_adapter(step):
            adapted.save_pretrained(folder / "lora" / f"checkpoint-{step}")

        steps(adapted, save_adapter)
    tokenizer(brackets=False).save_pretrained(folder / "lora")
    # for the naive loss
    tokenizer(brackets=False).save_pretrained(folder / "model")
    (folder / "sewa.yaml").write_text(YAML)
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def heldout(folder, model):
    with third_party():
        return naive_loss(
            model.eval(), naive_examples(folder, "causal-lm", "heldout"), "causal-lm"
        )[0]


def test_model_and_tokenizer_are_those_of_the_newest_checkpoint(here, sewa):
    ended = sewa("select", "-o", "best", "--json")
    assert ended.code == 0, ended.err
    assert "model and tokenizer from run/checkpoint-5" in " ".join(ended.err.split())
    average = json.loads(ended.out)["average"]
    with third_party():
        model = transformers.LlamaForCausalLM.from_pretrained("best")
    assert heldout(here, model) == pytest.approx(average["heldout_loss"], rel=1e-4)
    # an average is a folder like theirs
    evaluated = sewa("evaluate", "best", "run/checkpoint-1", "--json")
    assert evaluated.code == 0, evaluated.err
    assert "from run/checkpoint-1" in evaluated.err
    [best, _] = json.loads(evaluated.out)["files"]
    assert best["heldout_loss"] == pytest.approx(average["heldout_loss"], rel=1e-5)


def test_a_tokenizer_in_the_run_above_is_used_and_noted(here, sewa):
    for path in here.glob("run/checkpoint-*/tokenizer*"):
        path.unlink()
    ended = sewa("validate")
    assert ended.code == 4
    assert ended.error.startswith("run/checkpoint-5, run: holds no tokenizer")
    tokenizer(brackets=False).save_pretrained("run")
    ended = sewa("validate")
    assert ended.code == 0, ended.err
    message = " ".join(ended.err.split())
    assert "model from run/checkpoint-5, tokenizer from run" in message
    ended = sewa("validate", "--set", "args.tokenizer=model", "--set", "args.model=base")
    assert ended.code == 0, ended.err


def test_files_without_a_config_are_reported(here, sewa):
    (here / "flat").mkdir()
    for step in range(1, 6):
        shutil.copy(f"run/checkpoint-{step}/model.safetensors", f"flat/step-{step}.safetensors")
    ended = sewa("validate", "flat")
    assert ended.code == 2
    assert ended.error == (
        "args.model: is missing, and there is no config.json in flat, .; name a folder with a "
        "config.json"
    )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):  # next to them
        shutil.copy(f"run/checkpoint-5/{name}", "flat")
    assert sewa("validate", "flat").code == 0


def on_base(folder):
    with third_party():
        base = transformers.LlamaForCausalLM.from_pretrained("base")
        return peft.PeftModel.from_pretrained(base, folder)


@pytest.mark.parametrize("mode", ["factors", "merged"])
def test_adapters_need_yaml_alone(here, sewa, mode):
    shown = transformers.utils.logging.is_progress_bar_enabled()
    ended = sewa("select", "lora", "--set", f"lora={mode}", "-o", "best", "--json")
    assert ended.code == 0, ended.err
    message = " ".join(ended.err.split())
    assert "adapters on the base model base, tokenizer from lora" in message
    assert "Loading weights" not in message
    assert transformers.utils.logging.is_progress_bar_enabled() == shown
    report = json.loads(ended.out)
    adapter = load_file("lora/checkpoint-5/adapter_model.safetensors")
    assert report["parameters"] == sum(tensor.numel() for tensor in adapter.values())
    assert heldout(here, on_base("best")) == pytest.approx(
        report["average"]["heldout_loss"], rel=1e-4
    )
    last = report["references"]["last"]["heldout_loss"]
    assert heldout(here, on_base("lora/checkpoint-5")) == pytest.approx(last, rel=1e-4)
    ended = sewa("evaluate", "lora/checkpoint-5", "--json")
    assert json.loads(ended.out)["files"][0]["heldout_loss"] == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize(
    ("target", "tied", "mode"),
    [
        ("lm_head", False, "factors"),
        (None, True, "factors"),
        pytest.param("embed_tokens", False, "merged", marks=pytest.mark.breadth),
        pytest.param("embed_tokens", True, "factors", marks=pytest.mark.breadth),
    ],
)
def test_embeddings_that_peft_saves_along_are_part_of_the_adapter(here, sewa, target, tied, mode):
    """Target embeddings are saved with the weights they are added to; None: all of them."""
    with third_party():
        config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied)
        transformers.LlamaForCausalLM(config).save_pretrained("base")
        base = transformers.LlamaForCausalLM.from_pretrained("base")
        targets = ["q_proj", *([target] if target else [])]
        adapted = peft.get_peft_model(
            base, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
        )
        adapted.peft_config["default"].base_model_name_or_path = "base"
        along = True if target is None else "auto"
        steps(
            adapted,
            lambda step: adapted.save_pretrained(
                f"heads/checkpoint-{step}", save_embedding_layers=along
            ),
        )
    tokenizer(brackets=False).save_pretrained("heads")
    names = set(load_file("heads/checkpoint-5/adapter_model.safetensors"))
    assert any(name.endswith(("base_layer.weight", "embed_tokens.weight")) for name in names)
    with third_party():  # PEFT warns of targets that are tied
        ended = sewa("select", "heads", "--set", f"lora={mode}", "-o", "best", "--json")
    assert ended.code == 0, ended.err
    assert set(load_file("best/adapter_model.safetensors")) == names
    assert heldout(here, on_base("best")) == pytest.approx(
        json.loads(ended.out)["average"]["heldout_loss"], rel=1e-4
    )


def test_a_classifier_head_is_part_of_the_adapter(here, sewa):
    with third_party():
        config = transformers.LlamaConfig(**LLAMA, num_labels=2)
        transformers.LlamaForSequenceClassification(config).save_pretrained("base")
        base = transformers.LlamaForSequenceClassification.from_pretrained("base")
        settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
        adapted = peft.get_peft_model(base, settings)
        adapted.peft_config["default"].base_model_name_or_path = "base"
        for step in (1, 2, 3):
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.1)
            adapted.save_pretrained(f"heads/checkpoint-{step}")
    tokenizer(brackets=False).save_pretrained("heads")
    rows = [{"text": row["text"], "label": i % 2} for i, row in enumerate(text_rows()[:30])]
    write_rows(here / "data" / "labels.jsonl", rows)
    data = "args={kind: sequence-classification, data: data/labels.jsonl}"
    ended = sewa("select", "heads", "--set", data, "--K", 2, "-o", "best", "--json")
    assert ended.code == 0, ended.err
    found, name = load_file("best/adapter_model.safetensors"), "base_model.model.score.weight"
    assert set(found) == set(load_file("heads/checkpoint-1/adapter_model.safetensors"))
    mean = sum(
        one["coefficient"] * load_file(f"{one['path']}/adapter_model.safetensors")[name]
        for one in json.loads(ended.out)["recipe"]["sources"]
    )
    torch.testing.assert_close(found[name], mean)


def test_a_base_that_is_not_here_is_asked_for(here, sewa):
    (here / "base").rename("elsewhere")
    ended = sewa("validate", "lora")
    assert ended.code == 2
    assert ended.error == (
        "args.model: is missing: name the folder of the base model; "
        "lora/checkpoint-5/adapter_config.json calls it base, which is not a folder with "
        "config.json here"
    )
    ended = sewa("validate", "lora", "--set", "args.model=elsewhere")
    assert ended.code == 0, ended.err


def test_a_base_of_pickles_or_without_weights_is_refused(here, sewa):
    weights = load_file("base/model.safetensors")
    Path("base/model.safetensors").unlink()
    torch.save(weights, "base/pytorch_model.bin")
    ended = sewa("validate", "lora")
    assert ended.code == 4
    assert ended.error.startswith("base: a model for causal-lm cannot be made from it: ")
    (here / "base" / "pytorch_model.bin").unlink()
    lost = "model.layers.0.mlp.up_proj.weight"
    del weights[lost]
    save_file(weights, "base/model.safetensors", metadata={"format": "pt"})
    ended = sewa("validate", "lora")
    assert ended.code == 4
    assert ended.error.startswith(f"base: has no weights for {lost}, and neither has lora/")


def test_no_adapter_runs_code(here, sewa):
    """PEFT imports a module that adapter_config.json names."""
    (here / "evil.py").write_text("open('ran', 'w')")
    for path in here.glob("lora/checkpoint-*/adapter_config.json"):
        settings = {"megatron_config": {}, "megatron_core": "evil"}
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    ended = sewa("validate", "lora")
    assert ended.code == 4
    assert "adapter_config.json: megatron_core names a Python module to run; refused" in ended.error
    assert not (here / "ran").exists()


def warnings(sewa, *flags):
    ended = sewa("validate", "--json", *flags)
    assert ended.code == 0, ended.err
    return [text for text in json.loads(ended.out)["warnings"] if "training data" in text]


@pytest.mark.parametrize(
    ("name", "is_warned"),
    [
        ("train.jsonl", True),
        ("train-00000-of-00001.jsonl", True),
        ("train/rows.jsonl", True),
        ("not_trained.jsonl", False),
        ("dev.jsonl", False),
    ],
)
def test_a_name_that_says_train_is_warned_of(here, sewa, name, is_warned):
    path = here / "some" / name
    path.parent.mkdir(parents=True)
    shutil.copy("data/dev.jsonl", path)
    found = warnings(sewa, "--set", f"args.selection=some/{name}")
    assert len(found) == is_warned
    if is_warned:
        assert found[0].startswith(
            f"some/{name}: is training data by its name, and used for selection: rows that the "
            "model has seen"
        )
