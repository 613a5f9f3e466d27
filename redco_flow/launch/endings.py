"""Judge how a job ended, from its ranks' records, the cluster's report and requested stops.

A rank that fails takes the others along: they are killed, or lose the one they talk to. The job's
ending is the culprit's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.typed_records import find_record, unless_damaged

_PUBLISHED = "the result is published."
_CANCELLED = "it was cancelled."
_LOSS_MARKS = (
    b"the JAX distributed service detected fatal errors",
    b"stopped sending heartbeats",
    b"Shutdown barrier has failed",
    b"Connection closed by peer",
    b"Connection reset by peer",
    b"rank 0 left the meeting",
)
_LOG_END_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RankEnding(ExitRecord):
    """`ranks/<rank>/exit.json`, by the rank's own supervisor."""

    rank: int
    restart: int
    host: str

    @property
    def is_victim(self) -> bool:
        """Whether it failed only because it lost another rank."""
        return self.cause.is_failure and self.lost_another_rank


@dataclass(frozen=True, kw_only=True)
class ClusterWord:
    """An ending that only the cluster can report, with its cause and message.

    Args:
        decided: the cluster ended the job for this reason; counts more than what ranks wrote.
        stopped: who had ranks stop that redco-flow did not stop; an empty message keeps theirs.
        silent: why ranks left no record; None: what that means without more knowledge.
        unstarted: the same where no rank left one; None: as `silent`.
    """

    decided: tuple[Cause, str] | None = None
    stopped: tuple[Cause, str] = (Cause.PREEMPTED, "")
    silent: tuple[Cause, str] | None = None
    unstarted: tuple[Cause, str] | None = None


def judge(
    ranks: Sequence[RankEnding],
    num_processes: int,
    word: ClusterWord,
    *,
    has_result: bool,
    was_cancelled: bool,
) -> ExitRecord:
    """Return how a job ended of which no process runs any more.

    A published result counts most. Then a cancellation, unless a rank had failed by itself; then
    what the cluster decided; then the ranks' own records; last what the cluster knows where they
    say nothing.

    Args:
        ranks: the records that there are.
        was_cancelled: redco-flow was asked to cancel it.
    """
    found = _judge_ranks(ranks, num_processes, word)
    if has_result:  # rank 0's last act
        return replace(found, cause=Cause.COMPLETED, message=_PUBLISHED, exit_code=0)
    is_own_failure = bool(ranks) and not found.cause.is_taken_back and found.cause is not Cause.LOST
    if was_cancelled and not is_own_failure:
        return replace(found, cause=Cause.CANCELLED, message=_CANCELLED)
    if word.decided is not None:
        return _record(word.decided, ranks)
    if found.cause is Cause.TERMINATED:
        cause, message = word.stopped
        return replace(found, cause=cause, message=message or found.message)
    if found.cause is Cause.COMPLETED:
        message = f"{found.host} lost the result before it was copied here."
        return replace(found, cause=Cause.NODE_FAILURE, message=message, exit_code=None)
    return found


def never_began(why: str) -> ExitRecord:
    """Return how a job ended that was taken out of a queue before it began."""
    return ExitRecord(exit_code=None, cause=Cause.CANCELLED, message=f"it never began: {why}.")


def never_submitted(why: str) -> ExitRecord:
    """Return the end of a job that no cluster ever got, or that another job replaces."""
    return ExitRecord(exit_code=None, cause=Cause.NEVER_SUBMITTED, message=why)


def end_later_stages(
    later: Iterable[AttemptDirectory], attempt: AttemptDirectory, cause: Cause
) -> None:
    """Write the ends of stages that the same job would have run after one that did not complete.

    In a packed job, those of other runs are never submitted: another job runs them.
    """
    for one in later:
        if not one.exit_path.exists():
            why = f"stage {attempt.stage}, before it in the same job, ended: {cause}"
            record = never_began(why)
            is_packed = "pack" in (unless_damaged(one.read_job) or {})
            if is_packed and one.path.parents[3] != attempt.path.parents[3]:
                record = replace(record, cause=Cause.NEVER_SUBMITTED)
            write_exit(one, record)


def write_exit(attempt: AttemptDirectory, record: ExitRecord) -> None:
    """Write exit.json; the end is now unless the record says when it was."""
    record = replace(record, ended_at=record.ended_at or utc_now())
    write_json(attempt.exit_path, record.to_json())


def says_that_a_rank_was_lost(log: Path, start: int) -> bool:
    """Look whether the end of a rank's log has the words of JAX for another rank's death.

    Args:
        start: bytes that the log had before this start of the job.
    """
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _LOG_END_BYTES))
        text = file.read()
    return any(mark in text for mark in _LOSS_MARKS)


def read_endings(attempt: AttemptDirectory, restart: int) -> list[RankEnding]:
    """Return the endings of this start of the job, by rank; ranks that have not ended lack."""
    found = (_read(path) for path in attempt.path.glob("ranks/*/exit.json"))
    endings = [ending for ending in found if ending is not None and ending.restart == restart]
    return sorted(endings, key=lambda ending: ending.rank)


def last_restart(attempt: AttemptDirectory) -> int:
    """Return how often the job was restarted, as far as its ranks have written."""
    endings = (_read(path) for path in attempt.path.glob("ranks/*/exit.json"))
    return max((ending.restart for ending in endings if ending is not None), default=0)


def find_culprit(endings: Iterable[RankEnding]) -> RankEnding | None:
    """Return the first rank that failed by itself; if none did, the first that failed."""
    failures = [ending for ending in endings if ending.cause.is_failure]
    # Clocks of hosts differ by less than a victim needs to notice, except when they do not:
    # hence what it said counts before when it ended.
    return min(failures, key=lambda one: (one.is_victim, one.ended_at or ""), default=None)


def _read(path: Path) -> RankEnding | None:
    """A rank's ending; one that is damaged is no word of how it ended."""
    return unless_damaged(lambda: find_record(path, RankEnding))


def _judge_ranks(ranks: Sequence[RankEnding], num_processes: int, word: ClusterWord) -> ExitRecord:
    """Return what the ranks' records say together, or what the cluster says of those that lack.

    Its cause may be TERMINATED: only the cluster knows why.
    """
    if not ranks and word.unstarted is not None:
        return _record(word.unstarted, ranks)
    culprit = find_culprit(ranks)
    missing = set(range(num_processes)) - {ending.rank for ending in ranks}
    if missing and (culprit is None or culprit.is_victim):
        text = f"{_named(missing)} of {num_processes} left no word: the host went down, or the "
        unknown = (Cause.NODE_FAILURE, f"{text}supervisor was killed.")
        return _record(word.silent or unknown, ranks)
    stopped = {ending.rank for ending in ranks if ending.cause is Cause.TERMINATED}
    if culprit is not None and culprit.is_victim and stopped:
        text = (
            f"{_named(stopped)} of {num_processes} no longer answered the others and had to be "
            f"killed; stacks are in the logs. Noticed by rank {culprit.rank}: {culprit.message}"
        )
        blamed = _record_of(culprit, num_processes, ranks)
        return replace(blamed, cause=Cause.STALLED, message=text, rank=min(stopped))
    if culprit is not None:
        return _record_of(culprit, num_processes, ranks)
    for cause in (Cause.TERMINATED, Cause.PREEMPTED, Cause.TIMEOUT):
        for ending in ranks:
            if ending.cause is cause:
                return _record_of(ending, num_processes, ranks)
    return _record_of(ranks[0], num_processes, ranks)


def _named(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _record_of(ending: RankEnding, num_processes: int, ranks: Sequence[RankEnding]) -> ExitRecord:
    message = ending.message
    if num_processes > 1 and ending.cause is not Cause.COMPLETED:
        message = f"rank {ending.rank} of {num_processes} on {ending.host}: {message}"
    return replace(
        _record((ending.cause, message), ranks),
        **{
            key: getattr(ending, key)
            for key in ("exit_code", "signal", "ended_at", "rank", "host", "restart")
        },
    )


def _record(said: tuple[Cause, str], ranks: Sequence[RankEnding]) -> ExitRecord:
    peak = max((ending.peak_memory_bytes for ending in ranks), default=0)
    return ExitRecord(exit_code=None, cause=said[0], message=said[1], peak_memory_bytes=peak)
