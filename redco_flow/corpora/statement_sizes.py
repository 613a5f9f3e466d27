"""Statements of the Python standard library, and how many instructions each one compiles to.

    CO_NESTED = 16   →   2.32, the binary logarithm of 5

A logarithm, so that short and long statements count alike. Every machine with Python has the text,
and each answer can be checked.
"""

from __future__ import annotations

import ast
import dis
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from redco_flow.corpora.decompilation import files as modules
from redco_flow.corpora.decompilation import identity, statements

__all__ = ["files", "identity", "rows"]

MAX_CHARACTERS = 60


def files() -> list[Path]:
    """The standard library's modules, without its packages."""
    found = modules()
    root = min(len(path.parts) for path in found)
    return [path for path in found if len(path.parts) == root]


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str | float]]:
    """Yield {"statement", "log2_instructions"}, each statement once, in the order of the files."""
    seen: set[str] = set()
    for path in paths:
        for node in statements(ast.parse(path.read_bytes(), str(path))):
            if not isinstance(
                node, ast.Assign | ast.AugAssign | ast.Expr | ast.Assert | ast.Delete
            ):
                continue
            statement = ast.unparse(node)
            if len(statement) > MAX_CHARACTERS or statement in seen:
                continue
            seen.add(statement)
            if (count := _num_instructions(statement)) is not None:
                yield {"statement": statement, "log2_instructions": round(math.log2(count), 4)}


def _num_instructions(statement: str) -> int | None:
    """Count them; None of what compiles within a function only."""
    try:
        code = compile(statement, "statement", "exec")
    except SyntaxError:
        return None
    return len(list(dis.get_instructions(code)))
