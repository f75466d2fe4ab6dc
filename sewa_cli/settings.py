"""Types of settings: what they are called, what they refuse. For sewa.yaml and for every solver."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

AUTO = 0  # K: auto
USUAL = 10  # K, where a number is needed and none was named: the paper's smallest


class Settings(BaseModel):
    """A section of sewa.yaml: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def refuse_bool(value: object) -> object:
    # YAML's `yes` and `on` are booleans, and pydantic would read true as 1
    if isinstance(value, bool):
        raise ValueError(f"must be a number, found {str(value).lower()}")
    return value


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _as_bytes(value: object) -> object:
    """8GiB, 500MB or plain bytes."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError(f"must be a size such as 8GiB or 500MB, found {value!r:.100}")
        size = float(found[1]) * _UNITS[found[2].upper()]
        return int(size) if size < 2**64 else size  # digits without end are Inf
    return refuse_bool(value)


Whole = Annotated[int, BeforeValidator(refuse_bool)]
Count = Annotated[Whole, Field(ge=1)]
CountOrNone = Annotated[Whole, Field(ge=0)]  # zero: none at all
Positive = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, lt=1)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, BeforeValidator(_as_bytes), Field(ge=1, lt=2**64)]
