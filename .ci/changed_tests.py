"""Print the test files whose import closure contains a file that differs from a base commit.

Usage: changed_tests.py [BASE]; the base is where the branch left main, unless it is given.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from redco_flow.tracking.code_digest import read_imports

# Modules that are imported by name when a program runs: the importer, and a pattern of their files.
BY_NAME = {
    "redco_flow/cli/main.py": "redco_flow/cli/*.py",
    "redco_flow/models/find.py": "redco_flow/models/families/*.py",
    "redco_flow/recipes/find.py": "redco_flow/recipes/*/*.py",
    "redco_flow/spec/metric.py": "redco_flow/metrics/*.py",
    "tests/stages/kinds/stage_kinds.py": "redco_flow/stages/*/*.py",
    "tests/hub/conftest.py": "redco_flow/stages/data/hub_references.py",
    "redco_flow/orchestrate/checkpoints/chat.py": "redco_flow/stages/predict/conversation.py",
}
# What a test names: a subprocess's `-m redco_flow.cli.main`, a kind in a pipeline.
DOTTED = re.compile(r"\b[a-z_]\w*(?:\.\w+)+")
CONCERNS_ALL = ("pyproject.toml", "constraints.txt", "tests/conftest.py")


class Sources:
    """The Python files below a folder, by module name as tests import them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Path] = {}
        folders = [root, root / "tests" / "cluster", *root.glob("tests/*/kinds"), root / "examples"]
        for folder in folders:
            for path in folder.rglob("*.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                if not any(part.startswith(".") for part in parts):
                    self._modules.setdefault(name, path)

    @cache  # noqa: B019 (one object per process)
    def imports(self, path: Path) -> frozenset[Path]:
        """The files that a file imports or names, and the conftest files above a test."""
        source = path.read_bytes()
        place = path.relative_to(self._root).as_posix()
        names = set(DOTTED.findall(source.decode())) if place.startswith("tests/") else set()
        module = next((name for name, one in self._modules.items() if one == path), path.stem)
        is_package = path.name == "__init__.py"
        for one in read_imports(source, module, is_package=is_package).taken:
            names |= {one.module, f"{one.module}.{one.name}"}
        known = {part for name in names for part in _prefixes(name) & self._modules.keys()}
        found = {self._modules[name] for name in known}
        found.update(self._root.glob(BY_NAME[place]) if place in BY_NAME else ())
        found.update(one for folder in path.parents if (one := folder / "conftest.py").is_file())
        return frozenset(found)

    def closure(self, path: Path) -> set[Path]:
        """Everything that a file imports, directly or not, and the file."""
        found, pending = set(), [path]
        while pending:
            if (one := pending.pop()) not in found:
                found.add(one)
                pending.extend(self.imports(one))
        return found


def _prefixes(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def changed_files(root: Path, base: str | None) -> set[Path]:
    """What differs from the base, committed or not; new files too.

    Raises:
        SystemExit: git knows no such commit.
    """
    base = base or _git(root, "merge-base", "HEAD", "main")[0]
    names = _git(root, "diff", "--name-only", base)
    names += _git(root, "ls-files", "--others", "--exclude-standard")
    return {root / name for name in names}


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}; give a base: BASE=COMMIT")
    return done.stdout.splitlines()


def tests_of(root: Path, changed: set[Path]) -> Iterator[Path]:
    """The test files to run: by imports, and for other files than Python's by their names."""
    sources = Sources(root)
    others = {path.name for path in changed if path.suffix != ".py"}
    all_tests = any(root / name in changed for name in CONCERNS_ALL)
    for test in sorted(root.glob("tests/**/test_*.py")):
        named = others and any(name in test.read_text() for name in others)
        if all_tests or named or not changed.isdisjoint(sources.closure(test)):
            yield test


if __name__ == "__main__":
    top = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel")[0])
    base = sys.argv[1] if len(sys.argv) > 1 else None
    for test in tests_of(top, changed_files(top, base)):
        sys.stdout.write(f"{os.path.relpath(test)}\n")
