"""Train a small T5 to read numbers from right to left in German, and leave its checkpoints here."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

HERE = Path(__file__).parent
ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
GERMAN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
SPECIAL = ["<pad>", "</s>"]


def pairs(count, seed):
    source = random.Random(seed)
    numbers = [[source.randrange(10) for _ in range(source.randint(5, 8))] for _ in range(count)]
    return [
        (" ".join(ENGLISH[n] for n in digits), " ".join(GERMAN[n] for n in reversed(digits)))
        for digits in numbers
    ]


def write_data(part, count, seed):
    (HERE / "data").mkdir(exist_ok=True)
    with (HERE / "data" / f"{part}.jsonl").open("w") as file:
        for source, target in pairs(count, seed):
            file.write(json.dumps({"source": source, "target": target}) + "\n")


def make_tokenizer():
    words = {word: i for i, word in enumerate([*SPECIAL, *ENGLISH, *GERMAN])}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")


def train(out, steps=300, every=10):
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2}
    config = T5Config(vocab_size=len(tokenizer), dropout_rate=0, decoder_start_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        sources, targets = zip(*pairs(64, step), strict=True)
        batch = tokenizer([*sources], padding=True, return_tensors="pt")
        labels = tokenizer([*targets], padding=True, return_tensors="pt")["input_ids"]
        error = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=labels.where(labels != 0, -100),
        ).loss
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        if step % every == 0:
            model.save_pretrained(out / f"checkpoint-{step}")
            tokenizer.save_pretrained(out / f"checkpoint-{step}")


if __name__ == "__main__":
    write_data("selection", 300, seed=-1)
    write_data("heldout", 500, seed=-2)
    torch.set_num_threads(1)
    train(HERE / "ckpts")
