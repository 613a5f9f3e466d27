"""Whatever is missing or damaged: there is a page, and it says what it cannot show."""

import json
import shutil

import pytest

from redco_flow.records import write_json
from redco_flow.report.page import build_report
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory


def test_a_run_that_has_just_begun_has_a_page(builder, read_report):
    page = read_report(builder.run)

    assert "… pending" in page.text
    for nothing in (
        "No stage has reported a metric.",
        "No stage has logged a training.",
        "There are no predictions.",
        "No stage has a result yet.",
    ):
        assert nothing in page.text
    assert not page.has("section", "remarks")


def test_a_failed_stage_shows_its_error_and_the_end_of_its_log(builder, read_report):
    builder.preprocess()
    log = "".join(f"line {number}\n" for number in range(50)) + "\x1b[31mlast <b>words</b>\x1b[0m\n"
    builder.fail("train", type_="NonFiniteLoss", message="the loss is nan", log=log)
    builder.skip("predict")

    page = read_report(builder.close("failed", "stage 'train' failed"))

    assert "Stage train failed NonFiniteLoss: the loss is nan" in page.text
    assert "line 31 line 32" in page.text
    assert "line 30" not in page.text
    assert "last <b>words</b>" in page.text  # as text: the parser found no such tag
    assert "\x1b" not in page.html
    assert "Traceback (most recent call last)" in page.text
    assert "stages/train/attempts/1/logs/rank0.log" in page.text
    assert f"redco-flow retry {builder.run.id}" in page.text
    assert "– skipped" in page.text
    assert "an upstream stage failed" in page.text


def test_a_stage_that_ran_out_of_memory_says_so(builder, read_report):
    attempt = builder.fail("train")
    attempt.error_path.unlink()
    message = "the worker was killed by SIGKILL (signal 9) by the kernel's out-of-memory killer"
    write_json(attempt.exit_path, {"exit_code": None, "cause": "out_of_memory", "message": message})

    page = read_report(builder.close("failed"))

    assert f"Stage train ran out of memory {message}" in page.text
    assert "Its log is empty or not there." in page.text


def test_a_stage_without_a_job_shows_what_the_orchestrator_said(builder, read_report):
    builder.entries["train"] = {"state": "failed", "message": "stage 'train': the disk is full"}

    page = read_report(builder.close("failed"))

    assert "Stage train failed stage 'train': the disk is full" in page.text


def test_a_cancelled_stage_is_told_too(builder, read_report):
    builder.fail("train", state="cancelled", message="as asked")

    page = read_report(builder.close("cancelled", "cancelled as asked"))

    assert "■ cancelled" in page.text
    assert "Stage train was cancelled" in page.text


def test_a_training_that_failed_still_shows_its_curve(builder, read_report):
    builder.fail("train")
    attempt = builder.attempt(
        "train", records=[{"step": s, "loss": 5.0, "total_steps": 9} for s in (1, 2)]
    )
    recipe = {"recipe": "text_to_text"}
    call = {"stage": "train", "kind": "train", "config": recipe, "fingerprint": ""}
    write_json(attempt.call_path, call)

    page = read_report(builder.close("failed"))

    assert page.charts
    assert "2 of 9" in page.text
    assert "nats per target token" in str(page.plots)


@pytest.mark.parametrize(
    ("stage_states", "said"),
    [
        (["completed", "completed"], "✓ completed"),
        (["completed", "failed"], "✗ failed"),
        (["cancelled", "skipped"], "■ cancelled"),
        (["completed", "running"], "▶ running"),
    ],
)
def test_a_run_whose_stages_have_ended_is_not_called_running(
    builder, read_report, stage_states, said
):
    for index, state in enumerate(stage_states):
        builder.entries[f"stage{index}"] = {"state": state}

    page = read_report(builder.close("running", ""))

    assert f"{builder.run.id} {said}" in page.text


def test_damaged_records_are_told_and_the_rest_is_shown(builder, read_report):
    run = builder.whole()
    run.state_path.write_text("{ torn")

    page = read_report(run)

    assert "This report is incomplete" in page.text
    assert "state.json: damaged record: it is no JSON" in page.text
    assert "Reproduce" in page.text


def test_a_run_without_its_record_has_a_page(builder, read_report):
    run = builder.whole()
    (run.path / "run.json").write_text("[]")

    page = read_report(run)

    assert "This report is incomplete" in page.text
    assert "18.75" in page.text


@pytest.mark.parametrize("damaged", ["run.json", "state.json", "plan.json"])
def test_no_record_whatever_it_holds_prevents_a_page(builder, read_report, damaged):
    path = builder.whole().path / damaged
    for content in (b"", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"stages": 3}'):
        path.write_bytes(content)

        assert "Lineage" in read_report(RunDirectory(builder.run.path)).text, content


def test_no_file_of_an_attempt_prevents_a_page(builder, read_report):
    builder.preprocess()
    attempt = builder.fail("train", log="something\n")
    run = builder.close("failed")
    for name in ("call", "job", "exit", "error", "result"):
        path = attempt.path / f"{name}.json"
        before = path.read_bytes() if path.exists() else None
        for content in (b"[]\n", b"\xff", b'"text"\n', b"null\n"):
            path.write_bytes(content)

            assert "Stage train failed" in read_report(run).text, (name, content)
        path.unlink() if before is None else path.write_bytes(before)


def test_no_line_of_a_metrics_file_prevents_a_page(builder, read_report):
    run = builder.whole()
    path = run.attempt("train", 1).metrics_path
    whole = path.read_bytes()
    for content in (b"[]\n", b"\xff\n", b'"text"\n', b'{"step": "x"}\n', b'{"step": 3}\n'):
        path.write_bytes(content + whole)

        assert "Stage evaluate" in read_report(run).text, content


def test_deleted_artifacts_are_told(builder, workspace, read_report):
    run = builder.whole()
    for artifact in ArtifactStore(workspace).list():
        shutil.rmtree(artifact.directory)

    page = read_report(run)

    assert "deleted" in page.text
    assert "missing or damaged" in page.text
    assert "18.75" in page.text


def test_damaged_artifacts_are_told(builder, workspace, read_report):
    run = builder.whole()
    artifact = ArtifactStore(workspace).latest("predictions")
    assert artifact is not None
    path = artifact.path / "predictions.jsonl"
    path.chmod(0o644)
    path.write_text("nonsense\n")

    page = read_report(run)

    assert "Sample predictions cannot be shown" in page.text
    assert "damaged" in page.text


def test_text_of_users_and_models_is_escaped_everywhere(make_builder, read_report):
    trap = "<script>alert('trap')</script>"
    builder = make_builder(argv=["redco-flow", "run", trap], pipeline_path=trap, overrides=[trap])
    row = {"row_id": trap, "source": trap, "prediction": trap, "references": [trap, trap]}
    builder.whole([row])
    builder.fail("other", type_=trap, message=trap, log=trap)
    builder.run.resolved_path.write_text(trap)

    page = read_report(builder.close("failed", trap, prefect_url="javascript:alert('trap')"))

    assert "<script>alert" not in page.html
    assert not any("javascript:" in str(one) for _, one in page.tags)
    assert page.text.count(trap) >= 10


def test_text_that_is_no_text_can_be_written(builder, read_report):
    run = builder.whole()
    state = {**run.read_state(), "state": "failed", "message": "half \ud800 a\x00b\x1b[0m"}
    run.state_path.write_text(json.dumps(state))

    assert "half \ufffd a\ufffdb\ufffd[0m" in read_report(run).text


def test_a_page_can_be_built_again_over_the_old_one(builder, workspace):
    run = builder.whole()

    first = build_report(run, workspace, clock=lambda: "2026-02-01T00:00:00.000+00:00")
    text = first.read_text()
    again = build_report(run, workspace, clock=lambda: "2026-02-01T00:00:00.000+00:00")

    assert again.read_text() == text
    assert "2026-02-01 00:00:00 UTC" in text
