"""Train net.py on scikit-learn's digits; leaves data/ (npz) and ckpts/ next to this file."""

from pathlib import Path

import numpy as np
import torch
from net import make_net
from sklearn.datasets import load_digits
from torch.nn import functional as F

from sewa_cli.callbacks import save_weights

HERE = Path(__file__).parent


def main(steps=400, every=10):
    torch.manual_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = digits.data[order].astype(np.uint8), digits.target[order]
    (HERE / "data").mkdir(exist_ok=True)
    np.savez(HERE / "data" / "selection.npz", x=x[797:1297], y=y[797:1297])
    np.savez(HERE / "data" / "heldout.npz", x=x[1297:], y=y[1297:])

    inputs, labels = torch.tensor(x[:797]) / 16, torch.tensor(y[:797])
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(labels), (16,))
        loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > steps // 4 and step % every == 0:
            save_weights(model, HERE / "ckpts", step, {"loss": loss})
    print(f"checkpoints in {HERE / 'ckpts'}")


if __name__ == "__main__":
    main()
