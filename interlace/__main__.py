"""Runs the commands by `python -m interlace`."""

from interlace.cli.main import app

if __name__ == "__main__":
    app(prog_name="interlace")
