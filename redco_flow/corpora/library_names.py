"""Conversations about the Python standard library: what kind of thing its names are.

    In subprocess, what is Popen?   →   A class.
    And Popen.wait?                 →   A method.
    And TimeoutExpired?             →   An exception.

Each definition of the library's sources is asked for once, so the last answer of a conversation
that was held out is nowhere in the others. Every machine with Python has the text, and each answer
can be checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from redco_flow.corpora.decompilation import identity
from redco_flow.corpora.statement_sizes import files

__all__ = ["files", "identity", "rows"]

SYSTEM = "You know Python's standard library."
NUM_TURNS = 3
_RAISED = ("Error", "Exception", "Warning")


def rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield {"messages"}, the conversations of each module in the order of its definitions."""
    for path in paths:
        found = dict(_definitions(ast.parse(path.read_bytes(), str(path)).body))
        names = list(found.items())
        for start in range(0, len(names) - NUM_TURNS + 1, NUM_TURNS):
            yield {"messages": _conversation(path.stem, names[start : start + NUM_TURNS])}


def _conversation(module: str, asked: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM}]
    for number, (name, kind) in enumerate(asked):
        question = f"And {name}?" if number else f"In {module}, what is {name}?"
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"{kind}."},
        ]
    return messages


def _definitions(body: Sequence[ast.stmt], owner: str = "") -> Iterator[tuple[str, str]]:
    """Yield what a module or class defines, its name and its kind."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + node.name, _kind_of_function(node) if owner else "A function"
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            is_raised = any(base.endswith(_RAISED) for base in bases)
            yield owner + node.name, "An exception" if is_raised else "A class"
            yield from _definitions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield owner + node.targets[0].id, "An attribute" if owner else "A constant"


def _kind_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    return "A property" if "property" in marks else "A method"
