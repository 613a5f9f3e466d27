"""When Slurm is asked: seldom, by one thread, less often when it does not answer."""

from itertools import pairwise

import pytest

from redco_flow.errors import ClusterUnreachable, StageFailed
from redco_flow.launch.slurm.queue import JobEntry, NotAskedYet, SlurmQueue, TryLater, submit
from redco_flow.launch.slurm.resubmission import Resubmission


class Cluster:
    """Stands for squeue and sacct: counts the questions, and may be out of order."""

    def __init__(self):
        self.now = 0.0
        self.asked_at = []
        self.accounting_asked_at = []
        self.accounting_asked_for = []
        self.accounting = None
        self.problem = None
        self.state = "RUNNING"
        self.queue = SlurmQueue(self.list_jobs, self.find_accounted, clock=lambda: self.now)

    def list_jobs(self):
        self.asked_at.append(self.now)
        if self.problem:
            raise ClusterUnreachable(self.problem)
        return {"1": JobEntry("1", self.state)}

    def find_accounted(self, job_ids):
        self.accounting_asked_at.append(self.now)
        self.accounting_asked_for.append(job_ids)
        if self.accounting is None:
            raise StageFailed("Slurm accounting storage is disabled")
        return {job_id: self.accounting[job_id] for job_id in job_ids if job_id in self.accounting}

    def look_often(self, seconds, **how):
        end = self.now + seconds
        while self.now < end:
            for _ in range(200):  # jobs
                self.queue.look(**how)
            self.now += 0.25


@pytest.fixture
def cluster():
    return Cluster()


def test_two_hundred_jobs_cost_six_requests_a_minute(cluster):
    cluster.look_often(60)

    assert len(cluster.asked_at) == 6


def test_jobs_that_wait_for_two_days_cost_a_request_in_two_minutes_until_one_changes(cluster):
    for _ in range(2 * 24 * 3600 // 5):
        cluster.queue.look()
        cluster.now += 5.0
    num_asked = len(cluster.asked_at)
    cluster.state = "COMPLETING"
    cluster.look_often(150)

    assert num_asked < 1600
    assert [b - a for a, b in pairwise(cluster.asked_at[-3:])] == [10.0, 10.0]


def test_an_event_makes_it_ask_within_a_second_but_not_more_often_than_that(cluster):
    cluster.queue.look()

    cluster.look_often(3, urgent=True)

    assert cluster.asked_at == [0.0, 1.0, 2.0]


def test_a_cluster_that_does_not_answer_is_asked_ever_less_and_the_last_answer_stands(cluster):
    cluster.queue.look()
    cluster.problem = "squeue: Unable to contact slurm controller"

    cluster.look_often(400, urgent=True)

    assert cluster.asked_at[1:] == [1.0, 11.0, 31.0, 71.0, 151.0, 271.0, 391.0]
    view = cluster.queue.look()
    assert view.entries["1"].state == "RUNNING"
    assert (view.asked_at, view.problem) == (0.0, cluster.problem)


def test_it_asks_at_its_usual_pace_again_once_it_gets_answers(cluster):
    cluster.problem = "down"
    cluster.look_often(15)
    cluster.problem = None

    cluster.look_often(30)

    assert cluster.queue.look().problem == ""
    assert cluster.asked_at == [0.0, 10.0, 30.0, 40.0]


def test_missing_accounting_is_asked_for_once_in_ten_minutes(cluster):
    """Fault 11: how the job ended is known within seconds all the same."""
    for _ in range(1200):
        assert cluster.queue.accounted("1") is None
        cluster.now += 1.0

    assert cluster.accounting_asked_at == [0.0, 600.0]


def test_one_request_asks_the_accounting_for_all_jobs_and_one_not_asked_for_is_not_unknown(cluster):
    """Fault 53: three jobs that the queue has forgotten, and that their user had cancelled."""
    cluster.accounting = {name: JobEntry(name, "CANCELLED") for name in "123"}
    for name in "123":
        cluster.queue.expect_accounted(name)

    found = [cluster.queue.accounted(name) for name in "123"]
    with pytest.raises(NotAskedYet):
        cluster.queue.accounted("4")  # the next request is due in 10 s
    cluster.now += 10.0

    assert [entry.state for entry in found] == ["CANCELLED"] * 3
    assert cluster.queue.accounted("4") is None
    assert cluster.accounting_asked_for == [["1", "2", "3"], ["4"]]


def test_an_answer_confirms_only_what_was_found_before_it_was_asked_and_only_once(cluster):
    finding = "job 7 waits for job 6, which has completed"
    before = cluster.queue.look()
    cluster.now += 9.0
    is_confirmed = [cluster.queue.is_confirmed(finding, before)]
    cluster.now += 1.0
    after = cluster.queue.look()

    is_confirmed += [cluster.queue.is_confirmed(finding, after) for _ in range(2)]

    assert is_confirmed == [False, True, False]


def resubmissions(clock, answers):
    """Retry a submission while the answers last; return the moments, and the reasons to wait."""
    moments, reasons = [], []

    def submit():
        moments.append(clock[0])
        answer = answers.pop(0) if answers else "7"
        if isinstance(answer, Exception):
            raise answer
        return answer

    resubmission = Resubmission(submit, answers.pop(0), clock=lambda: clock[0])
    while True:
        reasons.append(resubmission.reason)
        clock[0] += resubmission.seconds_left
        if resubmission.try_again():
            return moments, reasons


def test_a_limit_is_waited_for_without_end_at_a_growing_pace():
    limit = TryLater("sbatch: refused", "QOSMaxSubmitJobPerUserLimit")

    moments, reasons = resubmissions([0.0], [limit] * 60)

    assert moments[:6] == [10.0, 30.0, 70.0, 150.0, 270.0, 390.0]
    assert moments[-1] > 6000.0
    assert set(reasons) == {"QOSMaxSubmitJobPerUserLimit"}


def test_other_refusals_are_retried_for_half_an_hour_and_the_error_says_what_was_tried():
    """Fault 52: the controller does not answer for long."""
    clock = [0.0]

    with pytest.raises(StageFailed, match=r"Socket timed out.* tried 19 times in 30 minutes"):
        resubmissions(clock, [TryLater("sbatch: Socket timed out.")] * 60)

    assert 1800.0 <= clock[0] <= 1920.0


def test_an_sbatch_that_is_killed_may_have_been_heard(tmp_path):
    """As by a preemption of the node where the launcher is a job."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nkill -TERM $$\n")
    sbatch.chmod(0o755)

    with pytest.raises(TryLater, match="sbatch was ended by signal 15"):
        submit(tmp_path / "job.sh", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
