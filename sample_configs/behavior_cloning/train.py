"""Train the network of task.py and leave its last checkpoints in ckpts/ next to this file."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from task import build_model, loss, tables

from sewa_cli.errors import TaskError


def options():
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--data", default="hopper-medium", help="a name in data/, or a path")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--before", type=int, default=10_000, help="steps before the first is saved")
    asked.add_argument("--checkpoints", type=int, default=1000)
    asked.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    asked.add_argument("--out", type=Path, default=Path(__file__).parent / "ckpts")
    asked.add_argument("--width", type=int, default=128)
    asked.add_argument("--dropout", type=float, default=0.1)
    asked.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
    asked.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    asked.add_argument("--decay", choices=["linear", "step"], help="of the rate")
    asked.add_argument("--batch", type=int, default=128)
    asked.add_argument("--threads", type=int, default=1)
    return asked.parse_args()


def share_of_rate(decay, step, first, final):
    """`linear`: to nothing between the first checkpoint and the final; `step`: early, and stays."""
    if decay == "linear":
        return min(1.0, (final - step) / (final - first))
    return 0.1 if decay == "step" and step > first / 2 else 1.0


def main():
    args = options()
    if any(args.out.glob("step-*.safetensors")):
        raise TaskError(f"{args.out}: has checkpoints of another run; name another --out")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = build_model(args.data, args.width, args.dropout, env="none")  # no episode is played
    observations, actions = tables(args.data)["training"]
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), args.rate, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), args.rate, momentum=0.9)

    steps = args.before + args.checkpoints * args.every
    saved = range(args.before + args.every, steps + 1, args.every)
    files = {step: f"step-{step}.safetensors" for step in saved}
    args.out.mkdir(parents=True, exist_ok=True)
    for step in range(1, steps + 1):
        share = share_of_rate(args.decay, step - 1, args.before, steps)
        optimizer.param_groups[0]["lr"] = args.rate * share
        chosen = torch.randint(len(actions), (args.batch,))
        error = loss(model(observations[chosen]), (None, actions[chosen]))
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        if step in files:
            save_file(model.state_dict(), args.out / files[step], {"step": str(step)})
        if step % 5000 == 0:
            print(f"step {step} of {steps}: loss {error.item():.4f}", flush=True)
    print(f"{args.checkpoints} checkpoints in {args.out}")


if __name__ == "__main__":
    try:
        main()
    except TaskError as error:
        raise SystemExit(f"error: {error}") from error
