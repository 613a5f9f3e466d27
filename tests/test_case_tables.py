"""The lists of faults and of engine cases in docs/: each has its tests, and each test its case."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"
LISTS = {"faults.md": "fault", "engine_cases.md": "engine case"}
NUMBERS = r"\d+(?:(?:,| and|, and) \d+)*"
CASE = re.compile(r"^## (\d+)\. ", re.MULTILINE)
TEST = re.compile(r"^- `(tests/[a-z0-9_/]+\.py::test_\w+)`$", re.MULTILINE)

if not DOCS.is_dir():
    pytest.skip("no docs beside the tests: not a checkout", allow_module_level=True)


def cases_in_docstrings(word):
    """Each case's tests by its number, as their docstrings say: "Faults 12 and 17"."""
    pattern = re.compile(rf"\b{word}s? ({NUMBERS})", re.IGNORECASE)
    found = {}
    for path in sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("contract.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            name = f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"
            for numbers in pattern.findall(" ".join((ast.get_docstring(node) or "").split())):
                for number in re.findall(r"\d+", numbers):
                    found.setdefault(int(number), set()).add(name)
    return found


def cases_in_list(text):
    """Each case's tests by its number, as a list in docs/ has them."""
    _, *parts = CASE.split(text)
    return {
        int(number): set(TEST.findall(part))
        for number, part in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("name", LISTS)
def test_each_case_is_listed_with_the_very_tests_that_say_they_assert_it(name):
    listed = cases_in_list((DOCS / name).read_text())

    assert list(listed) == sorted(listed)  # ascending; a case not yet covered leaves a gap
    assert [number for number, tests in listed.items() if not tests] == []
    assert listed == cases_in_docstrings(LISTS[name])
