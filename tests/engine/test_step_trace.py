"""Tracing some steps of a training: real traces, and what becomes of them where it ends early."""

import gzip
import json
import multiprocessing
import os
import signal
import time

import jax
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer
from redco_flow.engine.errors import NonFiniteLoss, TrainingStopped
from redco_flow.engine.step_trace import StepTrace, TracedSteps

NUM_STEPS = 8
ROWS = list(np.linspace(0.1, 1, 4 * NUM_STEPS, dtype=np.float32))


def loss_fn(params, batch, rngs, is_training):
    return (params["a"] * batch["x"] - 1) ** 2, np.ones(len(batch["x"]), np.float32)


def fit(start_step, num_steps, folder, *, rows=ROWS, **options):
    trainer = Trainer(
        Deployer(devices=jax.devices()[:2]),
        collate_fn=lambda rows: {"x": np.array(rows)},
        loss_fn=loss_fn,
        params={"a": np.zeros((), np.float32)},
        optimizer=optax.sgd(0.1),
        global_batch_size=4,
    )
    traced = TracedSteps(folder / "profile", start_step, num_steps)
    return trainer.fit(rows, num_epochs=1, traced_steps=traced, **options)


def steps_in(folder):
    """The steps that a trace names; in each of them the train step was called."""
    (path,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {int(e["args"]["step_num"]): e for e in events if "step_num" in e.get("args", {})}
    calls = [e["ts"] for e in events if e.get("name") == "PjitFunction(train_step)"]
    for one in steps.values():
        assert any(one["ts"] <= start <= one["ts"] + one["dur"] for start in calls)
    return sorted(steps)


def test_a_trace_holds_the_steps_that_were_asked_for_and_changes_nothing(tmp_path, caplog):
    traced = fit(3, 2, tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["profile"]
    assert steps_in(tmp_path / "profile") == [3, 4]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))

    assert traced == fit(NUM_STEPS + 1, 1, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert "no profile: the training ended after step 8, before step 9" in caplog.text


def test_of_steps_that_a_training_does_not_reach_the_others_are_kept(tmp_path, caplog):
    caplog.set_level("INFO")

    fit(NUM_STEPS - 1, 5, tmp_path)

    assert steps_in(tmp_path / "profile") == [7, 8]
    assert "profile of steps 7 to 8" in caplog.text


def test_a_stop_in_the_middle_keeps_what_was_traced_and_a_resume_traces_the_rest(tmp_path):
    looks = iter([False, False, True])
    with Checkpointer(tmp_path / "checkpoints") as checkpointer, pytest.raises(TrainingStopped):
        fit(3, 3, tmp_path, checkpointer=checkpointer, should_stop=lambda: next(looks))
    stopped = steps_in(tmp_path / "profile")

    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        fit(3, 3, tmp_path, checkpointer=checkpointer)

    assert (stopped, steps_in(tmp_path / "profile")) == ([3], [4, 5])


def test_a_training_that_goes_on_after_the_steps_says_so(tmp_path, caplog):
    caplog.set_level("INFO")

    with StepTrace(TracedSteps(tmp_path / "profile", 2, 2), steps_done=4):
        pass

    assert "its steps were done before" in caplog.text


def test_an_error_in_the_middle_ends_the_profiler_too(tmp_path):
    rows = [*ROWS[:16], *[np.float32(np.nan)] * 16]
    with pytest.raises(NonFiniteLoss):
        fit(1, NUM_STEPS, tmp_path / "one", rows=rows)

    fit(1, 1, tmp_path / "two")

    assert steps_in(tmp_path / "two" / "profile") == [1]


def test_a_profiler_that_fails_ends_no_training(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")

    result = fit(2, 2, tmp_path / "file")

    assert result.step == NUM_STEPS
    assert "no profile, for it failed" in caplog.text


def _trace_until_killed(folder):
    def stop():
        (folder / "is tracing").touch()
        time.sleep(60)
        return False

    fit(1, NUM_STEPS, folder, should_stop=stop)


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_no_trace_and_the_next_attempt_writes_one(tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=_trace_until_killed, args=(tmp_path,)
    )
    process.start()
    while not (tmp_path / "is tracing").exists():
        assert process.is_alive()
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "profile").exists()

    fit(1, 2, tmp_path)

    assert steps_in(tmp_path / "profile") == [1, 2]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("unfinished")]


@pytest.mark.parametrize(("start_step", "num_steps"), [(0, 1), (1, 0)])
def test_steps_count_from_one(tmp_path, start_step, num_steps):
    with pytest.raises(ValueError, match="must be a positive whole number"):
        TracedSteps(tmp_path, start_step, num_steps)
