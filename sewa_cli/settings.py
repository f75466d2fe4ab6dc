"""Types of settings in sewa.yaml and in solvers' sections."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

AUTO = 0  # K: auto
USUAL = 10  # K where a number is needed and none is given: the paper's smallest


class Settings(BaseModel):
    """A section of sewa.yaml: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def refuse_bool(value: object) -> object:
    # YAML's `yes` and `on` are booleans, and pydantic would read true as 1
    if isinstance(value, bool):
        raise ValueError(f"must be a number, found {str(value).lower()}")
    return value


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _as_bytes(value: object) -> object:
    """Read 8GiB, 500MB or plain bytes."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError(f"must be a size such as 8GiB or 500MB, found {value!r:.100}")
        size = float(found[1]) * _UNITS[found[2].upper()]
        return int(size) if size < 2**64 else size  # inf is refused later
    return refuse_bool(value)


_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> float | None:
    """Read 90s, 10m or 1.5h; None for anything else."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h|d)\s*", text)
    return float(found[1]) * _SECONDS[found[2]] if found else None


def _as_seconds(value: object) -> object:
    if isinstance(value, str) and (seconds := seconds_of(value)) is not None:
        return seconds
    if isinstance(value, str):
        raise ValueError(f"must be a time such as 30s or 10m, found {value!r:.100}")
    return refuse_bool(value)


def _as_effort(value: object) -> object:
    if isinstance(value, str) and not value.strip().isdecimal():
        if not seconds_of(value):
            what = "must be a number of evaluations, or a time such as 90s, 10m or 2h"
            raise ValueError(f"{what}, found {value!r:.100}")
        return value.replace(" ", "")
    refuse_bool(value)
    if isinstance(value, str) and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or not 1 <= value < 2**53:
        raise ValueError(
            f"must be 1 evaluation or more, or a time such as 10m, found {value!r:.100}"
        )
    return value


WholeNumber = Annotated[int, BeforeValidator(refuse_bool)]
Count = Annotated[WholeNumber, Field(ge=1)]
CountOrNone = Annotated[WholeNumber, Field(ge=0)]  # zero: none at all
Positive = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, lt=1)]
Seed = Annotated[WholeNumber, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, BeforeValidator(_as_bytes), Field(ge=1, lt=2**64)]
Duration = Annotated[float, BeforeValidator(_as_seconds), Field(gt=0, allow_inf_nan=False)]
Effort = Annotated[int | str, BeforeValidator(_as_effort)]  # evaluations, or a time
