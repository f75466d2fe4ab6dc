"""The door: talks to people; alone prints and exits.

app      the commands and their flags
talk     what people read on stderr: progress, warnings
screen   what of it needs rich
summary  what `select` says in the end
door     standard output kept for data; exceptions become one line and an exit code
"""

from sewa_cli.cli.main import main

__all__ = ["main"]
