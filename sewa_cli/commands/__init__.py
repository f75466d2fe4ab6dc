"""One file, one command: from a config and a task to a report. Nothing here prints."""

from sewa_cli.present import html
from sewa_cli.report.shared import Head

Head.in_a_notebook = html  # a report knows nothing of how it is shown
