"""A view of each kind of report."""

from collections.abc import Callable
from typing import Any, Final

from sewa_cli.present.view import View
from sewa_cli.present.views import compare, metric, others, select
from sewa_cli.report.findings import ContestFinding

VIEWS: Final[dict[str, Callable[[Any], View]]] = {
    "select": lambda report: (metric if report.find(ContestFinding) else select).view(report),
    "compare": compare.view,
    "average": others.average,
    "evaluate": others.evaluate,
    "forecast": others.forecast,
    "inspect": others.inspect,
    "validate": others.validate,
    "verify": others.verify,
}
