"""Train the network of task.py and leave 40 checkpoints in ckpts/ next to this file."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from task import build_model, loss, training_data

FOLDER = Path(__file__).parent / "ckpts"


def main(checkpoints=40, spacing=10, batch=16):
    torch.manual_seed(0)
    model = build_model()
    images, labels = (torch.cat(parts) for parts in zip(*training_data(), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    FOLDER.mkdir(exist_ok=True)
    for step in range(1, checkpoints * spacing + 1):
        chosen = torch.randint(len(labels), (batch,))
        optimizer.zero_grad()
        loss(model(images[chosen]), (None, labels[chosen])).backward()
        optimizer.step()
        if step % spacing == 0:
            save_file(model.state_dict(), FOLDER / f"step-{step}.safetensors", {"step": str(step)})
    print(f"{checkpoints} checkpoints in {FOLDER}")


if __name__ == "__main__":
    main()
