"""What a worker does with a call, without a supervisor, as any executor would start it."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

KINDS = Path(__file__).parent / "launch" / "kinds"
sys.path.append(str(KINDS))

from tiny_stages.calls import make_attempt, make_call, new_attempt, wait_until  # noqa: E402

from redco_flow.launch.call import JobResources, write_call  # noqa: E402
from redco_flow.records import digest_file, read_json  # noqa: E402
from redco_flow.stages.preprocess import config as preprocess  # noqa: E402
from redco_flow.tracking.artifacts import ArtifactStore  # noqa: E402
from redco_flow.tracking.results import find_result, read_result  # noqa: E402
from redco_flow.tracking.workspace import Workspace  # noqa: E402


@pytest.fixture
def workspace(tmp_path):
    return tmp_path / "workspace"


@pytest.fixture
def start():
    """Start a worker; none outlives its test."""
    processes = []

    def start(attempt, **environment):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "redco_flow.worker", attempt.call_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(KINDS)} | environment,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start):
    def run(attempt, **environment):
        process = start(attempt, **environment)
        output, _ = process.communicate(timeout=400)
        return process.returncode, output

    return run


def test_a_result_is_published_with_its_origin_and_then_told(run, workspace):
    attempt = make_attempt(workspace, config={"text": "one"}, origins={"text": {"line": 3}})

    code, output = run(attempt)

    assert code == 0, output
    told = attempt.read_result()
    result = find_result(Workspace(workspace), told["fingerprint"])
    artifact = ArtifactStore(Workspace(workspace)).get(told["outputs"]["dataset"])
    assert result.outputs == told["outputs"]
    assert (result.run, result.attempt, result.stage) == ("tiny-abcd", 1, "act")
    assert result.origins == {"text": {"line": 3}}
    assert result.versions["python"].startswith("3.")
    assert (artifact.path / "text.txt").read_text() == "one"
    assert artifact.produced_by["fingerprint"] == told["fingerprint"]
    work = Workspace(workspace).work_directory(told["fingerprint"])
    assert (work / "text.txt").read_text() == "one"  # if the artifact is lost, it is not made again
    assert artifact.produced_by["config_digest"]
    assert output.startswith("redco-flow: stage 'act' of run tiny-abcd, attempt 1")


def test_manifests_and_metrics_are_published_without_secrets(run, workspace):
    attempt = make_attempt(workspace, "return_secret_metadata")

    code, output = run(attempt, OWN_API_KEY="correct horse 42")

    assert code == 0, output
    artifact = ArtifactStore(Workspace(workspace)).get(attempt.read_result()["outputs"]["dataset"])
    assert artifact.metadata == {"by": "me, [redacted]", "rows": 3}
    assert artifact.produced_by["devices"] == "2 x [redacted]"
    assert artifact.produced_by["fingerprint"] == attempt.read_result()["fingerprint"]
    records = [path for path in workspace.rglob("*.json*") if path.is_file()]
    assert [path for path in records if b"correct horse" in path.read_bytes()] == []


def test_inputs_arrive_as_artifacts_and_become_the_outputs_parents(run, workspace, tmp_path):
    first = make_attempt(workspace)
    run(first)
    store = ArtifactStore(Workspace(workspace))
    made = store.get(first.read_result()["outputs"]["dataset"])

    second = make_attempt(
        workspace,
        "note_inputs",
        number=2,
        config={"folder": str(tmp_path), "text": "other"},
        inputs=[made],
    )
    code, output = run(second)

    assert code == 0, output
    assert read_json(tmp_path / "inputs.json") == {"id": made.id, "files": ["text.txt"]}
    output_id = second.read_result()["outputs"]["dataset"]
    assert store.get(output_id).parents == {"dataset": made.id}


def test_a_missing_input_is_refused_before_the_stage_runs(run, workspace, tmp_path):
    """Fault 40: the artifact is made again; no path to the deleted one is used."""
    first = make_attempt(workspace)
    run(first)
    store = ArtifactStore(Workspace(workspace))
    made = store.get(first.read_result()["outputs"]["dataset"])
    second = make_attempt(
        workspace, "count_starts", number=2, config={"folder": str(tmp_path)}, inputs=[made]
    )
    (made.path / "text.txt").unlink()

    code, _ = run(second)

    assert code == 1
    assert "deleted or changed" in second.read_error()["message"]
    assert made.id in second.read_error()["message"]
    assert not (tmp_path / "starts").exists()


def _flip_a_bit(path):
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def _dataset(run, workspace):
    """An artifact that a stage has published."""
    first = make_attempt(workspace)
    run(first)
    return ArtifactStore(Workspace(workspace)).get(first.read_result()["outputs"]["dataset"])


def test_an_input_with_a_flipped_bit_is_refused_before_the_stage_runs(run, workspace, tmp_path):
    """Faults 22 and 41: the flip is detected in any file; the flip is detected before a stage reads
    the artifact; it is made again, and nothing made from it is reused.
    """
    made = _dataset(run, workspace)
    second = make_attempt(
        workspace, "count_starts", number=2, config={"folder": str(tmp_path)}, inputs=[made]
    )
    _flip_a_bit(made.path / "text.txt")

    code, _ = run(second)

    assert code == 1
    assert second.read_error()["type"] == "InputDamaged"
    assert f"{made.path / 'text.txt'}: its bytes are not" in second.read_error()["message"]
    assert not (tmp_path / "starts").exists()


def test_nothing_is_kept_of_a_stage_whose_input_is_damaged_while_it_runs(
    start, run, workspace, tmp_path
):
    """Fault 41: the flip is detected before a stage reads the artifact; it is made again, and
    nothing made from it is reused.
    """
    made = _dataset(run, workspace)
    second = make_attempt(
        workspace, "wait_for_go", number=2, config={"folder": str(tmp_path)}, inputs=[made]
    )
    fingerprint = second.read_call()["fingerprint"]
    process = start(second)
    wait_until((tmp_path / "starts").exists)

    _flip_a_bit(made.path / "text.txt")
    (tmp_path / "go").touch()

    assert process.wait(timeout=400) == 1
    assert second.read_error()["type"] == "InputDamaged"
    assert read_result(Workspace(workspace), fingerprint) is None
    work_dir = Workspace(workspace).work_directory(fingerprint)
    assert [path.name for path in work_dir.iterdir()] == ["lock"]


def test_an_input_that_is_linked_once_more_while_the_stage_runs_is_no_damage(
    start, run, workspace, tmp_path
):
    made = _dataset(run, workspace)
    second = make_attempt(
        workspace, "wait_for_go", number=2, config={"folder": str(tmp_path)}, inputs=[made]
    )
    process = start(second)
    wait_until((tmp_path / "starts").exists)

    os.link(made.path / "text.txt", tmp_path / "link")
    (tmp_path / "go").touch()

    assert process.wait(timeout=400) == 0
    result = find_result(Workspace(workspace), second.read_call()["fingerprint"])
    assert result.inputs_verified


@pytest.mark.slow
def test_data_that_changed_between_attempts_is_a_fingerprint_error(run, workspace, tmp_path):
    """Engine case 32: both attempts have the ingredients of one plan."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"source": "one word", "target": "word"}\n' * 20)
    settings = {"data": {"train": str(data), "tokenizer": {"train": {"vocab_size": 280}}}}
    call = replace(
        make_call(workspace, ingredients={"data": {data.name: digest_file(data)}}),
        kind="preprocess",
        config=preprocess.Config.from_json(settings).model_dump(mode="json"),
        inputs={},
    )
    attempts = [new_attempt(workspace, number=number) for number in (1, 2)]
    for attempt in attempts:
        write_call(attempt, call)
    data.write_text('{"source": "other word", "target": "word"}\n' * 20)

    code, output = run(attempts[0])
    data.write_text('{"source": "one word", "target": "word"}\n' * 20)
    code_as_planned, output_as_planned = run(attempts[1])

    assert code == 1, output
    assert attempts[0].read_error()["type"] == "DataChanged"
    assert f"{data}: changed since this run was planned" in attempts[0].read_error()["message"]
    assert code_as_planned == 0, output_as_planned


def test_what_a_killed_worker_left_half_published_is_cleaned(run, workspace):
    """Fault 13: the partial records are removed; the result is returned."""
    attempt = make_attempt(workspace)
    fingerprint = attempt.read_call()["fingerprint"]
    left_over = workspace / "results" / f".{fingerprint}.json.abc.tmp"
    left_over.write_text("{")

    code, _ = run(attempt)

    assert code == 0
    assert not left_over.exists()


def test_a_result_that_is_there_is_told_without_running_again(run, workspace, tmp_path):
    config = {"folder": str(tmp_path)}
    (tmp_path / "go").touch()
    run(make_attempt(workspace, "wait_for_go", config=config))
    again = make_attempt(workspace, "wait_for_go", run="tiny-efgh", config=config)

    code, output = run(again)

    assert code == 0
    assert "run tiny-abcd published this result already" in output
    assert again.read_result()["outputs"].keys() == {"dataset"}
    assert (tmp_path / "starts").read_text() == "x"


def test_two_workers_on_one_fingerprint_compute_once_and_the_second_waits(
    start, workspace, tmp_path
):
    config = {"folder": str(tmp_path)}
    first = make_attempt(workspace, "wait_for_go", config=config)
    second = make_attempt(workspace, "wait_for_go", run="tiny-efgh", config=config)
    holder = start(first)
    wait_until((tmp_path / "starts").exists)

    waiting = start(second)
    words = wait_until(lambda: (second.read_progress() or {}).get("phase"))
    (tmp_path / "go").touch()

    assert waiting.wait(timeout=400) == holder.wait(timeout=400) == 0
    assert "waiting for run tiny-abcd (stage act, attempt 1), process" in words
    assert f"process {holder.pid} on {os.uname().nodename}" in words
    assert (tmp_path / "starts").read_text() == "x"
    assert first.read_result()["outputs"] == second.read_result()["outputs"]


def test_a_waiting_worker_goes_on_when_the_holder_is_killed(start, workspace, tmp_path):
    config = {"folder": str(tmp_path)}
    holder = start(make_attempt(workspace, "wait_for_go", config=config))
    wait_until((tmp_path / "starts").exists)
    second = make_attempt(workspace, "wait_for_go", run="tiny-efgh", config=config)
    waiting = start(second)
    wait_until(second.progress_path.exists)

    holder.kill()
    wait_until(lambda: (tmp_path / "starts").read_text() == "xx")
    (tmp_path / "go").touch()

    assert waiting.wait(timeout=400) == 0


def test_a_waiting_worker_can_be_stopped(start, workspace, tmp_path):
    config = {"folder": str(tmp_path)}
    start(make_attempt(workspace, "wait_for_go", config=config))
    wait_until((tmp_path / "starts").exists)
    second = make_attempt(workspace, "wait_for_go", run="tiny-efgh", config=config)
    waiting = start(second)
    wait_until(second.progress_path.exists)

    waiting.terminate()

    assert waiting.wait(timeout=400) == 75
    assert second.read_error()["type"] == "Stopped"


def test_a_failure_ends_the_process_although_a_thread_runs_on(run, workspace):
    attempt = make_attempt(workspace, "raise_beside_a_running_thread")

    code, output = run(attempt)

    assert code == 1
    error = attempt.read_error()
    assert error["type"] == "ValueError"
    assert error["message"].startswith("the loss went away (at ")
    assert "in raise_beside_a_running_thread" in error["traceback"]
    assert "ValueError: the loss went away" in output
    assert not attempt.result_path.exists()


def test_an_error_whose_text_is_broken_still_ends_the_process(run, workspace):
    attempt = make_attempt(workspace, "raise_unprintable")

    code, _ = run(attempt)

    assert code == 1
    assert attempt.read_error()["type"] == "UnprintableError"


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("return_odd_metadata", "metadata of output 'dataset' is not JSON"),
        ("return_nan", "metric 'rouge2' is nan"),
        ("return_extra_output", r"returned the outputs ['dataset', 'more']; it declares"),
        ("return_nothing", "returned a NoneType, not StageOutputs"),
        ("return_other_kind", "output 'dataset' is of kind 'checkpoint'"),
        ("return_missing_file", "output 'dataset' is not there"),
    ],
)
def test_what_cannot_be_published_whole_is_not_published_at_all(run, workspace, action, said):
    """Fault 36, a result or a setting that is not data: it is refused when it is submitted or
    published; no file is left.
    """
    attempt = make_attempt(workspace, action)

    code, _ = run(attempt)

    assert code == 1
    assert attempt.read_error()["type"] == "BadOutputs"
    assert said in attempt.read_error()["message"]
    assert ArtifactStore(Workspace(workspace)).list() == []
    assert list(Workspace(workspace).results.iterdir()) == []


def test_a_stage_that_watches_for_a_stop_saves_and_ends_with_code_75(start, workspace, tmp_path):
    attempt = make_attempt(workspace, "save_when_stopped", config={"folder": str(tmp_path)})
    process = start(attempt)
    wait_until(lambda: (attempt.read_progress() or {}).get("phase") == "training")

    process.terminate()

    assert process.wait(timeout=400) == 75
    assert (tmp_path / "saved").exists()
    assert attempt.read_error()["type"] == "Stopped"


def test_a_stage_that_never_looks_is_interrupted_at_once(start, workspace):
    attempt = make_attempt(workspace, "hang")
    process = start(attempt)
    wait_until(lambda: (attempt.read_progress() or {}).get("phase") == "hanging")

    process.terminate()

    assert process.wait(timeout=400) == 75
    assert attempt.read_error()["type"] == "Stopped"


def test_stacks_are_shown_on_request_and_the_stage_runs_on(start, workspace, tmp_path):
    attempt = make_attempt(workspace, "wait_for_go", config={"folder": str(tmp_path)})
    process = start(attempt)
    wait_until((tmp_path / "starts").exists)

    process.send_signal(signal.SIGUSR1)
    lines = iter(process.stdout.readline, "")
    assert any("in wait_for_go" in line for line in lines)
    (tmp_path / "go").touch()

    assert process.wait(timeout=400) == 0


def test_jax_finds_the_calls_devices_and_is_not_imported_by_the_worker(run, workspace, tmp_path):
    attempt = make_attempt(
        workspace, "show_environment", config={"folder": str(tmp_path)}, num_cpu_devices=3
    )

    run(attempt, XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_dump_to=")

    assert read_json(tmp_path / "environment.json") == {
        "XLA_FLAGS": "--xla_dump_to=",
        "JAX_NUM_CPU_DEVICES": "3",
        "jax_is_imported": False,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ingredients": {"code": {"tiny_stages.act": "0" * 64}}}, "tiny_stages.act differ"),
        ({"ingredients": {"code": {"tiny_stages.gone": "0" * 64}}}, "tiny_stages.gone"),
        ({"fingerprint": "f" * 64}, "do not have its fingerprint"),
        ({"kind": "tiny_stages.gone"}, "no stage kind 'tiny_stages.gone'"),
        ({"config": {"colour": "red"}}, "colour"),
        ({"kind": "$(touch X)"}, "there is no stage kind"),
    ],
)
def test_a_call_that_does_not_fit_this_host_runs_nothing(run, workspace, tmp_path, changes, said):
    """Fault 34: the job is refused before anything runs."""
    config = {"action": "count_starts", "folder": str(tmp_path)} | changes.get("config", {})
    attempt = make_attempt(workspace, **(changes | {"config": config}))

    code, _ = run(attempt)

    assert code == 1
    assert said in attempt.read_error()["message"]
    assert not (tmp_path / "starts").exists()
    assert not read_result(Workspace(workspace), attempt.read_call()["fingerprint"])


def test_an_unreadable_call_is_an_error_record_not_a_traceback_alone(run, workspace):
    attempt = make_attempt(workspace)
    attempt.call_path.write_text("{")

    code, _ = run(attempt)

    assert code == 1
    assert "call.json: not a call" in attempt.read_error()["message"]


def test_a_stage_that_asks_for_gpus_which_are_not_there_fails_before_its_work(
    run, workspace, tmp_path
):
    attempt = make_attempt(
        workspace,
        "count_starts",
        config={"folder": str(tmp_path)},
        resources=JobResources(gpus_per_host=2),
    )

    code, output = run(attempt, JAX_PLATFORMS="cpu")

    assert code == 1, output
    assert attempt.read_error()["type"] == "MissingDevices"
    message = attempt.read_error()["message"]
    assert "stage 'act' asks for 2 GPUs" in message
    assert re.search(r"JAX finds 0: its devices are (\d+ × )?cpu\.", message)
    assert "profile.missing_gpus=warn" in message
    assert not (tmp_path / "starts").exists()


def test_a_profile_may_let_a_stage_without_its_gpus_go_on_with_a_warning(run, workspace):
    attempt = make_attempt(workspace, resources=JobResources(gpus_per_host=1), missing_gpus="warn")

    code, output = run(attempt, JAX_PLATFORMS="cpu")

    assert code == 0, output
    assert "WARNING: stage 'act' asks for 1 GPU in this process" in output


def test_a_worker_begins_before_the_settings_library_is_imported():
    """Its first lines and its heartbeat do not wait for it."""
    code = "import sys, redco_flow.worker; print('pydantic' in sys.modules)"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "False"
