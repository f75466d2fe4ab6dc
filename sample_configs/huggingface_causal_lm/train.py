"""Train a tiny language model on the standard library's docstrings with transformers.Trainer.

Leaves model/ (config and tokenizer), data/ (jsonl) and ckpts/ (bare weights) next to this file.
"""

import importlib
import inspect
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from sewa_cli.callbacks.huggingface import SaveForSewa

HERE = Path(__file__).parent
MODULES = "argparse asyncio collections csv datetime decimal email functools http inspect io json"
MODULES += " logging os pathlib random re shutil socket statistics string subprocess tarfile typing"


def paragraphs():
    """Real text that is always at hand."""
    found = {}
    for module in map(importlib.import_module, MODULES.split()):
        for _, thing in inspect.getmembers(module, lambda x: inspect.isclass(x) or callable(x)):
            things = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
            for text in (inspect.getdoc(x) or "" for x in things if callable(x)):
                found |= dict.fromkeys(" ".join(part.split()) for part in text.split("\n\n"))
    return [text for text in found if len(text) > 40]


def train_tokenizer(texts, words=800):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")


def main(steps=300):
    torch.manual_seed(0)
    texts = paragraphs()
    random.Random(0).shuffle(texts)
    parts = {"selection": texts[:200], "heldout": texts[200:400]}
    (HERE / "data").mkdir(exist_ok=True)
    for part, some in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (HERE / "data" / f"{part}.jsonl").write_text(lines, encoding="utf-8")

    tokenizer = train_tokenizer(texts[400:])
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.1,  # tiny layers learn faster so
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    tokenizer.save_pretrained(HERE / "model")
    config.save_pretrained(HERE / "model")
    rows = tokenizer(texts[400:], truncation=True, max_length=64)["input_ids"]
    Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(HERE / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            lr_scheduler_type="constant",  # a rate that stays high is where averaging pays
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row} for row in rows],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[SaveForSewa(HERE / "ckpts", every=4, start=0.67, overwrite=True)],
    ).train()


if __name__ == "__main__":
    main()
