"""Read a folder as a loader does: it has the old average, the new one, none, or worse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

Files = dict[str, bytes]  # by their path in the folder; an empty folder is its path and a slash
SUFFIX = ".safetensors"
INSIDE = "sewa.report.json"
GONE = b"there is no such file"


def files_in(folder: Path) -> Files:
    found: Files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = b"-> " + bytes(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found


def put(files: Files, folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def report_of(output: str) -> str:
    """Return where an output has its report: next to a file, inside a folder."""
    is_file = output.endswith(SUFFIX)
    return f"{output.removesuffix(SUFFIX)}.report.json" if is_file else f"{output}/{INSIDE}"


def average_in(files: Files, output: str) -> Files:
    """All that a loader reaches from a name: a file, a folder, or nothing."""
    inside, report = f"{output}/", f"{output}/{INSIDE}"
    found = {n: data for n, data in files.items() if n == output or n.startswith(inside)}
    return {name: data for name, data in found.items() if name != report}


def loads(folder: Path, files: Iterable[str]) -> None:
    """Every safetensors file is whole, says the library."""
    for name in files:
        if name.endswith(SUFFIX):
            with safe_open(folder / name, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118
                    file.get_tensor(key)


@dataclass(frozen=True)
class Scene:
    """A folder before a command, and after it when nothing disturbs it."""

    before: Files
    after: Files
    outputs: tuple[str, ...]  # names that each appear whole or not at all
    report: str | None = None  # where the first one's report stands, if there is one
    bystanders: tuple[str, ...] = ()

    def state(self, now: Files, output: str | None = None) -> str:
        """old, new, absent or mixture."""
        name = output or self.outputs[0]
        found = average_in(now, name)
        for state, files in (("new", self.after), ("old", self.before)):
            if found and found == average_in(files, name):
                return state
        return "mixture" if found else "absent"

    def mixtures(self, now: Files) -> list[str]:
        """Find averages of more than one run, and reports that describe another average."""
        states = {output: self.state(now, output) for output in self.outputs}
        faults = [f"{output}: a mixture" for output, state in states.items() if state == "mixture"]
        if self.report in now and not faults:
            state = states[self.outputs[0]]
            if state == "absent":
                faults.append(f"{self.report}: describes nothing that is there")
            elif not self._describes(now, state):
                faults.append(f"{self.report}: is not the {state} average's")
        return faults

    def _describes(self, now: Files, state: str) -> bool:
        assert self.report is not None
        if state == "old" or now[self.report] == self.before.get(self.report):
            return state == "old" and now[self.report] == self.before.get(self.report)
        return self.report in self.after and same_recipe(now, self.after, self.report)

    def litter(self, now: Files) -> list[str]:
        """What is neither an output, nor a report, nor somebody else's."""
        known = {self.report, *self.bystanders}
        for output in self.outputs:
            known |= average_in(now, output).keys()
        return [name for name in now if name not in known]

    def others(self, now: Files) -> list[str]:
        """What happened to files that are none of the command's business."""
        changed = [name for name in self.bystanders if now.get(name) != self.before[name]]
        return [f"{name}: is not ours, and was changed" for name in changed]

    def is_after(self, now: Files) -> bool:
        """All of the new: but for the time it took, the report too."""
        rest = [(n, data) for n, data in now.items() if n != self.report]
        if now.keys() != self.after.keys() or any(self.after[n] != data for n, data in rest):
            return False
        return not self.mixtures(now)


def same_recipe(now: Files, then: Files, report: str) -> bool:
    """Whether a report says the same as another one but for how long things took."""
    found, expected = (_said(json.loads(files[report])) for files in (now, then))
    hashes = json.loads(now[report]).get("files") or []
    return found == expected and all(
        hashlib.sha256(now.get(one["path"], GONE)).hexdigest() == one["sha256"] for one in hashes
    )


def _said(report: dict[str, Any]) -> Any:
    return report.get("files"), report.get("output"), report.get("recipe")
