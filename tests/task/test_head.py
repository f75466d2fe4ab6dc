"""Language models of transformers: their head in pieces, and metrics from the same pass."""

import pytest
import torch
import transformers
from helpers.hf_runs import LLAMA, WORDS, text_rows, tokenizer, write_model, write_rows
from helpers.objectives import objective_of

from sewa_cli.task import load_task

ROOM = 4 * WORDS * 7  # logits of seven words
CONFIGS = {
    "Llama": transformers.LlamaConfig(**LLAMA),
    "tied": transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "softcapping": transformers.Gemma2Config(**LLAMA, query_pre_attn_scalar=8),
    "no softcapping": transformers.Gemma2Config(
        **LLAMA, query_pre_attn_scalar=8, final_logit_softcapping=None
    ),
    "scaled": transformers.CohereConfig(**LLAMA, logit_scale=0.0625),
    "divided": transformers.GraniteConfig(**LLAMA, logits_scaling=4.0),
}
OTHERS = ("tied", "no softcapping", "scaled", "divided", "GPT-2")
CHANGED = ("softcapping", "scaled", "divided")  # logits after the last layer


def breadth(values):
    return [pytest.param(value, marks=pytest.mark.breadth) for value in values]


def language_task(folder, name, **args):
    kind = "masked-lm" if name == "BERT" else "causal-lm"
    if name in CONFIGS:
        CONFIGS[name].save_pretrained(folder / "model")
        tokenizer(brackets=False).save_pretrained(folder / "model")
    else:
        write_model(folder / "model", kind)  # GPT-2 or BERT
    rows = text_rows()
    for part, some in (("selection", rows[:20]), ("heldout", rows[20:43])):
        write_rows(folder / f"{part}.jsonl", some)
    data = {part: folder / f"{part}.jsonl" for part in ("selection", "heldout")}
    usual = {"kind": kind, "model": folder / "model", "batch_size": 8}
    return load_task("huggingface", {**usual, **data, **args})


def built(task, scale=3.0):
    """Weights large enough for a cap on logits to show."""
    torch.manual_seed(0)
    model = task.build_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def in_one_go(task, model):
    expected = objective_of(task, model)
    expected.classes = expected.summarize = None
    return expected


def agree(found, expected, data, rel=1e-5):
    flat = expected.model.flat.clone()
    mine, theirs = found.unit_losses(data), expected.unit_losses(data)
    assert mine.mean == pytest.approx(theirs.mean, rel=rel)
    torch.testing.assert_close(mine.rows, theirs.rows, rtol=rel, atol=1e-6)
    some = list(data)[:2]
    one, two = found.gradient(flat, some), expected.gradient(flat, some)
    assert float(one[0]) == pytest.approx(float(two[0]), rel=rel)
    torch.testing.assert_close(one[1], two[1], rtol=rel, atol=rel * float(two[1].abs().max()))


class Largest:
    """The largest number of logits that the last layer ever made at once, in bytes."""

    def __init__(self, model):
        self.bytes = 0
        model.get_output_embeddings().register_forward_hook(self._look)

    def _look(self, _, __, logits):
        self.bytes = max(self.bytes, 4 * logits.numel())


@pytest.mark.parametrize("name", ["Llama", "softcapping", "BERT", *breadth(OTHERS)])
def test_pieces_make_up_the_loss_its_rows_and_its_gradient(name, tmp_path):
    task = language_task(tmp_path, name)
    expected = in_one_go(task, built(task))
    model = built(task)
    largest = Largest(model)
    agree(objective_of(task, model, ROOM), expected, task.selection_data)
    batch = next(iter(task.selection_data))
    hidden = task.features(model, batch)
    if name in CHANGED:
        assert hidden is None  # then some rows at a time
        row = 4 * WORDS * max(batch["input_ids"].shape[1] for batch in task.selection_data)
        assert largest.bytes <= max(row, 4 * WORDS * 16)  # the few tokens that were looked at
    else:
        assert hidden.shape == (*batch["input_ids"].shape, 16)
        # one token of each row, to run the model to its end, and those that were looked at
        assert largest.bytes <= 4 * WORDS * 16


@pytest.mark.parametrize("on", [["q_proj", "lm_head"], *breadth([["q_proj", "v_proj"]])])
def test_adapters_are_run_in_pieces_too(on, tmp_path):
    peft = pytest.importorskip("peft")
    task = language_task(tmp_path, "Llama")

    def adapted():
        config = peft.LoraConfig(
            r=2, target_modules=on, task_type="CAUSAL_LM", init_lora_weights=False
        )
        torch.manual_seed(1)
        return peft.get_peft_model(built(task), config).eval()

    model = adapted()
    largest = Largest(model)
    found = objective_of(task, model, ROOM)
    agree(found, in_one_go(task, adapted()), task.selection_data)
    assert largest.bytes <= 4 * WORDS * 16
