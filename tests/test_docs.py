"""What README and docs say: commands that can run here run as written, links lead somewhere."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = ("README.md", "docs/tutorial.md", "docs/guides/local.md", "docs/guides/slurm.md")
# What sets up an environment is run by CI as its own step; it needs a package index.
SET_UP = ("make", "python3", "uv")

if not README.is_file():
    pytest.skip("no README beside the tests: not a checkout", allow_module_level=True)


def commands(page):
    """Every line of a page's shell blocks, without comments."""
    for block in re.findall(r"```sh\n(.*?)```", (PROJECT / page).read_text(), re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def call(words, folder):
    done = subprocess.run(
        [sys.executable, "-m", "redco_flow.cli.main", *words],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shorten(project):
    """Let the project that `init` wrote train for seconds: the commands are what is tested."""
    data = project / "data" / "dates.csv"
    with data.open() as lines:
        few = "".join(islice(lines, 300))
    data.write_text(few)
    pipeline = project / "pipelines" / "dates.yaml"
    text, count = re.subn(r"num_epochs: \d+", "num_epochs: 1", pipeline.read_text())
    assert count == 1
    pipeline.write_text(text)


def test_the_readme_is_short_and_leads_to_every_page():
    text = README.read_text()

    assert len(text.splitlines()) <= 130
    for page in [*PROJECT.glob("docs/*.md"), *PROJECT.glob("docs/guides/*.md")]:
        link = str(page.relative_to(PROJECT))
        assert link in text or page.name in (PROJECT / "mkdocs.yml").read_text(), page


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_does_what_it_says(page, tmp_path, prefect_home):
    folder, ran = tmp_path, 0

    for words in commands(page):
        if words[0] in SET_UP:
            continue
        if words[0] == "cd":
            folder = folder / words[1]
            continue
        assert words[0] == "redco-flow", words
        call(words[1:], folder)
        if words[1] == "init":
            shorten(folder / words[2])
        ran += 1

    assert ran >= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_init_writes_is_learnt(tmp_path, prefect_home):
    """The tutorial's pipeline as it is written, not shortened."""
    call(["init", "dates"], tmp_path)

    said = call(["run", "pipelines/dates.yaml", "--json"], tmp_path / "dates")

    assert json.loads(said.splitlines()[-1])["metrics"]["exact_match"] > 50


def test_init_overwrites_nothing(tmp_path):
    there = tmp_path / "pipelines" / "dates.yaml"
    there.parent.mkdir()
    there.write_text("mine")

    done = subprocess.run(
        [sys.executable, "-m", "redco_flow.cli.main", "init", str(tmp_path)],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert str(there) in done.stderr
    assert there.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["pipelines"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_chapter_about_ones_own_parts_runs_as_it_stands(tmp_path, prefect_home):
    """Data, recipe, metric, stage kind and executor of a user's: one module each."""
    shutil.copytree(PROJECT / "docs" / "examples", tmp_path / "examples")
    words = ["run", "own.yaml", "-p", "own_profile.yaml", "--json"]

    said = call(words, tmp_path / "examples")

    metrics = json.loads(said.splitlines()[-1])["metrics"]
    assert {"exact_match", "absolute_error", "share_longer"} <= metrics.keys()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_to_a_file_leads_to_one(document):
    links = re.findall(r"\]\(([^)#]+)", (PROJECT / document).read_text())

    missing = [link for link in links if "://" not in link and not (PROJECT / link).exists()]

    assert not missing


def test_the_readme_names_every_pipeline_and_profile():
    text = README.read_text()

    for path in [*PROJECT.glob("pipelines/*.yaml"), *PROJECT.glob("cluster_profiles/*.yaml")]:
        assert str(path.relative_to(PROJECT)) in text, path
