"""Train a small Llama to name the largest of three numbers, and leave its checkpoints in ckpts/."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
WORDS = ["</s>", "largest", "is", *map(str, range(100))]


def questions(count, seed):
    source = random.Random(seed)
    return [source.sample(range(100), 3) for _ in range(count)]


def write_data(part, count, seed):
    """One question a line: {"question": "largest 41 7 88 is", "choices": […], "answer": 2}."""
    (HERE / "data").mkdir(exist_ok=True)
    with (HERE / "data" / f"{part}.jsonl").open("w") as file:
        for some in questions(count, seed):
            row = {
                "question": f"largest {some[0]} {some[1]} {some[2]} is",
                "choices": [*map(str, some)],
                "answer": some.index(max(some)),
            }
            file.write(json.dumps(row) + "\n")


def make_tokenizer():
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="</s>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>")


def train(out, steps=600, every=20):
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    places = {"max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
    config = LlamaConfig(vocab_size=len(WORDS), num_attention_heads=4, **sizes, **places)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        texts = [f"largest {a} {b} {c} is {max(a, b, c)}" for a, b, c in questions(32, step)]
        tokens = torch.tensor(tokenizer(texts)["input_ids"])
        error = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        if step % every == 0:
            model.save_pretrained(out / f"checkpoint-{step}")
            tokenizer.save_pretrained(out / f"checkpoint-{step}")


if __name__ == "__main__":
    write_data("selection", 400, seed=-1)
    write_data("heldout", 1000, seed=-2)
    torch.set_num_threads(1)
    train(HERE / "ckpts")
