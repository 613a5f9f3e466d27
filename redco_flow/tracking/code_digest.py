"""The code that a result depends on: digests of the sources that modules import; git's state.

Follows import statements through the source, into every module that is not installed, without
importing any of it. Imports made at run time by name are invisible here: a stage names those in
`code_modules`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import subprocess
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.git import run_git

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.Import, ast.ImportFrom, ast.Raise)
_IMPORT = re.compile(rb"\bimport\b")
_TOP_LEVEL = re.compile(rb"^[A-Za-z_@]", re.MULTILINE)
_TOP_LEVEL_NAME = re.compile(r"^\w+(?=[/.])", re.MULTILINE)  # of a path


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


_MAX_NEW_FILE_BYTES = 1 << 20  # source is small; data that git does not ignore is not


def git_state(directory: Path) -> dict[str, Any]:
    """Return `{"commit", "dirty", "patch"}` of the repository around `directory`, or `{}`.

    The patch holds the changes of tracked files since the commit, and new, not ignored Python
    files of at most 1 MiB; `git apply` on the commit gives the code that ran.
    """
    commit = _git(directory, "rev-parse", "--verify", "HEAD").strip()
    if not commit:
        return {}
    changed = _git(directory, "status", "--porcelain", "--untracked-files=normal")
    if not changed:
        return {"commit": commit.decode(), "dirty": False, "patch": ""}
    root = Path(os.fsdecode(_git(directory, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    patch = _git(root, "diff", *_PLAIN, "HEAD") + b"".join(_new_files(root))
    return {"commit": commit.decode(), "dirty": True, "patch": patch.decode("utf-8", "replace")}


def code_record(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `git_state`'s answer with the patch's SHA-256 in its place, for records."""
    if not state:
        return {}
    patch = str(state["patch"])
    digest = hashlib.sha256(patch.encode()).hexdigest() if patch else None
    return {"commit": state["commit"], "dirty": state["dirty"], "patch_digest": digest}


# A patch that can be applied, whatever the user's configuration makes of `git diff`.
_PLAIN = (
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--full-index",
)


def _new_files(root: Path) -> list[bytes]:
    names = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    small = [
        name
        for name in os.fsdecode(names).split("\0")
        if name and (root / name).lstat().st_size <= _MAX_NEW_FILE_BYTES
    ]
    return [_git(root, "diff", *_PLAIN, "--no-index", "--", os.devnull, name) for name in small]


def _git(directory: Path, *arguments: str) -> bytes:
    """The command's output; empty where it fails. A difference (status 1) is no failure."""
    try:
        done = run_git(directory, *arguments)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode in (0, 1) else b""


_OURS = "redco_flow"
# They decide how and where a stage runs and how its result is kept, never what it is. The root
# package itself holds only the version and names.
_NO_PART_OF_RESULTS = frozenset(
    f"{_OURS}.{name}"
    for name in (
        "bounded",
        "cli",
        "errors",
        "git",
        "hub_guard",
        "launch",
        "orchestrate",
        "records",
        "report",
        "search_path",
        "spec",
        "tracking",
        "worker",
    )
)
_SUFFIXES = (*EXTENSION_SUFFIXES, ".py")  # in the order in which Python looks for them


def module_digests(modules: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of every source file the modules import, by dotted name, sorted.

    Followed are imports of redco_flow, of the modules' own top-level packages and of modules that
    are not installed, wherever they are found; of what redco_flow imports, its own modules.
    `from package import name` takes the submodule, if there is one, and every `__init__.py` on
    the way.

    Raises:
        UsageError: a given module does not exist, or a file of its package is not Python.
    """
    closure = _Closure()
    for module in modules:
        closure.add_root(module)
    closure.follow()
    return dict(sorted(closure.digests.items()))


def source_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of source files, by the names they are given."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def is_source_file(name: str) -> bool:
    """Whether a name among digests is of a source file, not of a module."""
    return name.endswith(_SUFFIXES)


@dataclass(frozen=True)
class ScriptCode:
    """The code of a script that is run by its path.

    Args:
        files: the script and the modules beside it that it imports, by path below its folder.
        modules: the other ones that it imports, unless they are installed.
    """

    files: Mapping[str, Path]
    modules: tuple[str, ...]


_SCRIPT = "__main__"


def read_script(script: Path) -> ScriptCode:
    """Return what a script imports, found as Python finds it: beside the script first.

    Raises:
        UsageError: the script, or a file beside it, is not Python.
        OSError: the script cannot be read.
    """
    closure = _Closure(folder=script.parent)
    closure.top_level[_SCRIPT] = script
    closure.pending.append(_SCRIPT)
    closure.follow()
    files, modules = {}, []
    for name in sorted(closure.digests):
        root = name.partition(".")[0]
        path = closure.files[name]
        if root in closure.own and path is not None:
            files[path.relative_to(script.parent).as_posix()] = path
        else:
            modules.append(name)
    return ScriptCode(files, tuple(modules))


def changed_modules(digests: Mapping[str, str]) -> list[str]:
    """Return the modules of redco_flow in `digests` whose source has changed or is gone."""
    ours = [name for name in digests if name.startswith(f"{_OURS}.")]
    found = digests_of(ours)
    return [name for name in ours if found.get(name) != digests[name]]


def digests_of(modules: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of these modules' files alone, by name, without those that are gone."""
    places = {root: _top_level(root) for root in set(map(_root, modules))}
    found = {name: _file(places[_root(name)], name) for name in modules}
    return source_digests({name: file for name, file in found.items() if file is not None})


@dataclass
class _Closure:
    """Modules reached so far.

    Args:
        folder: a script's, where its imports are looked for first.
    """

    folder: Path | None = None
    digests: dict[str, str] = field(default_factory=dict)
    imports: dict[str, Imports] = field(default_factory=dict)
    files: dict[str, Path | None] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    top_level: dict[str, Path | None] = field(default_factory=dict)  # name → file or folder
    own: set[str] = field(default_factory=lambda: {_SCRIPT})  # top-level, named or in `folder`
    installed: dict[Path, frozenset[str]] = field(default_factory=dict)  # `_installed_in` of each
    entries: dict[str, frozenset[str] | None] = field(default_factory=dict)  # of each folder

    def add_root(self, module: str) -> None:
        """Begin at this module; its top-level package is followed from now on."""
        root = _root(module)
        self.own.add(root)
        if root not in self.top_level:
            self.top_level[root] = _top_level(root)
        if _file(self.top_level[root], module) is None:
            raise UsageError(
                f"module {module!r} cannot be found; looked along PYTHONPATH and in the current "
                f"directory. Check the spelling, or install its package."
            )
        self.pending.append(module)

    def follow(self) -> None:
        """Visit everything reachable."""
        while self.pending:
            module = self.pending.pop()
            for package in _packages(module):
                self._visit(package)
            self._visit(module)

    def _visit(self, module: str) -> None:
        if module in self.imports or _is_left_out(module):
            return
        imports = self.imports[module] = self._read(module)
        is_ours = _root(module) == _OURS
        for imported in imports.taken:
            if not is_ours or _root(imported.module) == _OURS:
                self.pending.extend(self._modules(imported.module, imported.name))

    def _read(self, module: str) -> Imports:
        """Digest one file and return what it imports."""
        file = self._find(module)
        if file is None:
            return Imports()
        source = file.read_bytes()
        if module != _OURS:
            self.digests[module] = hashlib.sha256(source).hexdigest()
        if file.suffix != ".py":  # compiled, perhaps from a file of its name
            file = file.with_name(f"{file.name.partition('.')[0]}.py")
            if not file.is_file():
                return Imports()
            source = file.read_bytes()
        try:
            return read_imports(source, module, is_package=file.name == "__init__.py")
        except (SyntaxError, ValueError) as error:
            if _root(module) not in self.own:  # perhaps never imported, as one for Python 2
                return Imports()
            raise UsageError(f"{file}: is not Python: {error}.") from error

    def _modules(self, module: str, name: str | None) -> Iterator[str]:
        """The modules that one imported name brings in, if they are followed."""
        if not self._is_followed(module):
            return
        yield module
        self._visit_for_names(module)
        lazy = self.imports[module].lazy if module in self.imports else {}
        if name is None:
            # `import package` may use any name that the package imports on first use.
            yield from lazy.values()
        elif name == "*":
            yield from self._submodules(module)
        elif name in lazy:
            yield lazy[name]
        elif self._is_followed(f"{module}.{name}"):
            yield f"{module}.{name}"

    def _visit_for_names(self, module: str) -> None:
        """Read a package before its names are asked for; plain modules can wait."""
        file = self._find(module)
        if file is not None and file.name == "__init__.py":
            self._visit(module)

    def _submodules(self, package: str) -> Iterator[str]:
        """All direct submodules: `from package import *` may name any of them."""
        file = self._find(package)
        if file is None or file.name != "__init__.py":
            return
        for path in sorted(file.parent.iterdir()):
            name = f"{package}.{path.name.partition('.')[0]}"
            if path.stem != "__init__" and self._is_followed(name):
                yield name

    def _is_followed(self, module: str) -> bool:
        return not _is_left_out(module) and (
            self._find(module) is not None or self._is_namespace(module)
        )

    def _is_namespace(self, module: str) -> bool:
        location = self._location(_root(module))
        if location is None or not self._may_be_there(location, module):
            return False
        return location.joinpath(*module.split(".")[1:]).is_dir()

    def _find(self, module: str) -> Path | None:
        if module not in self.files:
            location = self._location(_root(module))
            is_there = location is not None and self._may_be_there(location, module)
            self.files[module] = _file(location, module) if is_there else None
        return self.files[module]

    def _may_be_there(self, location: Path, module: str) -> bool:
        """Whether the folder has such an entry: most imported names are not modules."""
        _, *words = module.split(".")
        if not words:
            return True
        folder = os.path.join(location, *words[:-1])
        if folder not in self.entries:
            try:
                self.entries[folder] = frozenset(os.listdir(folder))
            except (FileNotFoundError, NotADirectoryError):
                self.entries[folder] = frozenset()
            except OSError:  # its files may be readable all the same
                self.entries[folder] = None
        entries = self.entries[folder]
        return entries is None or any(words[-1] + end in entries for end in ("", *_SUFFIXES))

    def _location(self, root: str) -> Path | None:
        """Return the location of a top-level module, if its code is followed."""
        if root not in self.top_level:
            self.top_level[root] = self._find_top_level(root)
        return self.top_level[root]

    def _find_top_level(self, root: str) -> Path | None:
        found = _top_level(root)
        if self.folder is not None:
            own = _origin(PathFinder.find_spec(root, [str(self.folder)]))
            # A folder without __init__.py is a package only if there is no other of its name.
            if own is not None and (found is None or _file(own, root) is not None):
                self.own.add(root)
                return own
        is_followed = root == _OURS or (found is not None and not self._is_installed(found))
        return found if is_followed else None

    def _is_installed(self, location: Path) -> bool:
        """Whether a module is Python's own or an installed one, wherever pip put it."""
        paths = sysconfig.get_paths()
        folder = location.parent
        folders = {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        named = {"site-packages", "dist-packages", "lib-dynload"}
        if folder in folders or named & set(location.parts):
            return True
        if folder not in self.installed:
            self.installed[folder] = _installed_in(folder)
        return location.name.partition(".")[0] in self.installed[folder]


def _root(module: str) -> str:
    return module.partition(".")[0]


def _packages(module: str) -> Iterator[str]:
    """The packages around a module, outermost first: their `__init__.py` runs before it."""
    words = module.split(".")
    for count in range(1, len(words)):
        yield ".".join(words[:count])


def _is_left_out(module: str) -> bool:
    return ".".join(module.split(".")[:2]) in _NO_PART_OF_RESULTS


def _top_level(root: str) -> Path | None:
    """The file or folder of a top-level module, found without importing it."""
    try:
        spec = importlib.util.find_spec(root)
    except (ValueError, ImportError):
        return None
    return _origin(spec)


def _origin(spec: ModuleSpec | None) -> Path | None:
    """The file of a module, or the folder of a package."""
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).absolute()
    return Path(spec.origin).absolute() if spec.has_location and spec.origin else None


def _file(location: Path | None, module: str) -> Path | None:
    """A module's file below its top-level package's folder; None for a namespace or nothing."""
    if location is None:
        return None
    words = module.split(".")[1:]
    if location.is_file():
        return None if words else location
    path = location.joinpath(*words)
    init = path / "__init__.py"
    if init.is_file():
        return init
    if not words:
        return None
    for suffix in _SUFFIXES:
        file = path.with_name(path.name + suffix)
        if file.is_file():
            return file
    return None


def _installed_in(folder: Path) -> frozenset[str]:
    """The top-level modules that `pip install --target` has put into a folder."""
    records = [one.read_text(errors="replace") for one in folder.glob("*.dist-info/RECORD")]
    return frozenset(name for record in records for name in _TOP_LEVEL_NAME.findall(record))
