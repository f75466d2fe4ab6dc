"""Each toolkit's run is found as it was left, and its average is read as the toolkit reads it."""

import json

import pytest
import torch
from helpers.toolkit_runs import RUNS, STEPS, weights

LEFT_OUT = {
    "fairseq": ["checkpoint.best_loss_4.1000.pt", "checkpoint_best.pt", "checkpoint_last.pt"],
    "icefall": ["best-valid-loss.pt", "pretrained.pt"],
    "ESPnet": ["checkpoint.pth", "valid.acc.ave_10best.pth", "valid.acc.ave_5best.till10epoch.pth"],
}


@pytest.mark.parametrize("toolkit", RUNS)
def test_a_toolkits_run_is_found_in_order_and_its_average_is_read_by_its_loader(
    tmp_path, sewa, toolkit
):
    make, suffix, read = RUNS[toolkit]
    run, output = tmp_path / "run", tmp_path / f"out{suffix}"
    run.mkdir()
    make(run)
    inspected = sewa("inspect", run, "--json", "--from", "snapshots", "-v")
    assert inspected.code == 0, inspected.err
    assert [c["step"] for c in json.loads(inspected.out)["checkpoints"]] == list(STEPS)
    if toolkit in LEFT_OUT:
        [note] = [line for line in inspected.err.splitlines() if f"of {toolkit}, but" in line]
        assert note.endswith(f": {', '.join(LEFT_OUT[toolkit])}")
    options = ["--method", "latest", "--K", 5, "--from", "snapshots"]
    if toolkit in ("Megatron-Core", "OLMo-core"):
        options += ["--set", "output_format=dcp"]
    averaged = sewa("average", run, *options, "-o", output)
    assert averaged.code == 0, averaged.err
    if not suffix and "output_format=dcp" not in options:
        assert sewa("average", run, *options, "-o", output, "--force").code == 0
    found = read(output)
    states = [weights(step) for step in STEPS[-5:]]
    assert found.keys() == states[0].keys()
    for name, tensor in found.items():
        expected = torch.stack([state[name] for state in states]).double().mean(0)
        assert torch.allclose(tensor.double(), expected, atol=1e-6)


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_loads_an_average_of_its_models(tmp_path, sewa):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    base, states = tmp_path / "base", []
    base.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (base / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab_file=str(base / "vocab.txt")).save_pretrained(base)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": len(words)}
    BertModel(BertConfig(**sizes)).save_pretrained(base)
    modules = [models.Transformer(str(base)), models.Pooling(16)]
    modules += [models.Dense(16, 8), models.Normalize()]
    model = library.SentenceTransformer(modules=modules, device="cpu")
    for step in (10, 20):
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter)
        model.save(str(tmp_path / "run" / f"checkpoint-{step}"))
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    ended = sewa("average", tmp_path / "run", "-o", tmp_path / "out")
    assert ended.code == 0, ended.err
    loaded = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert loaded.encode(["a b c"]).shape == (1, 8)
    for name, tensor in loaded.state_dict().items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, (states[0][name] + states[1][name]) / 2, atol=1e-6)
