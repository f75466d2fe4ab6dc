"""Averaging against the machine's limit, timm and mergekit: `python benchmarks/average.py`.

    python benchmarks/average.py --files 20 --megabytes 100 --mergekit PYTHON

Makes the files (a small Llama of random weights) in a temporary folder, all of them in the page
cache, and lets the contestants take turns; best time and median of each. The limit is a plain sum
over the mapped files by two threads. Memory is the peak of anonymous memory (RssAnon: what a
program has allocated, not the pages of files it has mapped), each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from common import markdown
from safetensors.torch import load_file, save_file
from torch import Tensor

from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.config import Config
from sewa_cli.run import run_average
from sewa_cli.run.recipe import Averaged

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
        save_file(state, path, metadata={"format": "pt", "step": str(n)})
        paths.append(path)
    return paths


def linked(paths: Sequence[Path], folder: Path, count: int) -> list[Path]:
    """So many names for these files: as many mappings, without the disk space."""
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


def averaged(paths: Sequence[Path]) -> Averaged:
    sources = [open_checkpoint(path, Reads()) for path in paths]
    names = {name: name for name in sources[0].tensors}
    return Averaged(sources, [1 / len(paths)] * len(paths), names)


def sum_only(paths: Sequence[Path]) -> None:
    """Headers, reading and summing of `sewa average`: everything but the writing."""
    mean = averaged(paths)
    for _ in mean.pieces(list(mean.names)):
        pass


def sum_and_write(paths: Sequence[Path], output: Path) -> None:
    """What the peers do as well: the file may still be in the system's hands when they end."""
    with output.open("wb") as file:
        averaged(paths).write(file)


def sewa_average(paths: Sequence[Path], output: Path) -> None:
    """All of `sewa average` after the imports: also the checks, the fsync, the new name."""
    weights = [1 / len(paths)] * len(paths)
    run_average(Config(checkpoints=tuple(paths), output=str(output)), "", weights, force=True)


def timm_way(paths: Sequence[Path], output: Path) -> None:
    """As timm's avg_checkpoints.py does it: whole state dicts, sums in float64."""
    total: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for path in paths:
        for name, tensor in load_file(path).items():
            if name not in total:
                total[name] = tensor.clone().to(torch.float64)
                counts[name] = 1
            else:
                total[name] += tensor.to(torch.float64)
                counts[name] += 1
    for name, tensor in total.items():
        tensor.div_(counts[name])
    limits = torch.finfo(torch.float32)
    final = {n: t.clamp(limits.min, limits.max).to(torch.float32) for n, t in total.items()}
    save_file(final, output)


CONTESTANTS = {"sewa average": sewa_average, "timm's way": timm_way}


class Mergekit:
    """A process that has mergekit loaded, and merges when told to."""

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

    def peak(self) -> int:
        with watched(self.process.pid) as peak:
            self()
        return peak[0]

    def close(self) -> None:
        self.process.communicate()


# ---- memory ------------------------------------------------------------------------------------


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """The peak of a process' anonymous memory, in bytes, looked at a thousand times a second."""
    status, peak, done = Path(f"/proc/{pid}/status"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            found = re.search(r"RssAnon:\s+(\d+)", status.read_text())
            peak[0] = max(peak[0], int(found[1]) * 1024 if found else 0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def peak_of(contestant: str, paths: Sequence[Path], output: Path) -> int:
    """In a fresh process, so that nobody inherits another's heap."""
    command = [sys.executable, __file__, "--peak-of", contestant, "--output", str(output)]
    ended = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, check=True)
    return int(ended.stdout)


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


def measure(folder: Path, given: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    paths = make_files(folder, given.files, given.megabytes)
    output = folder / "out.safetensors"
    size = sum(path.stat().st_size for path in paths) / 1e9
    python = given.mergekit or (sys.executable if find_spec("mergekit") else None)
    mergekit = Mergekit(python, paths, folder / "merged") if python else None
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
    times = take_turns(contestants, given.rounds, [output, folder / "merged/model.safetensors"])
    best = {name: min(seconds) for name, seconds in times.items()}
    usual = {name: median(seconds) for name, seconds in times.items()}
    speed: list[dict[str, object]] = [
        {
            "": name,
            "best, s": best[name],
            "median, s": usual[name],
            "GB/s": size / best[name],
            "of raw read": f"{best[RAW] / best[name]:.0%}",
            "best / ours": best[name] / best[OURS],
            "median / ours": usual[name] / usual[OURS],
        }
        for name in contestants
    ]
    many = linked(paths, folder, MANY)
    peaks = {
        name: (peak_of(name, paths, output), peak_of(name, many, output)) for name in CONTESTANTS
    }
    if mergekit and python:
        after = Mergekit(python, many, folder / "merged")
        peaks["mergekit linear"] = (mergekit.peak(), after.peak())
        mergekit.close()
        after.close()
    few_files, many_files = f"{len(paths)} files, MB", f"{MANY} files, MB"
    memory: list[dict[str, object]] = [
        {"peak anonymous memory": name, few_files: round(a / 1e6), many_files: round(b / 1e6)}
        for name, (a, b) in peaks.items()
    ]
    return {"speed": speed, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=100, help="of each file; 20 or more")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mergekit", metavar="PYTHON", help="a Python that can import mergekit")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak_of:
        with watched(os.getpid()) as peak:
            CONTESTANTS[given.peak_of](given.paths, given.output)
        print(peak[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given)
    print(markdown(found["speed"]), markdown(found["memory"]), sep="\n\n")
    if given.json:
        Path(given.json).write_text(json.dumps({"benchmark": "average", **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
