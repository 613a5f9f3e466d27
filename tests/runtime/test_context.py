import numpy as np
import pytest

from redco_flow.errors import ArtifactError, WorkspaceError
from redco_flow.runtime.context import InputArtifact, StageContext, Stopped
from redco_flow.tracking.attempt import AttemptDirectory


@pytest.fixture
def context(tmp_path):
    made = InputArtifact("a" * 64, "dataset", tmp_path, {"metadata": {"rows": 3}})
    return StageContext(
        run="tiny-abcd",
        stage="train",
        fingerprint="f" * 64,
        inputs={"dataset": (made,), "many": (made, made), "none": ()},
        work_dir=tmp_path,
        attempt_dir=AttemptDirectory(tmp_path),
    )


def test_progress_is_written_at_once_when_the_phase_changes_and_else_held_back(context):
    context.report(phase="training", step=1, loss=2.0)
    context.report(step=2)
    held_back = context.attempt_dir.read_progress()
    context.report(phase="evaluating")

    assert (held_back["phase"], held_back["step"], held_back["loss"]) == ("training", 1, 2.0)
    assert context.attempt_dir.read_progress()["phase"] == "evaluating"
    assert context.attempt_dir.read_progress()["step"] is None


def test_what_is_not_said_again_keeps_its_value_within_a_phase(context):
    context.report(phase="training", total_steps=9)
    context.report(step=2)
    context.flush()

    record = context.attempt_dir.read_progress()
    assert (record["phase"], record["step"], record["total_steps"]) == ("training", 2, 9)


def test_array_scalars_become_numbers_and_nan_becomes_null(context):
    context.report(phase="training", step=np.int64(3), loss=np.float32("nan"))
    context.log_metrics({"step": np.int32(3), "loss": np.float32(0.5), "all": [np.inf, 1]})

    (record,) = context.attempt_dir.read_metrics()
    assert context.attempt_dir.read_progress()["loss"] is None
    assert context.attempt_dir.read_progress()["step"] == 3
    assert (record["step"], record["loss"], record["all"]) == (3, 0.5, [None, 1])
    assert record["time"].endswith("+00:00")


def test_an_unwritable_directory_is_named(context):
    (context.attempt_dir.path / "metrics.jsonl").mkdir()
    (context.attempt_dir.path / "progress.json").mkdir()

    with pytest.raises(WorkspaceError, match=r"metrics\.jsonl"):
        context.log_metrics({})
    with pytest.raises(WorkspaceError, match=r"progress\.json"):
        context.report(phase="x")


@pytest.mark.parametrize("slot", ["many", "none", "unknown"])
def test_a_slot_without_exactly_one_artifact_is_refused(context, slot):
    with pytest.raises(ArtifactError, match=f"input '{slot}' holds [02] artifacts"):
        context.input(slot)


def test_an_input_tells_what_its_producer_wrote_about_it(context):
    assert context.input("dataset").metadata == {"rows": 3}


def test_a_stop_is_raised_only_once_it_was_requested(context):
    context.raise_if_stopped()
    context.stop.requested = True

    assert context.stop_requested()
    with pytest.raises(Stopped, match="train"):
        context.raise_if_stopped()


def test_the_devices_that_a_stage_names_and_their_use_stay_in_its_progress(context):
    context.report(phase="preparing", devices="2 × NVIDIA H100")
    use = {"tflops_per_device": 402.0, "mfu": 0.4, "peak_memory_bytes": 7, "step_seconds": 0.5}
    context.report(phase="training", step=3, **use)

    context.report(phase="digesting parameters")

    progress = context.attempt_dir.read_progress()
    assert progress["devices"] == "2 × NVIDIA H100"
    assert {key: progress[key] for key in use} == use
    assert progress["step"] is None
    assert context.devices == "2 × NVIDIA H100"


def test_progress_and_metrics_hold_no_secrets(context, monkeypatch):
    monkeypatch.setenv("TEAM_API_KEY", "correct horse 42")
    token = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"

    context.report(phase=f"reading with {token}", devices="gpu of correct horse 42")
    context.log_metrics({"kind": "own", "note": token, "parts": [{"password": "tr0ub4dor&3"}]})

    written = "".join(path.read_text() for path in context.attempt_dir.path.glob("*.json*"))
    assert [word for word in (token, "correct horse 42", "tr0ub4dor&3") if word in written] == []
    assert context.attempt_dir.read_progress()["phase"] == "reading with [redacted]"
