"""What `--dry-run` says, over what a run takes: `python benchmarks/forecast.py`.

Seconds, bytes read and peak anonymous memory of the whole process, for each solver on (a) the demo
and (b) a small Llama; each in a process of its own. `dry run`: what the forecast itself took of
seconds, and of memory at its peak. `--cpu` takes the processor's time in place of the clock's, for
a machine that others share. Last, (c): Llamas of 1, 7 and 70 billion weights with 20 checkpoints,
in shards that are holes in a file, planned from headers alone: 300 rows of 512 tokens, on a machine
with all the memory that one could want.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "the default": {"K": "auto"},
    "linear": {"K": 5, "solver": "linear"},
    "gumbel": {"K": 5, "solver": "gumbel"},
}
CHECKPOINTS, ROWS, TOKENS, WORDS = 12, 200, 64, 4000
LLAMA_7B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LARGE: dict[str, dict[str, Any]] = {
    "1B": LLAMA_7B
    | {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 22,
        "num_attention_heads": 16,
    },
    "7B": LLAMA_7B,
    "70B": LLAMA_7B
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


class Watch:
    """The most anonymous memory, looked at now and then."""

    def __init__(self) -> None:
        self.peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        from sewa_cli.session.rates import anonymous_bytes

        while not self._over.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes())


def llama(**changes: Any) -> Any:
    import transformers

    small = {
        "vocab_size": WORDS,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "use_cache": False,
    }
    config = transformers.LlamaConfig(**(small | changes))
    return transformers.AutoModelForCausalLM.from_config(config)


def texts(rows: int, seed: int, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Words that follow each other by a rule, most of the time."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(WORDS, (rows, 1), generator=draw)
    ids = (start + 7 * torch.arange(tokens)) % WORDS
    noise = torch.rand(rows, tokens, generator=draw) < 0.2
    ids[noise] = torch.randint(WORDS, (int(noise.sum()),), generator=draw)
    return [{"input_ids": some} for some in torch.split(ids, 8)]


def language_task(rows: int = ROWS, tokens: int = TOKENS, **changes: Any) -> Any:
    from torch.nn import functional as F

    from sewa_cli.task import make_task

    def loss(outputs: Any, batch: Any) -> Any:
        logits, targets = outputs[:, :-1], batch["input_ids"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    functions = {
        "build_model": lambda: llama(**changes),
        "predict": lambda model, batch: model(input_ids=batch["input_ids"]).logits,
        "loss": loss,
        "selection_data": lambda: texts(rows, 0, tokens),
        "heldout_data": lambda: texts(rows // 2, 1, tokens),
    }
    return make_task(functions, source="benchmarks/forecast.py", args={})


def make_llama(folder: Path) -> None:
    import torch
    from safetensors.torch import save_model

    torch.manual_seed(0)
    model, task = llama(), language_task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = texts(8 * 3 * (CHECKPOINTS + 8), 2)
    folder.mkdir(parents=True)
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        task.loss(task.predict(model, batch), batch).backward()
        optimizer.step()
        if step % 3 == 0 and step > 24:
            save_model(model, str(folder / f"step-{step}.safetensors"))


def holes(folder: Path, checkpoints: int = 20, shards: int = 3, **sizes: Any) -> int:
    """Sharded checkpoints whose headers are real and whose data are holes; returns the weights."""
    import torch

    with torch.device("meta"):
        state = llama(**sizes).state_dict()
    names = list(state)
    parts = [names[i::shards] for i in range(shards)]
    weight_map: dict[str, str] = {}
    for step in range(1, checkpoints + 1):
        inside = folder / f"checkpoint-{1000 * step}"
        inside.mkdir(parents=True)
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
            header, end = {}, 0
            for name in part:
                size = 2 * state[name].numel()
                shape = list(state[name].shape)
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
                weight_map[name] = file
                end += size
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            with (inside / file).open("wb") as written:
                written.write(len(text).to_bytes(8, "little") + text)
                written.truncate(8 + len(text) + end)
        index = {"metadata": {}, "weight_map": weight_map}
        (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(tensor.numel() for tensor in state.values())


def one(what: str, folder: Path, way: str, cpu: bool) -> dict[str, Any]:
    """A forecast, or a run, in this process."""
    if cpu:
        time.perf_counter = time.process_time
    from sewa_cli.commands.forecast import run_forecast
    from sewa_cli.commands.select import run_select
    from sewa_cli.session.extensions import load_settings
    from sewa_cli.task import load_task

    is_demo = (folder / "task.py").exists()
    task = load_task(str(folder / "task.py"), {}) if is_demo else language_task()
    flags = {"checkpoints": (folder / "ckpts",), "device": "cpu", **WAYS[way]}
    flags["output"] = str(folder / f"{way}.safetensors")
    config = load_settings(None, flags)
    with Watch() as watch:
        start = time.perf_counter()
        if what == "forecast":
            found = run_forecast(config, task)
            said: dict[str, Any] = {
                "seconds": found.seconds,
                "bytes": found.bytes_read,
                "peak": found.peak_memory_bytes,
                "how": found.how,
                "rows": found.rows_used,
                "forward": found.forward_passes,
            }
        else:
            cost = run_select(config, task, force=True).report.cost
            said = {
                "seconds": cost.seconds.total,
                "bytes": cost.bytes_read,
                "forward": cost.forward_passes,
                "stages": cost.seconds.model_dump(),
            }
        took = time.perf_counter() - start
    return {**said, "took": took, "memory": watch.peak}


def planned(folder: Path, name: str, cpu: bool) -> list[dict[str, Any]]:
    """A large model, by every solver."""
    if cpu:
        time.perf_counter = time.process_time
    from sewa_cli.commands.forecast import run_forecast
    from sewa_cli.session.extensions import load_settings

    start = time.perf_counter()
    holes(folder, **LARGE[name])
    flags = {"checkpoints": (folder,), "device": "cpu", "memory": "64TiB"}
    task = language_task(300, 512, **LARGE[name])
    found = run_forecast(load_settings(None, flags), task, shapes_only=True)
    took = time.perf_counter() - start
    return [
        {
            "weights": f"{found.parameters / 1e9:.1f}e9",
            "solver": plan.solver,
            "K": plan.K,
            "rows": plan.rows_used,
            "W": plan.placement.tier,
            "TB read": plan.bytes_read / 1e12,
            "forward": plan.forward_passes,
            "backward": plan.backward_passes,
            "memory, GB": plan.peak_memory_bytes / 1e9,
            "hours": plan.seconds / 3600,
            "planned in s": took,
        }
        for plan in (found, *found.alternatives)
    ]


def apart(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def compared(name: str, folder: Path, way: str, cpu: list[str]) -> dict[str, Any]:
    said = apart("forecast", str(folder), way, *cpu)
    truth = apart("run", str(folder), way, *cpu)
    if os.environ.get("VERBOSE"):
        print(said, truth, sep="\n", file=sys.stderr)
    return {
        "run": name,
        "way": way,
        "rows": said["rows"],
        "seconds": truth["seconds"],
        "forecast / seconds": said["seconds"] / truth["seconds"],
        "MB read": truth["bytes"] / 1e6,
        "forecast / bytes": said["bytes"] / truth["bytes"],
        "peak MB": truth["memory"] / 1e6,
        "forecast / peak": said["peak"] / truth["memory"],
        "dry run: seconds": said["took"],
        "peak of dry run, MB": said["memory"] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json")
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor")
    parser.add_argument("--only", nargs="+", default=["demo", "llama", "large"])
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "FOLDER", "WAY"))
    given = parser.parse_args()
    if given.one:
        what, folder, way = given.one
        print(json.dumps(one(what, Path(folder), way, given.cpu)))
        return
    from common import finish, processor

    print(f"{processor()}, load before {os.getloadavg()[0]:.1f}\n", flush=True)
    cpu, rows = ["--cpu"] * given.cpu, []
    with tempfile.TemporaryDirectory() as temporary:
        if "demo" in given.only:
            folder = Path(temporary, "demo")
            making = [sys.executable, "-m", "sewa_cli", "demo", "-q", str(folder)]
            subprocess.run(making, check=True, stdout=subprocess.DEVNULL)
            rows += [compared("demo", folder, way, cpu) for way in WAYS]
        if "llama" in given.only:
            folder = Path(temporary, "llama")
            make_llama(folder / "ckpts")
            rows += [compared("small Llama", folder, way, cpu) for way in WAYS]
        if rows:
            finish("forecast", rows, given.json)
        if "large" in given.only:
            print()
            large = [
                row for name in LARGE for row in planned(Path(temporary, name), name, given.cpu)
            ]
            finish("large", large, None)


if __name__ == "__main__":
    main()
