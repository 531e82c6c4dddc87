"""Tables of the docs that a benchmark writes: what stands between two comments of its name."""

from pathlib import Path


def write_table(page: Path, name: str, text: str) -> None:
    """Replaces what a page says between `<!-- name -->` and `<!-- /name -->`. ValueError where they are not there."""
    begin, end, content = f"<!-- {name} -->", f"<!-- /{name} -->", page.read_text(encoding="utf-8")
    before, found, rest = content.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no {begin} ... {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
