"""A language model of 32,000 words: `python benchmarks/language_model.py --folder lm`.

The run is made once, in the folder: a tokenizer and a small Llama, both trained on the sources of
Python's own standard library, at a constant rate after warm-up, and the last 20 checkpoints.

    predictions  of 20 random averages of five or more, from all logits and from digests of them
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

WORDS, LENGTH, CHECKPOINTS = 32_000, 128, 20
STEPS, WARM_UP, EVERY, BATCH, RATE = 900, 50, 20, 8, 2e-3
ROWS = 300  # to choose by, and as many held out


def make_run(folder: Path) -> None:
    """Tokenizer, checkpoints `run/checkpoint-*`, `selection.jsonl` and `heldout.jsonl`."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = _sources()
    tokenizer = _tokenizer(texts, folder / "tokenizer")
    ids = [i for text in texts for i in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    rows = [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH, LENGTH)]
    random.Random(0).shuffle(rows)
    # the very tokens, when the text is read again
    whole = (row for row in rows if tokenizer(tokenizer.decode(row))["input_ids"] == row)
    kept = [next(whole) for _ in range(2 * ROWS)]
    for name, some in (("selection", kept[:ROWS]), ("heldout", kept[ROWS:])):
        lines = [json.dumps({"text": tokenizer.decode(row)}) + "\n" for row in some]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    used = {tuple(row) for row in kept}
    _train([row for row in rows if tuple(row) not in used], tokenizer, folder / "run")
    (folder / "done").touch()


def _sources() -> list[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(stdlib.rglob("*.py")) if "site-packages" not in f.parts]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def _tokenizer(texts: list[str], folder: Path) -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    found = ByteLevelBPETokenizer()
    found.train_from_iterator(texts, vocab_size=WORDS, special_tokens=["<end>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=found._tokenizer, eos_token="<end>", pad_token="<end>"
    )
    fast.save_pretrained(folder)
    return fast


def _train(rows: list[list[int]], tokenizer: Any, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.eos_token_id,
        )
    )
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    start = time.time()
    for step in range(1, STEPS + 1):
        adam.param_groups[0]["lr"] = RATE * min(1.0, step / WARM_UP)
        ids = torch.tensor([rows[(step * BATCH + i) % len(rows)] for i in range(BATCH)])
        loss = model(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        left = STEPS - step
        if left % EVERY == 0 and left // EVERY < CHECKPOINTS:
            model.save_pretrained(folder / f"checkpoint-{step}")
            tokenizer.save_pretrained(folder / f"checkpoint-{step}")
        if step % 20 == 0:
            print(f"step {step}  loss {loss:.4f}  {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="kept there, made once")
    torch.set_num_threads(1)
    make_run(parser.parse_args().folder)
