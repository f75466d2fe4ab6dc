"""The command line: flags, streams, exit codes. Nothing else prints or exits.

main      standard output kept for data; exceptions become one line and an exit code
app       the commands
options   their flags, and the request that these make
console   what people read on stderr: progress, warnings, words
"""

from sewa_cli.cli.main import main

__all__ = ["main"]
