"""A calculator: sums, products and brackets of numbers."""

import ast
import operator
from collections.abc import Callable, Mapping

from interlace.agents.tools.base import ToolError

OPERATIONS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
LONGEST = 200
"""Maximum length of an expression, in characters."""


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: numbers with + - * / // % and brackets, such as 12*(3+4)
    """
    if len(expression) > LONGEST:
        raise ToolError(f"the expression has {len(expression)} characters, at most {LONGEST} are computed")
    try:
        found = _evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ToolError("that is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    return str(int(found)) if isinstance(found, int) or found.is_integer() else f"{found:.10g}"


def _evaluate_node(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes()):
            raise ToolError("only numbers can be computed")
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_evaluate_node(left), _evaluate_node(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_evaluate_node(operand))
    raise ToolError("that is no arithmetic expression")
