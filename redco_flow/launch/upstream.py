"""Fill in a call that was submitted before its inputs were made.

Such a call names the attempts that make them. What those have published is read here: by every
rank of the job before it starts, and by the process that follows the job. Nothing is written, and
the same results give the same call to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import Call, InputReference
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.fingerprint import fingerprint
from redco_flow.tracking.workspace import Workspace

_SECONDS_BETWEEN_LOOKS = 0.5


class UpstreamMissing(RedcoFlowError):
    """A stage that the call takes from has no result that can be used; nothing has run."""


def with_inputs(call: Call, *, wait_seconds: float = 0.0) -> Call:
    """Return the call with the inputs and the fingerprint that its upstream jobs decided.

    Args:
        call: any; one whose inputs are known is returned as it is.
        wait_seconds: how long a result may take to be seen, where its job ended on another host.

    Raises:
        UpstreamMissing: a result, or the artifact that is wanted of it, is not there.
    """
    if not call.upstream:
        return call
    deadline = time.monotonic() + wait_seconds
    made = {
        stage: _outputs_of(stage, AttemptDirectory(Path(path)), deadline)
        for stage, path in call.upstream.items()
    }
    store = ArtifactStore(Workspace(Path(call.workspace)))
    inputs = {
        slot: [one if one.id else _filled_in(one, made, store) for one in references]
        for slot, references in call.inputs.items()
    }
    ids = {slot: [one.id for one in references] for slot, references in inputs.items()}
    ingredients = call.ingredients | {"inputs": ids}
    return replace(
        call,
        inputs=inputs,
        ingredients=ingredients,
        fingerprint=fingerprint(ingredients),
        upstream={},
    )


def _outputs_of(stage: str, attempt: AttemptDirectory, deadline: float) -> Mapping[str, str]:
    """Artifact ids by output name, of an attempt that has completed."""
    while (result := attempt.read_result()) is None:
        if time.monotonic() > deadline:
            raise UpstreamMissing(
                f"stage '{stage}' has no result in {attempt.path}: it did not complete, or this "
                f"host does not see the workspace. Nothing ran; `redco-flow resume` tries again."
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return result["outputs"]


def _filled_in(
    reference: InputReference, made: Mapping[str, Mapping[str, str]], store: ArtifactStore
) -> InputReference:
    outputs = made[reference.stage]
    if reference.output not in outputs:
        raise UpstreamMissing(
            f"output '{reference.output}' is taken from stage '{reference.stage}', which made "
            f"only: {', '.join(sorted(outputs)) or 'nothing'}. Nothing ran."
        )
    artifact = store.find(outputs[reference.output])
    if artifact is None:
        raise UpstreamMissing(
            f"{reference.kind} {outputs[reference.output]}, made by stage '{reference.stage}', is "
            f"gone from the workspace. Nothing ran; `redco-flow resume` makes it anew."
        )
    return replace(reference, id=artifact.id, path=str(artifact.path), kind=artifact.kind)
