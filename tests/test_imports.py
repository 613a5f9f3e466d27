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


# What a login node loads: the launcher, what describes a stage or recipe, what looks into a plan.
LIGHT = ("cli", "launch", "orchestrate", "report", "runtime", "spec", "tracking")
LIGHT_FILES = ("config", "schema", "new_rows", "fit")


def loads(path):
    """The modules that a file imports as it is loaded: not in functions, not for types alone."""
    nodes = list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With):
            nodes += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nothing_that_a_login_node_loads_imports_jax():
    known = modules()
    reached = {
        name
        for name in known
        for parts in [name.split(".")]
        if parts[-1] in LIGHT_FILES or (len(parts) > 1 and parts[1] in LIGHT)
    }
    way = {name: name for name in reached}
    while reached:
        name = reached.pop()
        for target in loads(known[name]):
            assert target.split(".")[0] not in ("jax", "flax", "optax"), f"{way[name]} > {target}"
            for length in range(1, target.count(".") + 2):
                part = ".".join(target.split(".")[:length])
                if part in known and part not in way:
                    way[part] = f"{way[name]} > {part}"
                    reached.add(part)
