"""Files that are there whole or not at all, whatever ends the process that writes them."""

from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """All of the text, or what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
