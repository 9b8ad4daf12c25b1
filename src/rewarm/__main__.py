"""`python -m rewarm` is the same as the command `rewarm`."""

from rewarm.cli import main

if __name__ == "__main__":
    main(prog_name="rewarm")
