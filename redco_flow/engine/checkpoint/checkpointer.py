"""Checkpoints of a training: saved in the background, committed with digests, verified, retained.

`<directory>/<step>/` holds Orbax stores, `tree.json` and, written last, `commit.json`. A directory
without a commit does not count: whatever kills a save, the checkpoints before it are untouched.
Metrics are part of the commit, so "best" can only name parameters that were scored and saved.
Knows no run directories and no artifacts; those take files and digests from `checkpoint_files`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax

from redco_flow.engine.agreement import (
    check_everywhere,
    decide_first,
    is_first_process,
    wait_for_all,
)
from redco_flow.engine.checkpoint.arrays import (
    StoredArray,
    StoredState,
    as_stored,
    make_checkpointer,
    parameter_digests,
    restore_params_only,
    restore_state,
    start_save,
    stored_arrays,
    write_tree,
)
from redco_flow.engine.checkpoint.commit import (
    Commit,
    FileRecord,
    checkpoint_files,
    digest_tree,
    find_damage,
    read_commit,
    write_commit,
)
from redco_flow.engine.checkpoint.copies import copy_to_all, whole_on_host
from redco_flow.engine.checkpoint.directory import (
    CheckpointDirectory,
    KeepState,
    Mode,
    best_step,
)
from redco_flow.engine.errors import CheckpointError
from redco_flow.engine.files import canonical_json

__all__ = [
    "Checkpointer",
    "Commit",
    "StoredArray",
    "check_checkpoint",
    "checkpoint_files",
    "parameter_digests",
    "restore_params",
    "restore_state",
    "stored_arrays",
]

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_REPORTS = 5.0


class Checkpointer:
    """The checkpoints in one directory.

    Opening it changes nothing, so a directory can be read while a training writes into it; what a
    killed save left behind is removed before the first save. One writer at a time.

    Args:
        directory: made if absent.
        keep_last: how many of the newest to keep, at least 1. With 1 there may be nothing to
            fall back to when that one is damaged.
        keep_best: metric -> "max" or "min": also keep the best by each.
        keep_state: "last" keeps of the best that are not among the newest the parameters alone;
            no training resumes from those.
        is_async: return from `save` as soon as the state is copied to the host.
        is_shared: whether all processes see the directory. Where they do not, process 0 saves
            and the others get copies.
        local_directory: on a disk of this machine, for a training of one process: a save is
            written there and copied to `directory` before it is committed. Where that fails, this
            save and later ones are written to `directory` alone. None: all are.
        while_waiting: called every few seconds while a save is waited for.

    Raises:
        CheckpointError: the directory cannot be made, or an argument is out of range.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 1,
        keep_best: Mapping[str, Mode] | None = None,
        keep_state: KeepState = "all",
        is_async: bool = True,
        is_shared: bool = True,
        local_directory: Path | None = None,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> None:
        if local_directory is not None and jax.process_count() > 1:
            raise CheckpointError(
                f"local_directory is {local_directory}, and {jax.process_count()} processes write "
                f"parts of one checkpoint: only a training of one process can have one."
            )
        if keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}; at least the newest must be kept: 1.")
        for metric, mode in (keep_best or {}).items():
            if mode not in ("max", "min"):
                raise CheckpointError(f"keep_best[{metric!r}] is {mode!r}; allowed: max, min.")
        self._on_disk = CheckpointDirectory(Path(directory))
        self.directory = self._on_disk.path
        self.keep_last = keep_last
        self.keep_best = dict(keep_best or {})
        self.keep_state = keep_state
        self._is_async = is_async
        self.is_shared = is_shared or jax.process_count() == 1
        self._local_directory = local_directory
        self._while_waiting = while_waiting
        self._orbax: Any = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        self._pending: Future[None] | None = None
        self._may_have_unfinished = True

    def step_directory(self, step: int) -> Path:
        """Return where a step is, or would be."""
        return self._on_disk.step_directory(step)

    def steps(self) -> list[int]:
        """Return the committed steps, in order."""
        return self._on_disk.steps()

    def latest(self) -> int | None:
        """Return the newest committed step; a save that is still running does not count."""
        return max(self.steps(), default=None)

    def resumable(self) -> int | None:
        """Return the newest step with all of its state; only for the one writer.

        Steps after it, whose parameters alone were kept, are deleted: they are trained again.
        """

        def find() -> int:
            step = self._on_disk.newest_with_state()
            self._on_disk.delete_after(step)
            return step

        return decide_first(find) or None

    def best(self, metric: str, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best score, the earliest of equals.

        Args:
            mode: what `keep_best` says for the metric, by default.

        Raises:
            CheckpointError: no mode is known.
        """
        mode = mode or self.keep_best.get(metric)
        if mode is None:
            raise CheckpointError(
                f"whether more or less {metric!r} is better is not known; keep_best has "
                f"{', '.join(sorted(self.keep_best)) or 'no metric'}. Pass mode='max' or 'min'."
            )
        return best_step(self._on_disk.scores(), metric, mode)

    def commit(self, step: int) -> Commit:
        """Return a step's commit record.

        Raises:
            CheckpointError: the step is not committed, or its record is damaged.
        """
        return self._on_disk.commit(step)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        cursor: Mapping[str, Any],
        through_local: bool = True,
    ) -> None:
        """Save a state; it counts once its commit is written, `wait` says when.

        Args:
            step: optimizer steps done; each is saved once.
            state: a tree of arrays and numbers; may be donated or changed afterwards.
            metrics: scores of these parameters; one that is not finite is never the best.
            cursor: JSON: where to go on reading the data.
            through_local: use `local_directory`. A save without it is committed earlier.

        Raises:
            CheckpointError: this save, or the one before it in the background, failed. Earlier
                checkpoints are untouched.
        """
        self.wait()
        if step < 0:
            raise CheckpointError(f"step is {step}; it counts from 0.")
        scores = {name: _finite_or_none(value) for name, value in (metrics or {}).items()}
        record = Commit(step, scores, _json_object(cursor), {})
        try:
            decide_first(lambda: self._make_room(step))
            end_save = self._start_save(
                self.step_directory(step), state, through_local=through_local
            )
        except CheckpointError:
            raise
        except Exception as error:
            raise self._failed(step, error) from error
        self._pending = self._background.submit(self._finish, record, end_save)
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Return once every save so far is committed.

        Raises:
            CheckpointError: the save in the background failed; told once, then forgotten.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            while wait_for_futures([pending], _SECONDS_BETWEEN_REPORTS).not_done:
                self._while_waiting()
            pending.result()
        finally:
            # Only process 0 commits; the others must not run ahead and look for it too early.
            wait_for_all("checkpoint committed")
        if not self.is_shared:
            copy_to_all(self._on_disk)

    def close(self) -> None:
        """Wait for the last save and end the background threads.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._background.shutdown()
            orbax, self._orbax = self._orbax, None
            if orbax is not None:
                orbax.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any,
        before_reading: Callable[[], None] | None = None,
    ) -> tuple[Any, Commit]:
        """Read a state back, after comparing every file with its digest.

        Args:
            step: which; None: the newest that is intact. A newer one that is damaged is skipped
                with a warning.
            like: a tree of arrays or `jax.ShapeDtypeStruct`s; the result has its structure,
                its shardings (also on another mesh than the saved one's) and its kinds of leaves.
            before_reading: is called once the step is known to be intact and like that: it may
                free the memory that the state then takes.

        Raises:
            CheckpointError: there is no such step, it is damaged, none is intact, or it does not
                have the paths, shapes and dtypes of `like`.
        """
        self.wait()
        disk = self._on_disk
        chosen = decide_first(
            lambda: (
                disk.newest_intact() if step is None else disk.check_intact(step, needs_state=True)
            )
        )
        directory = self.step_directory(chosen)
        state = restore_state(directory, like, before_reading=before_reading)
        return state, self.commit(chosen)

    def restore_params(self, step: int, *, like: Any) -> Any:
        """Read a step's parameters back, also where they alone were kept.

        Args:
            like: a tree of the parameters alone, as in `restore`.

        Raises:
            CheckpointError: as `restore`.
        """
        self.wait()
        decide_first(lambda: self._on_disk.check_intact(step))
        return restore_params_only(self.step_directory(step), like)

    def verify(self, step: int) -> None:
        """Compare a step's files with their digests before it is used otherwise than by `restore`.

        Raises:
            CheckpointError: it is damaged; it and all after the newest step before it with all of
                its state are gone, to be trained again.
        """

        def check() -> int:
            try:
                return self._on_disk.check_intact(step)
            except CheckpointError as error:
                start = self._on_disk.newest_with_state(before=step)
                self._on_disk.delete_after(start)
                raise CheckpointError(
                    f"{error} It was removed with all after step {start}; a resumed training makes "
                    f"them again, from {f'step {start}' if start else 'its first step'} on."
                ) from error

        decide_first(check)

    def pin(self, step: int) -> None:
        """Keep a step whatever retention says, until `unpin`; over restarts too.

        Raises:
            CheckpointError: the step is not committed.
        """
        self._on_disk.pin(step)

    def unpin(self, step: int) -> None:
        """Leave a step to retention again, at the next save."""
        self._on_disk.unpin(step)

    def pinned(self) -> set[int]:
        """Return the pinned steps."""
        return self._on_disk.pinned()

    def _make_room(self, step: int) -> int:
        self._on_disk.make_room(step)
        if self._may_have_unfinished:
            self._on_disk.remove_unfinished()
        self._may_have_unfinished = False
        return step

    def _start_save(
        self, path: Path, state: Any, *, through_local: bool
    ) -> Callable[[], dict[str, FileRecord]]:
        """Copy a state to the host; return what ends the save, in the background."""
        if through_local and self._local_directory is not None:
            stored = as_stored(state, whole_on_host)
            return partial(self._write_through, self._local_directory / path.name, path, stored)
        stored = as_stored(state) if self.is_shared else as_stored(state, whole_on_host)
        self._start_writing(path, stored)
        return partial(self._end_writing, path, stored)

    def _start_writing(self, path: Path, stored: StoredState) -> None:
        if self.is_shared or is_first_process():
            self._orbax = self._orbax or make_checkpointer(is_alone=not self.is_shared)
            start_save(self._orbax, path, stored)

    def _end_writing(
        self, path: Path, stored: StoredState, copy: Path | None = None
    ) -> dict[str, FileRecord]:
        """Wait for Orbax; return the digests of the files, or of their copy."""
        if self._orbax is not None:
            self._orbax.wait_until_finished()
        if not is_first_process():
            return {}
        write_tree(path, stored)
        return digest_tree(path) if copy is None else digest_tree(copy, copy_of=path)

    def _write_through(self, local: Path, path: Path, stored: StoredState) -> dict[str, FileRecord]:
        """Write to this machine's disk and copy to `path`; directly there where that fails."""
        num_bytes = sum(one.nbytes for store in stored.stores.values() for one in store.values())
        try:
            if num_bytes > shutil.disk_usage(local.parent).free:
                raise OSError(errno.ENOSPC, f"{num_bytes:,} bytes do not fit", str(local.parent))
            self._start_writing(local, stored)
            return self._end_writing(local, stored, copy=path)
        except Exception as error:  # noqa: BLE001 (what Orbax raises on a full disk is no OSError)
            _log.warning(
                "%s could not be written through %s (%s): this checkpoint and later ones are "
                "written directly.",
                *(path, local.parent, error),
            )
            self._local_directory = self._orbax = None
        finally:
            for left_over in local.parent.glob(f"{local.name}*"):  # Orbax' own, too
                shutil.rmtree(left_over, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
        self._start_writing(path, stored)
        return self._end_writing(path, stored)

    def _finish(self, commit: Commit, end_save: Callable[[], dict[str, FileRecord]]) -> None:
        """End a save, then commit and retain; runs in the background."""
        try:
            files = end_save()
            if is_first_process():
                write_commit(self.step_directory(commit.step), replace(commit, files=files))
                self._on_disk.retain(self.keep_last, self.keep_best, self.keep_state)
        except Exception as error:
            failure = self._failed(commit.step, error)
            # Also here: a program that ends without waiting would never hear of it.
            _log.error("%s", failure)
            if is_first_process():
                # On a full disk the error's own record needs the room. Orbax may still be writing
                # the other store, so what cannot go now goes before the next save.
                with contextlib.suppress(OSError):
                    self._on_disk.remove_unfinished()
            raise failure from error

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        self._may_have_unfinished = True
        self._orbax = None
        return CheckpointError(
            f"{self.step_directory(step)}: saving step {step} failed: {type(error).__name__}: "
            f"{error}. Earlier checkpoints are untouched: {self._on_disk.listed()}."
        )


def restore_params(step_directory: str | Path, like: Any) -> Any:
    """Read one checkpoint's parameters, after comparing their files with their digests.

    Args:
        step_directory: a step's directory, or a copy of what `checkpoint_files` lists.
        like: a tree of the parameters alone, as in `Checkpointer.restore`.

    Raises:
        CheckpointError: no commit, a damaged file, or other paths, shapes or dtypes.
    """
    path = Path(step_directory).absolute()
    _check_intact(path, params_only=True)
    return restore_params_only(path, like)


def check_checkpoint(step_directory: str | Path) -> None:
    """Compare a checkpoint's files with their digests, on all processes of a training at once.

    Args:
        step_directory: as of `restore_params`.

    Raises:
        CheckpointError: no commit, or a damaged file.
        RuntimeError: so it is for another process, whose host has a copy of the checkpoint.
    """
    check_everywhere(lambda: _check_intact(Path(step_directory).absolute()))


def _check_intact(path: Path, *, params_only: bool = False) -> None:
    if damage := find_damage(path, read_commit(path), params_only=params_only):
        raise CheckpointError(f"{path}: damaged: {'; '.join(damage)}.")


def _finite_or_none(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _json_object(cursor: Mapping[str, Any]) -> dict[str, Any]:
    try:
        canonical_json(dict(cursor))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the cursor must be JSON: {error}.") from error
    return dict(cursor)
