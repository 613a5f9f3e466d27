"""What README and docs say: commands that can run here run as written, links lead somewhere."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest

from redco_flow import __version__
from redco_flow.cli.view import LIVE_STATES, read_run_view
from redco_flow.tracking.run_directory import RunDirectory

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = ("docs/tutorial.md", "docs/guides/local.md", "docs/guides/slurm.md")
# What sets up an environment is run by CI as its own step; it needs a package index.
SET_UP = ("make", "python3", "uv")

pytestmark = pytest.mark.usefixtures("compile_cache", "prefect_tables")

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
    set_to_one(project, "num_epochs", "num_layers")


def set_to_one(project, *keys):
    pipeline = project / "pipelines" / "dates.yaml"
    text = pipeline.read_text()
    for key in keys:
        text, count = re.subn(rf"{key}: \d+", f"{key}: 1", text)
        assert count == 1
    pipeline.write_text(text)


def call_all(lines, folder, change=lambda project: None):
    """Call each line's verb and yield it with what it said; a project of `init` is changed."""
    for words in lines:
        if words[0] in SET_UP:
            continue
        if words[0] == "cd":
            folder = folder / words[1]
            continue
        assert words[0] == "redco-flow", words
        yield words[1], call(words[1:], folder)
        if words[1] == "init":
            change(folder / words[2])


def test_the_readme_is_short_and_leads_to_every_page():
    text = README.read_text()

    assert len(text.splitlines()) <= 130
    for page in [*PROJECT.glob("docs/*.md"), *PROJECT.glob("docs/guides/*.md")]:
        link = str(page.relative_to(PROJECT))
        assert link in text or page.name in (PROJECT / "mkdocs.yml").read_text(), page


def test_the_changelogs_newest_release_is_the_packages_version():
    text = (PROJECT / "CHANGELOG.md").read_text()

    newest = re.search(r"^## (\d\S*) - \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)

    assert newest is not None
    assert newest[1] == __version__


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_does_what_it_says(page, tmp_path):
    assert len(list(call_all(commands(page), tmp_path, change=shorten))) >= 1


def test_the_readmes_first_pipeline_plans_with_a_model_of_its_family(tmp_path):
    (text,) = re.findall(r"```yaml\n(# assistant.yaml.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "assistant.yaml").write_text(text)
    row = {"messages": [{"role": role, "content": "ping"} for role in ("user", "assistant")]}
    (tmp_path / "conversations.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64}
    (tmp_path / "model").mkdir()
    for name, value in (("config", config), ("tokenizer", {})):
        (tmp_path / "model" / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "model" / "model.safetensors").touch()

    words = ["plan", "assistant.yaml", "-p", "slurm", "model.name_or_path=./model", "--json"]
    planned = json.loads(call(words, tmp_path).splitlines()[-1])

    assert list(planned["stages"]) == ["preprocess", "train", "predict", "evaluate"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.covers("a pipeline", family="t5", recipe="text_to_text", executor="local")
def test_every_command_of_the_readme_does_what_it_says_and_what_init_writes_is_learnt(tmp_path):
    """All rows, for one epoch: the exact match is 33, and 97 after all four of them."""
    said = dict(
        call_all(
            commands("README.md"),
            tmp_path,
            change=lambda project: set_to_one(project, "num_epochs"),
        )
    )

    (score,) = re.findall(r"exact_match = ([0-9.]+)", said["why"].splitlines()[0])
    assert float(score) > 20


def wait_until(is_so, run, timeout=400):
    """Wait for what a run does; if it ends first, or the time is over, show its state and logs."""
    deadline = time.monotonic() + timeout
    while not is_so():
        is_over = read_run_view(run)["state"] not in LIVE_STATES or time.monotonic() > deadline
        if is_over and not is_so():
            place = ["-w", str(run.path.parents[1])]
            verbs = (["status", run.id], ["logs", run.id, "-n", "30"])
            pytest.fail("\n\n".join(call([*words, *place], run.path) for words in verbs))
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readmes_recipe_learns_over_two_devices_though_it_is_killed(tmp_path):
    """Fault 1, as a person meets it."""
    section = README.read_text().partition("## Three functions")[2].partition("\n## ")[0]
    for name, language in (("digits.py", "python"), ("digits.yaml", "yaml")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
        (tmp_path / name).write_text(text)
    _, words = (shlex.split(line, comments=True) for line in re.findall(r"\$ (.*)", section))
    assert len((tmp_path / "digits.py").read_text().splitlines()) <= 60

    name = call([*words[1:], "--detach"], tmp_path).split()[0]
    run = RunDirectory(tmp_path / "redco-workspace" / "runs" / name)
    attempts = run.path / "stages" / "train" / "attempts"
    metrics = attempts / "1" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and '"evaluation"' in metrics.read_text(), run)
    supervisor = json.loads((attempts / "1" / "job.json").read_text())["supervisor"]["pid"]
    for worker in psutil.Process(supervisor).children():
        worker.kill()
    wait_until(lambda: run.read_state()["state"] == "failed", run)
    found = json.loads(call(["resume", name, "--json"], tmp_path).splitlines()[-1])

    lines = (attempts / "2" / "metrics.jsonl").read_text().splitlines()
    resumed, *others = map(json.loads, lines)
    assert (found["state"], resumed["kind"]) == ("completed", "evaluation")
    assert resumed["is_resumed"]
    assert resumed["step"] < min(one["step"] for one in others if one["kind"] == "training")
    assert 90 < found["metrics"]["accuracy"] <= 100
    assert " 2 model shards" in call(["logs", f"{name}/train"], tmp_path)


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
def test_the_chapter_about_ones_own_parts_runs_as_it_stands(tmp_path):
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


GLOSSARY_ROW = re.compile(
    r"\| (?P<words>\*\*.+?\*\*) \| (?P<meaning>[^|]+) \| (?P<elsewhere>[^|]+) "
    r"\| `(?P<module>[\w.]+)` \|"
)


def test_the_glossary_is_sorted_defines_a_word_once_and_its_modules_can_be_imported():
    text = (PROJECT / "docs" / "glossary.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]

    rows = [GLOSSARY_ROW.fullmatch(line) for line in lines]

    assert [line for line, row in zip(lines, rows, strict=True) if row is None] == []
    words = [re.findall(r"\*\*([^*]+)\*\*", row["words"]) for row in rows]
    assert len(words) > 50
    assert [one[0].lower() for one in words] == sorted(one[0].lower() for one in words)
    every_word = [word for one in words for word in one]
    assert sorted(every_word) == sorted(set(every_word))
    for module in sorted({row["module"] for row in rows}):
        assert importlib.import_module(f"redco_flow.{module}"), module
