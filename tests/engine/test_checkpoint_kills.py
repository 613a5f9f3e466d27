"""Killing a process while it saves: what it said was committed is there, whole."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.engine.checkpoint.checkpointer import Checkpointer

NUM_KILLS = 10

SCRIPT = """
# Fork a saver, kill it at a random moment of a random save, again and again; print what each told.
import json, os, pathlib, random, signal, sys, tempfile, time
import jax, jax.numpy as jnp, numpy as np
from redco_flow.engine.checkpoint.checkpointer import Checkpointer

directory, num_kills = sys.argv[1], int(sys.argv[2])

def state_at(step):
    return {"params": {"w": jnp.full((256, 1024), step, jnp.float32)}, "step": jnp.int32(step)}

def save_for_ever(tell, local):
    checkpointer = Checkpointer(directory, keep_last=2, local_directory=local)
    step = 0
    if checkpointer.latest() is not None:
        restored, commit = checkpointer.restore(like=state_at(0))
        step = commit.step
        exact = all(jax.tree.leaves(jax.tree.map(np.array_equal, restored, state_at(step))))
        tell({"restored": step, "exact": exact, "cursor": commit.cursor})
    else:
        tell({"restored": 0})
    while True:
        step += 1
        started = time.monotonic()
        checkpointer.save(step, state_at(step), cursor={"step": step})
        checkpointer.wait()
        tell({"committed": step, "seconds": time.monotonic() - started})

chance, save_seconds = random.Random(0), 0.5
for number in range(num_kills):
    # Every other one saves through a disk that is lost with it.
    local = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[3])) if number % 2 else None
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            save_for_ever(
                lambda fact: os.write(send, (json.dumps(fact) + "\\n").encode()), local
            )
        finally:
            os._exit(1)
    os.close(send)
    facts = []
    with open(receive) as lines:
        for _ in range(1 + chance.randrange(3)):
            facts.append(json.loads(next(lines)))
            save_seconds = facts[-1].get("seconds", save_seconds)
        time.sleep(chance.uniform(0, 1.2 * save_seconds))
        os.kill(child, signal.SIGKILL)
        facts += [json.loads(line) for line in lines]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    unfinished = [name for name in os.listdir(directory)
                  if not os.path.exists(os.path.join(directory, name, "commit.json"))]
    unfinished += os.listdir(local) if local else []
    print(json.dumps({"facts": facts, "unfinished": unfinished}), flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_while_saving_loses_nothing_that_was_committed(tmp_path):
    """Fault 3: the next attempt restores the previous checkpoint."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (tmp_path / "disk").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, directory, str(NUM_KILLS), tmp_path / "disk"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(rounds) == NUM_KILLS
    last_committed = 0
    for number, found in enumerate(rounds):
        first, *commits = found["facts"]
        restored = first["restored"]
        # One more than was told may be there: killed between committing and telling.
        assert last_committed <= restored <= last_committed + 1, f"after kill {number}"
        assert restored == 0 or (first["exact"] and first["cursor"] == {"step": restored})
        last_committed = max([restored, *(fact["committed"] for fact in commits)])
    assert last_committed > NUM_KILLS / 2
    assert sum(bool(found["unfinished"]) for found in rounds) >= NUM_KILLS / 4, "no kill hit a save"
    like = {"params": {"w": jnp.zeros((256, 1024))}, "step": jnp.int32(0)}
    with Checkpointer(directory) as checkpointer:
        state, commit = checkpointer.restore(like=like)
    assert np.all(np.asarray(state["params"]["w"]) == commit.step)
    assert Path(directory, str(commit.step), "commit.json").is_file()
