"""What a module's source says it imports, without running it.

Reads statements only, at any depth, and leaves out what stands under `if TYPE_CHECKING:`. Knows
no files: whether a name is a module is decided by `code_digest.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.Import, ast.ImportFrom, ast.Raise)
_IMPORT = re.compile(rb"\bimport\b")
_TOP_LEVEL = re.compile(rb"^[A-Za-z_@]", re.MULTILINE)


@dataclass(frozen=True)
class Imported:
    """One imported name.

    Args:
        module: the absolute name of the module named by the statement.
        name: what is taken from it; None for `import module`, "*" for everything.
    """

    module: str
    name: str | None


@dataclass(frozen=True)
class Imports:
    """A module's imports.

    Args:
        taken: what it imports when it runs.
        lazy: for a package with `__getattr__`, the names it declares under TYPE_CHECKING and
            imports on first use: name to module.
    """

    taken: tuple[Imported, ...] = ()
    lazy: Mapping[str, str] = field(default_factory=dict)


@cache
def read_imports(source: bytes, module: str, *, is_package: bool) -> Imports:
    """Return the imports in `source`; parsed once for all the stages whose closures have it.

    Args:
        source: the file's bytes.
        module: its dotted name, against which relative imports are resolved.
        is_package: the file is an `__init__.py`.

    Raises:
        SyntaxError: the source is not Python, as far as it was read.
    """
    package = module if is_package else module.rpartition(".")[0]
    tree = _parse(source)
    taken: list[Imported] = []
    type_checking: list[Imported] = []
    for statement, runs in _statements(tree.body, runs=True):
        (taken if runs else type_checking).extend(_imported(statement, package))
    if not any(isinstance(one, ast.FunctionDef) and one.name == "__getattr__" for one in tree.body):
        return Imports(tuple(taken))
    return Imports(tuple(taken), {one.name: one.module for one in type_checking if one.name})


def _parse(source: bytes) -> ast.Module:
    """Parse up to the last import: that is mostly a small part, and parsing takes all the time."""
    words = list(_IMPORT.finditer(source))
    if not words:
        return ast.Module([], [])
    top_level = _TOP_LEVEL.search(source, words[-1].end())
    if top_level is None or b"__getattr__" in source:
        return ast.parse(source)
    try:
        # What parses as the beginning of a file says the same as within the whole file.
        return ast.parse(source[: top_level.start()])
    except SyntaxError:  # cut inside a string or in parentheses
        return ast.parse(source)


def _statements(body: list[ast.stmt], *, runs: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, nested ones too, and whether it runs outside a type checker."""
    for statement in body:
        yield statement, runs
        if isinstance(statement, _SIMPLE):
            continue
        in_body, in_else = _runs(statement)
        for part, part_runs in (
            ("body", runs and in_body),
            ("orelse", runs and in_else),
            ("finalbody", runs),
        ):
            yield from _statements(getattr(statement, part, None) or [], runs=part_runs)
        for part in ("handlers", "cases"):
            for branch in getattr(statement, part, ()):
                yield from _statements(branch.body, runs=runs)


def _runs(statement: ast.stmt) -> tuple[bool, bool]:
    """Whether an `if`'s two branches run when types are not being checked."""
    if not isinstance(statement, ast.If):
        return True, True
    test, is_negated = statement.test, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_negated = test.operand, True
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    if name != "TYPE_CHECKING":
        return True, True
    return (True, False) if is_negated else (False, True)


def _imported(statement: ast.stmt, package: str) -> Iterator[Imported]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield Imported(alias.name, None)
    elif isinstance(statement, ast.ImportFrom):
        module = _absolute(statement.module or "", statement.level, package)
        for alias in statement.names:
            yield Imported(module, alias.name)


def _absolute(module: str, level: int, package: str) -> str:
    """`from ..x import y` seen from `package`."""
    if level == 0:
        return module
    base = package
    for _ in range(level - 1):
        base = base.rpartition(".")[0]
    return f"{base}.{module}".strip(".")
