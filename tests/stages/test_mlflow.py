"""log_to: mlflow and promotions, against a real MLflow server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import closing, suppress

import pytest
from stage_kinds import train

from redco_flow.runtime.context import FinishedStage
from redco_flow.spec.load import settings_of
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.tracking.aliases import AliasName
from redco_flow.tracking.mlflow_server import MlflowError, MlflowServer
from redco_flow.tracking.promotion import PromotionRequest, PromotionRule, promote, roll_back
from redco_flow.tracking.results import StageResult
from tests.cli.promoting import Shop

PROGRAM = os.environ.get("REDCO_FLOW_TEST_MLFLOW") or shutil.which("mlflow") or ""
FINGERPRINT = "f" * 64


@pytest.fixture(scope="module")
def mlflow_url(tmp_path_factory):
    """A tracking server with a registry; its packages may be those of another environment."""
    if not PROGRAM:
        pytest.skip(
            "there is no MLflow server: install mlflow, and name its program in "
            "REDCO_FLOW_TEST_MLFLOW"
        )
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [PROGRAM, "server", *address, *store],
            cwd=folder,
            # Without its eight further processes for jobs, which nothing here needs.
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 400
    while not _answers(url):
        assert server.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield url
    os.killpg(server.pid, signal.SIGKILL)  # its workers too; it has nothing to lose
    server.wait()


def _answers(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def asked(mlflow_url, monkeypatch):
    """Ask the server by its own API."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)

    def asked(path, **body):
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{mlflow_url}/api/2.0/mlflow/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())

    return asked


def run_of(asked, run):
    """A run's parameters, its tags and its last numbers, by name."""
    found = asked(f"runs/get?run_id={run}")["run"]
    parts = (
        {one["key"]: one["value"] for one in found["data"].get(part, ())}
        for part in ("params", "tags", "metrics")
    )
    return found["info"], *parts


@pytest.mark.slow
def test_a_training_is_a_run_with_parameters_and_numbers_that_a_later_attempt_goes_on_with(asked):
    import math

    from redco_flow.stages.train.records import MlflowLog

    settings = train.Config.from_json({"log_to": ["mlflow"], "learning_rate": 0.25})
    given = {
        "experiment": "demo",
        "name": "demo-abc123/train",
        "fingerprint": FINGERPRINT,
        "settings": settings.model_dump(mode="json"),
        "tags": {"redco_flow.run": "demo-abc123"},
    }
    first = MlflowLog(**given)
    first.write({"train/loss": 2.5, "train/grad_norm": math.nan}, 1)
    with suppress(RuntimeError), closing(first):
        raise RuntimeError("out of memory")
    run = MlflowServer.of(os.environ).find_run(FINGERPRINT)
    assert run_of(asked, run)[0]["status"] == "FAILED"

    again = MlflowLog(**given)
    again.write({"train/loss": 1.5, "val/recall@1": 0.5}, 2)
    again.close()

    info, params, tags, metrics = run_of(asked, run)
    assert (info["status"], info["run_name"]) == ("FINISHED", "demo-abc123/train")
    assert (params["learning_rate"], params["schedule.type"]) == ("0.25", settings.schedule.type)
    assert tags["redco_flow.run"] == "demo-abc123"
    assert metrics == {"train/loss": 1.5, "val/recall_1": 0.5}
    history = asked(f"metrics/get-history?run_id={run}&metric_key=train/loss")["metrics"]
    assert [(one["step"], one["value"]) for one in history] == [(1, 2.5), (2, 1.5)]


@pytest.mark.slow
def test_the_registrys_alias_follows_promotion_and_rollback_by_reference(asked, tmp_path):
    shop = Shop(tmp_path)
    server = MlflowServer.of(os.environ)
    experiment = server.experiment("shop")
    made, runs = [shop.checkpoint("one"), shop.checkpoint("two")], []
    for checkpoint in made:
        fingerprint = checkpoint.produced_by["fingerprint"]
        tags = {"redco_flow.fingerprint": fingerprint}
        runs.append(server.create_run(experiment, "train", {}, tags))
        result = StageResult(fingerprint, "demo", "train", "train", {}, {"last": checkpoint.id})
        config = train.Config.from_json({"log_to": ["mlflow"]})
        finished = FinishedStage(shop.workspace, "demo", "demo-abc123", result)
        assert find_stage_kind("train").conclude(config, finished) == ""
    name = AliasName.parse("production", "demo")

    def named():
        found = asked("registered-models/alias?name=demo&alias=production")["model_version"]
        return found["run_id"], found["source"]

    one, two = (f"redco-flow://{checkpoint.path}" for checkpoint in made)
    assert run_of(asked, runs[0])[2]["redco_flow.output.last"] == one
    promote(shop.workspace, PromotionRequest(made[0], name, PromotionRule((), 0.0, 0.95)))
    assert named() == (runs[0], one)
    alias = promote(shop.workspace, PromotionRequest(made[1], name, PromotionRule((), 0.0, 0.95)))
    assert named() == (runs[1], two)
    roll_back(shop.workspace, alias)
    assert named() == (runs[0], one)
    versions = asked("model-versions/search?filter=name%3D'demo'")["model_versions"]
    assert len(versions) == 2


def test_a_promotion_stands_though_no_server_answers(tmp_path, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    shop = Shop(tmp_path)
    checkpoint = shop.checkpoint("one")
    name = AliasName.parse("production", "demo")

    alias = promote(
        shop.workspace, PromotionRequest(checkpoint, name, PromotionRule((), 0.0, 0.95))
    )

    assert alias.checkpoint == checkpoint.id
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("MLflow's alias of @demo/production was not moved: no answer of")


@pytest.mark.parametrize("url", ["", "file:///mlruns", "sqlite:///mlflow.db"])
def test_only_a_server_can_be_logged_to(url):
    with pytest.raises(MlflowError, match="must hold the http address of an MLflow server"):
        MlflowServer.of({"MLFLOW_TRACKING_URI": url})


def test_passwords_and_tokens_of_the_environment_let_in_and_are_not_shown():
    url = {"MLFLOW_TRACKING_URI": "https://mlflow.example.org/"}
    by_user = url | {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "s3cret"}
    by_token = url | {"MLFLOW_TRACKING_TOKEN": "t0ken"}

    # `me:s3cret` in base64, by RFC 7617.
    assert MlflowServer.of(by_user).authorization == "Basic bWU6czNjcmV0"
    assert MlflowServer.of(by_token).authorization == "Bearer t0ken"
    assert "bWU6czNjcmV0" not in repr(MlflowServer.of(by_user))


def test_where_a_training_is_logged_is_no_part_of_what_it_is():
    logged = settings_of(train.Config.from_json({"log_to": ["mlflow"]}))

    assert logged == settings_of(train.Config.from_json({}))
