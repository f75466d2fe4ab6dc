"""The cases: every command that writes, every form of output, over nothing and over older ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from helpers.tiny import TASK, train_tiny

from faults.driver import Driver, Ended, Run
from faults.judge import Files, Scene, files_in, loads, put, report_of

FORMS = ("file", "folder", "shards", "three shards")
# bytes; the network has 64 + 384 and 8 + 128
SIZES = {"shards": "450", "three shards": "390"}
# what stands next to outputs and is nobody's litter, however it may look
BYSTANDERS: Files = {
    "notes.txt": b"mine",
    ".hidden": b"mine",
    ".sewa-notes": b"mine",
    "out2.safetensors": b"mine",
    ".sewa-12345678": b"mine",
}


@dataclass(frozen=True)
class Case:
    """A command that writes an output of a form, over nothing (`over` is None) or an older one."""

    command: str
    form: str  # one of FORMS; of inspect and init, file
    over: str | None = None
    # report: where it usually is; elsewhere; none; or stale: there is one of the older average only
    report: str = "report"

    def __str__(self) -> str:
        over = "new" if self.over is None else f"over a {self.over}"
        return f"{self.command}: {self.form}, {over}, {self.report}"

    @property
    def output(self) -> str:
        return "out.safetensors" if self.form == "file" else "out"

    @property
    def outputs(self) -> tuple[str, ...]:
        own = {"inspect": ("out.png",), "init": ("sewa.yaml", "task.py")}
        return own.get(self.command, (self.output,))

    @property
    def report_name(self) -> str:
        return "out.report.json" if self.report == "elsewhere" else report_of(self.output)

    @property
    def inputs(self) -> str:
        return f"../inputs/{'folders' if self.form == 'folder' else 'files'}"

    def argv(self, force: bool) -> list[str]:
        task = ["--task", "../inputs/task.py", "--set", "device=cpu"]
        name = ["-o", self.output]
        shards = ["--shard-size", SIZES[self.form]] if self.form in SIZES else []
        asked = self.report in ("report", "elsewhere")
        report = ["--report", self.report_name] if asked else []
        size = ["--set", f"shard_size={SIZES[self.form]}"] if shards else []
        quick = ["--K", "3", "--solver", "gumbel", "--set", "gumbel.iterations=2"]
        few = ["--methods", "uniform,lawa", "--K", "3", "--set", "compare.bootstrap=100"]
        own = {
            "average": ["average", self.inputs, *name, *shards, *report],
            "apply": ["apply", f"../inputs/{self.form}.report.json", "-o", self.output],
            "select": ["select", self.inputs, *task, *name, *shards, *quick],
            "compare": ["compare", self.inputs, *task, "--output-best", self.output, *few, *size],
            "inspect": ["inspect", self.inputs, "--plot", "out.png"],
            "init": ["init", "."],
        }[self.command]
        return [*own, "--force"] if force else own

    def older(self) -> list[str]:
        """The command that makes what is there before: another average of the same name."""
        report = "elsewhere" if self.report == "elsewhere" else "report"
        other = replace(self, command="average", form=self.over or self.form, report=report)
        return [*other.argv(force=False), "--last", "2"]


class Stage:
    """A folder for one case after the other, with inputs next to it that must stay as they are."""

    def __init__(self, root: Path, driver: Driver) -> None:
        self.out, self.inputs, self._driver = root / "out", root / "inputs", driver
        self.out.mkdir(parents=True)
        write_inputs(self.inputs)
        for form in FORMS:
            case = Case("average", form)
            self._must(case.argv(force=False))
            (self.out / case.report_name).rename(self.inputs / f"{form}.report.json")
            self.clear()
        self._untouched = files_in(self.inputs)

    def clear(self, files: Files | None = None) -> None:
        # not by its name: some test may have a lock on it, or stand in it
        for path in self.out.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        put(files or {}, self.out)

    def run(self, argv: Sequence[str], **faults: object) -> Ended:
        return self._driver.run(self.asked(argv, **faults))

    def together(self, *runs: Run) -> list[Ended]:
        return self._driver.together(*runs)

    def asked(self, argv: Sequence[str], **faults: object) -> Run:
        return replace(Run(argv, str(self.out), str(self.out)), **faults)  # type: ignore[arg-type]

    def _must(self, argv: Sequence[str], **faults: object) -> Ended:
        ended = self.run(argv, **faults)
        assert ended.code == 0, f"{' '.join(argv)}: {ended.err}"
        return ended

    def inputs_changed(self) -> list[str]:
        now = files_in(self.inputs)
        names = self._untouched.keys() | now.keys()
        return [f"inputs/{n}: changed" for n in names if now.get(n) != self._untouched.get(n)]

    def prepare(self, case: Case) -> Files:
        """The folder as it is before the case."""
        self.clear(BYSTANDERS)
        if case.over is not None:
            if case.command == "init":
                put({"sewa.yaml": b"old", "task.py": b"old"}, self.out)
            elif case.command == "inspect":
                put({"out.png": b"old"}, self.out)
            else:
                self._must(case.older())
                if case.report == "none":
                    (self.out / case.report_name).unlink()
        return files_in(self.out)

    def scene(self, case: Case, before: Files, force: bool, **faults: object) -> Scene:
        """With what an undisturbed run makes in a folder where there was nothing before."""
        self.clear(BYSTANDERS)
        self._must(case.argv(force), **faults)
        after = files_in(self.out)
        loads(self.out, (name for name in after if name not in BYSTANDERS))
        return Scene(before, after, case.outputs, case.report_name, tuple(BYSTANDERS))


def write_inputs(folder: Path) -> None:
    """Four checkpoints, as files and as folders of the Hugging Face kind; a task for them."""
    for path in train_tiny(folder / "files", k=4):
        place = folder / "folders" / f"checkpoint-{path.stem.removeprefix('step-')}"
        place.mkdir(parents=True)
        shutil.copyfile(path, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({"model_type": "tiny"}))
        (place / "tokenizer.json").write_text("{}")
    (folder / "task.py").write_text(TASK)
