"""Statements of the Python standard library, and the bytecode that each one compiles to.

A row's source is what the interpreter executes, its target the statement that was compiled:

    load b load_method c load d call 1 store a   →   a = b.c(d)

Every machine with Python has the text, and each answer can be checked. Names are shortened to
letters in their order of appearance, so that a small model can learn the grammar, and rows of
one shape count once. Reads the interpreter's own sources; knows nothing of tokens and models.
"""

from __future__ import annotations

import ast
import dis
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

MIN_CHARACTERS = 6
MAX_CHARACTERS = 24
MAX_INSTRUCTIONS = 8
_LEFT_OUT = frozenset({"test", "site-packages", "dist-packages"})
_MAX_COLUMNS = 4 * MAX_CHARACTERS  # as written, before names become letters
_PLAIN_NUMBERS = (0, 1, 2)
_HOLD_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
# Bookkeeping of the interpreter that says nothing about the statement.
_SILENT = frozenset({"RESUME", "NOP", "PRECALL", "PUSH_NULL", "CACHE", "POP_TOP", "EXTENDED_ARG"})

# How versions of Python say that a call follows, which the call itself says.
_CALL_FOLLOWS = re.compile(r"NULL(\|self)? \+ | \+ NULL(\|self)?")


def files() -> list[Path]:
    """The standard library's modules and its packages' modules, in order of name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [*root.glob("*.py"), *root.glob("*/*.py")]
    return sorted(path for path in found if path.parent.name not in _LEFT_OUT)


def identity() -> dict[str, str]:
    """The interpreter that compiles: other versions have other bytecode."""
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield {"bytecode", "statement"}, each statement once, in the order of the files."""
    seen: set[str] = set()
    for path in paths:
        for node in statements(ast.parse(path.read_bytes(), str(path))):
            statement = _shortened(node)
            if statement is None or statement in seen:
                continue
            seen.add(statement)
            instructions = _disassemble(statement)
            if len(instructions) <= MAX_INSTRUCTIONS:
                yield {"bytecode": " ".join(instructions), "statement": statement}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk the statements of a tree, level by level; what stands within an expression is none."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        inner = ast.iter_child_nodes(node)
        waiting.extend(child for child in inner if isinstance(child, _HOLD_STATEMENTS))


def _shortened(node: ast.AST) -> str | None:
    """The statement, or the value that it returns or tests, with short names; None to skip it."""
    if isinstance(node, ast.Return | ast.Expr):
        node = node.value or ast.Constant(None)
    elif isinstance(node, ast.If | ast.While | ast.Assert):
        node = node.test
    elif not isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        return None
    if isinstance(node, ast.Constant | ast.Name) or not _is_short(node) or _has_own_scope(node):
        return None
    try:
        short = ast.unparse(_Shortener().visit(node))
    except IndexError:  # more names than letters
        return None
    return short if MIN_CHARACTERS <= len(short) <= MAX_CHARACTERS else None


def _is_short(node: ast.expr | ast.stmt) -> bool:
    is_one_line = node.lineno == node.end_lineno
    return is_one_line and (node.end_col_offset or 0) - node.col_offset <= _MAX_COLUMNS


def _has_own_scope(node: ast.AST) -> bool:
    """Whether part of it compiles to code of its own, or only works inside a function."""
    kinds = (
        ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
        ast.Yield, ast.YieldFrom, ast.Await, ast.JoinedStr, ast.NamedExpr,
    )  # fmt: skip
    return any(isinstance(part, kinds) for part in ast.walk(node))


class _Shortener(ast.NodeTransformer):
    """Renames a to z in order of appearance, and brings constants down to a few."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def _letter(self, name: str) -> str:
        return self._letters.setdefault(name, ascii_lowercase[len(self._letters)])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._letter(node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        value = self.visit(node.value)
        return ast.Attribute(value, self._letter(node.attr), node.ctx)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        name = None if node.arg is None else self._letter(node.arg)
        return ast.keyword(name, self.visit(node.value))

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str | bytes):
            return ast.Constant("s" if isinstance(node.value, str) else b"s")
        is_number = isinstance(node.value, int | float | complex)
        if is_number and not isinstance(node.value, bool) and node.value not in _PLAIN_NUMBERS:
            return ast.Constant(9)
        return node


def _disassemble(statement: str) -> list[str]:
    try:
        code = compile(statement, "statement", "eval")
    except SyntaxError:
        code = compile(statement, "statement", "exec")
    shown = [one for one in dis.get_instructions(code) if one.opname not in _SILENT]
    lines = [line for one in shown for line in _readable(one, code.co_consts)]
    ends = 1 if lines[-2:-1] != ["load_const None"] else 2
    return lines[:-ends]


def _readable(instruction: dis.Instruction, constants: Sequence[Any]) -> list[str]:
    name = instruction.opname.lower().removesuffix("_name")
    if instruction.opname == "RETURN_CONST":  # of Python 3.12 and 3.13: two in one
        return [f"load_const {instruction.argrepr}", "return_value"]
    if instruction.opname == "KW_NAMES" and instruction.arg is not None:
        return [f"{name} {' '.join(constants[instruction.arg])}"]
    if isinstance(instruction.argval, frozenset):
        # As it would be shown, but for its order, which is another one in every process.
        return [f"{name} frozenset({{{', '.join(sorted(map(repr, instruction.argval)))}}})"]
    if instruction.argrepr:
        return [f"{name} {_CALL_FOLLOWS.sub('', instruction.argrepr)}"]
    return [name if instruction.arg is None else f"{name} {instruction.arg}"]
