"""Print the sizes of a checkout: files, lines, functions, import closures, words, tests.

Usage: python tests/figures.py [CHECKOUT ...]: one column for each (default: this one).
`--collect` also collects the tests, and prints their number and the CPU seconds that it takes.
"""

import argparse
import ast
import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from test_imports import imports, modules

PROJECT = Path(__file__).resolve().parents[1]
# To understand one of these, its whole closure may have to be read; the first that exists counts.
STARTS = {
    "trainer": ["engine.trainer"],
    "deployer": ["engine.sharding.deployer", "engine.deployer"],
    "train stage": ["stages.train.run"],
    "plan": ["orchestrate.run.plan", "orchestrate.plan"],
    "worker": ["worker"],
}


class Modules:
    """The parsed modules of a checkout's package."""

    def __init__(self, root):
        known = modules(root / "redco_flow")
        self.sources = {name: path.read_text() for name, path in sorted(known.items())}
        self.trees = {name: ast.parse(source) for name, source in self.sources.items()}
        self.imports = {name: set(imports(path, known)) - {name} for name, path in known.items()}

    def closure(self, starts):
        """Return the modules that the first existing start imports, directly or not."""
        pending = [name for start in starts if (name := f"redco_flow.{start}") in self.trees][:1]
        found = set()
        while pending:
            if (one := pending.pop()) not in found:
                found.add(one)
                pending.extend(self.imports[one])
        return found

    def lines(self, names):
        return sum(self.sources[name].count("\n") for name in names)

    def nodes(self, *kinds):
        for tree in self.trees.values():
            yield from (node for node in ast.walk(tree) if isinstance(node, kinds))


def package_figures(root):
    """Yield name and value of each figure of the package's source."""
    package = Modules(root)
    every = package.sources
    lengths = [every[name].count("\n") for name in every]
    yield "files", f"{len(every):,}"
    yield "lines", f"{sum(lengths):,}"
    yield "lines a file: median, longest", f"{statistics.median(lengths):.0f}, {max(lengths)}"
    layers = sorted({name.split(".")[1] for name in every if name.count(".") > 1})
    for layer in layers:
        names = [name for name in every if f"{name}.".startswith(f"redco_flow.{layer}.")]
        yield f"  {layer}: files, lines", f"{len(names)}, {package.lines(names):,}"
    sizes = [
        node.end_lineno - node.lineno + 1
        for node in package.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    ]
    yield "functions", f"{len(sizes):,}"
    longest = f"{statistics.median(sizes):.0f}, {max(sizes)}, {sum(size > 50 for size in sizes)}"
    yield "lines a function: median, longest, over 50", longest
    importers = {name: sum(name in one for one in package.imports.values()) for name in every}
    single = [name for name, number in importers.items() if number == 1]
    yield "files with one importer: files, lines", f"{len(single)}, {package.lines(single):,}"
    for title, starts in STARTS.items():
        found = package.closure(starts)
        yield f"closure of {title}: files, lines", f"{len(found)}, {package.lines(found):,}"
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [text for node in package.nodes(*documented) if (text := ast.get_docstring(node))]
    words = sum(len(text.split()) for text in texts)
    yield "docstrings: number, words", f"{len(texts):,}, {words:,}"


def other_figures(root):
    """Yield name and value of each figure of tests, benchmarks and docs."""
    for folder in ("tests", "benchmarks", "examples"):
        files = list((root / folder).rglob("*.py"))
        lines = sum(path.read_text().count("\n") for path in files)
        yield f"{folder}: files, lines", f"{len(files)}, {lines:,}"
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    yield "documentation: words", f"{sum(len(page.read_text().split()) for page in pages):,}"
    architecture = (root / "ARCHITECTURE.md").read_text()
    yield (
        "ARCHITECTURE.md: lines, words",
        f"{architecture.count(chr(10))}, {len(architecture.split()):,}",
    )


def collection_figures(root):
    """Yield the number of tests by mark, and the CPU seconds of one collection."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for title, marks in {"light": "not slow and not cluster and not gpu", "all": "not gpu"}.items():
        words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, "tests"]
        done = subprocess.run(words, cwd=root, capture_output=True, text=True)
        found = re.search(r"(\d+)(?:/\d+)? tests", done.stdout)
        yield f"tests, {title}", found[1] if found else f"not collected: {done.stdout[-200:]}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    yield "CPU seconds of a collection", f"{spent / 2:.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[PROJECT])
    parser.add_argument("--collect", action="store_true")
    options = parser.parse_args()
    columns = []
    for root in options.checkouts:
        figures = dict(package_figures(root)) | dict(other_figures(root))
        columns.append(figures | (dict(collection_figures(root)) if options.collect else {}))
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, "-") for column in columns]
        sys.stdout.write(f"{name:<44}{''.join(f'{value:>18}' for value in values)}\n")


if __name__ == "__main__":
    main()
