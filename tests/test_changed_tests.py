"""`make test-changed`: which test files a change concerns."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "changed_tests.py"

if not SCRIPT.is_file():
    pytest.skip("no .ci beside the tests: not a checkout", allow_module_level=True)

FILES = {
    "redco_flow/__init__.py": "",
    "redco_flow/low.py": "X = 1\n",
    "redco_flow/high.py": "def f():\n    from redco_flow.low import X\n",
    "redco_flow/apart.py": "",
    "docs/page.md": "",
    "tests/conftest.py": "",
    "tests/part/conftest.py": "import redco_flow.apart\n",
    "tests/part/test_apart.py": "",
    "tests/test_high.py": "from redco_flow import high\n",
    "tests/test_low.py": "COMMAND = ['python', '-m', 'redco_flow.low']\n",
    "tests/test_page.py": "PAGE = 'page.md'\n",
}
ALL = ["tests/part/test_apart.py", "tests/test_high.py", "tests/test_low.py", "tests/test_page.py"]


@pytest.fixture
def checkout(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "add", ".")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    git(tmp_path, *who, "commit", "--quiet", "--message=a")
    return tmp_path


def git(folder, *words):
    subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("redco_flow/low.py", ["tests/test_high.py", "tests/test_low.py"]),
        ("redco_flow/high.py", ["tests/test_high.py"]),
        ("redco_flow/apart.py", ["tests/part/test_apart.py"]),
        ("tests/test_page.py", ["tests/test_page.py"]),
        ("docs/page.md", ["tests/test_page.py"]),
        ("tests/conftest.py", ALL),
        ("pyproject.toml", ALL),
    ],
)
def test_a_change_concerns_the_tests_that_import_or_name_the_file(checkout, changed, tests):
    with (checkout / changed).open("a") as file:
        file.write("\n")

    done = subprocess.run(
        [sys.executable, SCRIPT], cwd=checkout, capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == tests
