"""sewa.yaml, the flags and `--set` become one frozen `Config`; every fault is told at once.

Where a key may be given three times, the strongest wins: `--set`, then a flag, then the YAML.
Paths in the YAML are relative to the YAML; paths in flags are relative to the working directory.

models      every setting
yaml_file   what is written in YAML
loading     all of it laid over each other
"""

from sewa_cli.config.loading import explain, find_config, load_config, names_a_file
from sewa_cli.config.models import (
    AUTO,
    READY_MADE,
    STDOUT,
    CompareConfig,
    Config,
    Count,
    GumbelConfig,
    LinearConfig,
    Positive,
    Seed,
)

__all__ = [
    "AUTO",
    "READY_MADE",
    "STDOUT",
    "CompareConfig",
    "Config",
    "Count",
    "GumbelConfig",
    "LinearConfig",
    "Positive",
    "Seed",
    "explain",
    "find_config",
    "load_config",
    "names_a_file",
]
