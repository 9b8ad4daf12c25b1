"""The command line: the only room that parses arguments, reads the environment, prints and exits.

`main` is the command `rewarm`. Each verb lives in its own module `<verb>_command.py`, which exposes it as `command` and
is imported when the verb is called, so that help and errors answer at once.
"""

from rewarm.cli.group import main

__all__ = ["main"]
