"""A view of each kind of report; `metric` is a select by a metric."""

from collections.abc import Callable
from typing import Any, Final

from sewa_cli.present.view import View
from sewa_cli.present.views import compare, metric, others, select

VIEWS: Final[dict[str, Callable[[Any], View]]] = {
    "select": select.view,
    "metric": metric.view,
    "compare": compare.view,
    "average": others.average,
    "evaluate": others.evaluate,
    "forecast": others.forecast,
    "inspect": others.inspect,
    "validate": others.validate,
    "verify": others.verify,
}
