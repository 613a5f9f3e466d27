"""The page of the Python API: signatures and docstrings, read from the source without imports."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CHAPTERS = {
    "The engine": (
        "engine.deployer.Deployer",
        "engine.training_plan.TrainingPlan",
        "engine.training_plan.StepMemory",
        "engine.trainer.Trainer",
        "engine.rounds.Rounds",
        "engine.predictor.Predictor",
    ),
    "Sharding rules": ("engine.sharding.rules.ShardingRules",),
    "Stages": (
        "runtime.context.StageContext",
        "runtime.context.StageOutputs",
        "runtime.context.Output",
        "spec.stage_kind.InputSlot",
    ),
    "Scripts": ("stages.script.context.script_context", "stages.script.context.ScriptContext"),
    "Recipes": ("recipes.recipe.Recipe",),
    "Executors": ("launch.executor.CallExecutor", "launch.job.CallJob"),
}
SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Source|Attributes):\s*(.*)$")


def api_page() -> Iterator[str]:
    """Yield the page's lines."""
    yield from ("# Python API", "", "Signatures and docstrings of the public classes.")
    for chapter, names in CHAPTERS.items():
        yield from ("", f"## {chapter}")
        for name in names:
            yield from _object(name)


def _object(name: str) -> Iterator[str]:
    module, _, member = name.rpartition(".")
    path = PROJECT / "redco_flow" / f"{module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (node,) = (one for one in tree.body if getattr(one, "name", None) == member)
    link = f"../../{path.relative_to(PROJECT)}"
    yield from ("", f"### {member}", "", f"`redco_flow.{name}`, in `{link.removeprefix('../../')}`")
    yield from ("", "```python", f"{member}{_signature_of(node)}", "```", "", *_text(node))
    if isinstance(node, ast.ClassDef):
        for method in _methods(node):
            yield from ("", f"#### {member}.{method.name}", "", "```python")
            yield from (f"{method.name}{_signature(method)}", "```", "", *_text(method))


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name[0] != "_" and ast.get_docstring(one):
            yield one


def _signature_of(node: ast.stmt) -> str:
    """The signature of a function, of `__init__`, or of a dataclass' fields."""
    if isinstance(node, ast.FunctionDef):
        return _signature(node)
    assert isinstance(node, ast.ClassDef)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return _signature(one)
    fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
    return _in_lines(fields, "") if node.decorator_list or fields else "()"


def _signature(node: ast.FunctionDef) -> str:
    if any(ast.unparse(one) in ("property", "cached_property") for one in node.decorator_list):
        return f": {ast.unparse(node.returns)}" if node.returns else ""
    arguments = node.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_argument(one, of) for one, of in zip(arguments.args, defaults, strict=True)]
    if arguments.vararg:
        words.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        words.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    words += [_argument(one, of) for one, of in pairs]
    if arguments.kwarg:
        words.append("**" + _argument(arguments.kwarg, None))
    words = [word for word in words if word not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return _in_lines(words, returns)


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    text = one.arg + (f": {ast.unparse(one.annotation)}" if one.annotation else "")
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _in_lines(words: list[str], returns: str) -> str:
    line = f"({', '.join(words)}){returns}"
    if len(line) <= 88:
        return line
    return "\n".join(["(", *(f"    {word}," for word in words), f"){returns}"])


def _text(node: ast.stmt) -> Iterator[str]:
    """A docstring as Markdown: a list of each section's entries."""
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    is_list = False
    for line in inspect.cleandoc(ast.get_docstring(node) or "").splitlines():
        if match := SECTION.match(line):
            is_list = True
            yield from (f"**{match[1]}:** {match[2]}".rstrip(), "")
        elif is_list and re.match(r"    \S", line):
            name, colon, rest = line.strip().partition(": ")
            yield f"- `{name}`: {rest}" if colon and " " not in name else f"- {line.strip()}"
        else:
            yield f"  {line.strip()}" if is_list and line.startswith(" ") else line
