"""Find the model that a command line means: a checkpoint, or a published model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.hub import is_hub_name
from redco_flow.local_paths import expanded
from redco_flow.orchestrate.checkpoints.export import find_checkpoint
from redco_flow.spec.names import import_named
from redco_flow.tracking.artifacts import Artifact
from redco_flow.tracking.workspace import Workspace

PUBLISHED_MODULE = "redco_flow.stages.artifacts.published"  # loaded by name: it is a stage's


def find_model(workspace: Workspace, text: str) -> Artifact | Path:
    """Return a checkpoint, or the directory of a published model.

    Args:
        text: as of `find_checkpoint`, or a directory with a config.json.

    Raises:
        UsageError: nothing, several, or something else has this name.
        ArtifactError: the checkpoint's files were deleted.
    """
    folder = expanded(text)
    if (folder / "config.json").is_file():
        return folder.absolute()
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{text} is a PEFT adapter, and not a model: merge it into its model with PEFT's "
            "merge_and_unload, save_pretrained into a directory, and name that."
        )
    try:
        return find_checkpoint(workspace, text)
    except UsageError as error:
        if folder.is_dir() and not (folder / "manifest.json").is_file():
            raise UsageError(
                f"{text} is a directory without a config.json, so no model of Hugging Face's "
                f"format, and no checkpoint either."
            ) from error
        if not is_hub_name(text) or "/" not in text or (workspace.runs / text).parent.is_dir():
            raise
        raise UsageError(
            f"there is no run {text.partition('/')[0]!r}. A model of the hub is downloaded first: "
            f"`hf download {text} --local-dir DIRECTORY`; then name the directory."
        ) from error


def conversing(model: Artifact | Path) -> dict[str, Any]:
    """Return the fields of `conversation.Request` that name a model.

    Raises:
        UsageError: a published model is not read here, or does not converse.
    """
    if isinstance(model, Artifact):
        return {"checkpoint": str(model.path)}
    published = import_named(PUBLISHED_MODULE).read_published(model)
    if published.recipe not in ("chat", "language_modeling"):
        raise UsageError(
            f"{model}: the model is of recipe {published.recipe}, which does not converse: "
            "`redco-flow predict` takes it."
        )
    return {"checkpoint": str(model), "dtype": published.dtype}


def name_of(model: Artifact | Path) -> str:
    """Return a model's name for people."""
    return model.short_id if isinstance(model, Artifact) else model.name
