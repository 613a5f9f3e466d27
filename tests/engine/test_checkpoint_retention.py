"""What is kept and what counts as best."""

import json
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redco_flow.engine.checkpoint.checkpointer import Checkpointer, restore_params
from redco_flow.engine.checkpoint.commit import COMMIT_FILE
from redco_flow.engine.checkpoint.directory import best_step, steps_to_delete
from redco_flow.engine.errors import CheckpointError
from redco_flow.engine.files import digest_json

SCORES = st.dictionaries(
    st.integers(0, 50),
    st.dictionaries(
        st.sampled_from(["bleu", "loss"]),
        st.none() | st.sampled_from([0.0, 0.5, 1.0, float("nan"), float("inf")]),
    ),
    max_size=12,
)


def state_at(step):
    return {"params": {"w": jnp.full((4,), float(step))}, "step": step}


def save(checkpointer, step, **metrics):
    checkpointer.save(step, state_at(step), metrics=metrics, cursor={"step": step})
    checkpointer.wait()


@given(scores=SCORES, keep_last=st.integers(1, 4), pinned=st.sets(st.integers(0, 50)))
def test_retention_never_deletes_the_newest_the_best_or_a_pinned_one(scores, keep_last, pinned):
    """Engine case 50: the best, the newest and pinned checkpoints are never deleted."""
    deleted = set(
        steps_to_delete(
            scores, keep_last=keep_last, keep_best={"bleu": "max", "loss": "min"}, pinned=pinned
        )
    )

    kept = set(scores) - deleted
    finite = {
        name: {
            step: m[name]
            for step, m in scores.items()
            if m.get(name) is not None and np.isfinite(m[name])
        }
        for name in ("bleu", "loss")
    }
    assert deleted.isdisjoint(pinned)
    assert set(sorted(scores)[-keep_last:]) <= kept
    assert not finite["bleu"] or max(finite["bleu"].values()) in [
        v for s, v in finite["bleu"].items() if s in kept
    ]
    assert not finite["loss"] or min(finite["loss"].values()) in [
        v for s, v in finite["loss"].items() if s in kept
    ]
    assert len(kept - pinned) <= keep_last + 2


def test_the_earliest_of_equal_scores_is_the_best():
    scores = {3: {"bleu": 0.5}, 1: {"bleu": 0.5}, 2: {"bleu": 0.1}, 4: {"bleu": None}}

    assert best_step(scores, "bleu", "max") == 1
    assert best_step(scores, "bleu", "min") == 2
    assert best_step(scores, "rouge", "max") is None


def test_the_last_the_best_and_the_pinned_stay_on_disk(tmp_path):
    """Engine case 50: the best, the newest and pinned checkpoints are never deleted."""
    keep = {"bleu": "max", "loss": "min"}
    with Checkpointer(tmp_path, keep_last=2, keep_best=keep) as checkpointer:
        save(checkpointer, 1, bleu=0.9, loss=5.0)
        save(checkpointer, 2, bleu=0.1, loss=1.0)
        save(checkpointer, 3)
        checkpointer.pin(3)
        for step in range(4, 8):
            save(checkpointer, step, bleu=0.5, loss=float("nan"))

        assert checkpointer.steps() == [1, 2, 3, 6, 7]
        assert checkpointer.best("bleu") == 1
        assert checkpointer.best("loss") == 2
        assert checkpointer.best("bleu", "min") == 2
        checkpointer.unpin(3)
        save(checkpointer, 8)
        assert checkpointer.steps() == [1, 2, 7, 8]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"1", "2", "7", "8"}


def test_only_the_newest_keep_what_a_training_resumes_from_where_that_is_asked_for(tmp_path):
    keep = {"keep_last": 2, "keep_best": {"bleu": "max"}, "keep_state": "last"}
    with Checkpointer(tmp_path, **keep) as checkpointer:
        save(checkpointer, 1, bleu=0.9)
        for step in (2, 3, 4):
            save(checkpointer, step, bleu=0.1)
        best = checkpointer.step_directory(1)

        assert checkpointer.steps() == [1, 3, 4]
        assert not (best / "training").exists()
        checkpointer.verify(1)
        found = restore_params(best, state_at(0)["params"])
        assert found["w"].tolist() == [1.0] * 4
        with pytest.raises(CheckpointError, match="its parameters alone were kept"):
            checkpointer.restore(1, like=state_at(0))
        for step in (3, 4):
            (checkpointer.step_directory(step) / "tree.json").write_text("{}")
        with pytest.raises(CheckpointError, match="no checkpoint is intact"):
            checkpointer.restore(like=state_at(0))


def test_a_damaged_best_step_is_trained_again_from_the_newest_that_has_state(tmp_path):
    keep = {"keep_last": 2, "keep_best": {"bleu": "max", "loss": "min"}, "keep_state": "last"}
    with Checkpointer(tmp_path, **keep) as checkpointer:
        save(checkpointer, 1, bleu=0.9, loss=9.0)
        checkpointer.pin(1)
        save(checkpointer, 2, bleu=0.5, loss=1.0)
        save(checkpointer, 3, bleu=0.99, loss=9.0)
        for step in (4, 5, 6):
            save(checkpointer, step, bleu=0.1, loss=9.0)
        assert checkpointer.steps() == [1, 2, 3, 5, 6]
        (checkpointer.step_directory(3) / "tree.json").write_text("{}")

        with pytest.raises(CheckpointError, match=r"all after step 1; .* from step 1 on"):
            checkpointer.verify(3)

        assert checkpointer.steps() == [1]
        assert checkpointer.resumable() == 1
        assert checkpointer.restore(like=state_at(0))[1].step == 1
        # As after a kill in the middle of such deletions.
        checkpointer._on_disk.drop_state(1)
        assert checkpointer.resumable() is None
        assert checkpointer.steps() == []


def test_pins_and_scores_outlive_the_process(tmp_path):
    """Engine case 50: the best, the newest and pinned checkpoints are never deleted."""
    with Checkpointer(tmp_path, keep_best={"bleu": "max"}) as first:
        save(first, 1, bleu=0.9)
        save(first, 2)
        first.pin(2)

    with Checkpointer(tmp_path, keep_best={"bleu": "max"}) as second:
        save(second, 3)
        save(second, 4)

        assert second.steps() == [1, 2, 4]


def test_only_a_committed_step_can_be_pinned(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
        with pytest.raises(CheckpointError, match=r"step 2 cannot be pinned.*committed: 1"):
            checkpointer.pin(2)

    assert Checkpointer(tmp_path).pinned() == set()


def test_best_restores_the_parameters_that_were_scored(tmp_path):
    """Engine case 49: "Best" is the step that was scored."""
    with Checkpointer(tmp_path, keep_best={"bleu": "max"}) as checkpointer:
        for step, bleu in ((1, 0.2), (2, 0.8), (3, 0.4)):
            save(checkpointer, step, bleu=bleu)
        restored, commit = checkpointer.restore(checkpointer.best("bleu"), like=state_at(0))

    assert restored["params"]["w"].tolist() == [2.0] * 4
    assert commit.metrics == {"bleu": 0.8}
    assert commit.cursor == {"step": 2}


def test_a_crash_between_scoring_and_committing_leaves_the_older_best(tmp_path):
    """Engine case 49: "Best" is the step that was scored."""
    keep = {"bleu": "max"}
    with Checkpointer(tmp_path, keep_best=keep) as checkpointer:
        save(checkpointer, 1, bleu=0.2)
        checkpointer.pin(1)
        save(checkpointer, 2, bleu=0.8)
    # All arrays of the better step 2 are on the disk, and the process died before its commit.
    (tmp_path / "2" / COMMIT_FILE).unlink()

    with Checkpointer(tmp_path, keep_best=keep) as checkpointer:
        assert checkpointer.best("bleu") == 1
        restored, _ = checkpointer.restore(like=state_at(0))
        save(checkpointer, 2, bleu=0.8)
        assert checkpointer.best("bleu") == 2

    assert restored["params"]["w"].tolist() == [1.0] * 4


def test_a_metric_without_a_mode_has_no_best(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_best={"bleu": "max"})

    with pytest.raises(
        CheckpointError, match=r"more or less 'rouge' is better.*keep_best has bleu"
    ):
        checkpointer.best("rouge")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        (
            {"keep_best": {"bleu": "highest"}},
            r"keep_best\['bleu'\] is 'highest'; allowed: max, min",
        ),
    ],
)
def test_impossible_retention_is_refused(tmp_path, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path, **arguments)


def test_opening_for_reading_leaves_a_save_that_is_under_way_alone(tmp_path):
    under_way = tmp_path / "5.orbax-checkpoint-tmp"
    under_way.mkdir()
    (tmp_path / "6").mkdir()

    reader = Checkpointer(tmp_path)

    assert reader.steps() == []
    assert under_way.is_dir()


def test_what_a_killed_save_left_is_removed_and_other_files_are_not(tmp_path, caplog):
    for name in ("5.orbax-checkpoint-tmp", "6", "notes", "007", "5.orbax-checkpoint-tmp-1"):
        (tmp_path / name / "params").mkdir(parents=True)

    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 9)

    assert {path.name for path in tmp_path.iterdir()} == {"notes", "007", "9"}
    assert "an unfinished save, removed" in caplog.text


@pytest.fixture(scope="module")
def five_thousand(tmp_path_factory):
    """Commits as `write_commit` writes them, without its fsyncs: those would take minutes."""
    directory = tmp_path_factory.mktemp("many")
    for step in range(5000):
        record = {
            "version": 1,
            "step": step,
            "metrics": {"bleu": float(step % 1777)},
            "cursor": {"step": step},
            "files": [],
        }
        record["digest"] = digest_json(record)
        (directory / str(step)).mkdir()
        (directory / str(step) / COMMIT_FILE).write_text(json.dumps(record))
    return directory


def test_five_thousand_checkpoints_are_listed_in_under_a_second(five_thousand):
    """Fault 38, thousands of checkpoints and artifacts: they are listed within a second; retention
    keeps exactly what it should.
    """
    checkpointer = Checkpointer(five_thousand, keep_best={"bleu": "max"})

    started = time.process_time()
    steps, latest = checkpointer.steps(), checkpointer.latest()
    seconds = time.process_time() - started

    assert steps == list(range(5000))
    assert latest == 4999
    # Processor time: the wall clock of a busy test machine measures the others too.
    assert seconds < 1
    assert checkpointer.best("bleu") == 1776


def test_retention_among_five_thousand_keeps_exactly_what_it_should(five_thousand):
    """Fault 38, thousands of checkpoints and artifacts: they are listed within a second; retention
    keeps exactly what it should.
    """
    keep = {"bleu": "min", "loss": "max"}
    with Checkpointer(five_thousand, keep_last=4900, keep_best=keep) as checkpointer:
        checkpointer.pin(17)
        save(checkpointer, 5000, bleu=5.0)

        assert checkpointer.steps() == [0, 17, *range(101, 5001)]
