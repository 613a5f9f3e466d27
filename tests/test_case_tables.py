"""The tables docs/faults.md and docs/engine_cases.md name the test files of each case.

Run as a script, this file writes their last column from the docstrings of the tests.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"
TABLES = {"faults.md": "fault", "engine_cases.md": "engine case"}
NUMBERS = r"\d+(?:(?:,| and|, and) \d+)*"
ROW = re.compile(r"^(\| (\d+) \| .+ \| .+ \|) .*\|$")


def files_of_cases(word):
    """Each case's test files by its number, from docstrings such as "Faults 12 and 17"."""
    pattern = re.compile(rf"\b{word}s? ({NUMBERS})", re.IGNORECASE)
    found = {}
    for path in sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("contract.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for numbers in pattern.findall(" ".join((ast.get_docstring(node) or "").split())):
                for number in re.findall(r"\d+", numbers):
                    file = path.relative_to(TESTS).with_suffix("").as_posix()
                    found.setdefault(int(number), {})[file] = None
    return {number: list(files) for number, files in found.items()}


def with_files(text, files):
    """The page with the last column written from `files`."""
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if match := ROW.match(line):
            names = ", ".join(f"`{file}`" for file in files.get(int(match[2]), ()))
            lines[at] = f"{match[1]} {names} |\n"
    return "".join(lines)


@pytest.mark.skipif(not DOCS.is_dir(), reason="no docs beside the tests: not a checkout")
@pytest.mark.parametrize("name", TABLES)
def test_each_case_is_listed_with_the_test_files_that_assert_it(name):
    text, files = (DOCS / name).read_text(), files_of_cases(TABLES[name])
    numbers = [int(match[2]) for line in text.splitlines() if (match := ROW.match(line))]

    assert numbers == sorted(files)  # ascending, and every case has a test
    assert text == with_files(text, files), "run: python tests/test_case_tables.py"


if __name__ == "__main__":
    for name, word in TABLES.items():
        page = DOCS / name
        page.write_text(with_files(page.read_text(), files_of_cases(word)))
