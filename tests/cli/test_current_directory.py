"""The current directory is looked into last: files there take no library's place."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import KINDS, PIPELINE

COMMANDS = {
    "console script": [str(Path(sys.executable).with_name("redco-flow"))],
    "python -m": [sys.executable, "-m", "redco_flow.cli.main"],
}
# What the tool, its workers and its server import, or would if it were there.
LIBRARIES = re.findall(
    r"\w+",
    """absl aiosqlite argparse asyncssh blake3 cloudpickle dataclasses datasets email_validator
    fastapi flax fsspec grain httpx huggingface_hub jax jaxlib jinja2 json logging msgpack numpy
    optax orbax orjson pandas prefect psutil pyarrow pydantic pydantic_core pygments rich
    rouge_score sacrebleu safetensors sniffio submitit subprocess tokenizers transformers typing
    typing_extensions uvicorn websockets yaml""",
)
# What installed packages import where it is installed, and do without elsewhere.
OPTIONAL = re.findall(
    r"\w+",
    """IPython brotli brotlicffi cchardet colorama coverage cupy dask dotenv gunicorn h2
    httptools ipykernel ipywidgets keras lxml multipart numexpr odfpy onnx openpyxl opentelemetry
    paramiko pycurl pyodbc python_multipart readline regex ruamel scipy sentry_sdk simplejson snappy
    socks soundfile tensorboardX tensorflow torch torchvision ujson uvloop watchfiles wandb
    win32api win32con zstandard""",
)
READING = (
    ["run", "-n", "sums.yaml"],
    ["doctor"],
    ["status"],
    ["plan", "sums.yaml", "--render"],
    ["profile"],
    ["schema"],
    ["ls"],
    ["logs"],
    ["artifacts"],
    ["why", "total"],
    ["ui", "--status"],
)


@pytest.fixture
def baited(tmp_path):
    """A directory whose modules have libraries' names, and note that they were executed."""
    (tmp_path / "sums.yaml").write_text(PIPELINE)
    bait = "open({!r}, 'a').write(__name__ + '\\n')\nraise SystemExit('executed ' + __name__)\n"
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(bait.format(str(tmp_path / "EXECUTED")))
    return tmp_path


@pytest.fixture
def fully_baited(baited):
    """The same, with all names that Python has on any system, and those of optional libraries."""
    for name in {*sys.stdlib_module_names, *OPTIONAL}:
        (baited / f"{name}.py").write_text((baited / f"{LIBRARIES[0]}.py").read_text())
    return baited


def executed(folder):
    path = folder / "EXECUTED"
    return path.read_text().split() if path.exists() else []


def call(command, words, folder, home, **environment):
    return subprocess.run(
        [*COMMANDS[command], *words],
        cwd=folder,
        env={**os.environ, "REDCO_FLOW_HOME": str(home), "PYTHONPATH": str(KINDS), **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("command", "verbs"), zip(COMMANDS, (READING, READING[:3]), strict=True))
def test_no_verb_that_reads_executes_a_module_of_the_current_directory(
    command, verbs, baited, prefect_home
):
    """Fault 45: a verb that only reads imports none; what replaces a bundled file is named."""
    for words in verbs:
        done = call(command, words, baited, prefect_home)
        assert executed(baited) == [], words
        assert "Traceback" not in done.stderr, (words, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "sums.yaml"],
        ["run", "-n", "sums.yaml"],
        ["chat", "no-such-checkpoint"],
        ["promote", "no-such-checkpoint", "@sums/best"],
        ["export", "no-such-checkpoint", "folder"],
        ["diff", "one", "another"],
        ["rollback", "@sums/best"],
        ["schedule", "ls"],
        ["serve", "--stop"],
    ],
)
def test_no_name_that_python_or_a_library_tries_to_import_is_found_here(
    words, fully_baited, prefect_home
):
    """`subprocess` tries `msvcrt`, which Linux lacks."""
    done = call("console script", words, fully_baited, prefect_home)

    assert executed(fully_baited) == []
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_completes_where_modules_have_the_names_of_libraries(fully_baited, prefect_server):
    """Fault 45: launcher, flow, supervisors and workers import what is installed."""
    home, baited = os.environ["REDCO_FLOW_HOME"], fully_baited

    done = call("console script", ["run", "sums.yaml", "--json"], baited, home)

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["metrics"]["total"] == 12.0
    assert executed(baited) == []


@pytest.mark.slow
def test_an_empty_entry_of_pythonpath_does_not_put_the_current_directory_first(
    baited, prefect_home
):
    """Fault 45: `export PYTHONPATH=$PYTHONPATH:/folder` makes such an entry."""
    for name in ("argparse", "dataclasses", "json", "logging", "subprocess", "typing"):
        (baited / f"{name}.py").unlink()  # Python itself imports these before any program of ours

    done = call("python -m", ["doctor"], baited, prefect_home, PYTHONPATH=f":{KINDS}")

    assert done.returncode == 0, done.stderr
    assert executed(baited) == []


@pytest.mark.slow
def test_a_users_own_kinds_beside_the_pipeline_are_found_by_plan_and_by_workers(
    tmp_path,
):
    """Fault 45: the current directory comes last, and it does come."""
    (tmp_path / "sums.yaml").write_text(PIPELINE)
    (tmp_path / "orchestrate_kinds").symlink_to(KINDS / "orchestrate_kinds")
    home = tmp_path / "home"

    for command in COMMANDS:
        planned = call(command, ["plan", "sums.yaml", "--json"], tmp_path, home, PYTHONPATH="")
        assert json.loads(planned.stdout)["stages"]["total"]["action"] == "wait"
    done = call("console script", ["run", "sums.yaml", "--json"], tmp_path, home, PYTHONPATH="")

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["metrics"]["total"] == 12.0


@pytest.mark.slow
@pytest.mark.parametrize("words", [["profile", "own.yaml"], ["doctor", "-p", "own.yaml"]])
def test_a_users_own_executor_beside_the_profile_is_found_by_verbs_that_read_only_a_profile(
    words, tmp_path, prefect_home
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/executor.py").write_text(
        "from redco_flow.launch.local.executor import make, reattach  # noqa: F401\n"
    )
    (tmp_path / "own.yaml").write_text("executor: mine.executor\n")

    done = call("console script", words, tmp_path, prefect_home)

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_takes_the_place_of_a_bundled_file_is_named(tmp_path, prefect_home):
    """Fault 45: a verb that only reads imports none; what replaces a bundled file is named."""
    flow, profile = Path("flows/pipeline.py"), Path("cluster_profiles/local.yaml")
    pipeline = Path("pipelines/quickstart.yaml")
    for path, text in (
        (flow, "raise SystemExit('executed')\n"),
        (profile, "name: local\nexecutor: local\n"),
        (pipeline, PIPELINE),
    ):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)

    planned = call("console script", ["plan", "quickstart", "--json"], tmp_path, prefect_home)
    examined = call("console script", ["profile"], tmp_path, prefect_home)

    assert json.loads(planned.stdout)["replace_bundled"] == [
        str(pipeline),
        str(profile),
        str(flow),
    ]
    for path in (pipeline, profile, flow):
        assert f"note: {path} takes the place of the bundled {path.name}\n" in planned.stderr
    assert f"note: {profile} takes the place" in examined.stderr


@pytest.mark.slow
def test_a_copy_that_is_the_bundled_file_itself_is_no_news(tmp_path, prefect_home):
    """Fault 45: a verb that only reads imports none; what replaces a bundled file is named."""
    bundled = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
    (tmp_path / "quickstart.yaml").write_bytes(bundled.read_bytes())

    planned = call("console script", ["plan", "quickstart", "--json"], tmp_path, prefect_home)

    assert json.loads(planned.stdout)["replace_bundled"] == []
    assert "takes the place" not in planned.stderr
