"""The cost of interval means: `IntervalMean.update` against the training step it follows.

python benchmarks/means_cost.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from sewa_cli.callbacks import IntervalMean

EVERY = (1, 2, 10)
ROUNDS = {"50 k": 500, "5 M": 15, "100 M": 6}


class Text(nn.Module):
    """A small language model: embedding, encoder, head."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True)
        self.embed = nn.Embedding(words, width)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embed(x)))
        return found.flatten(0, 1)


def setting(size: str) -> tuple[nn.Module, Tensor, Tensor, str]:
    if size == "50 k":
        model = nn.Sequential(
            *(nn.Linear(17, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 6))
        )
        return model, torch.randn(256, 17), torch.randint(6, (256,)), "MLP, 256 rows"
    words, width, layers, shape = {
        "5 M": (2000, 256, 6, (8, 64)),
        "100 M": (20_000, 768, 12, (4, 128)),
    }[size]
    x = torch.randint(words, shape)
    return (
        Text(words, width, layers),
        x,
        x.flatten(),
        f"transformer, {shape[0]} × {shape[1]} tokens",
    )


def seconds(job: Callable[[], object]) -> float:
    start = perf_counter()
    job()
    return perf_counter() - start


def measure(size: str, rounds: int) -> str:
    model, x, y, name = setting(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    means = {every: IntervalMean(model, every) for every in EVERY}
    steps, updates = [], {every: list[float]() for every in EVERY}
    for done in range(rounds + 2):
        now = seconds(step)
        took = {every: seconds(mean.update) for every, mean in means.items()}
        if done > 1:  # the first steps make the optimizer's state, and the means
            steps.append(now)
            for every in EVERY:
                updates[every].append(took[every])
    one = median(updates[1])
    idle = median(updates[10])  # nine of ten of these calls only count
    shares = [(one + (every - 1) * idle) / every / median(steps) for every in EVERY]
    count = sum(parameter.numel() for parameter in model.parameters())
    shown = " | ".join(f"{share:.2%}" for share in shares)
    return (
        f"| {count / 1e6:.3g} M ({name}) | {1000 * median(steps):.3g} ms | {1000 * one:.3g} ms "
        f"| {shown} | {4 * count / 1e6:.3g} MB |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=list(ROUNDS), choices=ROUNDS)
    asked = parser.parse_args()
    print("| weights | training step | update | every step | every 2 | every 10 | memory |")
    print("|---|---|---|---|---|---|---|")
    for size in asked.sizes:
        print(measure(size, ROUNDS[size]), flush=True)


if __name__ == "__main__":
    main()
