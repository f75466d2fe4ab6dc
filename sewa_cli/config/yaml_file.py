"""What is written in YAML: a file, or the value of a `--set`."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from sewa_cli.config.models import Config
from sewa_cli.errors import ConfigError
from sewa_cli.text import one_line


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys and says nothing; a user would want to know."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_value(text: str) -> Any:
    """Raises ValueError where it is no YAML."""
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(one_line(getattr(error, "problem", None) or error)) from error


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; check --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a UTF-8 text file; check --config") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        what = one_line(getattr(error, "problem", None) or error)
        raise ConfigError(f"{where}: {what}; fix the YAML") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        is_list = isinstance(content, list)
        found = "a list" if is_list else f"the single value {str(content)[:40]!r}"
        raise ConfigError(f"{path}: must hold `key: value` lines, found {found}")
    # `args:` with nothing behind it is the same as no `args:`; an unknown key is still a fault
    known = Config.model_fields
    return {str(k): v for k, v in content.items() if v is not None or str(k) not in known}
