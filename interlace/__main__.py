"""Runs the commands by `python -m interlace`."""

from interlace.cli.entry import main

if __name__ == "__main__":
    main()
