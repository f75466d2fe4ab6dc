"""Pages of the site that are made from the code or lie outside of docs/.

The start page is the README, and the commands and the keys of sewa.yaml come from the code.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from mkdocs.structure.files import File
from pydantic import BaseModel

from sewa_cli import solvers
from sewa_cli.cli.app import app
from sewa_cli.config.models import Config

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "development/contributing.md"}


def on_files(files: Any, config: Any) -> Any:
    made = {place: (ROOT / name).read_text() for name, place in COPIED.items()}
    made |= {"reference/commands.md": commands_page(), "reference/settings.md": settings_page()}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep links within the site; a file of the repository is named instead."""
    sources = {place: name for name, place in COPIED.items()}
    here = posixpath.dirname(page.file.src_uri)
    before = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def relink(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        place = posixpath.normpath(posixpath.join(before, path))
        inside = COPIED.get(place) or (place.removeprefix("docs/") if _is_in_docs(place) else None)
        if inside is None:
            return text if place in text else f"{text} (`{place}`)"
        return f"{mark}[{text}]({posixpath.relpath(inside, here or '.')}{hash_}{anchor})"

    return LINK.sub(relink, markdown)


def _is_in_docs(place: str) -> bool:
    return place.startswith("docs/")


# ---- the command line ----------------------------------------------------------------------------


def commands_page() -> str:
    return "\n".join(["# Commands", "", *_command_lines()]) + "\n"


def _command_lines() -> Iterator[str]:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        yield f"## sewa {name}"
        yield ""
        yield from [*(command.help or "").strip().split("\n"), ""]
        rows = [row for parameter in command.params if (row := _parameter(parameter))]
        if rows:
            yield from ["| argument | |", "|---|---|", *rows, ""]


def _parameter(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    is_option = parameter.param_type_name == "option"
    names = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
    takes = f" {parameter.metavar or ''}".rstrip() if is_option and not parameter.is_flag else ""
    return f"| `{names}{takes}` | {_cell(parameter.help or '')} |"


# ---- sewa.yaml -----------------------------------------------------------------------------------


def settings_page() -> str:
    lines = [
        "# sewa.yaml",
        "",
        "Every key is optional, and `--set KEY=VALUE` overrides any of them. "
        "`sewa init` writes a file with comments.",
        "",
        "| key | default | |",
        "|---|---|---|",
        *_setting_rows(Config(), ""),
        *(row for name in solvers.names() for row in _solver_rows(name)),
    ]
    return "\n".join(lines) + "\n"


def _solver_rows(name: str) -> Iterator[str]:
    solver = solvers.find(name)
    return _setting_rows(solver.Settings(), f"{name}.")


def _setting_rows(model: BaseModel, above: str) -> Iterator[str]:
    defaults = model.model_dump(mode="json", by_alias=True)
    for name, field in type(model).model_fields.items():
        inner = getattr(model, name)
        key = field.alias or name
        if isinstance(inner, BaseModel):
            yield from _setting_rows(inner, f"{above}{key}.")
            continue
        default = yaml.safe_dump(defaults[key], default_flow_style=True, width=1000)
        shown = default.removesuffix("\n...\n").strip()
        yield f"| `{above}{key}` | `{shown}` | {_cell(field.description or '')} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
