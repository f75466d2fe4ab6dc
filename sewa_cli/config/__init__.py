"""sewa.yaml, the flags and `--set` become one frozen `Config`; all faults are reported together.

`--set` wins over a flag, and a flag over the YAML. Paths in the YAML are relative to the YAML;
paths in flags are relative to the working directory.

models      every setting
yaml_file   reading YAML
loading     merging YAML, flags and `--set`
"""

from sewa_cli.config.loading import Sections, explain, find_config, load_config, names_a_file
from sewa_cli.config.models import RANGE, READY_MADE, STDOUT, CompareConfig, Config, ObjectiveConfig
from sewa_cli.settings import AUTO

__all__ = [
    "AUTO",
    "RANGE",
    "READY_MADE",
    "STDOUT",
    "CompareConfig",
    "Config",
    "ObjectiveConfig",
    "Sections",
    "explain",
    "find_config",
    "load_config",
    "names_a_file",
]
