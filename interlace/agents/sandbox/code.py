"""Runs a piece of code in this process, like a notebook's cell. Standard library only."""

import ast
import atexit
import linecache
import sys
import threading
import traceback

_NAME = "<code>"


def run_code(code: str) -> int:
    """Runs code as `__main__` with the current standard streams, and returns its exit status.

    If the last statement is an expression, its value is printed, unless it is None.
    """
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - stays open
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = [_NAME]
    linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
    status = 0
    try:
        _run(code)
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException as error:  # noqa: BLE001 - any exception of the code is shown
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename != _NAME:  # skip the frames of this module
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end
    atexit._run_exitfuncs()
    return status


def _run(code: str) -> None:
    tree = ast.parse(code, _NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(tree, _NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)
        if value is not None:
            print(repr(value))  # noqa: T201 - output of the code


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as an interpreter does
    return 1
