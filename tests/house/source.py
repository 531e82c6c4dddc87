"""The package's source as syntax trees, for the house tests."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "interlace"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    """Parses a file. Searches for cycles among the nodes of all files would take twice as long as the parsing."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file. A walk over the package takes a second of CPU time, so each test shares it."""
    return tuple(ast.walk(tree(path)))


def sources(*folders: str) -> list[Path]:
    """Python files under folders of the repository root, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def package_files(*, outside: tuple[str, ...] = ()) -> list[Path]:
    """Files of the package that are in none of the folders named."""
    return [path for path in sources("interlace") if path.relative_to(PACKAGE).parts[0] not in outside]


def functions(path: Path) -> Iterator[FunctionNode]:
    return (node for node in nodes(path) if isinstance(node, FunctionNode))


def public_functions(path: Path) -> Iterator[FunctionNode]:
    """Functions of the module and methods of its classes whose names have no leading underscore."""
    bodies = [tree(path).body, *(node.body for node in nodes(path) if isinstance(node, ast.ClassDef))]
    found = (node for body in bodies for node in body if isinstance(node, FunctionNode))
    return (node for node in found if not node.name.startswith("_"))


def excused(path: Path, node: FunctionNode) -> bool:
    """Whether the `def` line says why a rule does not fit it: `# house: the signature is another library's`."""
    line = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
    return len(line.partition("# house: ")[2]) > 10


def place(path: Path, node: ast.AST) -> str:
    """`file:line`, as editors and terminals link it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
