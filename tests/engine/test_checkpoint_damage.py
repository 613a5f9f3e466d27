"""Damaged checkpoints: noticed in every file, and the one before is used."""

import logging
import random
import resource
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow.engine.checkpoint.checkpointer import Checkpointer, restore_params
from redco_flow.engine.checkpoint.commit import COMMIT_FILE, find_damage, read_commit
from redco_flow.engine.errors import CheckpointError


def state_at(step):
    params = {"w": jnp.full((4, 4), float(step)), "b": jnp.arange(3.0)}
    return {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": jnp.int32(step)}


def save(checkpointer, step):
    save_and_wait(checkpointer, step, state_at(step))


def save_and_wait(checkpointer, step, state):
    checkpointer.save(step, state, cursor={"step": step})
    checkpointer.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 1 and 2, never changed."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory, keep_last=2) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def files_of(step_directory):
    return sorted(path for path in step_directory.rglob("*") if path.is_file())


def flip_bit(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def assert_the_previous_one_is_used(directory, path, caplog):
    caplog.clear()
    with Checkpointer(directory) as checkpointer, caplog.at_level(logging.WARNING):
        restored, commit = checkpointer.restore(like=state_at(0))
        with pytest.raises(CheckpointError, match=r"damaged|not committed"):
            checkpointer.restore(2, like=state_at(0))

    assert commit.step == 1
    assert np.all(np.asarray(restored["params"]["w"]) == 1.0)
    if path.exists() or path.name != COMMIT_FILE:
        # Without its commit record a directory is an unfinished save, no damaged checkpoint.
        assert path.name in caplog.text
        assert "Using step 1 instead" in caplog.text


def test_one_flipped_bit_in_any_file_is_noticed_and_the_previous_one_used(directory, caplog):
    """Engine case 51: the flip is detected; the checkpoint before is restored. Fault 22: the flip
    is detected in any file.
    """
    chance = random.Random(0)
    files = files_of(directory / "2")
    assert len(files) > 10

    for path in files:
        whole = path.read_bytes()
        flip_bit(path, chance.randrange(8 * len(whole)))
        assert_the_previous_one_is_used(directory, path, caplog)
        path.write_bytes(whole)


@pytest.mark.slow
def test_a_file_cut_short_or_gone_is_noticed_and_the_previous_one_used(directory, caplog):
    """Fault 23: the damage is detected in any file."""
    for path in files_of(directory / "2"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert_the_previous_one_is_used(directory, path, caplog)
        path.unlink()
        assert_the_previous_one_is_used(directory, path, caplog)
        path.write_bytes(whole)


def test_a_flipped_bit_anywhere_in_the_commit_record_is_noticed(directory):
    """Fault 22: the record that guards the others guards itself."""
    path = directory / "2" / COMMIT_FILE
    whole = path.read_bytes()
    chance = random.Random(0)

    for byte in chance.sample(range(len(whole)), 300):
        flip_bit(path, 8 * byte + chance.randrange(8))
        with pytest.raises(CheckpointError, match=COMMIT_FILE):
            read_commit(directory / "2")
        path.write_bytes(whole)


def test_params_alone_are_verified_without_the_optimizer_s_files(directory):
    """Fault 22, of one checkpoint that was published."""
    step_directory = directory / "2"
    like = state_at(0)["params"]
    training, params = (
        max((step_directory / part).rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
        for part in ("training", "params")
    )

    flip_bit(training, 100)
    assert restore_params(step_directory, like)["w"].tolist() == [[2.0] * 4] * 4
    flip_bit(params, 100)
    with pytest.raises(CheckpointError, match=f"{params.name}: its BLAKE3 differs"):
        restore_params(step_directory, like)


def test_without_an_intact_checkpoint_all_of_them_are_named(directory):
    """Fault 22: never a silent start from scratch."""
    for step in ("1", "2"):
        flip_bit(directory / step / "tree.json", 5)

    with Checkpointer(directory) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(like=state_at(0))

    assert "no checkpoint is intact" in str(caught.value)
    assert f"{directory}/1" in str(caught.value)
    assert f"{directory}/2" in str(caught.value)


def test_a_damaged_step_that_is_verified_goes_with_those_after_it(directory):
    """Fault 22: what was best is made again by training on from before it."""
    with Checkpointer(directory, keep_last=3) as checkpointer:
        save(checkpointer, 3)
        checkpointer.verify(1)
        flip_bit(max(files_of(directory / "2"), key=lambda path: path.stat().st_size), 9)

        with pytest.raises(CheckpointError, match=r"2.*: damaged: .* from step 1 on"):
            checkpointer.verify(2)

        assert checkpointer.steps() == [1]


def test_training_on_after_a_fallback_replaces_the_damaged_step(directory, caplog):
    """Fault 22: the flip is detected in any file."""
    flip_bit(directory / "2" / "tree.json", 5)

    with Checkpointer(directory, keep_last=2) as checkpointer:
        _, commit = checkpointer.restore(like=state_at(0))
        save(checkpointer, 2)
        restored, again = checkpointer.restore(like=state_at(0))

    assert (commit.step, again.step) == (1, 2)
    assert np.all(np.asarray(restored["params"]["w"]) == 2.0)
    assert "It is saved again" in caplog.text


def test_a_damaged_commit_record_loses_its_metrics_and_stops_no_later_save(directory, caplog):
    flip_bit(directory / "1" / COMMIT_FILE, 30)

    with Checkpointer(directory, keep_last=2, keep_best={"bleu": "max"}) as checkpointer:
        save(checkpointer, 3)

        assert checkpointer.steps() == [2, 3]
        assert checkpointer.best("bleu") is None
    assert "Its metrics are ignored" in caplog.text


@pytest.fixture
def small_files_only():
    """No file may grow beyond 2 MiB: what a write then gets is what a full disk gives it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_async", [True, False])
def test_a_full_disk_is_an_error_with_the_path_before_done_and_keeps_the_earlier_one(
    tmp_path, small_files_only, is_async
):
    """Fault 20: the error names the disk, earlier checkpoints are intact, and a background save
    fails before "done".
    """
    big = {"params": {"w": jnp.ones((4 << 20,))}}
    with Checkpointer(tmp_path, is_async=is_async) as checkpointer:
        save(checkpointer, 1)
        with pytest.raises(CheckpointError) as caught:
            save_and_wait(checkpointer, 2, big)

        assert f"{tmp_path}/2: saving step 2 failed" in str(caught.value)
        assert "Earlier checkpoints are untouched: 1." in str(caught.value)
        assert find_damage(tmp_path / "1", read_commit(tmp_path / "1")) == []
        assert sum(p.stat().st_size for p in tmp_path.rglob("*")) < 2 << 20, (
            "the room is free again"
        )
        save(checkpointer, 3)
        assert checkpointer.steps() == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_failed_save_in_the_background_is_told_at_the_next_save_and_at_close(
    tmp_path, small_files_only
):
    """Fault 20: the error names the disk, earlier checkpoints are intact, and a background save
    fails before "done".
    """
    big = {"params": {"w": jnp.ones((4 << 20,))}}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, big, cursor={})
    with pytest.raises(CheckpointError, match="saving step 1 failed"):
        checkpointer.save(2, state_at(2), cursor={})
    checkpointer.save(3, big, cursor={})
    with pytest.raises(CheckpointError, match="saving step 3 failed"):
        checkpointer.close()
    checkpointer.close()

    assert Checkpointer(tmp_path).steps() == []
