"""Receive the streams of all ranks of a job over SSH until they end; reconnects broken links.

What the ranks write is mirrored into the attempt's directory here; records that all ranks read
are handed to the other hosts. A request to cancel is handed on. A host that is silent for long
while it is needed counts as lost.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from redco_flow.errors import ArtifactError, RedcoFlowError
from redco_flow.launch.endings import ClusterWord, judge, read_endings
from redco_flow.launch.hosts.connection import HostConnection
from redco_flow.launch.hosts.file_sets import FileSet, forget_steps
from redco_flow.launch.hosts.follow import (
    GROWING,
    SECONDS_BETWEEN_WORDS,
    is_for_all,
    is_mirrored,
    write_record,
)
from redco_flow.launch.hosts.ssh import HostRefused, HostUnreachable, Talk
from redco_flow.launch.hosts.start import StartedJob
from redco_flow.records import open_no_link, read_json, read_json_if_present, write_json
from redco_flow.tracking.attempt import Cause, ExitRecord


class CheckpointMirror:
    """The copies of one job's checkpoints."""

    def __init__(self, job: StartedJob) -> None:
        self._job = job
        self._steps: list[int] = []
        self._copying: asyncio.Task[None] | None = None

    def mirror(self, connection: HostConnection, steps: list[int]) -> None:
        """Copy what is new among the host's checkpoints, in the background."""
        self._steps = steps
        if self._copying is None or self._copying.done():
            self._copying = asyncio.create_task(self._copy(connection))

    async def finish(self, connection: HostConnection) -> None:
        """Wait until what the host last had is here, as far as the link allows."""
        if self._copying is not None:
            await self._copying
            await self._copy(connection)

    async def _copy(self, connection: HostConnection) -> None:
        workspace = self._job.workspace
        with contextlib.suppress(RedcoFlowError, OSError):
            while missing := [
                step
                for step in self._steps
                if step not in workspace.committed_steps(self._job.work)
            ]:
                steps = self._steps
                answer = await connection.ask(
                    "steps",
                    workspace=str(connection.workspace.root),
                    work=self._job.work,
                    steps=missing,
                )
                for one in answer["sets"]:
                    # Deleted or damaged meanwhile: the steps after it are copied nevertheless.
                    with contextlib.suppress(ArtifactError, HostRefused):
                        await connection.pull([FileSet.from_json(one)], workspace)
                forget_steps(workspace, self._job.work, steps)
                if steps == self._steps:
                    return


_LOST = "lost"

_FATES = {
    "gone": "its supervisor was killed (kill -9 or the out-of-memory killer)",
    "rebooted": "the host was restarted",
    "never started": "the host has forgotten it: its directory was emptied",
    _LOST: "the host has not answered for too long (hosts.lost_after_minutes)",
}


def ending_of(job: StartedJob, fates: Mapping[int, str]) -> ExitRecord:
    """Return what exit.json says.

    Args:
        fates: of every rank: ended, or why there is no word of it.
    """
    silent = [
        f"rank {rank} on {job.host_of(rank)}: {_FATES[fate]}"
        for rank, fate in sorted(fates.items())
        if fate in _FATES
    ]
    return judge(
        read_endings(job.attempt, 0),
        job.call.resources.num_processes,
        ClusterWord(
            stopped=(Cause.PREEMPTED, "the host is being shut down."),
            silent=(Cause.NODE_FAILURE, f"{'; '.join(silent)}.") if silent else None,
        ),
        has_result=job.attempt.result_path.exists(),
        was_cancelled=job.attempt.cancel_path.exists(),
    )


_SECONDS_OF_SILENCE = 5 * SECONDS_BETWEEN_WORDS
_MAX_SECONDS_BETWEEN_TRIES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.2
_RESULT = "result.json"


class GroupFollowing:
    """The followers of one job's hosts.

    Args:
        tell: takes words for people: where it runs, which host is silent.
    """

    def __init__(self, job: StartedJob, tell: Callable[[str], None]) -> None:
        self._job = job
        self._tell = tell
        self._talks: dict[str, Talk] = {}
        self._silent: dict[str, str] = {}
        self._handed_on: set[tuple[str, bool]] = set()  # by host, whether to kill at once
        self._result: dict[str, Any] | None = None
        self._mirror = CheckpointMirror(job)

    async def until_ended(self) -> dict[int, str]:
        """Return each rank's fate: ended, or why there is no word of it."""
        self._say_where()
        cancelling = asyncio.create_task(self._hand_on_cancels())
        try:
            fates = await asyncio.gather(*(self._follow(one) for one in self._job.connections))
        finally:
            cancelling.cancel()
        return {rank: fate for part in fates for rank, fate in part.items()}

    def keep_result(self) -> None:
        """Write rank 0's result.json here: its artifacts are here by now."""
        if self._result is not None:
            write_json(self._job.attempt.result_path, self._result)

    async def _follow(self, connection: HostConnection) -> dict[int, str]:
        """Listen to one host, again and again, until its ranks have ended."""
        pause = 0.5
        while True:
            try:
                if not connection.is_open:
                    await connection.open()
                await self._hand_on_cancel(connection)  # what has not begun by now never does
                fates = await self._listen(connection)
                self._hear_again(connection)
                return fates
            except (RedcoFlowError, OSError) as error:
                connection.close()
                self._note_silence(connection, error)
            if connection.is_lost(self._job.record.settings.lost_after_minutes * 60):
                return {info.rank: _LOST for info in self._job.rank_infos(connection)}
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_SECONDS_BETWEEN_TRIES)

    async def _listen(self, connection: HostConnection) -> dict[int, str]:
        """Take in what a host says until it says how its ranks ended."""
        ranks = [rank_info.rank for rank_info in self._job.rank_infos(connection)]
        copies = not self._job.record.is_shared
        work = connection.workspace.work_directory(self._job.call.fingerprint) / "checkpoints"
        async with connection.talk(
            "follow",
            attempt=str(self._job.attempt_on(connection)),
            ranks=ranks,
            offsets=self._offsets(ranks),
            checkpoints=str(work) if copies and 0 in ranks else None,
            copies=copies,
        ) as talk:
            self._talks[connection.label] = talk
            if copies:
                talk.send({"records": self._records_for_all()})
            said_at = time.monotonic()
            try:
                while (said := await talk.hear(_SECONDS_OF_SILENCE)) is not None:
                    self._hear_again(connection)
                    if "ended" in said:
                        await self._mirror.finish(connection)
                        return {int(rank): fate for rank, fate in said["ended"].items()}
                    self._take(connection, said)
                    if time.monotonic() - said_at > SECONDS_BETWEEN_WORDS:
                        talk.send({})
                        said_at = time.monotonic()
            finally:
                del self._talks[connection.label]
        raise HostUnreachable(f"{connection.label} stopped talking.")

    def _take(self, connection: HostConnection, said: Mapping[str, Any]) -> None:
        name = said.get("grown") or said.get("record")
        if name is not None and not is_mirrored(name):
            raise HostRefused(f"{connection.label} sent {name!r}, which no rank writes.")
        if "grown" in said:
            self._append(said["grown"], said["offset"], base64.b64decode(said["data"]))
        elif "steps" in said:
            self._mirror.mirror(connection, said["steps"])
        elif said.get("record") == _RESULT:
            self._result = said["value"]
        elif "record" in said:
            write_record(self._job.attempt.path, said["record"], said["value"])
            if is_for_all(said["record"]):
                for label, talk in self._talks.items():
                    if label != connection.label:
                        talk.send({"records": {said["record"]: said["value"]}})

    def _append(self, name: str, offset: int, data: bytes) -> None:
        """Add a file's next bytes; what is here already is not written twice."""
        path = self._job.attempt.path / name
        path.parent.mkdir(exist_ok=True)
        with open(path, "ab", opener=open_no_link) as file:
            file.write(data[max(0, file.tell() - offset) :])

    def _offsets(self, ranks: list[int]) -> dict[str, int]:
        names = [f"logs/rank{rank}.log" for rank in ranks]
        paths = {name: self._job.attempt.path / name for name in [*names, *GROWING]}
        return {name: path.stat().st_size for name, path in paths.items() if path.exists()}

    def _records_for_all(self) -> dict[str, Any]:
        folder = self._job.attempt.path
        names = [path.relative_to(folder).as_posix() for path in folder.glob("ranks/**/*.json")]
        return {name: read_json(folder / name) for name in names if is_for_all(name)}

    async def _hand_on_cancels(self) -> None:
        """Tell every host of a request to cancel that comes while it is followed."""
        while True:
            for connection in self._job.connections:
                if connection.is_open:
                    with contextlib.suppress(HostUnreachable):
                        await self._hand_on_cancel(connection)
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    async def _hand_on_cancel(self, connection: HostConnection) -> None:
        """Ask a host once to stop its ranks, or to kill them, as cancel.json says."""
        request = read_json_if_present(self._job.attempt.cancel_path)
        if request is None:
            return
        word = (connection.label, bool(request.get("at_once")))
        if word not in self._handed_on:
            with contextlib.suppress(HostRefused):  # as with a full disk: asked again
                attempt = str(self._job.attempt_on(connection))
                await connection.ask("end", attempt=attempt, at_once=word[1])
                self._handed_on.add(word)

    def _note_silence(self, connection: HostConnection, error: Exception) -> None:
        """Report why the host cannot be heard: the current reason, not the first one."""
        since = connection.note_silence()
        reason = str(error).removesuffix(".")
        told = f"{reason}. Its ranks run on; no word since {since}."
        if self._silent.get(connection.label) != told:
            self._silent[connection.label] = told
            self._say_where()

    def _hear_again(self, connection: HostConnection) -> None:
        connection.note_word()
        if self._silent.pop(connection.label, None) is not None:
            self._say_where()

    def _say_where(self) -> None:
        told = "; ".join(self._silent.values())
        self._tell(f"runs on {', '.join(self._job.record.hosts)}{f' ({told})' if told else ''}")
