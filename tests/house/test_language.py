"""Docstrings and comments begin with a verb or a noun, and name the thing."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import ROOT, nodes, package_files, place

VAGUE_STARTS = re.compile(
    r"\W*(as|if|it|likewise|of|once|that|those|told|what|where|whether|who|whose)\b", re.IGNORECASE
)
"""First words that put a clause in front of the thing, or stand for its name."""
VAGUE_WORDS = re.compile(r"\b(nobody|somebody|whoever|so many|so much|anew|company|told|books)\b", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[ast.Expr, str]]:
    """Finds strings that stand alone, below a field or a constant too."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [
        f"{place(path, node)}: {text.splitlines()[0]}"
        for path in package_files()
        for node, text in docstrings(path)
        if VAGUE_STARTS.match(text)
    ]
    assert not found, "\n".join(found)


def test_docstrings_and_comments_name_the_thing() -> None:
    of_docstrings = (
        (place(path, node), word[0])
        for path in package_files()
        for node, text in docstrings(path)
        for word in VAGUE_WORDS.finditer(text)
    )
    of_comments = (
        (f"{path.relative_to(ROOT)}:{line}", word[0])
        for path in package_files()
        if VAGUE_WORDS.search(path.read_text(encoding="utf-8"))  # reading the tokens of a file takes longer
        for line, text in comments(path)
        for word in VAGUE_WORDS.finditer(text)
    )
    found = [f"{where}: {word!r}" for where, word in (*of_docstrings, *of_comments)]
    assert not found, "\n".join(found)
