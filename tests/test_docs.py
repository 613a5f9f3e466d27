"""What the README says: every command that can run here runs, every link leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")
# What sets up an environment is run by CI as its own step; it needs a package index.
SET_UP = ("make", "python3", "uv")
# What the section that a newcomer follows shows: each verb is run as written, the sweep too.
FIRST_STEPS = ["plan", "run", "status", "logs", "why", "run", "run"]

if not README.is_file():
    pytest.skip("no README beside the tests: not a checkout", allow_module_level=True)


def commands(section=""):
    """Every line of the shell blocks of the README, or of one of its sections, without comments."""
    text = README.read_text()
    if section:
        text = re.split(r"^## ", text.split(f"## {section}\n", 1)[1], flags=re.MULTILINE)[0]
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def test_the_first_steps_are_commands_that_are_run_as_written():
    shown = list(commands("Run a pipeline"))

    assert [words[1] for words in shown] == FIRST_STEPS
    assert all(words[0] == "redco-flow" for words in shown)
    assert "--sweep" in shown[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_readme_does_what_it_says(tmp_path, prefect_home):
    pipelines = tmp_path / "pipelines"
    pipelines.mkdir()
    text = (PROJECT / "pipelines" / "quickstart.yaml").read_text()
    small = text.replace("  dataset: python:", "  max_examples: 300\n  dataset: python:")
    small = small.replace("num_epochs: 3", "num_epochs: 1")
    assert small.count("max_examples") == 1
    (pipelines / "quickstart.yaml").write_text(small)
    ran = 0

    for words in commands():
        if words[0] in SET_UP:
            continue
        assert words[0] == "redco-flow", words
        done = subprocess.run(
            [sys.executable, "-m", "redco_flow.cli.main", *words[1:]],
            cwd=tmp_path,
            env=os.environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        ran += 1

    assert ran >= 5


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_to_a_file_leads_to_one(document):
    links = re.findall(r"\]\(([^)#]+)", (PROJECT / document).read_text())

    missing = [link for link in links if "://" not in link and not (PROJECT / link).exists()]

    assert not missing


def test_the_readme_names_every_pipeline_and_profile():
    text = README.read_text()

    for path in [*PROJECT.glob("pipelines/*.yaml"), *PROJECT.glob("cluster_profiles/*.yaml")]:
        assert str(path.relative_to(PROJECT)) in text, path
