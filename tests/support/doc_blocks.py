"""Collects the code blocks and the inline code of the documents.

A block that needs something of the reader has an HTML comment in the line before it:

    <!-- example: REASON -->     Python that does not run alone, or commands that need files of the reader.
    <!-- recipe: NAME -->        YAML whose sections belong to another recipe than the quick start.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "benchmarks/RESULTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
PLACEHOLDER = re.compile(r"(?<![a-z.:/])[A-Z][A-Z_]*(?![a-z.:/])")
"""A word in capitals, for which the reader writes a value."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code, or a span of it within a sentence."""

    page: str
    """Path of the page, from the root of the repository."""
    line: int
    language: str
    """Language of the fence; `bash` if the block is indented; `inline` for a span."""
    text: str
    notes: tuple[tuple[str, str], ...] = ()
    """Kind and text of the comments above the block."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def note(self, kind: str) -> str | None:
        """Returns the text of a comment above the block; None if it has none of this kind."""
        return dict(self.notes).get(kind)


@cache
def document_blocks() -> tuple[Block, ...]:
    """Returns the blocks and spans of all pages."""
    return tuple(block for page in PAGES for block in _blocks_in(page))


def _blocks_in(page: Path) -> Iterator[Block]:
    name, lines = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8").splitlines()
    number, notes = 0, []
    while number < len(lines):
        line, begin = lines[number], number + 1
        number += 1
        if fence := re.fullmatch(r"\s*```(\w*)", line):
            end = next(index for index in range(number, len(lines)) if lines[index].strip() == "```")
            yield Block(name, begin, fence[1], "\n".join(lines[number:end]) + "\n", tuple(notes))
            number, notes = end + 1, []
        elif line.startswith("    ") and not lines[begin - 2].strip():
            while number < len(lines) and lines[number].startswith("    "):
                number += 1
            indented = "\n".join(text[4:] for text in lines[begin - 1 : number])
            yield Block(name, begin, "bash", indented + "\n")
        elif note := re.fullmatch(r"<!-- (\w+): (.+) -->", line):
            notes.append((note[1], note[2]))
        elif line.strip() and not line.startswith("<!--"):
            notes = []
            paragraph = [line]
            while number < len(lines) and re.match(r"[^\s|#<`!-]|  \S", lines[number]) and not line.startswith("|"):
                paragraph.append(lines[number].strip())
                number += 1
            for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", " ".join(paragraph)):
                yield Block(name, begin, "inline", span)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a block."""

    block: Block
    words: tuple[str, ...]
    """Words of the shell, without variables in front of the program."""

    def __str__(self) -> str:
        return f"{self.block}: {shlex.join(self.words)}"


PROGRAMS = (
    "interlace", "make", "python", "pip", "pytest", "docker", "ray", "git", "cd", "sbatch", "kubectl", "ssh",
    "pre-commit", "ruff", "mypy", "lint-imports",
)  # fmt: skip
"""Programs of the commands in the documents; paths before them are left out."""


@cache
def document_commands() -> tuple[Command, ...]:
    """Returns all commands, those within sentences included."""
    found = []
    for block in document_blocks():
        first = block.text.split(maxsplit=1)[0] if block.text.strip() else ""
        if block.language == "bash" or (block.language == "inline" and first in PROGRAMS and " " in block.text):
            found += [Command(block, words) for words in _commands_in(block)]
    return tuple(found)


def _commands_in(block: Block) -> Iterator[tuple[str, ...]]:
    for line in re.sub(r"\$\(.*?\)", "", block.text.replace("\\\n", " ")).splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=block.language == "bash"), ";"]:
            if word in ("&&", ";", "|"):
                if words:
                    yield tuple(words)
                words = []
            elif word.endswith(";"):
                yield (*words, word[:-1])
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word if words else Path(word).name)
