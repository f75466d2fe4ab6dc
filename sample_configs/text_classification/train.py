"""Train the network of task.py; leaves checkpoints in ckpts/."""

import argparse
import sys
from pathlib import Path

import torch
from task import build_model, loss, training_data

from sewa_cli.callbacks import save_weights


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--checkpoints", type=int, default=500, help="how many are saved")
    add("--every", type=int, default=4, help="steps from one to the next")
    add("--warmup", type=int, default=500, help="steps before the first of them is due")
    add("--out", type=Path, default=Path(__file__).parent / "ckpts")
    add("--data", default="imdb_csv", help="a folder under sample_configs/data, or a path")
    add("--vocabulary", type=int, default=10_000)
    add("--length", type=int, default=64, help="tokens of a text")
    add("--layers", type=int, default=2, help="the paper has 1, 2, 3 and 5")
    add("--width", type=int, default=32)
    add("--heads", type=int, default=2)
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=1e-3)
    add("--decay", choices=["linear", "step"], help="of the rate")
    add("--batch", type=int, default=32)
    add("--threads", type=int, default=1)
    return parser.parse_args()


def share_of_rate(decay, step, first, final):
    """`linear`: to nothing between the first checkpoint and the final; `step`: early, and stays."""
    if decay == "linear":
        return min(1.0, (final - step) / (final - first))
    return 0.1 if decay == "step" and step > first / 2 else 1.0


def shuffled(rows, batch):
    """Row numbers in batches without end, shuffled anew in each epoch."""
    while True:
        yield from torch.randperm(rows)[: rows - rows % batch].split(batch)


def main(options):
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if any(options.out.glob("step-*.safetensors")):
        raise ValueError(f"{options.out}: has checkpoints of another run; name another --out")
    text = {"data": options.data, "vocabulary": options.vocabulary, "length": options.length}
    network = {name: getattr(options, name) for name in ("layers", "width", "heads", "dropout")}
    model = build_model(**text, **network).train()
    ids, classes = (torch.cat(parts) for parts in zip(*training_data(**text), strict=True))
    batch = min(options.batch, len(classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    steps = options.warmup + options.checkpoints * options.every
    recent = 0.0  # training loss, a running mean of the last hundred steps or so
    for step, rows in zip(range(1, steps + 1), shuffled(len(classes), batch), strict=False):
        share = share_of_rate(options.decay, step - 1, options.warmup, steps)
        optimizer.param_groups[0]["lr"] = options.lr * share
        now = loss(model(ids[rows]), (None, classes[rows]))
        optimizer.zero_grad()
        now.backward()
        optimizer.step()
        recent += (now.item() - recent) / min(step, 100)
        if step > options.warmup and (step - options.warmup) % options.every == 0:
            save_weights(model, options.out, step)
        if step % 500 == 0:
            epoch = step * batch / len(classes)
            print(f"step {step} of {steps}, epoch {epoch:.1f}: loss {recent:.3f}", flush=True)
    print(f"{options.checkpoints} checkpoints in {options.out}")


if __name__ == "__main__":
    try:
        main(arguments())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
