"""Under torchrun: trains the task's model with FSDP2 and saves it as distributed checkpoints."""

from __future__ import annotations

import runpy
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(task: str, output: str, steps: int = 8) -> None:
    dist.init_process_group("gloo")
    user = runpy.run_path(task)
    torch.manual_seed(0)
    model = user["build_model"]()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    rows = torch.stack([row["input_ids"] for row in user["examples"]()])
    for step in range(1, steps + 1):
        picked = torch.randint(len(rows), (8,), generator=torch.Generator().manual_seed(step))
        own = rows[picked][dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
        state = {"model": get_model_state_dict(model), "step": step}
        dcp.save(state, checkpoint_id=f"{output}/step-{step}")  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
