"""Hooks of MkDocs: a link from a page to a source file of the repository leads to a copy of the file in the site."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "source"
LINK = re.compile(r"\]\(((?:\.\./)+(?:interlace|examples|benchmarks)/[^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds each source file that a page links to. Raises PluginError if it does not exist."""
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            path = _in_repository(page.src_uri, link)
            if not (ROOT / path).is_file():
                raise PluginError(f"docs/{page.src_uri} links to {path}, which does not exist")
            address = f"{FOLDER}/{path}.txt"
            if files.get_file_from_path(address) is None:
                files.append(File.generated(config, address, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces the links to source files."""
    del config, files
    here = posixpath.dirname(page.file.src_uri)

    def replace(found: "re.Match[str]") -> str:
        address = f"{FOLDER}/{_in_repository(page.file.src_uri, found[1])}.txt"
        return f"]({posixpath.relpath(address, here or '.')})"

    return LINK.sub(replace, markdown)


def _in_repository(page: str, link: str) -> str:
    """Returns the path of a link's target below the root of the repository."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
