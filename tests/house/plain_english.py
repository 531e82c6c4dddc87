"""Counts constructions of unclear English in docstrings, comments and documents.

    python tests/house/plain_english.py [--list TEXT]

Prints the hits per 1,000 words of each part and the files above their limit. `--list` also prints each hit of the
files whose path contains TEXT. The limits are in `LIMITS` and `FILE_LIMITS`; test_plain_english.py enforces them.
"""

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LIMITS: Mapping[str, float] = {"package": 3.0, "documents": 3.0}
"""Most hits per 1,000 words of a part. Target: 3.0 for both."""
FILE_LIMITS: Mapping[str, float] = {"package": 6.0, "documents": 6.0}
"""Most hits per 1,000 words of one file with at least MIN_WORDS words. Target: 6.0 for both."""
MIN_WORDS = 150
"""Words below which one hit would already exceed the limit of a file."""

_CLAUSE_VERBS = (
    "is was were are it they its their the a an one this that come comes goes has had hold holds move moves wait waits "
    "run runs ended ends stand stands other others each share shares make makes made need needs do does did can cannot "
    "may will depends cost costs counts belongs lives lies"
)
RULES: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "write if or when instead of where": r"\bwhere (?!\w+ is (?:kept|stored))",
        "name the thing instead of a clause with what": rf"\bwhat (?:{'|'.join(_CLAUSE_VERBS.split())})\b",
        "write any X instead of whatever, whoever": r"\b(?:whatever|whichever|whoever|who)\b",
        "write after instead of behind": r"\bbehind\b",
        "write next to or in addition to instead of beside": r"\bbeside\b",
        "write continue instead of go on": r"\b(?:go|goes|going|went|gone) on\b",
        "write separate or its instead of of its own": r"\bof (?:its|their|one's|his|the \w+'s) own\b",
        "objects do not say or tell": r"\b(?:say|says|said|saying|tell|tells)\b",
        "write exists instead of is there": r"\b(?:is|are|was|were|be) (?:there|here)\b",
        "repeat the noun instead of that of": r"\b(?:that|those) of\b",
    }.items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One unclear construction."""

    place: str
    """File and line."""
    rule: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Result for one file or one part."""

    words: int
    hits: tuple[Hit, ...]

    @property
    def index(self) -> float:
        """Returns the hits per 1,000 words."""
        return 1000 * len(self.hits) / max(1, self.words)


def files_of(part: str) -> list[Path]:
    """Lists the files of a part, "package" or "documents"."""
    if part == "package":
        return sorted((ROOT / "interlace").rglob("*.py"))
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def measure_file(path: Path) -> Measure:
    """Counts the words and the hits of one file."""
    words, hits = 0, []
    for line, text in python_texts(path) if path.suffix == ".py" else markdown_texts(path):
        words += len(text.split())
        place = f"{path.relative_to(ROOT)}:{line}"
        hits += [Hit(place=place, rule=name, text=text) for name, rule in RULES.items() for _ in rule.findall(text)]
    return Measure(words=words, hits=tuple(hits))


def measure_part(files: Sequence[Measure]) -> Measure:
    """Adds up the measures of files."""
    return Measure(words=sum(one.words for one in files), hits=tuple(hit for one in files for hit in one.hits))


def python_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each docstring, each docstring of a field and each comment."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split())
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and len(token.string) > 14:
                yield token.start[0], token.string


def markdown_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each line outside fenced code."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif line.strip() and not is_code:
            yield number, line


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="TEXT", help="print the hits of the files whose path contains TEXT")
    listed = parser.parse_args().list
    for part, limit in LIMITS.items():
        files = {path: measure_file(path) for path in files_of(part)}
        whole = measure_part(list(files.values()))
        print(f"{part}: {whole.index:.1f} per 1,000 of {whole.words} words (limit {limit})")
        high = [(one.index, path) for path, one in files.items() if one.words >= MIN_WORDS]
        for index, path in sorted(high, reverse=True)[:10]:
            print(f"  {index:5.1f} {path.relative_to(ROOT)}")
        for hit in whole.hits:
            if listed is not None and listed in hit.place:
                print(f"{hit.place}: {hit.rule}: {hit.text[:140]}")


if __name__ == "__main__":
    sys.exit(main())
