"""Records of schedules and of their firings, small files of the workspace.

`schedules/<name>/schedule.json` is what was asked for; `firings/<id>.json` is one firing, named by
the id of its flow run and written only by the process that claimed it. Prefect's deployments are
made from these files, and can be made again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.records import refuse_link, write_json
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now
from redco_flow.tracking.typed_records import find_record, read_record, unless_damaged
from redco_flow.tracking.workspace import Workspace, check_name

FORMAT = 1

MAX_KEPT = 200
"""Ended firings of a schedule whose records are kept: this many skipped ones and
this many others."""


class FiringState(StrEnum):
    """The state of a firing."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"

    @property
    def is_end(self) -> bool:
        """Whether nothing follows."""
        return self not in (FiringState.WAITING, FiringState.RUNNING)


@dataclass(frozen=True)
class Schedule:
    """schedule.json.

    Args:
        pipeline: the file, absolute.
        directory: where its commands run.
        profile, overrides: as for `redco-flow run`.
        cron, every, rrule: one of them says when; the others are empty.
        timezone, overlap, missed, retries: see `spec.schedule.ScheduleSection`.
        is_paused: it does not fire.
        no_run_for: time without a successful firing after which a notice is sent; empty: never.
        told_by: the environment variable that holds the address, by channel.
        notify: the pipeline's `notify` section: recipients for a firing that starts no run.
    """

    name: str
    pipeline: str
    directory: str
    profile: str = "local"
    overrides: list[str] = field(default_factory=list)
    cron: str = ""
    every: str = ""
    rrule: str = ""
    timezone: str = "UTC"
    overlap: str = "skip"
    missed: str = "latest"
    retries: int = 0
    is_paused: bool = False
    no_run_for: str = ""
    told_by: dict[str, str] = field(default_factory=dict)
    notify: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def when(self) -> str:
        """For people."""
        rule = " ".join(self.rrule.split())
        said = self.cron or (f"every {self.every}" if self.every else rule)
        return said if self.every else f"{said} {self.timezone}"


@dataclass(frozen=True)
class Firing:
    """firings/<id>.json.

    Args:
        id: of the flow run in Prefect.
        due: when it was to fire, ISO 8601 in UTC.
        state: a FiringState.
        reason: why it was skipped or failed, for people.
        run: the run that it starts; empty where it starts none.
        run_path: that run's directory, which appears when the run is started.
        identity: digest of settings, data and code, by which a later firing knows that nothing is
            new.
        process: who has it.
        began, ended: UTC.
        num_retries: new attempts given.
    """

    id: str
    due: str
    state: str
    reason: str = ""
    run: str = ""
    run_path: str = ""
    identity: str = ""
    process: dict[str, Any] = field(default_factory=dict)
    began: str = ""
    ended: str = ""
    num_retries: int = 0

    @property
    def told(self) -> str:
        """The result in one line: `skipped: data unchanged since RUN`."""
        what = self.run or str(self.state)
        reason = self.reason.partition("\n")[0]
        return f"{what}: {reason}" if reason else what

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows."""
        return FiringState(self.state).is_end

    @property
    def has_started_run(self) -> bool:
        """Whether its run's directory is there."""
        return bool(self.run_path) and (Path(self.run_path) / "run.json").exists()

    @property
    def is_held(self) -> bool:
        """Whether a living process has it."""
        return bool(self.process) and ProcessIdentity.from_json(self.process).is_alive()

    @property
    def is_of_this_process(self) -> bool:
        """Whether it is, or was, in a thread of this process."""
        return self.process == ProcessIdentity.current().to_json()


@dataclass(frozen=True)
class ScheduleDirectory:
    """One schedule's folder."""

    path: Path

    @classmethod
    def of(cls, workspace: Workspace, name: str) -> ScheduleDirectory:
        """Return the folder of a name, which need not be there.

        Raises:
            UsageError: it is no name.
        """
        return cls(workspace.schedules / check_name(name, "schedule's name"))

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.path.name

    def read(self) -> Schedule:
        """Return what was asked for.

        Raises:
            FileNotFoundError: there is no such schedule.
            DamagedRecord: its file is damaged.
        """
        return read_record(self.path / "schedule.json", Schedule)

    def write(self, schedule: Schedule) -> None:
        """Write what is asked for, in place of what was."""
        for folder in (self.path.parent, self.path):
            refuse_link(folder)
            folder.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "schedule.json", asdict(schedule))

    def remove(self) -> None:
        """Delete it with its history; the runs stay."""
        shutil.rmtree(self.path)

    def find_firing(self, firing_id: str) -> Firing | None:
        """Return one firing, or None where it has not begun."""
        return find_record(self._firing_path(firing_id), Firing)

    def write_firing(self, firing: Firing) -> Firing:
        """Write a firing as it is now; return it."""
        self._firings.mkdir(exist_ok=True)
        write_json(self._firing_path(firing.id), asdict(firing))
        return firing

    def end_firing(self, firing: Firing, state: FiringState, reason: str) -> Firing:
        """Write the end of a firing; return it.

        Args:
            reason: for people; may be empty.
        """
        return self.write_firing(replace(firing, state=state, reason=reason, ended=utc_now()))

    def claim(self, firing: Firing) -> tuple[Firing | None, bool]:
        """Take a firing for a thread of this process, which has none for it.

        It may be a new one, one whose process is gone, or one to retry.

        Returns:
            The firing as it is now, or None where another process has it or it has ended well;
            and whether it had failed or been cancelled, which is forgotten.
        """
        with self.locked():
            present = self.find_firing(firing.id) or firing
            is_retry = present.state in (FiringState.FAILED, FiringState.CANCELLED)
            is_elsewhere = present.is_held and not present.is_of_this_process
            if not is_retry and (is_elsewhere or present.has_ended):
                return None, False
            if is_retry:
                present = replace(present, state=FiringState.WAITING, reason="", ended="")
            self._prune()
            process = dict(ProcessIdentity.current().to_json())
            return self.write_firing(replace(present, process=process)), is_retry

    def firings(self) -> list[Firing]:
        """Return all firings by when they were due; damaged ones are said and left out."""
        found = [
            unless_damaged(lambda path=path: read_record(path, Firing))  # type: ignore[misc]
            for path in self._firings.glob("*.json")
        ]
        return sorted((one for one in found if one is not None), key=lambda one: (one.due, one.id))

    def _prune(self) -> None:
        """Delete old records, except the last good one, by which a firing knows what is new."""
        ended = [one for one in self.firings() if one.has_ended]
        skipped = [one for one in ended if one.state == FiringState.SKIPPED]
        ran = [one for one in ended if one.state != FiringState.SKIPPED]
        last_good = [one for one in ran if one.state == FiringState.COMPLETED][-1:]
        for one in (*skipped[:-MAX_KEPT], *ran[:-MAX_KEPT]):
            if one not in last_good:
                self._firing_path(one.id).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the schedule's lock: two firings decide one after the other."""
        self._firings.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path / ".lock"):
            yield

    @property
    def _firings(self) -> Path:
        return self.path / "firings"

    def _firing_path(self, firing_id: str) -> Path:
        return self._firings / f"{check_name(firing_id, 'id of a firing')}.json"


def list_schedules(workspace: Workspace) -> list[ScheduleDirectory]:
    """Return the workspace's schedules, by name."""
    paths = sorted(workspace.schedules.glob("[!.]*/schedule.json"))
    return [ScheduleDirectory(path.parent) for path in paths]


def get_schedule(workspace: Workspace, name: str) -> ScheduleDirectory:
    """Return a schedule that is there.

    Raises:
        UsageError: there is none of this name; lists them.
    """
    found = {one.name: one for one in list_schedules(workspace)}
    if name in found:
        return found[name]
    known = ", ".join(found) or "none"
    raise UsageError(f"no schedule '{name}' in {workspace.root}; there are: {known}.")
