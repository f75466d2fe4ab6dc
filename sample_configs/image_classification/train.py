"""Train the network of task.py, and leave the checkpoints of the last stage in ckpts/.

python train.py --seed 1 --out ckpts-1
"""

import argparse
import time
from pathlib import Path

import torch
from task import CIFAR, as_inputs, build_model, loss, training_part

from sewa_cli.callbacks import save_weights
from sewa_cli.errors import TaskError

HERE = Path(__file__).parent


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=positive, default=500)
    parser.add_argument("--every", type=positive, default=8, help="steps between two checkpoints")
    parser.add_argument("--warmup", type=int, default=1000, help="steps before the first of them")
    parser.add_argument("--out", default="ckpts", help="a folder, relative to this file's")
    parser.add_argument("--data", default=CIFAR, help="a folder in ../data, or a path")
    parser.add_argument("--images", type=positive, default=20000, help="to train on, at most")
    parser.add_argument("--blocks", type=positive, default=3)
    parser.add_argument("--width", type=positive, default=16, help="channels of the first block")
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--lr", type=float, default=0.02, help="of SGD with momentum")
    parser.add_argument("--decay", choices=["linear", "step"], help="of the rate")
    parser.add_argument("--threads", type=positive, default=1)
    return parser.parse_args()


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, found {number}")
    return number


def share_of_rate(decay, step, first, final):
    """`linear`: to nothing between the first checkpoint and the final; `step`: early, and stays."""
    if decay == "linear":
        return min(1.0, (final - step) / (final - first))
    return 0.1 if decay == "step" and step > first / 2 else 1.0


def train(options):
    out = HERE / options.out
    if list(out.glob("step-*.safetensors")):
        raise TaskError(f"{out}: holds checkpoints of an earlier run; remove it, or name another")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = build_model(options.data, options.blocks, options.width)
    part, edge = training_part(options.data)
    images, labels = map(torch.from_numpy, part.take(0, min(options.images, edge)))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    started, steps = time.time(), options.warmup + options.checkpoints * options.every
    recent = []
    for step in range(1, steps + 1):
        share = share_of_rate(options.decay, step - 1, options.warmup, steps)
        optimizer.param_groups[0]["lr"] = options.lr * share
        chosen = torch.randint(len(labels), (options.batch,))
        inputs = as_inputs(images[chosen])
        mirrored = torch.rand(len(chosen)) < 0.5
        inputs[mirrored] = inputs[mirrored].flip(3)
        value = loss(model(inputs), (None, labels[chosen]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        recent.append(value.item())
        if step > options.warmup and (step - options.warmup) % options.every == 0:
            save_weights(model, out, step, {"loss": value})
        if step % 500 == 0:
            seconds = time.time() - started
            print(f"step {step} of {steps}: loss {mean(recent):.3f}, {seconds:.0f} s", flush=True)
            recent = []
    seconds = time.time() - started
    print(f"{options.checkpoints} checkpoints in {out}, of {len(labels)} images, {seconds:.0f} s")


def mean(numbers):
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    try:
        train(parse_options())
    except TaskError as error:
        raise SystemExit(f"error: {error}") from None
