"""Warn before a training whose checkpoints do not fit into the disk's free space or a quota."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import jax

from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.records import existing_parent, mount_of
from redco_flow.runtime.context import StageContext
from redco_flow.stages.train.config import Config

logger = logging.getLogger(__name__)

_SECONDS_FOR_QUOTA = 10.0
_BLOCK_BYTES = 1024  # the unit of `quota`


def warn_of_little_space(
    context: StageContext, config: Config, plan: TrainingPlan, *, num_steps: int, epoch_steps: int
) -> None:
    """Log, and report on the run's page, that a training's checkpoints may not fit on the disk.

    Args:
        num_steps: optimizer steps that this training adds; `epoch_steps` of an epoch.
    """
    if context.attempt_dir.rank:
        return
    num_saves = _num_saves(config, num_steps, epoch_steps)
    needed = bytes_of_checkpoints(config, plan.storage.shapes, num_saves)
    try:
        message = _lack_of_space(config, context.work_dir, needed)
    except OSError as error:  # such as a file that was just deleted
        logger.warning("whether all checkpoints fit on the disk is not known: %s", error)
        return
    if message:
        logger.warning("%s", message)
        context.report(warning=message)


def _lack_of_space(config: Config, work_dir: Path, needed: int) -> str:
    needed -= _num_bytes_in(work_dir / "checkpoints")
    folder = existing_parent(work_dir)
    free, limit = free_bytes(folder)
    if free is None or needed <= free:
        return ""
    cure = "keep fewer checkpoints (`keep`)"
    if config.keep.best and config.keep.optimizer is None:
        cure += ", or leave optimizer state out of the best ones (`keep: {optimizer: last}`)"
    return (
        f"checkpoints may need {_gib(needed)} GiB at once, and {_gib(free)} GiB are free on "
        f"{mount_of(folder)} ({limit}): free space there, use another workspace, or {cure}"
    )


def bytes_of_checkpoints(config: Config, state: Any, num_saves: int) -> int:
    """Return the most bytes that a training's checkpoints take at once.

    Args:
        state: arrays or shapes of `params` and all else that a checkpoint has.
        num_saves: how many are written.
    """
    params, all_state = num_bytes(state["params"]), num_bytes(state)
    # One more than `keep.last` to fall back to, and the one that is being written.
    num_newest = min(config.keep.last + 2, num_saves)
    num_best = min(len(config.keep.best), num_saves - num_newest)
    of_best = all_state if config.keep.optimizer is None else params
    # Low-rank factors are merged into parameters that are saved again.
    merged = 0 if config.lora is None else params * (1 + len(config.keep.best))
    return num_newest * all_state + num_best * of_best + merged


def free_bytes(folder: Path) -> tuple[int | None, str]:
    """Return the bytes that the user may still write into a folder, and what limits them.

    None where the file system does not report its size.
    """
    free = None
    with contextlib.suppress(OSError):
        usage = os.statvfs(folder)
        free = usage.f_bavail * usage.f_frsize if usage.f_blocks else None
    quota = _quota_bytes(mount_of(folder))
    if quota is not None and (free is None or quota < free):
        return quota, "by your quota"
    return free, "by the disk's size"


def _quota_bytes(mount: Path) -> int | None:
    """Return what `quota` reports as left on a mount; None without the command or a limit."""
    command = ["quota", "-w", "-p", "-f", str(mount)]  # one line, with times as numbers
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=_SECONDS_FOR_QUOTA)
        except subprocess.TimeoutExpired:
            process.kill()  # not waited for: with a dead file server it does not end
            return None
        # File system, blocks in use (* where there are too many), quota, limit, …
        used, soft, hard = printed.splitlines()[-1].split()[1:4]
        limit = int(hard) or int(soft)
        return max(0, limit - int(used.rstrip("*"))) * _BLOCK_BYTES if limit else None
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def _num_saves(config: Config, num_steps: int, epoch_steps: int) -> int:
    intervals = (epoch_steps, config.eval.every_steps, config.save_every_steps)
    return sum(math.ceil(num_steps / interval) for interval in intervals if interval)


def num_bytes(tree: Any) -> int:
    """Return the bytes of all arrays or shapes in a tree, as a checkpoint has them."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _num_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
