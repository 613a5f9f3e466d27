"""What starting a sweep asks git, however many points it has, and what each point records of it."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

GIT = shutil.which("git")
LOGGING_GIT = """\
#!{python}
import os, sys
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
os.execv({git!r}, [{git!r}, *sys.argv[1:]])
"""


@pytest.fixture
def repository(command):
    """The command's folder as a repository with a commit, a changed and two new Python files."""
    if GIT is None:
        pytest.skip("git is not installed (package git)")
    folder = command.folder
    (folder / "recipe.py").write_text("RATE = 1\n")
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=first"],
    ):
        subprocess.run([GIT, *words], cwd=folder, check=True)
    (folder / "recipe.py").write_text("RATE = 2\n")
    (folder / "one.py").write_text("ONE = 1\n")
    (folder / "two.py").write_text("TWO = 2\n")
    return folder


@pytest.fixture
def start(command, repository, tmp_path_factory):
    """Start a sweep of `num_points` points; return its runs' folders and its calls of git."""
    folder = tmp_path_factory.mktemp("git")
    log, script = folder / "calls", folder / "git"
    script.write_text(LOGGING_GIT.format(python=sys.executable, log=str(log), git=GIT))
    script.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])

    def start(num_points):
        log.write_text("")
        rates = ",".join(str(1.0 + one) for one in range(num_points))
        words = ["--sweep", f"total.learning_rate={rates}", "--max-parallel", "1", "--detach"]
        sweep = command.json("run", "sums.yaml", *words, environment={"PATH": path})["sweep"]
        calls = log.read_text().splitlines()
        command.start("cancel", sweep).communicate()  # it may have ended
        workspace = repository / "redco-workspace"
        record = json.loads((workspace / "sweeps" / sweep / "sweep.json").read_text())
        return [workspace / "runs" / point["run"] for point in record["points"]], calls

    return start


def test_git_is_asked_as_often_for_five_points_as_for_two(start):
    _, of_two = start(2)
    _, of_five = start(5)

    assert of_two == of_five
    assert sum(call.startswith("status") for call in of_five) == 1


def test_every_point_records_the_commit_and_the_same_patch_that_applies_to_it(start, repository):
    runs, _ = start(3)
    codes = [json.loads((run / "run.json").read_text())["code"] for run in runs]
    patches = [(run / "code.patch").read_bytes() for run in runs]
    head = subprocess.run(
        [GIT, "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True
    )

    assert codes[0]["commit"] == head.stdout.strip()
    assert codes[0]["dirty"]
    assert len({json.dumps(code) for code in codes}) == 1
    assert len(set(patches)) == 1
    for name in ("recipe.py", "one.py", "two.py"):
        (repository / name).unlink()
    subprocess.run([GIT, "checkout", "--quiet", "--", "recipe.py"], cwd=repository, check=True)
    subprocess.run([GIT, "apply"], cwd=repository, input=patches[0], check=True)
    assert (repository / "recipe.py").read_text() == "RATE = 2\n"
    assert (repository / "two.py").read_text() == "TWO = 2\n"
