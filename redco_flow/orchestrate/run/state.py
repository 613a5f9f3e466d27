"""A run's state.json and journal, owned by one process, and the record of its launch.

Threads of the orchestrating process report here; no other process writes these files while the
lease is held.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow import search_path
from redco_flow.errors import DamagedRecord, UsageError
from redco_flow.records import write_json
from redco_flow.tracking.attempt import State
from redco_flow.tracking.journal import Journal
from redco_flow.tracking.locks import Lease, acquire
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.typed_records import check_shape, read_record

if TYPE_CHECKING:
    from redco_flow.spec.profile import Profile

_BEGUN_STATES = (State.WAITING, State.RUNNING)


class StateStore:
    """A run's state, in memory and in its files."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._mutex = threading.Lock()
        self._has_left = False
        self._state: dict[str, Any] = run.read_state()
        self.journal = Journal(run.journal_path)

    def open_run(
        self, stages: Mapping[str, str], begin: Collection[str], *, judges_ended: bool = False
    ) -> None:
        """Say that the run runs (again).

        Args:
            stages: the kind of each of the pipeline's stages, in order.
            begin: those that are to be brought to their end now; what others are stays.
            judges_ended: as of `RunSession`; otherwise it is noted which attempts have ended, so
                that a later session does not judge them.
        """
        with self._mutex:
            known = self._state.get("stages", {})
            entries = {
                name: _at_start(known.get(name), begins=name in begin) | {"kind": kind}
                for name, kind in stages.items()
            }
            for name in () if judges_ended else begin:
                entries[name]["ended_before"] = _last_ended(self._run, name)
            self._state |= {
                "state": State.RUNNING,
                "exit_code": None,
                "message": "",
                "started_at": self._state.get("started_at") or utc_now(),
                "ended_at": None,
                "prefect_url": None,
                "stages": entries,
            }
            self._write("run_started", {"stages": list(begin)})

    def close_run(self, state: State, exit_code: int, message: str) -> None:
        """Say how the run ended."""
        message = _without_secrets(message)
        with self._mutex:
            self._state |= {"state": state, "exit_code": exit_code, "message": message}
            self._state["ended_at"] = utc_now()
            self._write("run_ended", {"state": state, "exit_code": exit_code, "message": message})

    def set_stage(
        self, stage: str, state: State, *, event: str | None = None, **fields: Any
    ) -> None:
        """Say what became of a stage; `fields` are its further keys in state.json."""
        fields = _told(fields)
        with self._mutex:
            self._state["stages"][stage] |= {"state": state, **fields}
            if self._state["state"] == State.RUNNING:
                self._state["message"] = ""  # what the launcher was at before
            self._write(event or f"stage_{state}", {"stage": stage, **fields})

    def set_phase(self, message: str) -> None:
        """Say what the launcher is at while no stage has begun: what people wait for."""
        with self._mutex:
            begun = [s for s in self._state["stages"].values() if s["state"] in _BEGUN_STATES]
            if not begun and self._state["state"] == State.RUNNING:
                self._state["message"] = message
                self._write("launcher_phase", {"message": message})

    def leave(self) -> None:
        """Write no more by what is in memory: without the lease, the run may have another owner."""
        with self._mutex:
            self._has_left = True

    def set_prefect_url(self, url: str) -> None:
        """Say where the run's page is; of a short run that is known when it has ended."""
        with self._mutex:
            self._state["prefect_url"] = url
            if not self._has_left:
                self._write("flow_run_created", {"prefect_url": url})
                return
            with contextlib.suppress(UsageError), acquire(self._run):  # another owner's page counts
                self._run.write_state(self._run.read_state() | {"prefect_url": url})
                self.journal.append("flow_run_created", prefect_url=url)

    def note(self, event: str, **fields: Any) -> None:
        """Write to the journal alone."""
        self.journal.append(event, **_told(fields))

    def stage(self, name: str) -> Mapping[str, Any]:
        """Return a copy of what is known of one stage."""
        with self._mutex:
            return dict(self._state["stages"][name])

    def stages(self) -> dict[str, dict[str, Any]]:
        """Return a copy of what is known of all stages, in the pipeline's order."""
        with self._mutex:
            return {name: dict(stage) for name, stage in self._state["stages"].items()}

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        """The journal first: what it says has happened even if state.json cannot be written."""
        if self._has_left:  # a thread that ends late: the run may have another owner
            return
        self.journal.append(event, **fields)
        self._run.write_state(self._state)


def _told(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields; messages and reasons are without secrets."""
    told = {
        key: value
        for key, value in fields.items()
        if isinstance(value, str) and (key == "message" or " " in value)
    }
    return {**fields, **{key: _without_secrets(value) for key, value in told.items()}}


def _without_secrets(text: str) -> str:
    # Imported here: who only reads a run's state need not wait for what finds secrets.
    from redco_flow.launch.redaction import redact_text
    from redco_flow.spec.secrets import secret_values

    return redact_text(text, secret_values(os.environ))


def note_takeover(run: RunDirectory, lease: Lease) -> None:
    """Write to the journal that the lease was taken from a process that is dead, if it was."""
    if lease.taken_over_from is not None:
        dead = lease.taken_over_from.to_json()
        Journal(run.journal_path).append("lease_taken_over", dead_process=dead)


def _last_ended(run: RunDirectory, stage: str) -> int:
    """The number of the stage's last attempt if that has ended, else 0."""
    attempt = run.latest_attempt(stage)
    return attempt.number if attempt is not None and attempt.exit_path.exists() else 0


def _at_start(known: dict[str, Any] | None, *, begins: bool) -> dict[str, Any]:
    """A stage's entry when a process takes the run up."""
    entry = known or {
        "state": State.PENDING if begins else State.SKIPPED,
        "reused": False,
        "attempt": None,
        "seconds": None,
        "artifacts": {},
        "metrics": None,
        "message": "" if begins else "left out by --from or --until",
    }
    if begins and entry["state"] != State.COMPLETED:
        return entry | {"state": State.PENDING, "message": ""}
    return entry


@dataclass(frozen=True)
class LaunchRecord:
    """The workspace, directory and profile with which a run was started.

    Args:
        workspace: an absolute path.
        directory: the current directory, for relative names.
        variables: by which its processes look for modules where this one does.
        profile: the whole profile.
        stage_profiles: of stages with a profile of their own.
        ahead: whether all stages' jobs are submitted at once.
    """

    workspace: str
    directory: str
    variables: dict[str, str]
    profile: dict[str, Any]
    ahead: bool = False
    stage_profiles: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_this_process(
        cls,
        workspace: Path,
        profile: Profile,
        *,
        ahead: bool = False,
        stage_profiles: Mapping[str, Profile],
    ) -> LaunchRecord:
        """Return the record of a run that is started here."""
        own = {stage: one.model_dump(mode="json") for stage, one in stage_profiles.items()}
        return cls(
            workspace=str(workspace),
            directory=str(Path.cwd()),
            variables=search_path.variables(),
            profile=profile.model_dump(mode="json"),
            ahead=ahead,
            stage_profiles=own,
        )

    @classmethod
    def read(cls, run: RunDirectory | SweepDirectory) -> LaunchRecord:
        """Read the record of a run, or of a sweep whose runs are made one by one.

        Raises:
            DamagedRecord: it is damaged or gone.
        """
        path = _path(run)
        try:
            record = read_record(path, dict[str, Any])
        except OSError as error:
            raise DamagedRecord(path, "it is gone") from error
        if isinstance(folders := record.get("search_path"), list):
            # Of a version that put all folders first.
            record["variables"] = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        # A workspace may have been moved since; a run's directory is in it.
        return replace(check_shape(record, cls, path), workspace=str(run.path.parents[1]))

    @property
    def launcher(self) -> str:
        """The profile's `launcher`."""
        from redco_flow.spec.profile import LOCAL_LAUNCHER

        return str(self.profile.get("launcher", LOCAL_LAUNCHER))  # absent up to 0.2.0

    def write(self, run: RunDirectory | SweepDirectory) -> None:
        """Write it into the directory of a new run or sweep."""
        write_json(_path(run), asdict(self))


def _path(run: RunDirectory | SweepDirectory) -> Path:
    return run.path / "launch.json"
