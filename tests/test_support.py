"""The page of what was tried: made from tests that are there, and from nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from redco_flow.models.find import FAMILIES

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = PROJECT / "docs" / "support.py"

if not SCRIPT.is_file():
    pytest.skip("no docs beside the tests: not a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def lines():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_committed_page_is_current(lines):
    committed = (PROJECT / "docs" / "reference" / "support.md").read_text().splitlines()

    assert [committed[0], *committed[3:]] == lines, "run `make reference`"


@pytest.mark.slow
def test_every_family_is_compared_with_torch_and_every_executor_trains(lines):
    cells = {line.split(" | ")[0][2:]: line for line in reversed(lines) if line.startswith("| ")}

    assert all(re.search(r"\| \d+ tests? \|", cells[family]) for family in FAMILIES)
    assert all("t5" in cells[executor] for executor in ("local", "slurm", "hosts", "xmanager"))


@pytest.mark.slow
def test_every_test_that_the_page_names_is_there(lines):
    named = {line.split("`")[1] for line in lines if line.startswith("| ") and "::" in line}

    assert len(named) > 10
    for path, _, test in (name.partition("::") for name in named):
        assert f"def {test}(" in (PROJECT / path).read_text()
