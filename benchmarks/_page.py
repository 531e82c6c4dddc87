"""Tables and pictures of the docs: a benchmark writes its table between two comments with its name."""

from pathlib import Path


def write_table(page: Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->`. Raises ValueError if the comments are missing."""
    begin, end, content = f"<!-- {name} -->", f"<!-- /{name} -->", page.read_text(encoding="utf-8")
    before, found, rest = content.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no {begin} ... {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def make_picture(figure: str, rules: str, attributes: str = "") -> str:
    """Returns the SVG of a figure as a file. rules: CSS, in the place of a page's. attributes: of the root element."""
    root = f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}'.rstrip()
    return figure.replace("<svg", root, 1).replace(">", f"><style>{rules}</style>", 1)
