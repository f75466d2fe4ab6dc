"""Train a small Llama on IMDB's reviews: a constant rate, then the same run decayed to nothing.

Leaves data/ (tokenizer and rows), ckpts/ (the constant run) and ckpts-decayed/ (what the decay does
from the step where it begins), as folders like those of transformers.Trainer. Run it again
after it was interrupted, and it goes on from the newest checkpoint.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from reviews import LENGTH, prepare
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).parent
STATE = "optimizer.pt"  # in the newest checkpoint only, and in the one where the decay begins


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=1024, help="at the constant rate, before the decay")
    add("--decay", type=int, default=192, help="steps from the constant rate to nothing")
    add("--further", action="store_true", help="go on at the constant rate too, as long as it took")
    add("--every", type=int, default=16, help="steps from one checkpoint to the next")
    add("--checkpoints", type=int, default=32, help="how many are saved before the decay")
    add("--warmup", type=int, default=100, help="steps")
    add("--lr", type=float, default=3e-3)
    add("--batch", type=int, default=8, help="rows of a step")
    add("--out", type=Path, default=HERE / "ckpts", help="the decayed ones go to OUT-decayed")
    add("--reviews", type=Path, default=HERE.parent / "data" / "imdb_csv")
    add("--data", type=Path, default=HERE / "data", help="tokenizer and rows, made if missing")
    add("--words", type=int, default=8192, help="of the tokenizer")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--selection", type=int, default=200, help="rows to choose with")
    add("--heldout", type=int, default=400, help="rows to report on")
    add("--threads", type=int, default=1)
    return parser.parse_args(given)


def build(tokenizer, options):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3 // 8 * 8,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def order(rows, batch, steps, seed):
    """The rows of each step: all of them once, in an order of the seed's, then all again."""
    chance = torch.Generator().manual_seed(seed)
    epochs = -(-steps * batch // rows)
    shuffled = torch.cat([torch.randperm(rows, generator=chance) for _ in range(epochs)])
    return shuffled[: steps * batch].view(steps, batch)


def share_of_rate(step, options, decayed):
    """Return the share of the constant rate in the step after `step`."""
    if decayed:
        return 1 - (step - options.steps) / options.decay
    return min(1.0, (step + 1) / options.warmup)


def checkpoints(folder):
    """(step, path) of those that are whole, the newest last."""
    found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*"))
    return sorted((int(match[1]), folder / match[0]) for match in found if match)


def save(model, optimizer, tokenizer, folder, step, kept):
    """Whole or not at all; Adam's moments of the checkpoint before are dropped unless `kept`."""
    temporary = folder / f".{os.getpid()}.tmp"
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    torch.save(optimizer.state_dict(), temporary / STATE)
    temporary.rename(folder / f"checkpoint-{step}")
    for before, path in checkpoints(folder)[:-1]:
        if before != kept:
            (path / STATE).unlink(missing_ok=True)


def train(folder, start, final, model, rows, tokenizer, options, decayed):
    """Train from the newest checkpoint in `folder`, else from `start`: a (step, path), or None."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left)
    matrices = [x for x in model.parameters() if x.ndim > 1]
    others = [x for x in model.parameters() if x.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    begun = 0
    if there := checkpoints(folder) or [start] * bool(start):
        begun, path = there[-1]
        model.load_state_dict(LlamaForCausalLM.from_pretrained(path).state_dict())
        optimizer.load_state_dict(torch.load(path / STATE, weights_only=True))
    first = options.steps - options.checkpoints * options.every
    longest = options.steps + options.decay
    batches = order(len(rows), options.batch, longest, options.seed)
    recent = 0.0  # training loss, a running mean of the last fifty steps or so
    for step in range(begun, final):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * share_of_rate(step, options, decayed)
        ids = torch.from_numpy(rows[batches[step].numpy()]).long()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        recent += (loss.item() - recent) / min(done - begun, 50)
        if done == final or (done > first and (done - first) % options.every == 0):
            save(model, optimizer, tokenizer, folder, done, options.steps)
        if done % 100 == 0 or done == final:
            print(f"{folder.name}: step {done} of {final}, loss {recent:.3f}", flush=True)


def main(options):
    if options.checkpoints * options.every > options.steps:
        raise ValueError("--checkpoints times --every is more than --steps")
    torch.set_num_threads(options.threads)
    disable_progress_bar()  # of each file, when there are dozens
    tokenizer, rows = prepare(
        options.reviews, options.data, options.words, options.selection, options.heldout
    )
    torch.manual_seed(options.seed)
    model = build(tokenizer, options).train()
    held = (model, rows, tokenizer, options)
    final = options.steps + options.decay
    train(options.out, None, options.steps, *held, decayed=False)
    start = (options.steps, options.out / f"checkpoint-{options.steps}")
    beside = options.out.with_name(f"{options.out.name}-decayed")
    train(beside, start, final, *held, decayed=True)
    if options.further:
        train(options.out, None, final, *held, decayed=False)


if __name__ == "__main__":
    try:
        main(arguments())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
