"""`args` of the ready-made tasks: one frozen model for each, all faults reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from sewa_cli.config import explain
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.files import check_regular, real
from sewa_cli.settings import Count, Seed, Settings, Share
from sewa_cli.task.fence import import_user_module
from sewa_cli.task.ready.tables import DataTable, Row, open_table

Part = Literal["selection", "heldout", "training"]


def _must_exist(path: Path) -> Path:
    try:
        if not path.is_dir():
            check_regular(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    return path


def _names_a_function(model: str) -> str:
    module, _, function = model.rpartition(":")
    if not module or not function.isidentifier():
        raise ValueError(
            f"must look like package.module:function or ./net.py:function, found {model!r}"
        )
    return model


Existing = Annotated[Path, AfterValidator(_must_exist)]
ModelFunction = Annotated[str, AfterValidator(_names_a_function)]


class DataArgs(Settings):
    """Examples to choose by, examples for the report, and their batch size."""

    selection: Existing | None = None
    heldout: Existing | None = None
    training: Existing | None = None
    data: Existing | None = None
    heldout_fraction: Share = 0.5
    batch_size: Count = 16
    limit: Count | None = 2000
    seed: Seed = 0
    metrics: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.selection is None):
            raise ValueError("give `selection` (and `heldout`), or `data`, which is split")
        if self.data is not None and self.heldout is not None:
            raise ValueError(
                "`data` is split into selection and held-out data; leave out `heldout`"
            )
        if self.heldout is not None and real(self.heldout) == real(self.selection):  # type: ignore[arg-type]
            raise ValueError("`heldout` is the same as `selection`; give it as `data` to split it")
        if self.data is None and "heldout_fraction" in self.model_fields_set:
            raise ValueError("`heldout_fraction` splits `data`; give `data`, or leave it out")
        return self

    @property
    def sources(self) -> dict[Part, Path]:
        """Each part that is given, and where its rows come from."""
        given = {
            "selection": self.selection or self.data,
            "heldout": self.heldout or self.data,
            "training": self.training,
        }
        return {part: path for part, path in given.items() if path is not None}  # type: ignore[misc]

    def draw(self, part: Part, rows: int, notes: list[str]) -> list[int]:
        """Return which rows belong to a part, shuffled; add a note if `limit` cuts them."""
        order: list[int] = np.random.default_rng(self.seed).permutation(rows).tolist()
        if self.data is not None and part != "training":
            cut = round(rows * self.heldout_fraction)
            order = order[:cut] if part == "heldout" else order[cut:]
        path, drawn = self.sources[part], order[: self.limit]
        if not order:
            raise TaskError(f"{path}: its {rows} rows leave none for {part}; use more rows")
        if len(drawn) < len(order):
            notes.append(
                f"{path}: {len(drawn)} of {rows} rows for {part}, drawn with seed {self.seed}; "
                f"args.limit: {len(order)} takes all"
            )
        return drawn

    def tables(self) -> dict[Part, DataTable]:
        """Open the file of each part."""
        opened = {path: open_table(path) for path in dict.fromkeys(self.sources.values())}
        return {part: opened[path] for part, path in self.sources.items()}

    def take(
        self, part: Part, table: DataTable, columns: Sequence[str], notes: list[str]
    ) -> list[Row]:
        """Return the rows of a part."""
        return table.take(self.draw(part, len(table), notes), columns)


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], args: Mapping[str, Any], section: str = "args") -> Model:
    """Validate `args`; ConfigError with a line for each fault, such as `args.kind: …`."""
    try:
        return model.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError(
            *(
                f"{'.'.join([section, *map(str, fault['loc'][:1])])}: "
                f"{explain(fault, list(model.model_fields))}"
                for fault in error.errors(include_url=False)
            )
        ) from error


def find_function(model: str) -> Callable[..., Any]:
    """Import the function that a ModelFunction names."""
    spec, _, name = model.rpartition(":")
    function = getattr(import_user_module(spec), name, None)
    if not callable(function):
        raise TaskError(f"args.model: {spec} has no function {name}")
    found: Callable[..., Any] = function
    return found
