"""An object is complete once it is made: no attribute is assigned only later."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import PACKAGE, nodes, package_files


def valueless(path: Path) -> Iterator[str]:
    """Yields the attributes that a constructor only announces. A torch module's buffers are set by torch."""
    for owner in nodes(path):
        if not isinstance(owner, ast.ClassDef) or any("Module" in ast.unparse(base) for base in owner.bases):
            continue
        makers = [part for part in owner.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        for node in (node for maker in makers for node in ast.walk(maker)):
            if isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.target, ast.Attribute):
                yield f"{owner.name}.{node.target.attr}"


def test_no_attribute_waits_for_its_value() -> None:
    found = {str(path.relative_to(PACKAGE)): names for path in package_files() if (names := [*valueless(path)])}
    assert not found, f"give each a value where the object is made: {found}"
