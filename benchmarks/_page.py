"""Tables of the docs that a benchmark writes between two comments with its name."""

from pathlib import Path


def write_table(page: Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->`. Raises ValueError if the comments are missing."""
    begin, end, content = f"<!-- {name} -->", f"<!-- /{name} -->", page.read_text(encoding="utf-8")
    before, found, rest = content.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no {begin} ... {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
