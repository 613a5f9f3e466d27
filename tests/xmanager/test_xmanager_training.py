"""Real training under XManager's local backend: the same result as without it."""

import pytest

from pipelines import Driven, losses, make_run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_cache"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def trained(xmanager, folder):
    """Training in one work unit with two jobs."""
    profile = {"executor": "xmanager", "xmanager": {"processes_per_host": 2}}
    driven = Driven(make_run(folder, num_cpu_devices=2, **profile))
    outcome = driven.end()
    assert outcome.state == "completed", "\n".join(driven.said)
    return driven


@pytest.mark.covers(
    "a pipeline", family="t5", recipe="text_to_text", mesh="data", executor="xmanager"
)
def test_two_jobs_train_as_one_process_does(trained, folder):
    """Four data shards in any case; sums over them may be added in another order."""
    driven = Driven(make_run(folder, workspace="home", num_cpu_devices=4))
    assert driven.end().state == "completed"

    alone, together = losses(driven.run), losses(trained.run)
    assert list(together) == list(alone) == list(range(1, 9))
    assert together == pytest.approx(alone, rel=1e-5)
    there, here = trained.stage("train")["metrics"], driven.stage("train")["metrics"]
    assert there == pytest.approx(here, rel=1e-5)
    assert trained.stage("train")["fingerprint"] == driven.stage("train")["fingerprint"]


def test_nothing_runs_again_when_only_the_profile_changes(trained, folder):
    driven = Driven(make_run(folder, num_cpu_devices=4))

    outcome = driven.end()

    assert outcome.message == "2 stages completed, 2 of them reused"
