"""The support matrix: which tests cover which family, mesh, recipe and executor.

`python docs/support.py` prints the page. Its rows are the tests that pytest collects and that say
what they cover: `@pytest.mark.covers(how, family=…, mesh=…, recipe=…, executor=…)`. A row without a
test cannot be. Where `family` or `mesh` names a test's parameter, the parameter's values count.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from redco_flow.models.find import FAMILIES
from redco_flow.recipes.find import find_recipe

PROJECT = Path(__file__).resolve().parent.parent
RECIPES = (
    "text_to_text",
    "language_modeling",
    "chat",
    "preference",
    "classification",
    "regression",
    "image_classification",
    "image_to_text",
)
EXECUTORS = ("local", "slurm", "hosts", "xmanager")
AXES = ("data", "fsdp", "context", "model")
NO_TEST = "no test"
TORCH, ONE_DEVICE = "transformers on torch", "one device"
STAGES, PIPELINE = "stages by themselves", "a pipeline"


@dataclass(frozen=True)
class Row:
    """What one collected test covers; "" where it says nothing of it."""

    test: str
    how: str
    family: str = ""
    mesh: str = ""
    recipe: str = ""
    executor: str = ""


class Collector:
    """A pytest plugin that keeps what was collected."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def collect_rows() -> list[Row]:
    """Collect the tests that say what they cover, without running any.

    Raises:
        SystemExit: pytest cannot collect them; the message is pytest's.
    """
    paths = [path for path in sorted((PROJECT / "tests").rglob("test_*.py")) if _says(path)]
    collector, said = Collector(), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", *map(str, paths)], [collector]
        )
    if code != pytest.ExitCode.OK:
        raise SystemExit(said.getvalue())
    return sorted(set(_rows(collector.items)), key=_order)


def _order(row: Row) -> tuple[str, ...]:
    return (row.family, row.how, row.test, row.mesh, row.recipe, row.executor)


def _says(path: Path) -> bool:
    return "@pytest.mark.covers(" in path.read_text(encoding="utf-8")


def _rows(items: Iterable[pytest.Item]) -> Iterator[Row]:
    for item in items:
        for marker in item.iter_markers("covers"):
            _check(item, marker)
            values = getattr(getattr(item, "callspec", None), "params", {})
            family = _family(str(values.get(marker.kwargs["family"], marker.kwargs["family"])))
            if not family:
                continue  # a case that is no family's
            mesh = marker.kwargs.get("mesh", "")
            yield Row(
                test=item.nodeid.partition("[")[0],
                how=marker.args[0],
                family=family,
                mesh=_mesh(values.get(mesh, mesh)),
                recipe=marker.kwargs.get("recipe", ""),
                executor=marker.kwargs.get("executor", ""),
            )


def _check(item: pytest.Item, marker: pytest.Mark) -> None:
    """Refuse words that the page has no place for."""
    recipe, executor = (marker.kwargs.get(name, "") for name in ("recipe", "executor"))
    known = {*RECIPES, *EXECUTORS, TORCH, ONE_DEVICE, STAGES, PIPELINE, ""}
    if unknown := {marker.args[0], recipe, executor} - known:
        raise SystemExit(f"{item.nodeid}: covers({unknown}) is none of {sorted(known - {''})}")


def _family(case: str) -> str:
    """The family of a test's case: `llama3` and `llama of odd length` are of llama."""
    return max((name for name in FAMILIES if case.startswith(name)), key=len, default="")


def _mesh(value: Any) -> str:
    """The axes with more than one shard: of (data, fsdp, context, model), or of names."""
    if isinstance(value, tuple):
        value = {axis: size for axis, size in zip(AXES, value, strict=True) if size > 1}
    names = " ".join(value) if isinstance(value, Mapping) else str(value)
    return " × ".join(axis for axis in AXES if axis in names)


def page(rows: list[Row]) -> Iterator[str]:
    """Yield the page's lines."""
    yield from (
        "# Support matrix",
        "",
        "Generated from the tests: each entry is what a collected test covers. *No test* means",
        "untested, not unsupported. All tests run on the CPU devices of one machine, with several",
        "processes if the executor starts several.",
        "",
        *_accelerators(),
        "",
        "## Model families",
        "",
        "*Equal to torch*: logits and gradients are those of transformers' model.",
        "*Equal on a mesh*: a forward pass or train steps over these axes give what one device",
        "gives. *Trained*: trained and read back by the stages of its recipe, by themselves or as",
        "a pipeline on an executor.",
        "",
        "| family | recipe | equal to torch | equal on a mesh | trained |",
        "|---|---|---|---|---|",
    )
    for family in FAMILIES:
        yield _family_line(family, [row for row in rows if row.family == family])
    yield from (
        "",
        "## Executors",
        "",
        "| executor | family, recipe, mesh | tests |",
        "|---|---|---|",
    )
    for executor in EXECUTORS:
        yield from _executor_lines(executor, [row for row in rows if row.executor == executor])
    yield from (
        "",
        "## The tests",
        "",
        "| family | mesh | compared with, or run as | test |",
        "|---|---|---|---|",
    )
    for row in rows:
        what = " on ".join(filter(None, [row.how, row.executor]))
        yield f"| {row.family} | {row.mesh} | {what} | `{row.test}` |"


def _accelerators() -> Iterator[str]:
    """What is said of GPUs and TPUs, for as long as no test asks for one."""
    tests = (PROJECT / "tests").rglob("test_*.py")
    if not any("@pytest.mark.gpu" in path.read_text(encoding="utf-8") for path in tests):
        yield "GPUs and TPUs: no test. Training steps were compiled ahead of time for them by"
        yield "`benchmarks/collectives.py --target gpu|tpu`; see [limits](../limits.md)."


def _family_line(family: str, rows: list[Row]) -> str:
    trained_by = [recipe for recipe in RECIPES if family in find_recipe(recipe).families]
    meshes = sorted({row.mesh for row in rows if row.how == ONE_DEVICE}, key=_mesh_order)
    cells = (
        family,
        ", ".join(trained_by) or "none (engine only)",
        _count(rows, TORCH),
        ", ".join(meshes) or NO_TEST,
        ", ".join(_trained(rows)) or NO_TEST,
    )
    return f"| {' | '.join(cells)} |"


def _trained(rows: list[Row]) -> Iterator[str]:
    executors = {row.executor for row in rows if row.how == PIPELINE}
    yield from (f"pipeline on {one}" for one in EXECUTORS if one in executors)
    if any(row.how == STAGES for row in rows):
        yield STAGES


def _mesh_order(mesh: str) -> tuple[int, str]:
    return mesh.count("×"), mesh


def _count(rows: list[Row], how: str) -> str:
    count = len({row.test for row in rows if row.how == how})
    return f"{count} test{'s' * (count > 1)}" if count else NO_TEST


def _executor_lines(executor: str, rows: list[Row]) -> Iterator[str]:
    for row in rows:
        what = ", ".join(filter(None, [row.family, row.recipe, row.mesh or "one device"]))
        yield f"| {executor} | {what} | `{row.test}` |"
    if not rows:
        yield f"| {executor} | {NO_TEST} | |"


def main() -> None:
    """Print the page."""
    os.chdir(PROJECT)
    sys.stdout.write("\n".join(page(collect_rows())) + "\n")


if __name__ == "__main__":
    main()
