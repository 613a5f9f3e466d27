"""Processes save and restore one sharded state together, on one disk or each host on its own."""

import numpy as np
import pytest
from blake3 import blake3

from redco_flow.engine.checkpoint.checkpointer import parameter_digests
from redco_flow.engine.files import canonical_json

SCRIPT = """
import sys
rank, num_processes, port, is_shared = map(int, sys.argv[1:5])
directory = sys.argv[5 + rank]
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
from redco_flow.engine.agreement import is_first_process, wait_for_all
from redco_flow.engine.checkpoint.checkpointer import Checkpointer

mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
whole = np.arange(72, dtype=np.float32).reshape(12, 6)

def spread(array, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

def state_at(step):
    return {"params": {"w": spread(whole * step, "data", "model")}, "step": spread(np.int32(step))}

with Checkpointer(directory, keep_last=2, is_shared=bool(is_shared)) as checkpointer:
    for step in (1, 2, 3):
        checkpointer.save(step, state_at(step), cursor={"step": step})
    checkpointer.wait()
    assert checkpointer.steps() == [2, 3], checkpointer.steps()
    wait_for_all("listed")
    if is_first_process():
        (checkpointer.step_directory(3) / "tree.json").write_text("{}")
    wait_for_all("damaged")
    like = {"params": {"w": spread(whole, "model", None)}, "step": spread(np.int32(0))}
    restored, commit = checkpointer.restore(like=like)
    assert commit.step == int(restored["step"]) == 2
    for shard in restored["params"]["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, 2 * whole[shard.index])
    checkpointer.save(3, state_at(3), cursor={"step": 3})
    restored, commit = checkpointer.restore(like=like)
    assert commit.step == 3
print('"exact"', flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("disks", [["one", "one"], ["first", "first", "second"]])
def test_processes_restore_what_they_saved_and_fall_back_to_the_same_step(
    tmp_path, run_ranks, disks
):
    """Engine case 22: every process makes the same calls; who writes what is not theirs to say."""
    is_shared = len(set(disks)) == 1
    folders = [tmp_path / disk for disk in disks]

    found = run_ranks(SCRIPT, len(disks), 6 // len(disks), int(is_shared), *folders)

    assert found == ["exact"] * len(disks)
    head = canonical_json({"shape": [12, 6], "dtype": "float32", "key_impl": None})
    values = 3 * np.arange(72, dtype=np.float32)
    for folder in folders:
        assert parameter_digests(folder / "3") == {"w": blake3(head + values.tobytes()).hexdigest()}
