"""Write down what a worker must do: call.json in a new attempt's directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from redco_flow.launch.call import Call, InputReference, write_call
from redco_flow.orchestrate.planning import output_id
from redco_flow.orchestrate.run_context import RunContext
from redco_flow.spec.load import ResolvedStage
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory


def write_attempt(
    context: RunContext,
    stage: ResolvedStage,
    made: Mapping[str, Mapping[str, str]],
    ingredients: dict[str, Any],
    fingerprint: str,
) -> AttemptDirectory:
    """Make the stage's next attempt, with its call.json; nothing is submitted.

    Args:
        made: outputs (artifact id by name) of every upstream stage.

    Raises:
        UsageError: the stage's config holds something that is not JSON.
        ArtifactError: an input has been deleted.
    """
    attempt = context.run.new_attempt(stage.name)
    origins = context.pipeline.stage_origins(stage.name)
    call = Call(
        run=context.run.id,
        pipeline=context.pipeline.name,
        stage=stage.name,
        kind=stage.kind,
        attempt=attempt.number,
        config=stage.config.model_dump(mode="json"),
        inputs=_inputs(context, stage, made),
        fingerprint=fingerprint,
        ingredients=ingredients,
        workspace=str(context.workspace.root),
        origins={key: asdict(one) for key, one in origins.items()},
        code=context.code,
        num_cpu_devices=context.profile.num_cpu_devices,
        environment=sorted(context.profile.environment),
    )
    write_call(attempt, call)
    return attempt


def _inputs(
    context: RunContext, stage: ResolvedStage, made: Mapping[str, Mapping[str, str]]
) -> dict[str, list[InputReference]]:
    store = ArtifactStore(context.workspace)

    def reference(producer: str, output: str) -> InputReference:
        artifact = store.get(output_id(stage, producer, output, made))
        return InputReference(artifact.id, str(artifact.path), artifact.kind, producer, output)

    return {
        slot: [reference(ref.stage, ref.output) for ref in refs]
        for slot, refs in stage.inputs.items()
    }
