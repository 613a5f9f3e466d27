"""Saving and restoring a training's state against raw files of the same bytes.

    python benchmarks/checkpoint.py [--megabytes 500] [--repeats 5]

Per repeat, in turn: a raw sequential write with fsync and a raw read of one file; a synchronous
save (written, hashed, synced, committed); an asynchronous save, of which only the time until
`save` returns counts (what a training waits); a restore with all digests verified; and a restore
onto another mesh. The raw read and every restore find their files in the page cache alike. Prints
one JSON line last: medians of the ratios within a repeat, and the seconds that a save blocks.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from redco_flow import Deployer
from redco_flow.engine.checkpoint.checkpointer import Checkpointer

CURSOR = {"epoch": 0, "index": 0}


def timed(action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def make_state(num_bytes: int, deployer: Deployer) -> dict:
    """Parameters and two moments of a 12-layer model, split over the model shards."""
    width = int((num_bytes / (3 * 12 * 12 * 4)) ** 0.5) // 16 * 16
    shapes = {
        "qkv": (12, width, 3 * width),
        "out": (12, width, width),
        "wi": (12, width, 4 * width),
        "wo": (12, 4 * width, width),
    }
    sharding = NamedSharding(deployer.mesh, PartitionSpec(None, None, "model"))
    random = np.random.default_rng(0)

    def draw() -> dict:
        return {
            name: jax.device_put(random.standard_normal(shape, np.float32), sharding)
            for name, shape in shapes.items()
        }

    return {"params": draw(), "opt_state": {"mu": draw(), "nu": draw()}, "step": np.int32(1)}


def like(state: dict, deployer: Deployer) -> dict:
    """The state's shapes on this deployer's mesh."""

    def describe(leaf):
        axes = (None, None, "model") if np.ndim(leaf) == 3 else ()
        sharding = NamedSharding(deployer.mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, state)


def raw_write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def measure(folder: Path, num_bytes: int, repeat: int) -> dict[str, float]:
    deployer, other = Deployer(num_model_shards=4), Deployer(num_model_shards=2)
    state = make_state(num_bytes, deployer)
    data = np.random.default_rng(1).bytes(sum(x.nbytes for x in jax.tree.leaves(state)))
    write = timed(lambda: raw_write(folder / "raw", data))
    read = timed(lambda: (folder / "raw").read_bytes())
    with Checkpointer(folder / f"sync-{repeat}", is_async=False) as saves:
        save = timed(lambda: saves.save(1, state, cursor=CURSOR))
        restore = timed(lambda: jax.block_until_ready(saves.restore(1, like=like(state, deployer))))
        reshard = timed(lambda: jax.block_until_ready(saves.restore(1, like=like(state, other))))
    with Checkpointer(folder / f"async-{repeat}") as saves:
        blocked = timed(lambda: saves.save(1, state, cursor=CURSOR))
    return {
        "save_ratio": save / write,
        "blocked_seconds": blocked,
        "restore_ratio": restore / read,
        "other_mesh_ratio": reshard / read,
        "write_seconds": write,
        "read_seconds": read,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    figures = []
    for repeat in range(options.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            figures.append(measure(Path(folder), options.megabytes * 1_000_000, repeat))
    # The first repeat imports and compiles.
    medians = {
        name: round(statistics.median(one[name] for one in figures[1:]), 3) for name in figures[0]
    }
    print(json.dumps({"megabytes": options.megabytes, **medians, "repeats": options.repeats}))


if __name__ == "__main__":
    main()
