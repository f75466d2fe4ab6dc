"""The base class of all models of a report."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION: Final = 3


class Part(BaseModel):
    # validators are built when first used: `sewa average` writes no report, and need not wait
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def to_json(report: BaseModel) -> str:
    return report.model_dump_json(indent=2) + "\n"


def schema(of: type[BaseModel]) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **of.model_json_schema(mode="serialization"),
    }
