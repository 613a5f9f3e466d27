"""Publish a stage's outputs: check all, then write the artifacts, then the result.

If it is killed in between, the next attempt publishes the same content under the same ids.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import Call
from redco_flow.launch.redaction import redact_record
from redco_flow.records import canonical_json, write_json
from redco_flow.runtime.context import StageContext, StageOutputs
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.file_lock import HeldLock
from redco_flow.tracking.results import StageResult, hold_result, publish_result
from redco_flow.tracking.workspace import Workspace


class BadOutputs(RedcoFlowError):
    """The stage returned something that cannot be published; nothing of it was."""


def check_outputs(call: Call, outputs: StageOutputs, names: list[str]) -> None:
    """Refuse before anything is published what could not be published whole.

    Args:
        names: the outputs that the stage's kind declares.

    Raises:
        BadOutputs: says what is wrong with which output or metric.
    """
    where = f"stage '{call.stage}' (kind {call.kind})"
    if not isinstance(outputs, StageOutputs):
        raise BadOutputs(f"{where} returned a {type(outputs).__name__}, not StageOutputs.")
    if set(outputs.outputs) != set(names):
        raise BadOutputs(
            f"{where} returned the outputs {sorted(outputs.outputs)}; it declares {sorted(names)}."
        )
    for name, output in outputs.outputs.items():
        if name != output.kind and not name.startswith(f"{output.kind}/"):
            raise BadOutputs(f"{where}: output '{name}' is of kind '{output.kind}'.")
        if not output.path.exists():
            raise BadOutputs(f"{where}: output '{name}' is not there: {output.path}.")
        _check_json(f"{where}: metadata of output '{name}'", output.metadata)
        _check_json(f"{where}: identity of output '{name}'", output.identity or {})
    for metric, value in (outputs.metrics or {}).items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadOutputs(f"{where}: metric '{metric}' is {value!r}, not a finite number.")


def publish(
    workspace: Workspace,
    call: Call,
    context: StageContext,
    outputs: StageOutputs,
    seconds: float,
    lock: HeldLock,
) -> StageResult:
    """Publish the outputs, then the result that names them.

    Call it with the stage's inputs verified after the last of them was read.

    Args:
        seconds: what the stage took.
        lock: the stage's.

    Raises:
        LockLost: another process has taken the lock; the result was not published.
    """
    lock.check()
    for left_over in workspace.results.glob(f".{call.fingerprint}.json.*.tmp"):
        left_over.unlink()  # its writer was killed: the lock is ours
    store = ArtifactStore(workspace)
    parents = {
        slot if len(artifacts) == 1 else f"{slot}/{index}": artifact.id
        for slot, artifacts in context.inputs.items()
        for index, artifact in enumerate(artifacts)
    }
    # The result has the ingredients already.
    produced_by = {k: v for k, v in context.provenance.items() if k != "ingredients"}
    if context.devices is not None:
        produced_by["devices"] = context.devices
    secrets = secret_values(os.environ)

    def publish_outputs() -> dict[str, str]:
        return {
            name: store.publish(
                output.kind,
                output.path,
                metadata=redact_record(output.metadata, secrets),
                parents=parents,
                produced_by=redact_record(produced_by, secrets),
                digests=output.digests,
                identity=output.identity,
            ).id
            for name, output in outputs.outputs.items()
        }

    result = publish_result(
        workspace,
        StageResult(
            fingerprint=call.fingerprint,
            pipeline=call.pipeline,
            stage=call.stage,
            kind=call.kind,
            ingredients=call.ingredients,
            outputs=publish_outputs(),
            metrics=None if outputs.metrics is None else redact_record(outputs.metrics, secrets),
            run=call.run,
            attempt=call.attempt,
            seconds=round(seconds, 3),
            code=call.code,
            origins=call.origins,
            host=os.uname().nodename,
            versions=context.provenance["versions"],
            inputs_verified=True,
        ),
        lock.check,
    )

    if hold_result(workspace, call.fingerprint) is None:
        publish_outputs()  # an equal artifact of another run was deleted meanwhile
    return result


def write_result(
    attempt: AttemptDirectory, result: StageResult, progress: Mapping[str, Any] | None = None
) -> None:
    """Write the attempt's result.json: the worker's last act that counts.

    Args:
        progress: the last one, of the worker that then removes its progress.json.
    """
    record = {
        "fingerprint": result.fingerprint,
        "outputs": result.outputs,
        "metrics": result.metrics,
        "seconds": result.seconds,
    }
    if progress is not None:
        record["progress"] = {key: said for key, said in progress.items() if said is not None}
    write_json(attempt.result_path, record)


def _check_json(where: str, value: Any) -> None:
    try:
        canonical_json(dict(value))
    except (TypeError, ValueError) as error:
        raise BadOutputs(f"{where} is not JSON: {error}.") from error
