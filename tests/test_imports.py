"""No import circle, also by way of imports in functions and for types."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "redco_flow"


def modules(package=PACKAGE):
    """Every module by its dotted name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path, known):
    """The modules of the package that a module's text imports, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [member if member in known else node.module for member in members]
        else:
            continue
        yield from (name for name in names if name in known)


def circles(graph):
    """Yield each circle once, as the modules on the way back to where a search has been."""
    state, way = {}, []

    def visit(module):
        state[module] = "open"
        way.append(module)
        for target in sorted(graph[module]):
            if state.get(target) == "open":
                yield way[way.index(target) :]
            elif target not in state:
                yield from visit(target)
        state[module] = "done"
        way.pop()

    for module in sorted(graph):
        if module not in state:
            yield from visit(module)


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}

    assert list(circles(graph)) == [["b", "c"]]


def test_no_module_imports_itself_however_far_around():
    known = modules()
    graph = {name: set(imports(path, known)) - {name} for name, path in known.items()}

    assert len(graph) > 100
    assert list(circles(graph)) == []
