"""Train the network of task.py and leave its last checkpoints in ckpts/ next to this file."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from task import build_model, loss, predict, rows, tensors


def options():
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--steps", type=int, default=600)
    asked.add_argument("--checkpoints", type=int, default=50)
    asked.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    asked.add_argument("--rate", type=float, default=1e-3, help="learning rate, constant")
    asked.add_argument("--batch", type=int, default=64)
    asked.add_argument("--out", type=Path, default=Path(__file__).parent / "ckpts")
    return asked.parse_args()


def main():
    args = options()
    if any(args.out.glob("step-*.safetensors")):
        raise SystemExit(f"{args.out}: has checkpoints of another run; name another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    written, read = tensors(rows("training"))
    first = args.steps - args.checkpoints * args.every
    for step in range(1, args.steps + 1):
        drawn = torch.randint(len(read), (args.batch,))
        batch = written[drawn], read[drawn]
        error = loss(predict(model, batch), batch)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        if step > first and (args.steps - step) % args.every == 0:
            save_file(model.state_dict(), args.out / f"step-{step}.safetensors")
        if step % 100 == 0:
            print(f"step {step}: training loss {float(error.detach()):.4f}", flush=True)


if __name__ == "__main__":
    main()
