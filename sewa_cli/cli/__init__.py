"""The command line: flags, streams, exit codes. Nothing else prints or exits.

main      standard output kept for data; exceptions become one line and an exit code
app       the commands
flags     their flags; commands made of a function and flags
request   what a command was asked for, and where its answer goes
console   what people read on stderr: progress, warnings, words
"""

from sewa_cli.cli.main import main

__all__ = ["main"]
