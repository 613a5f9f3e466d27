"""Docstrings name only what exists: a stale name sends a reader on a search for nothing."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "redco_flow"
# Names of other projects, of files' formats and of examples.
ELSEWHERE = {
    *("Dataset", "Encoding", "IOBase", "as_text", "b3sum", "distribute_saved_activations"),
    *("experimental", "no_sync", "pathlib", "pooler_output", "ragged_dot", "rouge_score"),
    *("reasoning_content", "simple_evaluate", "splash_attention", "tojson", "topologies"),
    *("JAX_DEFAULT_MATMUL_PRECISION", "brotli", "msvcrt", "my_package", "my_recipe"),
    *("chosen_log_likelihood", "rejected_log_likelihood", "reference_chosen", "reference_rejected"),
}
IN_BACKTICKS = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")


def words(text):
    return re.findall(r"[A-Za-z_]\w*", text)


def docstring_of(node):
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or not node.body:
        return None
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.value if is_text and isinstance(first.value.value, str) else None


def names_in(tree, docstrings):
    """Yield each identifier of a module, and each word of its texts that are no docstrings."""
    for node in ast.walk(tree):
        for key in ("id", "attr", "arg", "name"):
            yield from words(str(getattr(node, key, None) or ""))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from () if id(node) in docstrings else words(node.value)


def test_each_name_in_backticks_of_a_docstring_exists():
    known, quoted = set(ELSEWHERE), []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = [found for node in ast.walk(tree) if (found := docstring_of(node))]
        known |= {*path.with_suffix("").parts, *names_in(tree, {*map(id, docstrings)})}
        for one in docstrings:
            place = f"{path.relative_to(PACKAGE)}:{one.lineno}"
            quoted += [(place, name) for name in IN_BACKTICKS.findall(one.value)]

    assert [(place, name) for place, name in quoted if not {*words(name)} <= known] == []
