"""The committed steps in one directory: listing, pinning, verifying, deleting.

Reading changes nothing, so a directory can be looked at while a training writes into it.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Literal

from redco_flow.engine.checkpoint.commit import (
    COMMIT_FILE,
    TRAINING,
    Commit,
    find_damage,
    is_committed,
    read_commit,
)
from redco_flow.engine.errors import CheckpointError

Mode = Literal["max", "min"]
KeepState = Literal["all", "last"]
Scores = Mapping[int, Mapping[str, float | None]]


def best_step(scores: Scores, metric: str, mode: Mode) -> int | None:
    """Return the step with the best score, the earliest of equals; None where none has one."""
    sign = 1.0 if mode == "max" else -1.0
    scored = {}
    for step, metrics in scores.items():
        value = metrics.get(metric)
        if value is not None and math.isfinite(value):
            scored[step] = sign * value
    return max(scored, key=lambda step: (scored[step], -step)) if scored else None


def steps_to_delete(
    scores: Scores,
    *,
    keep_last: int,
    keep_best: Mapping[str, Mode],
    pinned: Set[int] = frozenset(),
) -> list[int]:
    """Return the steps that retention lets go: neither last, nor best, nor pinned; in order.

    Args:
        scores: the metrics of every committed step.
        keep_last: at least 1, so the newest always stays.
        keep_best: metric -> whether more or less is better.
    """
    kept = set(sorted(scores)[-keep_last:]) | set(pinned)
    for metric, mode in keep_best.items():
        best = best_step(scores, metric, mode)
        if best is not None:
            kept.add(best)
    return sorted(set(scores) - kept)


_log = logging.getLogger(__name__)
_PARAMS_ONLY_FILE = "params_only"
_ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointDirectory:
    """One directory of checkpoints; made if absent.

    Raises:
        CheckpointError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._deleting = threading.Lock()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be made: {error.strerror}.") from error

    def step_directory(self, step: int) -> Path:
        """Return where a step is, or would be."""
        return self.path / str(step)

    def steps(self) -> list[int]:
        """Return the committed steps, in order."""
        found = (int(path.name) for path in self.path.iterdir() if _is_step(path.name))
        return sorted(step for step in found if is_committed(self.step_directory(step)))

    def listed(self) -> str:
        """Return the newest committed steps for a message."""
        return ", ".join(map(str, self.steps()[-10:])) or "none"

    def commit(self, step: int) -> Commit:
        """Return a step's commit record.

        Raises:
            CheckpointError: the step is not committed, or its record is damaged.
        """
        return read_commit(self.step_directory(step))

    def scores(self) -> dict[int, Mapping[str, float | None]]:
        """Return the metrics of every committed step; none for one whose record is damaged."""
        scores: dict[int, Mapping[str, float | None]] = {}
        for step in self.steps():
            try:
                scores[step] = self.commit(step).metrics
            except CheckpointError as error:
                _log.warning("%s Its metrics are ignored.", error)
                scores[step] = {}
        return scores

    def has_state(self, step: int) -> bool:
        """Whether a committed step has all of its state, and not its parameters alone."""
        return not (self.step_directory(step) / _PARAMS_ONLY_FILE).exists()

    def drop_state(self, step: int) -> None:
        """Delete all but the parameters of a committed step; no training resumes from it then."""
        path = self.step_directory(step)
        # First the mark: after a kill in between, files that are gone must not count as damage.
        (path / _PARAMS_ONLY_FILE).touch()
        shutil.rmtree(path / TRAINING, ignore_errors=True)

    def check_intact(self, step: int, *, needs_state: bool = False) -> int:
        """Compare a step's files with their digests; return the step.

        Args:
            needs_state: refuse a step whose parameters alone were kept.

        Raises:
            CheckpointError: it is not committed or damaged; the message names the files.
        """
        path = self.step_directory(step)
        if not is_committed(path):
            raise CheckpointError(
                f"{self.path}: step {step} is not committed; committed: {self.listed()}."
            )
        has_state = self.has_state(step)
        if needs_state and not has_state:
            raise CheckpointError(f"{path}: its parameters alone were kept (keep_state: last).")
        damage = find_damage(path, read_commit(path), params_only=not has_state)
        if damage:
            raise CheckpointError(f"{path}: damaged: {'; '.join(damage)}.")
        return step

    def newest_intact(self) -> int:
        """Return the newest step whose files are what was committed; warn of those skipped.

        Raises:
            CheckpointError: there is none; the message says what is wrong with each.
        """
        problems = []
        for step in reversed(self.steps()):
            try:
                self.check_intact(step, needs_state=True)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                _log.warning(
                    "%s Using step %d instead; the steps since are repeated.", problem, step
                )
            return step
        if problems:
            raise CheckpointError(
                f"no checkpoint is intact; to train from the first step, delete {self.path}.\n  "
                + "\n  ".join(problems)
            )
        raise CheckpointError(f"{self.path}: no committed checkpoint here.")

    def newest_with_state(self, *, before: float = math.inf) -> int:
        """Return the newest step, intact or not, that has all of its state; 0 if none has."""
        return max((one for one in self.steps() if one < before and self.has_state(one)), default=0)

    def delete_after(self, step: int) -> None:
        """Delete all later steps, the newest first."""
        for later in reversed([one for one in self.steps() if one > step]):
            self.delete(later)

    def pin(self, step: int) -> None:
        """Keep a step whatever retention says, over restarts too.

        Raises:
            CheckpointError: the step is not committed.
        """
        with self._deleting:
            if not is_committed(self.step_directory(step)):
                raise CheckpointError(
                    f"{self.path}: step {step} cannot be pinned, it is not committed; committed: "
                    f"{self.listed()}."
                )
            self._pin_file(step).touch()

    def unpin(self, step: int) -> None:
        """Leave a step to retention again."""
        self._pin_file(step).unlink(missing_ok=True)

    def pinned(self) -> set[int]:
        """Return the pinned steps."""
        return {int(path.stem) for path in self.path.glob("*.pin") if _is_step(path.stem)}

    def make_room(self, step: int) -> int:
        """Free a step's name if what has it is damaged; return the step.

        Raises:
            CheckpointError: an intact checkpoint has it.
        """
        path = self.step_directory(step)
        if not is_committed(path):
            return step
        try:
            self.check_intact(step)
        except CheckpointError as error:
            _log.warning("%s It is saved again.", error)
            self.delete(step)
            return step
        raise CheckpointError(
            f"{path}: step {step} is already committed; a step is saved once. Use another "
            "directory to start from scratch."
        )

    def remove_unfinished(self) -> None:
        """Remove what killed or failed saves left; only the one writer may ask for it."""
        for path in self.path.iterdir():
            is_ours = _is_step(path.name.partition(_ORBAX_UNFINISHED)[0])
            if is_ours and path.is_dir() and not is_committed(path):
                _log.warning("%s: an unfinished save, removed.", path)
                shutil.rmtree(path)

    def retain(
        self, keep_last: int, keep_best: Mapping[str, Mode], keep_state: KeepState = "all"
    ) -> None:
        """Garbage-collect checkpoints: delete those that `steps_to_delete` names.

        Args:
            keep_state: "last" also deletes all but the parameters of those that stay and are
                neither among the newest nor pinned.
        """
        with self._deleting:
            pinned = self.pinned()
            for step in steps_to_delete(
                self.scores(), keep_last=keep_last, keep_best=keep_best, pinned=pinned
            ):
                self.delete(step)
            for step in self.steps()[:-keep_last] if keep_state == "last" else ():
                if step not in pinned:
                    self.drop_state(step)

    def _pin_file(self, step: int) -> Path:
        return self.path / f"{step}.pin"

    def delete(self, step: int) -> None:
        """Delete a committed step without regard to retention."""
        path = self.step_directory(step)
        # First the commit: a kill in between must not leave half a checkpoint that counts.
        (path / COMMIT_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name
