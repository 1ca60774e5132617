"""Check of size expressions in an untrusted program: torch runs them as Python code."""

from __future__ import annotations

import ast
import re

MAX_LENGTH = 1 << 16
"""Largest number of characters; the longest expression of the nine networks has a few thousand."""
_MAX_DEPTH = 150
_MAX_DEGREE = 256
"""Largest number of factors of a product: more would make numbers that take too long to compute."""
_MAX_INTEGER = 1 << 64
_MAX_EXPONENT = 8

#: Functions that an expression may call: arithmetic of sympy, and integer functions of torch.
_FUNCTIONS = frozenset(
    "Integer Rational Add Mod Max Min FloorDiv CleanDiv CeilDiv PythonMod Where TruncToInt FloorToInt"
    " CeilToInt RoundToInt IntTrueDiv FloatTrueDiv ToFloat Identity ModularIndexing Eq Ne Equality Unequality"
    " StrictLessThan StrictGreaterThan LessThan GreaterThan And Or Not min max abs".split()
)
#: Functions that torch 2.14 and newer write with their module.
_TORCH_FUNCTIONS = frozenset({"sym_max", "sym_min"})
_NAMES = re.compile(r"[su]\d+|oo|int_oo")
_BINARY = (ast.Add, ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr)
_UNARY = (ast.UAdd, ast.USub, ast.Not)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w{0,200}", re.ASCII)


def is_arithmetic(text: object) -> bool:
    """Return whether a text is arithmetic on sizes that takes bounded time.

    Only the attributes, calls and names that torch itself writes are allowed.

    >>> is_arithmetic("FloorDiv(Add(Symbol('s0', positive=True, integer=True), Integer(-1)), Integer(32))")
    True
    >>> is_arithmetic("1 + (((-1) + L['x'].size()[2]) // 32) >= 2")
    True
    >>> is_arithmetic("torch.sym_max(1, L['x'].size()[2] // 2) != 1")  # since torch 2.14
    True
    >>> is_arithmetic("__import__('os').system('true')")
    False
    >>> is_arithmetic("9**9**9")
    False
    """
    if not isinstance(text, str) or len(text) > MAX_LENGTH or re.search(r"[#\\\r\n\0]", text):
        return False
    try:
        return _degree(ast.parse(text.strip(), mode="eval").body, 0) <= _MAX_DEGREE
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _degree(node: ast.AST, depth: int) -> int:
    """Return an upper bound of the factors of a value; raise ValueError unless it is arithmetic."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    below = depth + 1
    if isinstance(node, ast.Constant) and _is_number(node.value):
        return 1
    if isinstance(node, ast.Name) and _NAMES.fullmatch(node.id):
        return 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, _UNARY):
        return _degree(node.operand, below)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(node.left, node.right, below)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _bounded(_degree(node.left, below) + _degree(node.right, below))
    if isinstance(node, ast.BinOp) and isinstance(node.op, _BINARY):
        return max(_degree(node.left, below), _degree(node.right, below))
    if isinstance(node, ast.BoolOp):
        return max(_degree(value, below) for value in node.values)
    if isinstance(node, ast.Compare):
        return max(_degree(value, below) for value in (node.left, *node.comparators))
    if isinstance(node, ast.Call):
        return _called(node, below)
    if isinstance(node, ast.Subscript) and _is_sizes(node.value) and _is_index(node.slice):
        return 1
    raise ValueError("not arithmetic")


def _called(node: ast.Call, depth: int) -> int:
    if isinstance(node.func, ast.Attribute) and node.func.attr == "storage_offset" and not node.args + node.keywords:
        if _is_source(node.func.value):
            return 1
        raise ValueError("not arithmetic")
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if not all(keyword.arg and isinstance(keyword.value, ast.Constant) for keyword in node.keywords):
        raise ValueError("not arithmetic")
    if name == "Symbol" and len(node.args) == 1 and _text(node.args[0], _IDENTIFIER):
        if "__" in ast.literal_eval(node.args[0]) or not all(
            isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
            for keyword in node.keywords
        ):
            raise ValueError("not arithmetic")
        return 1
    if name == "Float" and len(node.args) == 1 and _text(node.args[0], re.compile(r"-?\d{1,20}(\.\d{1,40})?")):
        if any(keyword.arg != "precision" or not _is_index(keyword.value) for keyword in node.keywords):
            raise ValueError("not arithmetic")
        return 1
    if node.keywords:
        raise ValueError("not arithmetic")
    if name == "Pow" and len(node.args) == 2:
        return _power(node.args[0], node.args[1], depth)
    degrees = [_degree(argument, depth) for argument in node.args]
    if name == "Mul":
        return _bounded(sum(degrees))
    if name in _FUNCTIONS or _is_torch_function(node.func):
        return max(degrees, default=1)
    raise ValueError("not arithmetic")


def _is_torch_function(node: ast.AST) -> bool:
    """Return whether a node is one of `torch.sym_max` and `torch.sym_min`."""
    is_of_torch = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    return is_of_torch and isinstance(node, ast.Attribute) and node.attr in _TORCH_FUNCTIONS


def _power(base: ast.AST, exponent: ast.AST, depth: int) -> int:
    """Return the factors of a power; refuse large exponents: `9**9**9` has 370 million digits."""
    if isinstance(exponent, ast.Call) and isinstance(exponent.func, ast.Name) and exponent.func.id == "Integer":
        exponent = exponent.args[0] if len(exponent.args) == 1 and not exponent.keywords else exponent
    sign = isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub)
    value = exponent.operand if sign and isinstance(exponent, ast.UnaryOp) else exponent
    if not isinstance(value, ast.Constant) or type(value.value) is not int or value.value > _MAX_EXPONENT:
        raise ValueError("not arithmetic")
    return _bounded(_degree(base, depth) * max(value.value, 1))


def _bounded(degree: int) -> int:
    if degree > _MAX_DEGREE:
        raise ValueError("too large")
    return degree


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value < _MAX_INTEGER)


def _is_index(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1000


def _text(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value) is not None


def _is_source(node: ast.AST) -> bool:
    """Return whether a node is an input, `L['x']`, or a part of one, `L['x'][0]`."""
    while isinstance(node, ast.Subscript):
        if not _is_index(node.slice) and not _text(node.slice, _IDENTIFIER):
            return False
        node = node.value
    return isinstance(node, ast.Name) and node.id == "L"


def _is_sizes(node: ast.AST) -> bool:
    """Return whether a node is `L['x'].size()` or `L['x'].stride()`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("size", "stride")
        and not node.args
        and not node.keywords
        and _is_source(node.func.value)
    )
