"""Real runs of real trainers, tiny: each leaves its directory as it always does.

Tasks are modules that `sewa --task` and the tests import alike, so both judge the same losses.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

STEPS, EVERY = 16, 2

FROZEN = Path(__file__).parents[1] / "frozen"


def larger(task: str) -> str:
    """Return the source of a frozen run's task with a model large enough to be sharded."""
    source = (FROZEN / task / "task.py").read_text()
    return source.replace(
        "hidden_size=8, intermediate_size=16", "hidden_size=16, intermediate_size=32"
    )


LANGUAGE, CLASSIFIER = larger("transformers"), larger("sharded")


def write_task(folder: Path, source: str) -> ModuleType:
    """task.py in a folder, imported for the test itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(source)
    return load_task(folder)


def load_task(folder: Path) -> ModuleType:
    """Import the task.py of a folder."""
    spec = importlib.util.spec_from_file_location(f"task_{folder.name}", folder / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with third_party():
        spec.loader.exec_module(module)
    return module


@contextmanager
def third_party() -> Iterator[None]:
    """Other people's warnings are not our errors; the random numbers are put back."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def heldout_loss(task: ModuleType, model: nn.Module) -> float:
    """The loss by the plainest loop there is."""

    def outputs(batch: Any) -> Any:
        if hasattr(task, "predict"):
            return task.predict(model, batch)
        return model(**batch).logits if isinstance(batch, dict) else model(batch[0])

    model.eval()
    total = rows = 0.0
    with torch.no_grad():
        for batch in task.heldout_data():
            first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
            total += float(task.loss(outputs(batch), batch)) * len(first)
            rows += len(first)
    return total / rows


def train_with_transformers(
    model: Any, examples: Any, output: Path, shard_size: str | None = None
) -> None:
    """A run of the Hugging Face Trainer; checkpoint-2 … checkpoint-16 and the final model."""
    from transformers import Trainer, TrainingArguments

    if shard_size is not None:  # the Trainer calls save_pretrained without a size
        model.save_pretrained = partial(model.save_pretrained, max_shard_size=shard_size)
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=EVERY,
        logging_steps=EVERY,
        per_device_train_batch_size=8,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    trainer.save_model()


def train_in_a_loop(
    model: nn.Module, task: ModuleType, save: Callable[[nn.Module, Any, int], None]
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    inputs, labels = task.data(0)
    for step in range(1, STEPS + 1):
        at = slice(8 * (step % 12), 8 * (step % 12) + 8)
        optimizer.zero_grad()
        task.loss(model(inputs[at]), (inputs[at], labels[at])).backward()
        optimizer.step()
        if step % EVERY == 0:
            save(model, optimizer, step)
