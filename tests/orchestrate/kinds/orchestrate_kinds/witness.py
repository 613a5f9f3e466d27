"""A stage kind that notes when its body begins and ends, and whether it should not have begun."""

import fcntl
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.model import Placement, PositiveInt
from redco_flow.spec.stage_kind import InputSlot, StageConfig

SECTIONS = ()
INPUTS = {"metrics": InputSlot(kind="metrics", many=True, is_optional=True)}
OUTPUTS = {"metrics": "metrics"}


class Config(StageConfig):
    """What it adds to its inputs, and for how long it works."""

    value: PositiveInt = 1
    folder: Annotated[str, Placement()]
    milliseconds: Annotated[PositiveInt, Placement()] = 100


def run(context: StageContext, config: Config) -> StageOutputs:
    """Add up, alone."""
    with _alone(context, Path(config.folder)):
        until = time.monotonic() + config.milliseconds / 1000
        while time.monotonic() < until:
            context.raise_if_stopped()
            time.sleep(0.02)
        given = (json.loads((one.path / "metrics.json").read_text()) for one in _inputs(context))
        total = config.value + sum(one["total"] for one in given)
        path = context.work_dir / "metrics.json"
        path.write_text(json.dumps({"total": total}))
    return StageOutputs({"metrics": Output("metrics", path)}, {"total": total})


def _inputs(context: StageContext):
    return context.inputs.get("metrics", ())


@contextmanager
def _alone(context: StageContext, folder: Path):
    """Hold a lock that the kernel takes from a process that ends; note what was found.

    `overlaps`: another body of the same work runs. `published`: its result is there already.
    """
    work = context.work_dir.name
    with (folder / f"{work}.body").open("w") as lock:
        found = {"overlaps": False, "published": _is_published(context, work)}
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock is what a shim takes away
        except BlockingIOError:
            found["overlaps"] = True
        _note(folder, "began", work, context, **found)
        yield
        _note(folder, "ended", work, context)


def _is_published(context: StageContext, work: str) -> bool:
    root = next(one for one in context.work_dir.parents if (one / "results").is_dir())
    return any((root / "results").glob(f"{work}*.json"))


def _note(folder: Path, event: str, work: str, context: StageContext, **found):
    record = {
        "event": event,
        "time": time.time(),
        "work": work,
        "stage": context.stage,
        "attempt": str(context.attempt_dir.path),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "pid": os.getpid(),
        **found,
    }
    with (folder / "bodies.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
