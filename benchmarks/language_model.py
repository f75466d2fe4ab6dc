"""A language model of 32,000 words: `python benchmarks/language_model.py --folder lm`.

The run is made once, in the folder: a tokenizer and a small Llama, both trained on the sources of
Python's own standard library, at a constant rate after warm-up, and the last 20 checkpoints.

    predictions  of 20 random averages of five or more, from all logits and from digests of them
    command      (`--command`) the default on 300 rows: all take part; its time in k plain forward
                 passes; its peak anonymous memory
    kills        (`--kills 10`) the default on 64 rows with a cache, killed so often at random from
                 its beginning to its end, then left alone: the bytes of an undisturbed run
    gumbel       (`--gumbel`) the mask of five on 300 rows: what it takes, and the
                 longest time without a word in the log
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import finish
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from sewa_cli.events import Events
from sewa_cli.objective.classes import Classes
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.units import Grouping
from sewa_cli.solvers import Problem
from sewa_cli.solvers.outputs.examples import PredictingSettings, settle
from sewa_cli.solvers.outputs.predictions import Predictions, mean, predict
from sewa_cli.trajectory.tiers import Dense

WORDS, LENGTH, CHECKPOINTS = 32_000, 128, 20
STEPS, WARM_UP, EVERY, BATCH, RATE = 900, 50, 20, 8, 2e-3
ROWS = 300  # to choose by, and as many held out
AVERAGES = 20  # random ones, of five checkpoints or more
VARIANTS = [(0, 0), (32, 32), (16, 16), (8, 56), (56, 8), (64, 64), (8, 8)]


def make_run(folder: Path) -> None:
    """Tokenizer, checkpoints `run/checkpoint-*`, `selection.jsonl` and `heldout.jsonl`."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = _sources()
    tokenizer = _tokenizer(texts, folder / "tokenizer")
    ids = [i for text in texts for i in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    rows = [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH, LENGTH)]
    random.Random(0).shuffle(rows)
    # the same tokens when the text is read again
    whole = (row for row in rows if tokenizer(tokenizer.decode(row))["input_ids"] == row)
    kept = [next(whole) for _ in range(2 * ROWS)]
    for name, some in (("selection", kept[:ROWS]), ("heldout", kept[ROWS:])):
        lines = [json.dumps({"text": tokenizer.decode(row)}) + "\n" for row in some]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    used = {tuple(row) for row in kept}
    _train([row for row in rows if tuple(row) not in used], tokenizer, folder / "run")
    (folder / "done").touch()


def _sources() -> list[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(stdlib.rglob("*.py")) if "site-packages" not in f.parts]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def _tokenizer(texts: list[str], folder: Path) -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    found = ByteLevelBPETokenizer()
    found.train_from_iterator(texts, vocab_size=WORDS, special_tokens=["<end>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=found._tokenizer, eos_token="<end>", pad_token="<end>"
    )
    fast.save_pretrained(folder)
    return fast


def _train(rows: list[list[int]], tokenizer: Any, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.eos_token_id,
        )
    )
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    start = time.time()
    for step in range(1, STEPS + 1):
        adam.param_groups[0]["lr"] = RATE * min(1.0, step / WARM_UP)
        ids = torch.tensor([rows[(step * BATCH + i) % len(rows)] for i in range(BATCH)])
        loss = model(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        left = STEPS - step
        if left % EVERY == 0 and left // EVERY < CHECKPOINTS:
            model.save_pretrained(folder / f"checkpoint-{step}")
            tokenizer.save_pretrained(folder / f"checkpoint-{step}")
        if step % 20 == 0:
            print(f"step {step}  loss {loss:.4f}  {time.time() - start:.0f} s", flush=True)


# ---- the command -------------------------------------------------------------------------------


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def _prepared(folder: Path, rows: int) -> Path:
    """Make a folder with a sewa.yaml that chooses by `rows` rows."""
    work = folder / "command"
    work.mkdir(exist_ok=True)
    lines = (folder / "selection.jsonl").read_text().splitlines(keepends=True)[:rows]
    (work / "selection.jsonl").write_text("".join(lines))
    (work / "sewa.yaml").write_text(
        f"checkpoints: {folder.absolute()}/run\ntask: huggingface\nargs: {{kind: causal-lm, "
        f"selection: selection.jsonl, max_length: {LENGTH}, batch_size: {BATCH}}}\n"
    )
    return work


def _select(output: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "sewa_cli", "select", "-o", output, "--force", *more]


def _run(line: list[str], work: Path) -> None:
    subprocess.run(line, cwd=work, env=ONE_THREAD, check=True, stdout=subprocess.DEVNULL)


def kills(folder: Path, rows: int, times: int) -> list[dict[str, Any]]:
    """Killed so often, each time when a further share of the work is done, then left alone.

    How far a run is, its cache tells: the shares are drawn from all the entries of an undisturbed
    one, so that kills are spread over the whole of it however fast the machine is. What was kept
    once must still be the same file in the end: nothing was made twice.
    """
    work, draw = _prepared(folder, rows), random.Random(0)
    for name in ("whole-cache", "cache"):
        shutil.rmtree(work / name, ignore_errors=True)
    _run(_select("whole", "--quiet", "--cache", "whole-cache"), work)
    total = len(_entries(work / "whole-cache"))
    line, killed, kept = _select("disturbed", "--quiet", "--cache", "cache"), 0, dict[str, int]()
    for after in sorted(draw.sample(range(1, total), times)):
        running = subprocess.Popen(line, cwd=work, env=ONE_THREAD, stdout=subprocess.DEVNULL)
        while running.poll() is None and len(_entries(work / "cache")) < after:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))  # in the midst of the next
        killed += running.poll() is None
        running.kill()
        running.wait()
        kept = _entries(work / "cache") | kept
    _run(line, work)
    ended = _entries(work / "cache")
    weights = [(work / name / "model.safetensors").read_bytes() for name in ("whole", "disturbed")]
    return [
        {
            "rows": rows,
            "entries": total,
            "killed": killed,
            "same bytes": str(weights[0] == weights[1]),
            "made twice": sum(ended.get(name) != file for name, file in kept.items()),
            "entries in the end": len(ended),
        }
    ]


def _entries(cache: Path) -> dict[str, int]:
    """Name → which file it is; a name that is written anew is another."""
    return {path.name: path.stat().st_ino for path in cache.glob("*/" + "?" * 64)}


def gumbel(folder: Path, rows: int) -> list[dict[str, Any]]:
    """`--solver gumbel`, in seconds of the processor; the log is watched by the clock."""
    work = _prepared(folder, rows)
    line = _select("mask", "--K", "5", "--solver", "gumbel")
    before, silence, last = _of_children(), 0.0, time.perf_counter()
    running = subprocess.Popen(line, cwd=work, env=ONE_THREAD, stderr=subprocess.PIPE)
    assert running.stderr is not None
    for _ in running.stderr:
        now = time.perf_counter()
        silence, last = max(silence, now - last), now
    if running.wait() != 0:
        raise SystemExit("sewa select failed")
    found = {"rows": rows, "CPU seconds": _of_children() - before}
    return [{**found, "longest silence, s": max(silence, time.perf_counter() - last)}]


def command(folder: Path, rows: int) -> list[dict[str, Any]]:
    """Time `sewa select` in a process of its own, next to k · rounds plain passes.

    In seconds of the processor, one thread each: the clock's depend on who else is at work.
    """
    work = _prepared(folder, rows)
    before = _of_children()
    with (work / "report.json").open("w") as out:
        running = subprocess.Popen(_select("out", "--json"), cwd=work, stdout=out, env=ONE_THREAD)
        peak = 0
        while running.poll() is None:
            peak = max(peak, _anonymous(running.pid))
            time.sleep(0.05)
    seconds = _of_children() - before
    if running.returncode != 0:
        raise SystemExit("sewa select failed")
    report = json.loads((work / "report.json").read_text())
    [predicted] = [one for one in report["findings"] if one["kind"] == "predicted"]
    objective, W = _objective(folder, rows, BATCH)
    start = time.process_time()
    with torch.no_grad():
        for batch in objective.selection:
            objective.predict(objective.model.module, batch)
    plain = CHECKPOINTS * (time.process_time() - start)
    batches = -(-rows // BATCH)
    return [
        {
            "rows": f"{predicted['rows']} of {rows}",
            "CPU seconds": seconds,
            "of plain passes": plain,
            "ratio": seconds / plain,
            "passes over the rows": report["cost"]["forward_passes"] / batches,
            "peak anonymous MiB": peak / 2**20,
            "model and two checkpoints MiB": 3 * 4 * W.shape[1] / 2**20,
        }
    ]


def _of_children() -> float:
    """CPU seconds of the processes that were begun here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _anonymous(pid: int) -> int:
    """Bytes that are in memory and in no file."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return 1024 * int(line.split()[1])
    return 0


# ---- predictions -------------------------------------------------------------------------------


def _predictions(problem: Problem, base: Tensor, rows: int, m: int, s: int) -> Predictions:
    """Predict around the mean of all; m = 0: from all logits, as of a task without targets()."""
    keep = PredictingSettings(outputs=10**12, largest=max(m, 1), samples=max(s, 1))
    if m == 0:
        problem = replace(problem, objective=replace(problem.objective, classes=None))
    problem, examples = settle(problem, keep, "linear")
    frame, at_base = examples.keep(problem, keep, base, splits=True)
    k, units = problem.trajectory.k, Grouping.make([rows], True, None)
    coefficients = mean(range(k), k)
    return predict(problem, frame, at_base, base, coefficients, units, 0.1, rows, lambda *_: None)


def predictions(folder: Path, rows: int, variants: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Predicted against true losses of random averages, around the mean of all."""
    objective, W = _objective(folder, rows)
    model, k = objective.model, len(W)
    problem = Problem(objective, Dense(W, model.layout), 2**34, 0, Events())
    base = W.mean(0)
    draw = random.Random(0)
    subsets = [draw.sample(range(k), draw.randint(5, k)) for _ in range(AVERAGES)]
    C = torch.stack([mean(chosen, k) for chosen in subsets])
    true = torch.tensor([objective.learning_losses(c.float() @ W).mean for c in C])
    found, rows_of_table = {}, []
    for m, s in variants:
        here = _predictions(problem, base, rows, m, s)
        start = time.perf_counter()
        predicted = torch.tensor([here.loss(c) for c in C])
        seconds = time.perf_counter() - start
        errors = (predicted - true).abs()
        found[m, s] = float(errors.mean())
        all_logits = found.get((0, 0))
        rows_of_table.append(
            {
                "kept": "all logits" if m == 0 else f"m={m}, s={s}",
                "numbers a token": WORDS if m == 0 else 1 + m + s,
                "mean error": found[m, s],
                "worst": float(errors.max()),
                "of all logits'": found[m, s] / all_logits if all_logits else 1.0,
                "at the base": abs(here.loss(here.base) - objective.learning_losses(base).mean),
                "ms a loss": 1000 * seconds / len(C),
                "rows": here.size.rows,
            }
        )
        print(rows_of_table[-1], flush=True)
        del here
    print(f"true losses {float(true.min()):.4f} to {float(true.max()):.4f}", flush=True)
    return rows_of_table


def _objective(folder: Path, rows: int, size: int = 4) -> tuple[Objective, Tensor]:
    """The newest checkpoint's model on the first selection rows, and W [k, P]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = sorted((folder / "run").iterdir(), key=lambda path: int(path.name.split("-")[-1]))
    tokenizer = AutoTokenizer.from_pretrained(folders[-1])
    lines = (folder / "selection.jsonl").read_text().splitlines()[:rows]
    ids = torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"] for line in lines])
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    batches = list(zip(torch.split(ids, size), torch.split(labels, size), strict=True))
    model = FlatModel(AutoModelForCausalLM.from_pretrained(folders[-1]), torch.device("cpu"))
    W = torch.empty(len(folders), model.layout.size)
    for row, one in zip(W, folders, strict=True):
        model.load(load_file(one / "model.safetensors").items())
        row.copy_(model.flat)
    predict = lambda module, batch: module(input_ids=batch[0]).logits  # noqa: E731
    loss = lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch[1].flatten())  # noqa: E731
    classes = Classes(predict, loss, lambda batch: (batch[1], None))
    objective = Objective(model, predict, loss, torch.autograd.backward, batches)
    objective = replace(objective, classes=classes)
    return objective, W


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="kept there, made once")
    parser.add_argument("--rows", type=int, help="to predict on (8), or for the command (300)")
    parser.add_argument("--command", action="store_true", help="the whole default command")
    parser.add_argument("--kills", type=int, help="so often, of the default command")
    parser.add_argument("--gumbel", action="store_true", help="the mask of five")
    parser.add_argument("--json", help="write the table here as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_run(args.folder)
    if args.command:
        table = command(args.folder, args.rows or ROWS)
    elif args.kills:
        table = kills(args.folder, args.rows or 64, args.kills)
    elif args.gumbel:
        table = gumbel(args.folder, args.rows or ROWS)
    else:
        table = predictions(args.folder, args.rows or 8, VARIANTS)
    finish("language_model", table, args.json)
