"""The flow of one run: one Prefect task per stage, upstream futures as the edges.

`redco-flow run` loads this file: the path `./flows/pipeline.py` first, so a changed copy there
takes its place. It decides in which order things happen and how they look on the run's page;
what a stage does, where its job runs and how it is found again is the session's business.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import State
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed, Crashed, Failed

from redco_flow.errors import RunCancelled, StoppedEarly
from redco_flow.orchestrate.prefect.live import reporting_live
from redco_flow.orchestrate.prefect.report import publish_summary
from redco_flow.orchestrate.run.session import RunSession, current_session

FINAL_STATES = {
    "completed": Completed,
    "failed": Failed,
    "cancelled": Cancelled,
    "stopped_early": Completed,  # a sweep's point whose training was not among the best
    "detached": Crashed,  # this process ends, the jobs run on
}


# No tags here: a tagged task asks the server for a slot and fails with it.
@task(cache_policy=NO_CACHE, persist_result=False, result_serializer="json")
def run_stage(session: RunSession, stage: str, upstream: list[Any]) -> State[Any]:
    """Bring one stage to its end; its job's log lines become the task's."""
    log = get_run_logger()
    try:
        with reporting_live(session, stage):
            finished = session.run_stage(stage, log.info)
    except StoppedEarly as error:  # completed, the stages that need its result would begin
        return Cancelled(name="StoppedEarly", message=str(error))
    except RunCancelled as error:
        return Cancelled(message=str(error))
    outputs = dict(finished.result.outputs)
    if finished.reused:
        # Prefect's own name for it: the UI's lists, as they are filtered at first, have no others.
        return Completed(name="Cached", message=f"reused from {finished.result.run}", data=outputs)
    return Completed(data=outputs)


@flow(persist_result=False, result_serializer="json", validate_parameters=False)
def run_pipeline(pipeline: str, profile: str, overrides: list[str]) -> State[Any]:
    """Run the pipeline that this process was started for.

    Args:
        pipeline: the pipeline's file, as the user gave it; for the page.
        profile: where it runs; for the page.
        overrides: `key=value` from the command line; for the page.
    """
    session = current_session()
    futures: dict[str, PrefectFuture[Any]] = {}
    for stage in session.stages:
        named = run_stage.with_options(name=stage.name, task_run_name=stage.name)
        upstream = [futures[name] for name in stage.upstream]
        futures[stage.name] = named.submit(session, stage.name, upstream)
    wait(list(futures.values()))
    outcome = session.outcome()
    publish_summary(session)
    return FINAL_STATES[outcome.state](message=outcome.message)
