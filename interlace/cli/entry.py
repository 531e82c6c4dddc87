"""Start of the program `interlace`: Ctrl-C while the commands are imported ends it with one line."""

import sys

INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as in a shell."""


def main() -> None:
    """Imports the commands, which takes seconds, and runs the one that the command line names."""
    try:
        from interlace.cli.main import app
    except KeyboardInterrupt:
        print("Interrupted before the command started.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    app(prog_name="interlace")
