"""What is written in YAML: a file, or the value of a `--set`."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from sewa_cli.config.models import Config
from sewa_cli.errors import ConfigError
from sewa_cli.files import DEPTH, MIB, read_bytes
from sewa_cli.text import is_utf8, one_line, shown

MOST_BYTES: Final = MIB // 4  # PyYAML takes a second for it
MOST_VALUES: Final = 100_000  # with each alias counted as what it stands for


class _Loader(yaml.SafeLoader):
    """PyYAML's, but strict where it is generous, and with an end to what a few bytes can stand for.

    It keeps the last of two equal keys and says nothing; a user would want to know.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0
        self._sizes: dict[yaml.Node, int] = {}  # values in each node that is complete

    def save_possible_simple_key(self) -> None:
        # called for every bracket; for thousands of open ones PyYAML takes minutes
        self._check_depth(self.flow_level, self.get_mark())
        super().save_possible_simple_key()

    def _check_depth(self, depth: int, mark: yaml.Mark) -> None:
        if depth > DEPTH:
            raise _fault(f"is nested more than {DEPTH} levels deep", mark)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        before, self._count, self._depth = self._count, self._count + 1, self._depth + 1
        self._check_depth(self._depth, mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and node not in self._sizes:
            raise _fault("holds itself", mark)
        if node is not None and is_alias:
            self._count += self._sizes[node]
        elif node is not None:
            self._sizes[node] = self._count - before
        if self._count > MOST_VALUES:
            raise _fault(f"holds more than {MOST_VALUES:,} values", mark)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()  # `!!map x` is none
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise _fault(f"the key {shown(key.value, 100)!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        mark = node.start_mark
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # PyYAML takes it for granted that a value fits its tag
            raise _fault(f"is no {node.tag.rpartition(':')[2]}", mark) from error
        if isinstance(value, int) and abs(value) >= 2**64:
            raise _fault("is a number of 2^64 or more", mark)
        # no file can be called so, and no report can hold it
        if isinstance(value, str) and ("\0" in value or not is_utf8(value)):
            raise _fault("has a NUL or half a character in it", mark)
        return value


def _fault(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _problem(error: yaml.YAMLError) -> str:
    return one_line(getattr(error, "problem", None) or error, 200)


def read_value(text: str) -> Any:
    """Raises ValueError where it is no YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(_problem(error)) from error


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(read_bytes(path, MOST_BYTES).decode("utf-8"), _Loader)
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
