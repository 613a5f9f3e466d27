"""The flow of a schedule: each of its runs is one firing, which starts a run of the pipeline.

`redco-flow schedule add` makes a deployment of it, whose parameters can be edited on its page.
"""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow
from prefect.client.schemas import State
from prefect.states import Cancelled, Completed, Failed

from redco_flow.orchestrate.recurring.deployments import fire_flow_run

FINAL_STATES = {
    "completed": Completed,
    "skipped": Completed,
    "failed": Failed,
    "cancelled": Cancelled,
}


@flow(name="recurring", persist_result=False, result_serializer="json")
def recurring(
    schedule: str,
    workspace: str,
    pipeline: str,
    profile: str = "local",
    overrides: list[str] | None = None,
    overlap: Literal["skip", "queue", "cancel_running"] = "skip",
    missed: Literal["latest", "skip", "all"] = "latest",
    retries: int = 0,
) -> State[Any]:
    """Fire once.

    Args:
        schedule: its name; its records are in the workspace's `schedules/`.
        workspace: that directory.
        pipeline: the pipeline's file.
        profile: where it runs.
        overrides: `key=value` settings.
        overlap: what to do while the firing before runs.
        missed: which firings to make up for that came due while nothing served.
        retries: how often failed stages are given new attempts.
    """
    words = (pipeline, profile, overrides or [])
    firing = fire_flow_run(schedule, workspace, *words, overlap, missed, retries)
    # A state of another name would be missing from the list of runs as it is filtered at first.
    return FINAL_STATES[firing.state](message=firing.told)
