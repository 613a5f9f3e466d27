"""Submit the points of a sweep in packs: jobs that compute several points one after the other.

A pack is submitted when the cluster has taken the one before it. Each point keeps its run, attempts
and records. What the points of several packs share is submitted as jobs of its own. Points that a
job leaves over, because its time or its node was gone or what they share has failed, are packed
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import read_call
from redco_flow.launch.executor import CallJob, make_chaining_executor, reattach
from redco_flow.orchestrate.run.ahead import SweepQueue
from redco_flow.orchestrate.run.cancel import Log, has_ended
from redco_flow.orchestrate.run.driver import Driver
from redco_flow.orchestrate.run.ingredients import Sources
from redco_flow.orchestrate.sweep.submission import HeldPoint, resolve_lost_ids, take_runs
from redco_flow.records import read_json, read_json_if_present, write_json
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory


class Packs:
    """The packs of one sweep.

    Args:
        sweep: its lease is held by this process.
        runs: of the points to submit; they have no orchestrator.
        driver: a signal to it ends the submission.
    """

    def __init__(
        self, sweep: SweepDirectory, runs: Sequence[RunDirectory], log: Log, driver: Driver
    ) -> None:
        self._sweep = sweep
        self._log = log
        self._driver = driver
        self._size = sweep.points_per_job or 1
        self._packed = {point.run: point.packed for point in sweep.points}
        self._sources = Sources()
        self._makers: dict[str, AttemptDirectory] = {}
        _give_up_unsubmitted(sweep)
        at_once = sweep.record["max_parallel"]
        self._before: deque[list[CallJob]] = deque([[]] * at_once, maxlen=at_once)
        # Points that are in the queue come first: those that are submitted now wait for them.
        self._left = deque(sorted(runs, key=lambda run: not _open_jobs(run)))
        self._unsubmitted: CallJob | None = None
        self._its_runs: list[RunDirectory] = []
        self._refused: list[AttemptDirectory] = []
        self._were_put_back: set[tuple[str, str]] = set()

    def put_back(self, runs: Sequence[RunDirectory], pack: str) -> bool:
        """Pack points again whose job has ended before their turn; return whether there are any.

        Each is packed again once for a job: one that could not be is left to its orchestrator. So
        is one of a second job in which no stage has completed.

        Args:
            pack: the job's directory.
        """
        members = (read_json_if_present(Path(pack) / "job.json") or {}).get("members", ())
        has_made = any(AttemptDirectory(Path(one)).result_path.exists() for one in members)
        keys = {(run.id, pack if has_made else ""): run for run in runs}
        again = [run for key, run in keys.items() if key not in self._were_put_back]
        self._were_put_back.update(keys)
        if again:
            text = f"points that {pack} has left over are packed again"
            self._log(f"{text}: {', '.join(run.id for run in again)}")
        self._left.extend(again)
        return bool(again)

    @property
    def held(self) -> set[str]:
        """The ids of runs that wait to be submitted."""
        return {run.id for run in (*self._left, *self._its_runs)}

    def submit(self) -> Iterator[RunDirectory]:
        """Submit what the cluster takes now; yield the points that no longer wait for that."""
        while not (self._sweep.cancel_path.exists() or self._driver.is_stopped):
            if self._unsubmitted is not None:
                self._unsubmitted.status()  # submits it when that is due
                if self._unsubmitted.is_unsubmitted:
                    return
            yield from self._its_runs
            self._unsubmitted, self._its_runs = None, []
            self._refused = [one for one in self._refused if _is_unsubmitted(one)]
            if self._refused or not self._left:
                return
            self._submit_next()

    def _submit_next(self) -> None:
        """Submit the next pack, and the jobs that its points share with those of other packs."""
        pack: list[AttemptDirectory] = []
        points: list[HeldPoint] = []
        num_packed = 0
        with ExitStack() as leases:
            while self._left and num_packed < self._size and not self._refused:
                found = self._open_next(self._size - num_packed, leases)
                while found and not self._refused:
                    points.append(found.popleft())
                    num_packed += self._collect(points[-1], pack)
                rest = [point.run for point in found]
                self._left.extendleft(reversed(rest))
                self._its_runs = [run for run in self._its_runs if run not in rest]
            if not pack:
                return
            try:
                job = self._submit_pack(points, pack)
            except (RedcoFlowError, OSError) as error:  # its runs try again, each alone
                runs = ", ".join(point.run.id for point in points)
                self._log(f"the job of these points could not be submitted: {runs}: {error}")
                unsubmitted = {*pack}
                self._makers = {
                    key: one for key, one in self._makers.items() if one not in unsubmitted
                }
                return
            for point in points:
                point.session.note_packed(job)
        self._before.append([reattach(pack[-1].read_job() or {})])
        text = f"is job {job.job_id}"
        if job.is_unsubmitted:
            self._unsubmitted, text = job, job.status().message
        self._log(f"pack {job.paths.folder.name} (points: {num_packed}) {text}")

    def _open_next(self, number: int, leases: ExitStack) -> deque[HeldPoint]:
        """Take the next runs; those whose jobs' ids were lost are looked up together."""
        runs = [self._left.popleft() for _ in range(min(number, len(self._left)))]
        self._its_runs += runs
        still = [run for run in runs if not has_ended(run)]
        found = deque(take_runs(still, leases, self._sources, self._log))
        resolve_lost_ids(self._sweep, found, self._driver)
        return found

    def _collect(self, point: HeldPoint, pack: list[AttemptDirectory]) -> bool:
        """Have the pack run a point's stages, and submit the others; return whether it has some."""
        num_before = len(pack)
        packed = self._packed[point.run.id]
        queue = SweepQueue(point.keys, self._makers, packed=packed, pack=pack)
        point.session.submit_ahead(point.log_to(self._log), queue)
        if point.session.is_cut:
            # Its orchestrator submits that job; points that need the same wait for it.
            self._refused = [one for one in self._makers.values() if _is_unsubmitted(one)]
        if len(pack) == num_before and (jobs := _packed_jobs(point.run)):
            self._note_queued(jobs)
        return len(pack) > num_before

    def _submit_pack(self, points: Sequence[HeldPoint], pack: list[AttemptDirectory]) -> CallJob:
        context = points[0].session.context
        profile = context.profile_of(pack[0].stage)
        paths = {str(one.path) for one in pack}
        upstream = {path for one in pack for path in read_call(one.call_path).upstream.values()}
        number = 1 + len(list(self._sweep.jobs_path.glob("*")))
        return make_chaining_executor(profile, context.environment).submit_pack(
            self._sweep.jobs_path / str(number),
            f"{self._sweep.id} {number}",
            pack,
            [
                reattach(AttemptDirectory(Path(path)).read_job() or {})
                for path in sorted(upstream - paths)
            ],
            self._before[0],
        )

    def _note_queued(self, jobs: Sequence[CallJob]) -> None:
        """Have packs that come later wait for those that an earlier process has submitted."""
        packs = {one.record()["pack"] for known in self._before for one in known}
        if jobs[-1].record()["pack"] not in packs:
            self._before.append([jobs[-1]])


def _give_up_unsubmitted(sweep: SweepDirectory) -> None:
    """Have the points of packs that no process submits any more be packed again."""
    for path in sweep.jobs_path.glob("*/job.json"):
        record = read_json(path)
        if record.pop("waiting", None) is not None:
            write_json(path, record)


def _open_jobs(run: RunDirectory) -> list[CallJob]:
    """The jobs of the run's own stages that have left no record of their end."""
    found = map(run.latest_attempt, run.read_state()["stages"])
    open_attempts = [one for one in found if one is not None and one.read_exit() is None]
    return [reattach(record) for one in open_attempts if (record := one.read_job())]


def _is_unsubmitted(attempt: AttemptDirectory) -> bool:
    """Whether the cluster has not taken the attempt's job, as far as its records say."""
    return attempt.cause is None and (attempt.read_job() or {}).get("job_id") == ""


def _packed_jobs(run: RunDirectory) -> list[CallJob]:
    return [job for job in _open_jobs(run) if "pack" in job.record()]
