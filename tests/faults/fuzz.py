"""Every kind of file that sewa reads, damaged or forged, given to the command that reads it.

    python tests/faults/fuzz.py --n 100000 --seed 0
    python tests/faults/fuzz.py --seed 0 --only 4711        one case again, with its files kept

A case is a number: the same seed and number make the same files and the same command. It passes if
the command ends within ten seconds with an exit code of the table that is not 1, with at most a
gigabyte, no traceback, nothing on standard error that moves a cursor, and no new file but a whole
output. Commands run in this process, in children that are forked after all is imported.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import IO, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not survive a fork

import torch
import typer.main
from safetensors import safe_open
from safetensors.torch import save
from torch.distributed import checkpoint as dcp

from sewa_cli.cli import main
from sewa_cli.commands import apply, average, inspect  # noqa: F401 - once, not per case
from sewa_cli.report import shared

SECONDS = 10
MEMORY = 2**30
BATCH = 400  # cases of one child: what leaks is gone with it
OUTPUTS = ("out", "out.safetensors", "out.pt", "out.json", "out.report.json", "out.html")
Files = dict[str, bytes]


# ---- what is damaged --------------------------------------------------------------------------


@dataclass(frozen=True)
class Seed:
    """Sound files; `targets`: which of them are damaged, and how; `commands`: what reads them."""

    files: Files
    targets: dict[str, Callable[[Random, bytes], bytes]]
    commands: list[str]


def _tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.arange(12.0).reshape(4, 3) * step,
        "layer.bias": torch.ones(4, dtype=torch.bfloat16) * step,
        "count": torch.tensor(step),
    }


def _safetensors(step: int, only: Sequence[str] = ()) -> bytes:
    tensors = {n: t for n, t in _tensors(step).items() if not only or n in only}
    return save(tensors, {"step": str(step), "metrics": '{"loss": 0.5}', "format": "pt"})


def _torch_file(content: object, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _lightning(step: int) -> dict[str, Any]:
    return {
        "state_dict": _tensors(step),
        "global_step": step,
        "hyper_parameters": {"lr": 0.1, "sizes": [1, 2, 3]},
        "metrics": {"loss": 0.25},
    }


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _set(step: int) -> Files:
    names = [["layer.weight"], ["layer.bias", "count"]]
    shards = {f"m-{i:05d}-of-00002.safetensors": only for i, only in enumerate(names, 1)}
    places = {name: shard for shard, only in shards.items() for name in only}
    files = {shard: _safetensors(step, only) for shard, only in shards.items()}
    index = {"metadata": {"total_size": 60}, "weight_map": places}
    return {**files, "m.safetensors.index.json": _json(index)}


def _run(make: Callable[[int], Files]) -> Files:
    return {f"run/step-{step}/{n}": data for step in (1, 2) for n, data in make(step).items()}


def _folder(step: int) -> Files:
    state = {
        "global_step": step,
        "epoch": 0.5,
        "log_history": [{"step": step, "loss": 0.7, "grad_norm": float("nan")}, {"step": 1}],
    }
    return {
        "model.safetensors": _safetensors(step),
        "config.json": _json({"model_type": "llama", "torch_dtype": "float32", "sizes": [1, 2]}),
        "trainer_state.json": _json(state),
    }


def _adapter(step: int) -> Files:
    factors = {
        "base_model.model.q.lora_A.weight": torch.ones(2, 6) * step,
        "base_model.model.q.lora_B.weight": torch.ones(6, 2) * step,
    }
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {}, "use_dora": False}
    return {"adapter_model.safetensors": save(factors), "adapter_config.json": _json(about)}


def _distributed(step: int) -> Files:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        content = {"model": _tensors(step), "step": step}
        dcp.save(content, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def seeds() -> dict[str, Seed]:
    two = {"a.safetensors": _safetensors(1), "b.safetensors": _safetensors(2)}
    reported = {**two, **_reports(two)}
    torch_files = {"a.pt": _torch_file(_lightning(1)), "b.pt": _torch_file(_lightning(2))}
    old = {"a.pt": _torch_file(_lightning(1), False), "b.pt": torch_files["b.pt"]}
    distributed = _run(_distributed)
    rebuild = ["apply r.json -o out.safetensors", "verify r.json", "report r.json -o out.html"]
    both = ["average run -o out --report out.json", "inspect run"]
    typed = [*both, "average run -o out --output-dtype float16"]
    return {
        "safetensors": Seed(
            two,
            {"a.safetensors": forge_header},
            [
                "average a.safetensors b.safetensors -o out.safetensors --report out.json",
                "inspect a.safetensors b.safetensors",
                "average . -o out.safetensors --shard-size 20",
            ],
        ),
        "safetensors bytes": Seed(
            two, {"a.safetensors": damage}, ["inspect a.safetensors b.safetensors"]
        ),
        "set": Seed(
            _run(_set),
            {
                "run/step-1/m.safetensors.index.json": forge_json,
                "run/step-2/m-00001-of-00002.safetensors": forge_header,
            },
            [
                "average run/step-1 -o out.safetensors",
                "inspect run/step-1/m.safetensors.index.json run/step-2/m.safetensors.index.json",
            ],
        ),
        "trainer_state": Seed(_run(_folder), {"run/step-1/trainer_state.json": forge_json}, both),
        "config.json": Seed(_run(_folder), {"run/step-2/config.json": forge_json}, typed),
        "adapter": Seed(
            _run(_adapter),
            {
                "run/step-1/adapter_config.json": forge_json,
                "run/step-2/adapter_model.safetensors": forge_header,
            },
            ["average run -o out", "average run -o out --set lora=merged"],
        ),
        "pt": Seed(
            torch_files,
            {"a.pt": forge_archive},
            ["average a.pt b.pt -o out.pt", "inspect a.pt b.pt"],
        ),
        "pt, legacy": Seed(
            old, {"a.pt": damage}, ["average a.pt b.pt -o out.safetensors", "inspect a.pt b.pt"]
        ),
        "distributed": Seed(
            distributed,
            {name: damage for name in distributed if name.startswith("run/step-1/")},
            both,
        ),
        "report": Seed(reported, {"r.json": forge_json}, rebuild),
    }


def _reports(files: Files) -> Files:
    """The report of a real average of these, with what only `select` puts into one."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        before = Path.cwd()
        os.chdir(folder)
        try:
            names = " ".join(files)
            command = f"average {names} -o out.safetensors --report r.json"
            assert call(command.split(), said).code == 0
            report = json.loads(Path("r.json").read_text())
        finally:
            os.chdir(before)
    replaced = save({"layer.bias": torch.zeros(4, dtype=torch.bfloat16)})
    report["recipe"]["replaced"] = base64.b64encode(replaced).decode()
    report["recipe"]["working_directory"] = "."
    return {"r.json": _json(report)}


# ---- how it is damaged ------------------------------------------------------------------------

NESTED = [("[" * n + "]" * n) for n in (99, 101, 990, 100_000)]
NESTED += ['{"a":' * n + "1" + "}" * n for n in (101, 990, 100_000)]
WORDS = [
    "", "\0", "a\0b", "\ud800", "\x1b[31m\x07", "x\nerror: forged", "\u202egnp", "x" * 300,
    "é" * 200, "x" * 20_000, "..", "../../etc/passwd", "/etc/passwd", "/dev/zero", ".",
    "__metadata__", "F64", "I64", "C64", "F8_E4M3", "BOOL", "1e400", "9" * 5000, "~nosuchuser/x",
    "None", "b.safetensors",
]  # fmt: skip
NUMBERS = ["0", "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e-400", "-0.0"]
NUMBERS += [str(n) for n in (2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)]
NUMBERS += ["1" + "0" * 400, "9" * 5000, "1e-5000", "true", "null", "[]", "{}", "[null]", '{"": 0}']
VALUES = NUMBERS + NESTED + [json.dumps(word) for word in WORDS]


def damage(random: Random, data: bytes) -> bytes:
    """Bits flipped, bytes lost, doubled, moved, put in, one to four times."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(data) + 1)
        if random.random() < 0.4:  # where headers and pickles are
            at = min(at, random.randrange(200))
        to = min(len(data), at + random.choice((1, 2, 4, 8, 16, 64, 512)))
        some = data[at:to]
        match random.randrange(8):
            case 0 | 1:
                flips = bytes(
                    1 << random.randrange(8) if random.random() < 0.3 else 0 for _ in some
                )
                data = (
                    data[:at] + bytes(a ^ b for a, b in zip(some, flips, strict=True)) + data[to:]
                )
            case 2:
                data = data[:at] if random.random() < 0.7 else data[at:]
            case 3:
                data = data[:to] + some * random.choice((1, 2, 1000)) + data[to:]
            case 4:
                data = data[:at] + data[to:]
            case 5:
                back = random.randrange(len(data) + 1)
                data = data[:back] + some + data[back:]
            case 6:
                edge = random.choice(
                    (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
                )
                data = data[:at] + struct.pack("<Q", edge)[: to - at] + data[to:]
            case 7:
                data = data[:at] + random.randbytes(len(some)) + data[to:]
    return data


def forge_json(random: Random, data: bytes) -> bytes:
    if random.random() < 0.15:
        return damage(random, data)
    content = json.loads(data)
    raw: dict[str, str] = {}  # what `json` would not write, by what stands for it
    for _ in range(random.choice((1, 1, 2, 3))):
        content = _replaced(random, content, raw)
    text = json.dumps(content)
    for mark, value in raw.items():
        text = text.replace(f'"{mark}"', value)
    if random.random() < 0.05:
        text = text[:-1] + "," + text[1:]  # every key twice
    return text.encode(errors="surrogatepass")


def _replaced(random: Random, content: Any, raw: dict[str, str]) -> Any:
    places = [(None, None), *_places(content)]
    owner, key = random.choice(places[-60:] if random.random() < 0.5 else places)
    mark = f"@{len(raw)}@"
    if owner is None:
        if random.random() < 0.9:
            return content if len(places) == 1 else _replaced(random, content, raw)
        raw[mark] = random.choice(VALUES)
        return mark
    match random.randrange(6):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[random.choice(WORDS)] = owner.pop(key)
        case 2:
            _, (other, there) = random.choice(places), random.choice(places[1:])
            owner[key] = json.loads(json.dumps(other[there]))
        case 3 if isinstance(owner, dict):
            raw[mark] = random.choice(VALUES)
            owner[random.choice(WORDS)] = mark
        case _:
            raw[mark] = random.choice(VALUES)
            owner[key] = mark
    return content


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """(owner, key) of every value in it."""
    keys = content.keys() if isinstance(content, dict) else range(len(content))
    for key in list(keys) if isinstance(content, dict | list) else []:
        yield content, key
        if isinstance(content[key], dict | list):
            yield from _places(content[key])


def forge_header(random: Random, data: bytes) -> bytes:
    """A safetensors file with another header, nearly always of the length that it says."""
    if random.random() < 0.2:
        return damage(random, data)
    (length,) = struct.unpack_from("<Q", data)
    header = forge_json(random, data[8 : 8 + length])
    said = len(header) if random.random() < 0.95 else random.choice((0, 7, 2**32, 2**63, 2**64 - 1))
    return struct.pack("<Q", said) + header + data[8 + length :]


def forge_archive(random: Random, data: bytes) -> bytes:
    """A PyTorch file of which the pickle is damaged and the archive around it is whole."""
    if random.random() < 0.3:
        return damage(random, data)
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(target, "w") as archive:
        for member in source.infolist():
            content = source.read(member)
            if member.filename.endswith("data.pkl"):
                content = forge_pickle(random, content)
            elif random.random() < 0.03:
                content = damage(random, content)
            archive.writestr(member.filename, content)
    return target.getvalue()


# opcodes that make, nest, name, call
OPCODES = [
    b".", b"0", b"(", b"}", b"]", b")", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u",
    b"R", b"b", b"\x81", b"N", b"\x88", b"h\x00", b"j\xff\xff\xff\x7f", b"q\x01", b"Q", b"K\xff",
    b"\x8a\x08" + b"\xff" * 8, b"J\xff\xff\xff\x7f", b"G" + b"\x7f\xf0" + b"\0" * 6, b"I1e400\n",
    b"cos\nsystem\n", b"ctorch\nload\n", b"ccollections\nOrderedDict\n", b"2" * 99, b"\x8a\xff",
    b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b")\x85" * 5000, b"](" * 3000,
]  # fmt: skip


def forge_pickle(random: Random, data: bytes) -> bytes:
    if random.random() < 0.4:
        return damage(random, data)
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(2, len(data))
        lost = random.choice((0, 0, 1, 2))
        data = data[:at] + random.choice(OPCODES) + data[at + lost :]
    return data


# ---- one case ---------------------------------------------------------------------------------


@dataclass
class Case:
    number: int
    kind: str
    files: Files
    command: list[str]


def make(found: dict[str, Seed], seed: int, number: int) -> Case:
    random = Random(f"{seed}:{number}")
    kind = list(found)[number % len(found)]
    chosen = found[kind]
    files = dict(chosen.files)
    target = random.choice(list(chosen.targets))
    files[target] = chosen.targets[target](random, files[target])
    return Case(number, kind, files, random.choice(chosen.commands).split())


@dataclass
class Ended:
    code: int
    err: str


def lay_out(case: Case, folder: Path) -> None:
    for name, data in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def call(arguments: Sequence[str], said: IO[bytes]) -> Ended:
    """The command in this process; what it prints goes to the file `said`, and to nowhere."""
    said.seek(0)
    said.truncate()
    kept = os.dup(1), os.dup(2), sys.stdout
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(said.fileno(), 2)
    try:
        code = main(arguments)
    finally:
        sys.stdout = kept[2]
        for descriptor, number in zip(kept[:2], (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)
    said.seek(0)
    return Ended(code, said.read().decode(errors="backslashreplace"))


def fault_of(case: Case, ended: Ended, folder: Path) -> str | None:
    """What is wrong with how it ended; None: nothing."""
    lines = ended.err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    odd = {c for c in ended.err if not c.isprintable() and c != "\n"}
    new = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {*case.files}
    if ended.code not in {0, 2, 3}:
        return f"exit code {ended.code}"
    if "Traceback" in ended.err or "a bug in sewa" in ended.err or "not enough memory" in ended.err:
        return "a traceback, a bug, or no memory"
    if odd:
        return f"control characters {sorted(odd)!r}"
    if any(len(line) > 2100 for line in lines):
        return "a line without end"
    if bool(ended.code) != bool(errors):
        return f"exit code {ended.code} with {len(errors)} errors"
    if ended.code and new:
        return f"left {sorted(new)}"
    return next((why for name in sorted(new) if (why := _not_whole(folder / name))), None)


def _not_whole(path: Path) -> str | None:
    known = path.name.startswith(OUTPUTS) or path.parent.name == "out"
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name)
        elif path.suffix == ".pt":
            torch.load(path, weights_only=True)
        elif path.name in ("out.json", "out.report.json"):
            json.loads(path.read_text())
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>")
    except Exception as error:
        return f"{path.name} is not whole: {error!r:.200}"
    return None if known else f"left {path.name}"


# ---- all of them ------------------------------------------------------------------------------


@dataclass
class Tally:
    say: Callable[[str], None]
    cases: int = 0
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)
    memory: int = 0  # the most above what a child starts with
    codes: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def count(
        self, number: int, kind: str, code: int, seconds: float, more: int, why: str | None
    ) -> None:
        self.cases += 1
        self.codes[str(code)] += 1
        self.slowest = max(self.slowest, (seconds, number))
        self.memory = max(self.memory, more)
        if why is not None:
            self.failures[number] = f"{kind}: {why}"
            self.say(f"case {number}: {kind}: {why}")

    def __str__(self) -> str:
        codes = ", ".join(f"{n} × {code}" for code, n in sorted(self.codes.items()))
        return (
            f"{self.cases} cases in {self.seconds:.0f} s, {len(self.failures)} failures; exit "
            f"codes: {codes}; slowest {self.slowest[0]:.1f} s (case {self.slowest[1]}); at most "
            f"{self.memory / 2**20:.0f} MiB"
        )


def work(numbers: Sequence[int], seed: int, found: dict[str, Seed], tell: IO[str]) -> None:
    """In a child: each case in turn, a line about each."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync is slow elsewhere
    with tempfile.TemporaryDirectory(dir=place) as above, tempfile.TemporaryFile() as said:
        for number in numbers:
            case = make(found, seed, number)
            folder = Path(above) / "case"
            folder.mkdir()
            lay_out(case, folder)
            os.chdir(folder)
            start = time.monotonic()
            signal.alarm(SECONDS)  # ends this process
            try:
                ended = call(case.command, said)
                seconds = time.monotonic() - start
                why = fault_of(case, ended, folder)
                code = ended.code
            except BaseException:
                code, seconds, why = 1, 0.0, traceback.format_exc()
            more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024
            if why is None and more > MEMORY:
                why = f"took {more / 2**20:.0f} MiB"
            tell.write(json.dumps([number, case.kind, code, seconds, more, why]) + "\n")
            tell.flush()
            os.chdir(above)
            shutil.rmtree(folder)


def run(numbers: Sequence[int], seed: int, say: Callable[[str], None]) -> Tally:
    """All these cases, in children of BATCH each; one that hangs or dies is a failure."""
    # what a process looks up once, we would for each case
    typer.main.get_command = cache(typer.main.get_command)
    shared.version = cache(shared.version)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    found, left = seeds(), list(numbers)
    tally, start = Tally(say), time.monotonic()
    while left:
        batch = left[:BATCH]
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reads)
                work(batch, seed, found, os.fdopen(writes, "w"))
            finally:
                os._exit(0)
        os.close(writes)
        done = 0
        with os.fdopen(reads) as lines:
            for line in lines:
                tally.count(*json.loads(line))
                done += 1
        _, status = os.waitpid(pid, 0)
        if done < len(batch):
            why = f"ended with {os.waitstatus_to_exitcode(status)}"
            tally.count(batch[done], "all", -1, SECONDS, 0, why)
            done += 1
        left = left[done:]
        tally.seconds = time.monotonic() - start
        say(str(tally))
    return tally


def keep(number: int, seed: int, why: str, into: Path) -> str:
    """The files of a failed case, to be looked at; returns the command that runs it again."""
    case = make(seeds(), seed, number)
    folder = into / f"{seed}-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    lay_out(case, folder)
    again = f"cd {folder} && sewa {' '.join(case.command)}"
    (folder / "why.txt").write_text(f"{why}\n{again}\n")
    return again


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--into", type=Path, default=Path("fuzz-failures"))
    given = parser.parse_args()
    start = given.start if given.only is None else given.only
    wanted = range(start, start + (given.n if given.only is None else 1))
    tally = run(wanted, given.seed, lambda text: print(text, flush=True))  # noqa: T201
    if given.only is not None:
        keep(given.only, given.seed, tally.failures.get(given.only, "passed"), given.into)
    for number, why in sorted(tally.failures.items())[:100]:
        print(f"{why}\n  {keep(number, given.seed, why, given.into)}")  # noqa: T201
    print(tally)  # noqa: T201
    sys.exit(bool(tally.failures))
