"""Read YAML: a file, or the value of a `--set`. It is the user's own, and trusted."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from sewa_cli.config.models import Config
from sewa_cli.errors import ConfigError
from sewa_cli.text import one_line, shown


class _Loader(yaml.SafeLoader):
    """Refuse equal keys, of which PyYAML keeps the last and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()  # `!!map x` is none
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {shown(key.value, 100)!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _load(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except RecursionError as error:
        raise yaml.YAMLError("is nested too deep") from error
    except Exception as error:  # PyYAML takes it for granted that a value fits its tag
        raise yaml.YAMLError(f"has a value that cannot be read ({one_line(error)})") from error


def _problem(error: yaml.YAMLError) -> str:
    return one_line(getattr(error, "problem", None) or error, 200)


def read_value(text: str) -> Any:
    """Raises ValueError where it is no YAML."""
    try:
        return _load(text)
    except yaml.YAMLError as error:
        raise ValueError(_problem(error)) from error


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = _load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; check --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a UTF-8 text file; check --config") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: {_problem(error)}; fix the YAML") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        is_list = isinstance(content, list)
        found = "a list" if is_list else f"the single value {shown(content, 40)!r}"
        raise ConfigError(f"{path}: must hold `key: value` lines, found {found}")
    # `args:` with nothing behind it is the same as no `args:`; an unknown key is still a fault
    known = Config.model_fields
    return {str(k): v for k, v in content.items() if v is not None or str(k) not in known}
