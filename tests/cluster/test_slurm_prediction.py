"""Real prediction on the test cluster: every process its share, one result in input order."""

import pytest

from pipelines import Driven, make_run
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.tracking.artifacts import ArtifactStore

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_cache"),
]


def test_two_hosts_with_two_processes_each_predict_what_one_process_does(slurm, tmp_path):
    """11 validation rows in batches of 4, one row to each process, the last batch not full."""
    home = Driven(make_run(tmp_path, predict=True, num_epochs=3))
    assert home.end().state == "completed", "\n".join(home.said)

    settings = {"processes_per_host": 2, "walltime_minutes": 10}
    away = Driven(
        make_run(
            tmp_path, predict=True, num_epochs=3, num_hosts=2, force=["predict"],
            executor="slurm", slurm=settings,
        )
    )  # fmt: skip
    outcome = away.end()

    assert outcome.state == "completed", "\n".join(away.said)
    attempt = away.run.latest_attempt("predict")
    assert attempt.ranks_with_logs() == [0, 1, 2, 3]
    assert away.stage("train")["reused"]
    assert not away.stage("predict")["reused"]
    assert predictions_of(away) == predictions_of(home)
    assert len({one.prediction for one in predictions_of(away)}) > 1  # an order can be seen


def predictions_of(driven):
    """What the run's predict stage published, in its order."""
    store = ArtifactStore(driven.session.context.workspace)
    artifact = store.get(driven.stage("predict")["artifacts"]["predictions"])
    predictions, _ = read_predictions(artifact.path)
    return predictions
