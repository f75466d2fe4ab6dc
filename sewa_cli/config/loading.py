"""Merge the YAML, the flags and `--set`; resolve paths; report every fault."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sewa_cli.config.models import (
    RANGE,
    READY_MADE,
    STDOUT,
    CompareConfig,
    Config,
    ObjectiveConfig,
    names_elsewhere,
)
from sewa_cli.errors import ConfigError
from sewa_cli.text import did_you_mean, one_line, shown

DEFAULT_FILE = "sewa.yaml"


def find_config(explicit: Path | None) -> Path | None:
    """Return the file named by --config, else ./sewa.yaml if there is one."""
    if explicit is not None:
        return explicit
    path = Path(DEFAULT_FILE)
    return path if os.path.lexists(path) else None


@dataclass(frozen=True)
class Sections:
    """The solvers, each of which has a section of its own name in sewa.yaml.

    models  the settings of those that these settings name; None: not to be checked now
    """

    names: list[str]
    models: Mapping[str, type[BaseModel] | None]


def load_config(
    path: Path | None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
    dashes: str = "--",
    find_sections: Callable[[Mapping[str, Any]], Sections] | None = None,
) -> Config:
    """Read the YAML at `path` (None: defaults); `flags` (dotted key → value) and `sets` win."""
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}  # dotted key → where it came from, for the fault's first words
    faults: list[str] = []
    flags = {key: value for key, value in (flags or {}).items() if value is not None}
    if path is not None:
        from sewa_cli.config.yaml_file import read_file  # PyYAML is slow to import

        settings = _relative_to(path.parent, read_file(path), flags.get("task"))

    for key, value in flags.items():
        with suppress(ValueError):  # the section is no section: validation will say so
            _put(settings, key, value)
            sources[key] = dashes + key.rpartition(".")[2].replace("_", "-")
    for text in sets:
        from sewa_cli.config.yaml_file import read_value

        key, equals, raw = text.partition("=")
        try:
            if not equals or not key:
                raise ValueError("must look like key=value")
            _put(settings, key, read_value(raw))
            sources[key] = f"--set {shown(key, 100)}"
        except ValueError as error:
            faults.append(f"--set {shown(text, 100)}: {one_line(error)}")
    where = str(path or "config")
    sections = None if find_sections is None else find_sections(settings)
    if sections is not None:
        faults += _validate_sections(settings, sections, where, sources)
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        faults += [
            _describe(fault, fault["loc"], where, sources, _known(fault["loc"], sections))
            for fault in error.errors(include_url=False)
        ]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))  # one flag may set several keys
    if config.checkpoints and "checkpoints" not in sources:
        config._file = path
    return config


def _validate_sections(
    settings: dict[str, Any], sections: Sections, file: str, sources: Mapping[str, str]
) -> list[str]:
    """Move solvers' sections into `solvers`, checked and completed; return the faults."""
    faults, whole = [], dict[str, Any]()
    chosen, known = settings.get("solver"), sections.names
    if "solvers" in settings:
        faults.append(
            f"{sources.get('solvers', file)}: solvers: unknown key; a solver's settings "
            f"stand under its name: {', '.join(known)}"
        )
    if isinstance(chosen, str) and chosen not in known:
        where = sources.get("solver", f"{file}: solver")
        hint = did_you_mean(chosen, known) or f"there are {', '.join(known)}"
        faults.append(f"{where}: unknown solver {chosen!r:.100}; {hint}")
    for name, model in sections.models.items():
        section = settings.pop(name, None)
        if model is None:
            whole[name] = section or {}
            if not isinstance(section, dict | None):
                where = sources.get(name, f"{file}: {name}")
                faults.append(
                    f"{where}: must be a section with keys of its own, found {section!r:.100}"
                )
            continue
        try:
            whole[name] = model.model_validate({} if section is None else section).model_dump()
        except ValidationError as error:
            faults += [
                _describe(fault, (name, *fault["loc"]), file, sources, list(model.model_fields))
                for fault in error.errors(include_url=False)
            ]
    settings["solvers"] = whole
    return faults


def _relative_to(
    folder: Path, settings: dict[str, Any], task: object | None = None
) -> dict[str, Any]:
    """Resolve the paths of a YAML in `folder`.

    In `args`, values that start with ./ or ../ are paths; a ready-made task has more.
    """

    def join(value: object) -> object:
        if isinstance(value, list):
            return [join(item) for item in value]
        if not isinstance(value, str) or names_elsewhere(value):
            return value
        return str(folder / _at_home(value))

    def join_dotted(value: object) -> object:
        if isinstance(value, dict):
            return {key: join_dotted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [join_dotted(item) for item in value]
        is_path = isinstance(value, str) and value.startswith(("./", "../"))
        return join(value) if is_path else value

    def join_command(word: str) -> str:
        return os.path.join(folder, word) if word.startswith(("./", "../")) else word  # noqa: PTH118

    resolved = dict(settings)
    for key in ("report", "output", "solver_from", "checkpoints", "cache", "scratch"):
        if settings.get(key) not in (None, STDOUT):
            resolved[key] = join(settings[key])
    if isinstance(score := settings.get("score"), str) and folder != Path():
        with suppress(ValueError):  # reported when it is to be run
            resolved["score"] = shlex.join(map(join_command, shlex.split(score)))
    objective = settings.get("objective")
    if isinstance(objective, dict) and is_file_of_parts(objective.get("parts")):
        resolved["objective"] = objective | {"parts": join(objective["parts"])}
    own = settings.get("task")
    if isinstance(own, str) and names_a_file(own):
        resolved["task"] = join(own)
    if isinstance(args := settings.get("args"), dict):
        paths = READY_MADE.get(str(own if task is None else task), ())
        resolved["args"] = {
            key: join(value) if key in paths and _is_path(value) else join_dotted(value)
            for key, value in args.items()
        }
    if isinstance(compare := settings.get("compare"), dict) and "methods_from" in compare:
        resolved["compare"] = compare | {"methods_from": join(compare["methods_from"])}
    return resolved


def is_file_of_parts(parts: object) -> bool:
    return isinstance(parts, str) and re.fullmatch(RANGE, parts) is None


def _at_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no such home; write the path in full") from None


def _is_path(value: object) -> bool:
    """Tell a path from `package.net:make_net`, a function in a module."""
    module, colon, _ = str(value).rpartition(":")
    return not colon or names_a_file(module)


def names_a_file(task: str) -> bool:
    """`./task.py` is a file; `package.task` is a module."""
    return task.endswith(".py") or "/" in task or os.sep in task


def _put(settings: dict[str, Any], dotted: str, value: object) -> None:
    *parents, leaf = dotted.split(".")
    here = settings
    for name in parents:
        inner = here.get(name)
        if inner is not None and not isinstance(inner, dict):
            raise ValueError(f"{name} is a single value, it has no keys")
        here[name] = dict(inner or {})  # a copy: the caller's mapping stays as it was
        here = here[name]
    here[leaf] = value


def _describe(
    fault: ErrorDetails,
    location: tuple[int | str, ...],
    file: str,
    sources: Mapping[str, str],
    known: Sequence[str],
) -> str:
    """Return one line: the file and key, or the flag; what is wrong; what was found."""
    key = ".".join(str(part) for part in location if part != "function-before[_as_paths()]")
    where = f"{file}: {shown(key, 100)}" if key else file
    for given, source in sources.items():
        if key == given or given.startswith(f"{key}."):
            where = source
        elif key.startswith(f"{given}."):
            where = f"{source}: {key.removeprefix(given + '.')}"
    said = explain(fault, known)
    name, _, rest = said.partition(": ")  # a section's rule names the key that breaks it
    if flag := sources.get(f"{key}.{name}".lstrip(".")):
        return f"{flag}: {rest}"
    return f"{where}: {said}"


def explain(fault: ErrorDetails, known: Sequence[str]) -> str:
    """Say what is wrong with a value; `known`: the keys that exist."""
    found = fault["input"]
    match fault["type"]:
        case "extra_forbidden":
            near = did_you_mean(str(fault["loc"][-1]), known)
            return "unknown key; " + (near or f"known keys: {', '.join(known)}")
        case "missing":
            return "is missing"
        case "int_parsing" | "int_type" | "int_from_float":
            what = "must be a whole number"
        case "float_parsing" | "float_type":
            what = "must be a number"
        case "model_type":
            what = "must be a section with keys of its own"
        case "tuple_type":
            what = "must be a path or a list of paths"
        case "value_error":
            return str(fault["ctx"]["error"])
        case _:
            what = fault["msg"].replace("Input should be", "must be")
    return f"{what}, found {found!r:.100}"


def _known(location: tuple[int | str, ...], sections: Sections | None) -> list[str]:
    sections_of_ours: dict[str, type[BaseModel]] = {
        "compare": CompareConfig,
        "objective": ObjectiveConfig,
    }
    if len(location) > 1 and (own := sections_of_ours.get(str(location[0]))):
        return list(own.model_fields)
    keys = [name for name in _keys() if name != "solvers"]
    return [*keys, *(sections.names if sections else ())]


def _keys() -> list[str]:
    return [field.alias or name for name, field in Config.model_fields.items()]
