"""Mirror artifacts and promotions to an MLflow server, next to a training's metrics.

By reference: files stay in the workspace. If the server is unavailable or
refuses, one log line reports it.
"""

from __future__ import annotations

import os
from pathlib import Path

from redco_flow.tracking.aliases import Alias
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.mlflow_server import ADDRESS_VARIABLE, MlflowError, MlflowServer
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.workspace import Workspace

_SCHEME = "redco-flow"


def tag_outputs(workspace: Workspace, result: StageResult) -> str:
    """Tag the MLflow run of a training with where each of its artifacts is.

    Returns:
        Why that could not be done; empty where it was.
    """
    store = ArtifactStore(workspace)
    try:
        server = MlflowServer.of(os.environ)
        run = server.find_run(result.fingerprint)
        if run:
            made = {name: store.find(one) for name, one in result.outputs.items()}
            tags = {
                f"redco_flow.output.{name}": source_of(one.path)
                for name, one in made.items()
                if one is not None
            }
            server.tag(run, tags)
        return ""
    except MlflowError as error:
        return f"MLflow does not know its artifacts: {error}"


def mirror_alias(workspace: Workspace, alias: Alias) -> str:
    """Have the registry's alias name the version that is the promoted checkpoint.

    Nothing is done where the environment names no MLflow server, or no run there trained it.

    Returns:
        Why that could not be done; empty where it was, or there was nothing to do.
    """
    if not os.environ.get(ADDRESS_VARIABLE, "").startswith("http"):
        return ""
    checkpoint = ArtifactStore(workspace).get(alias.checkpoint)
    try:
        server = MlflowServer.of(os.environ)
        run = server.find_run(str(checkpoint.produced_by.get("fingerprint", "")))
        if not run:
            return ""
        model, source = alias.name.model, source_of(checkpoint.path)
        version = server.version_of(model, checkpoint.id, run=run, source=source)
        server.set_alias(model, alias.name.alias, version)
        return ""
    except MlflowError as error:
        return f"MLflow's alias of {alias.name} was not moved: {error}"


def source_of(path: Path) -> str:
    """Return an artifact's place as an address that MLflow takes for no file of its own."""
    return f"{_SCHEME}://{path}"
