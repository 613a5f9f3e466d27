"""A stage in shards, each of which writes its part once it may."""

import time
from pathlib import Path
from typing import Annotated

from redco_flow.runtime.context import Output, Shard, StageOutputs
from redco_flow.spec.model import Placement, PositiveInt
from redco_flow.spec.stage_kind import StageConfig

OUTPUTS = {"dataset": "dataset"}


class Config(StageConfig):
    action: str = ""
    folder: str = ""
    num_shards: Annotated[PositiveInt, Placement()] = 1


def run(context, config):
    return run_shard(context, config, Shard())()


def run_shard(context, config, shard):
    """Note the start, wait for `go-<shard>`, write a part; joining waits for `join`."""
    folder, parts = Path(config.folder), context.work_dir / "parts"
    note(folder / f"starts-{shard.index}")
    wait_for(context, folder / f"go-{shard.index}", "waiting")
    parts.mkdir(exist_ok=True)
    (parts / f"{shard.index}.txt").write_text(f"part {shard.index}")

    def join():
        note(folder / "joins")
        wait_for(context, folder / "join", "joining")
        return StageOutputs({"dataset": Output("dataset", parts)})

    return join


def note(path):
    with path.open("a") as file:
        file.write("x")


def wait_for(context, path, phase):
    while not path.exists():
        context.report(phase=phase)
        context.raise_if_stopped()
        time.sleep(0.02)
