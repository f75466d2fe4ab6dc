"""Averaging against the machine's limit, timm and mergekit: `python benchmarks/average.py`.

    python benchmarks/average.py --files 20 --megabytes 100 --mergekit PYTHON

Makes the files (a small Llama of random weights) in a temporary folder, all of them in the page
cache, and lets the contestants take turns; best time and median of each. Three tables: the work
alone, in processes that have imported everything; whole commands, from start to end; and their peak
of anonymous memory (RssAnon: what a program has allocated, not the pages of files it has mapped).
The limit is a plain sum over the mapped files by two threads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from common import as_installed, markdown
from safetensors.torch import save_file
from timm_way import timm_way

from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.commands.average import run_average
from sewa_cli.config import Config
from sewa_cli.output.average import Average

HIDDEN, INNER = 512, 1408
MANY = 200
RAW = "raw read, 2 threads"
OURS = "sewa average, all of it"

# Runs in mergekit's own Python. For each line on its standard input: one merge, and its seconds.
MERGEKIT = """
import json, sys, time
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
models, output = json.loads(sys.argv[1]), sys.argv[2]
config = MergeConfiguration.model_validate({
    "merge_method": "linear", "dtype": "float32",
    "models": [{"model": model, "parameters": {"weight": 1.0}} for model in models],
})
options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
for line in sys.stdin:
    start = time.perf_counter()
    run_merge(config, output, options)
    print("seconds", time.perf_counter() - start, flush=True)
"""


# ---- the files ---------------------------------------------------------------------------------


def shapes(megabytes: int) -> tuple[dict[str, tuple[int, ...]], dict[str, object]]:
    """A Llama of this size in float32, half of it in its layers; and its config.json."""
    layer = {f"self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qkvo"}
    layer |= {f"mlp.{x}_proj.weight": (INNER, HIDDEN) for x in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (HIDDEN, INNER)}
    numbers = megabytes * 10**6 // 4
    of_layer = sum(a * b for a, b in layer.values())
    layers = max(1, numbers // 2 // of_layer)
    words = max(32, (numbers - layers * of_layer) // (2 * HIDDEN))
    found: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,)}
    found |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (words, HIDDEN))
    for i in range(layers):
        norms = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), HIDDEN)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        found |= {f"model.layers.{i}.{name}": (size,) for name, size in norms.items()}
    return found, {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": layers,
        "vocab_size": words,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def make_files(folder: Path, count: int, megabytes: int) -> list[Path]:
    """model-0/model.safetensors …, each with a config.json, as mergekit wants them."""
    tensors, config = shapes(megabytes)
    paths = []
    for n in range(count):
        generator = torch.Generator().manual_seed(n)
        path = folder / f"model-{n}" / "model.safetensors"
        path.parent.mkdir()
        (path.parent / "config.json").write_text(json.dumps(config))
        state = {k: torch.randn(shape, generator=generator) for k, shape in tensors.items()}
        save_file(state, path, metadata={"format": "pt"})
        paths.append(path)
    return paths


def linked(paths: Sequence[Path], folder: Path, count: int) -> list[Path]:
    """Link these files under more names: as many mappings, without the disk space."""
    found = []
    for n in range(count):
        path = folder / f"many-{n}" / "model.safetensors"
        path.parent.mkdir()
        os.link(paths[n % len(paths)], path)
        config = paths[n % len(paths)].parent / "config.json"
        (path.parent / "config.json").write_text(config.read_text())
        found.append(path)
    return found


# ---- the contestants ---------------------------------------------------------------------------


def raw_read(paths: Sequence[Path]) -> None:
    """The limit: every mapped byte read once, by two threads, into one number each."""
    torch.set_num_threads(1)

    def read(path: Path) -> float:
        count = path.stat().st_size // 4
        return torch.from_file(str(path), shared=False, size=count).sum().item()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, paths))
    torch.set_num_threads(2)


def averaged(paths: Sequence[Path]) -> Average:
    sources = [open_checkpoint(path, Reads()) for path in paths]
    return Average.of(sources, [1 / len(paths)] * len(paths), method="uniform")


def sum_only(paths: Sequence[Path]) -> None:
    """Headers, reading and summing of `sewa average`: everything but the writing."""
    mean = averaged(paths)
    for _ in mean.pieces(list(mean.names)):
        pass


def sum_and_write(paths: Sequence[Path], output: Path) -> None:
    """Return without flushing, as the other tools do."""
    with output.open("wb") as file:
        averaged(paths).write(file)


def sewa_average(paths: Sequence[Path], output: Path) -> None:
    """All of `sewa average` after the imports: also the checks, the fsync, the new name."""
    weights = [1 / len(paths)] * len(paths)
    run_average(Config(checkpoints=tuple(paths), output=str(output)), "", weights, force=True)


class Mergekit:
    """A process that has mergekit loaded, and merges on request."""

    def __init__(self, python: str, paths: Sequence[Path], output: Path) -> None:
        models = json.dumps([str(path.parent) for path in paths])
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-c", MERGEKIT, models, str(output)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("seconds"):
                return float(line.split()[1])
        raise RuntimeError("mergekit ended early; its error stands above")

    def close(self) -> None:
        self.process.communicate()


# ---- whole commands ----------------------------------------------------------------------------


def commands(
    paths: Sequence[Path], output: Path, merged: Path, python: str | None
) -> dict[str, list[str]]:
    """Return the commands that a user would type, each in a fresh process."""
    here = Path(__file__).parent
    files = [str(path) for path in paths]
    found = {
        "sewa average": [sys.executable, "-m", "sewa_cli", "average", *files, "-o", str(output)],
        "timm's way": [sys.executable, str(here / "timm_way.py"), str(output), *files],
    }
    if python is not None:
        config = output.with_name("merge.yaml")
        models = [{"model": str(path.parent), "parameters": {"weight": 1.0}} for path in paths]
        linear = {"merge_method": "linear", "dtype": "float32", "models": models}
        config.write_text(json.dumps(linear))  # JSON is YAML
        plain = ["--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
        command = str(Path(python).with_name("mergekit-yaml"))
        found["mergekit-yaml"] = [command, str(config), str(merged), *plain]
    return found


def run(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, env=as_installed())
    if ended.returncode != 0:
        raise RuntimeError(f"{command[:3]} failed:\n{ended.stderr[-2000:]}")


def peak_of(command: Sequence[str]) -> int:
    """The most anonymous memory a command has had, in bytes; looked at every millisecond."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+)", status.read_text())
        peak = max(peak, int(found[1]) * 1024 if found else 0)
        time.sleep(0.001)
    if process.returncode != 0:
        raise RuntimeError(f"{command[:3]} failed")
    return peak


# ---- all together ------------------------------------------------------------------------------


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, outputs: Sequence[Path]
) -> dict[str, list[float]]:
    """Seconds of each, after one round to warm up. Overwriting a file costs more than a new one."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, work in contestants.items():
            for path in outputs:
                path.unlink(missing_ok=True)
            start = time.perf_counter()
            work()
            if turn > 0:
                times[name].append(time.perf_counter() - start)
    return times


def table(times: Mapping[str, Sequence[float]], ours: str) -> list[dict[str, object]]:
    best = {name: min(seconds) for name, seconds in times.items()}
    usual = {name: median(seconds) for name, seconds in times.items()}
    return [
        {
            "": name,
            "best, s": best[name],
            "median, s": usual[name],
            "best / ours": best[name] / best[ours],
            "median / ours": usual[name] / usual[ours],
        }
        for name in times
    ]


def measure(folder: Path, given: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    paths = make_files(folder, given.files, given.megabytes)
    output, merged = folder / "out.safetensors", folder / "merged"
    outputs = [output, merged / "model.safetensors"]
    size = sum(path.stat().st_size for path in paths) / 1e9
    python = given.mergekit or (sys.executable if find_spec("mergekit") else None)
    mergekit = Mergekit(python, paths, merged) if python else None
    if mergekit is None:
        print("no mergekit: give --mergekit /path/to/python", file=sys.stderr)
    contestants: dict[str, Callable[[], object]] = {
        RAW: lambda: raw_read(paths),
        "sewa: read and sum": lambda: sum_only(paths),
        "sewa: read, sum, write": lambda: sum_and_write(paths, output),
        "SHA-256 for --report": lambda: averaged(paths).recipe(),
        OURS: lambda: sewa_average(paths, output),
        "timm's way": lambda: timm_way(paths, output),
        **({"mergekit linear": mergekit} if mergekit else {}),
    }
    times = take_turns(contestants, given.rounds, outputs)
    if mergekit:
        mergekit.close()
    raw = min(times[RAW])
    work = table(times, OURS)
    for row, seconds in zip(work, times.values(), strict=True):
        row |= {"GB/s": size / min(seconds), "of raw read": f"{raw / min(seconds):.0%}"}

    whole = {
        name: partial(run, command)
        for name, command in commands(paths, output, merged, python).items()
    }
    started = table(take_turns(whole, given.command_rounds, outputs), "sewa average")

    peaks: dict[str, dict[str, object]] = {}
    for sources in (paths, linked(paths, folder, MANY)):
        for name, command in commands(sources, output, merged, python).items():
            output.unlink(missing_ok=True)
            row = peaks.setdefault(name, {"peak anonymous memory": name})
            row[f"{len(sources)} files, MB"] = round(peak_of(command) / 1e6)
    return {"work": work, "commands": started, "memory": list(peaks.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=100, help="of each file; 20 or more")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--command-rounds", type=int, default=7, help="of whole commands")
    parser.add_argument("--mergekit", metavar="PYTHON", help="a Python that can import mergekit")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given)
    print(*map(markdown, found.values()), sep="\n\n")
    if given.json:
        Path(given.json).write_text(json.dumps({"benchmark": "average", **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
