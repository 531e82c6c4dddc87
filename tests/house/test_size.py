"""Files and functions stay short, nesting shallow, and signatures typed."""

import ast
from collections.abc import Iterable, Iterator

from tests.house.source import FunctionNode, excused, functions, nodes, package_files, place, public_functions, sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
MAX_ARGUMENTS = 8
MAX_METHODS = 20
ALL_CODE = ("interlace", "tests", "benchmarks")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def report(findings: Iterable[str]) -> None:
    found = sorted(findings)
    assert not found, "\n" + "\n".join(found)


def test_files_are_short() -> None:
    lengths = ((path, len(path.read_text(encoding="utf-8").splitlines())) for path in sources(*ALL_CODE))
    report(
        f"{place(path, ast.Pass())} has {n} lines, at most {MAX_FILE_LINES}"
        for path, n in lengths
        if n > MAX_FILE_LINES
    )


def test_functions_are_short() -> None:
    lengths = (
        (path, node, (node.end_lineno or node.lineno) - node.lineno + 1)
        for path in sources(*ALL_CODE)
        for node in functions(path)
    )
    report(
        f"{place(path, node)} {node.name}() has {n} lines, at most {MAX_FUNCTION_LINES}"
        for path, node, n in lengths
        if n > MAX_FUNCTION_LINES
    )


def test_nesting_is_shallow() -> None:
    depths = ((path, node, nesting(node)) for path in package_files() for node in functions(path))
    report(
        f"{place(path, node)} {node.name}() nests {depth} deep, at most {MAX_NESTING}"
        for path, node, depth in depths
        if depth > MAX_NESTING
    )


def nesting(node: ast.AST) -> int:
    """Depth of blocks within blocks; an `elif` counts as its `if`, a nested function starts anew."""
    return max((_depth(child) for child in ast.iter_child_nodes(node)), default=0)


def _depth(node: ast.AST) -> int:
    if isinstance(node, SCOPES):
        return 0
    if isinstance(node, ast.If):
        inside = max((_depth(child) for child in node.body), default=0)
        is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        otherwise = _depth(node.orelse[0]) - 1 if is_elif else max((_depth(child) for child in node.orelse), default=0)
        return 1 + max(inside, otherwise)
    return nesting(node) + isinstance(node, BLOCKS)


def test_functions_take_few_arguments() -> None:
    counts = ((path, node, len(list(arguments(node)))) for path in package_files() for node in functions(path))
    report(
        f"{place(path, node)} {node.name}() takes {n} arguments, at most {MAX_ARGUMENTS}"
        for path, node, n in counts
        if n > MAX_ARGUMENTS and not excused(path, node)
    )


def test_classes_have_few_methods() -> None:
    """Private methods and properties count, because each is one more thing that the class does."""
    found = (
        (path, node, num_methods(node))
        for path in package_files()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    report(
        f"{place(path, node)} {node.name} has {n} methods, at most {MAX_METHODS}"
        for path, node, n in found
        if n > MAX_METHODS
    )


def num_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body)


def arguments(node: FunctionNode) -> Iterator[ast.arg]:
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return (arg for arg in given if arg.arg not in ("self", "cls"))


def test_public_signatures_are_named_and_typed() -> None:
    """No **kwargs and no dict[str, Any]: what crosses a boundary has a name and a shape."""
    report(
        f"{place(path, node)} {node.name}() has {problem}"
        for path in package_files()
        for node in public_functions(path)
        if not excused(path, node)
        for problem in untyped(node)
    )


def untyped(node: FunctionNode) -> Iterator[str]:
    if node.args.kwarg is not None:
        yield f"**{node.args.kwarg.arg}"
    # An argument called kwargs is a call on its way elsewhere: what is in it was typed where the call was made.
    annotations = [arg.annotation for arg in arguments(node) if arg.arg != "kwargs"] + [node.returns]
    for annotation in annotations:
        if annotation is not None and "[str, Any]" in ast.unparse(annotation):
            yield ast.unparse(annotation)


def test_no_file_is_a_drawer() -> None:
    """A file says what is in it; `utils` and `misc` say nothing."""
    drawers = {"utils", "util", "misc", "helpers", "common"}
    report(
        place(path, ast.Pass())
        for path in sources(*ALL_CODE)
        if path.stem.lower() in drawers or path.parent.name in drawers
    )
