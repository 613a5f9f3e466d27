"""Losses and scores for TensorBoard and W&B: what is written, and a log that fails."""

import json
import logging
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import GuardedLog, MetricLog, TensorBoardLog


def scalars_of(directory):
    """What an event file says, by its own format: framed protocol buffers."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = directory.iterdir()
    data, place, found = path.read_bytes(), 0, {}
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        place += 12 + length + 4
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


@pytest.fixture
def tensorboard():
    pytest.importorskip("tensorboardX", reason="pip install redco-flow[tensorboard]")


def train(log, num_epochs=2):
    def loss(params, batch, rngs, is_training):
        errors = (params["a"] * batch["x"] - 1) ** 2
        return errors, jnp.ones_like(errors)

    trainer = Trainer(
        Deployer(),
        collate_fn=lambda examples: {"x": np.array(examples, np.float32)},
        loss_fn=loss,
        params={"a": jnp.zeros(())},
        optimizer=optax.sgd(0.1),
        global_batch_size=8,
    )
    examples = list(range(16))
    return trainer.fit(
        examples, num_epochs=num_epochs, eval_examples=examples, callbacks=[log], log_every_steps=1
    )


def test_losses_and_scores_stand_in_an_event_file_by_step(tensorboard, tmp_path):
    log = GuardedLog("tensorboard", lambda: TensorBoardLog(tmp_path))

    result = train(log)
    log.close()

    found = scalars_of(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["val/eval_loss"]] == [2, 4]
    # Event files hold float32.
    assert found["val/eval_loss"][-1][1] == pytest.approx(result.metrics["eval_loss"], rel=1e-6)
    assert {"train/grad_norm", "train/epoch", "val/seconds"} < set(found)
    assert "train/step" not in found


class FullDisk(MetricLog):
    num_written = 0

    def write(self, scalars, step):
        self.num_written += 1
        raise OSError("No space left on device")

    def close(self):
        raise OSError("No space left on device")


def test_a_log_that_fails_is_warned_of_once_and_the_training_goes_on(caplog):
    log = FullDisk()
    guarded = GuardedLog("full disk", lambda: log)

    with caplog.at_level(logging.WARNING):
        result = train(guarded)
        guarded.close()

    warnings = [record.message for record in caplog.records if "full disk" in record.message]
    assert warnings == [
        "no more is logged to full disk, for it failed: OSError: No space left on device"
    ]
    assert (result.step, log.num_written) == (4, 1)


def test_a_log_that_cannot_be_opened_is_warned_of_and_the_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    pytest.importorskip("tensorboardX", reason="pip install redco-flow[tensorboard]")

    with caplog.at_level(logging.WARNING):
        guarded = GuardedLog("tensorboard", lambda: TensorBoardLog(tmp_path / "file" / "logs"))
        result = train(guarded)

    assert [r.message[:32] for r in caplog.records].count("no more is logged to tensorboard") == 1
    assert result.step == 4


OFFLINE_RUN = """
import json, pathlib, sys
from redco_flow.engine.callbacks import WandbLog
log = WandbLog(name="a run", directory=pathlib.Path(sys.argv[1]), settings={"learning_rate": 0.1})
log.write({"train/loss": 0.5}, 3)
log.close()
print("standard output is still the caller's")
"""


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_in_its_folder(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not there: pip install redco-flow[wandb]")
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}

    done = subprocess.run(
        [sys.executable, "-c", OFFLINE_RUN, str(tmp_path / "logs")],
        env=environment | path,
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert done.returncode == 0, done.stderr
    assert "still the caller's" in done.stdout
    (folder,) = (tmp_path / "logs" / "wandb").glob("offline-run-*")
    (record,) = folder.glob("*.wandb")
    assert json.dumps("train/loss").encode()[1:-1] in record.read_bytes()
