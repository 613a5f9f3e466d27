"""The facts of a model that predicting needs, of a checkpoint or of a published directory.

Lineage leads from the checkpoint to the settings of the preprocess stage behind it; of a published
model its own files say as much (`stages.artifacts.published`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.orchestrate.checkpoints.chat import PUBLISHED_MODULE
from redco_flow.records import read_json
from redco_flow.spec.names import import_named
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.results import StageResult, read_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

ROWS_MODULE = "redco_flow.stages.preprocess.new_rows"  # loaded by name: they are stages'
_COLUMNS_MODULE = "redco_flow.stages.preprocess.recognition"
DATA_KEYS = (
    "text_key",
    "source_key",
    "pair_key",
    "target_key",
    "source_prefix",
    "source_suffix",
    "csv",
    "columns",
    "format",
    "messages_key",
    "chat_template_kwargs",
    "default_system_message",
)
# Settings of the predict stage that are of its dataset, and not of how texts are generated.
_OF_DATASET = ("recipe", "split", "num_examples", "score_targets", "references", "prompt_length")


@dataclass(frozen=True)
class UseRecord:
    """The record of a checkpoint's training, or of a published model, as predicting needs it.

    Args:
        pipeline: the name of the training's, or of the model.
        source: in words.
        preprocess: settings of the stage that made the training's dataset.
        predict: those of the predict stage of the same run, if it had one.
        answer_length: the most tokens of a text to be generated in that dataset.
        dataset: that dataset's directory.
        model: keys of the predict stage that name the model.
        tokenizer: keys of the preprocess stage that name the tokenizer.
        sections: more sections of the pipeline.
        reference: a stage with the scores that the training compared with, where they are known.
        reference_directory: the path of that stage's model then, where it was no artifact and none
            of the hub's.
        notes: what may surprise.
    """

    pipeline: str
    source: str
    preprocess: Mapping[str, Any]
    predict: Mapping[str, Any]
    classes: Sequence[str | int]
    answer_length: int
    dataset: Path
    model: Mapping[str, Any]
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] | None = None
    reference_directory: str = ""
    notes: Sequence[str] = ()

    @property
    def data(self) -> dict[str, Any]:
        """The keys of the data section that say what rows have."""
        data = self.preprocess["data"]
        return {key: data[key] for key in DATA_KEYS if data.get(key) is not None}


def record_of(
    workspace: Workspace, model: Artifact | Path, row: Mapping[str, Any], overrides: Sequence[str]
) -> UseRecord:
    """Return the record of a checkpoint, or of a published model in a directory.

    Args:
        row: the first of the new rows; empty where these are plain texts or images.
        overrides: the user's changes of the pipeline.

    Raises:
        UsageError: lineage does not lead to a preprocess stage; or what a published model
            predicts, or which columns it reads, is not known.
    """
    if isinstance(model, Artifact):
        return _for_prompts(_trained_record(workspace, model), row)
    return _published_record(model, row, overrides)


def _trained_record(workspace: Workspace, checkpoint: Artifact) -> UseRecord:
    store = ArtifactStore(workspace)
    trained = _producer(workspace, checkpoint)
    ids = trained.ingredients.get("inputs", {}).get("dataset", []) if trained else []
    dataset = store.find(ids[0]) if ids else None
    made = _producer(workspace, dataset) if dataset else None
    if trained is None or dataset is None or made is None or made.kind != "preprocess":
        raise UsageError(
            f"checkpoint {checkpoint.short_id} has no record of how its training data was "
            f"preprocessed, which predicting needs: `redco-flow why {checkpoint.short_id}` shows "
            "what is known of it."
        )
    model = read_json(checkpoint.path / "recipe.json")["model"]
    reference, reference_directory = _reference(workspace, trained)
    return UseRecord(
        pipeline=trained.pipeline,
        source=f"checkpoint {checkpoint.short_id}",
        model={"checkpoint": checkpoint.id},
        tokenizer={"tokenizer_of": checkpoint.id},
        preprocess=made.ingredients["settings"],
        predict=_predict_settings(workspace, trained.run),
        classes=(model.get("settings") or {}).get("classes") or (),
        answer_length=_answer_length(dataset.metadata["splits"]),
        dataset=dataset.path,
        reference=reference,
        reference_directory=reference_directory,
    )


def _reference(workspace: Workspace, trained: StageResult) -> tuple[dict[str, Any] | None, str]:
    """Return a stage that scores new rows as those of the training were; None without any.

    And the path of its model's directory, if it has one.
    """
    ids = trained.ingredients["inputs"].get("reference_scores", [])
    scores = ArtifactStore(workspace).find(ids[0]) if ids else None
    made = _producer(workspace, scores) if scores else None
    if made is None:
        return None, ""
    stage = {"kind": "reference_scores", "dataset": "preprocess"}
    [checkpoint] = made.ingredients["inputs"].get("checkpoint") or [""]
    if checkpoint:
        return {**stage, "checkpoint": checkpoint}, ""
    model = made.ingredients["settings"]["model"]
    name = model.get("name_or_path") or ""
    is_of_hub = f"hub:models/{name}" in made.ingredients["data"]
    return {**stage, "model": model}, "" if is_of_hub else name


def _for_prompts(record: UseRecord, row: Mapping[str, Any]) -> UseRecord:
    """Return the record by which a model that learnt preferences answers prompts, if it does."""
    found = import_named(ROWS_MODULE).as_prompts(record.preprocess, record.dataset, row)
    if found is None:
        return record
    settings, length = found
    note = (
        f"recipe {settings['recipe']}: the rows have no answers to compare, so these are generated"
    )
    return replace(
        record,
        preprocess=settings,
        predict={},
        answer_length=min(length, import_named(PUBLISHED_MODULE).MOST_ANSWER_TOKENS),
        notes=(note,),
    )


def _published_record(folder: Path, row: Mapping[str, Any], overrides: Sequence[str]) -> UseRecord:
    changes = dict(one.partition("=")[::2] for one in overrides)
    published = import_named(PUBLISHED_MODULE).read_published(folder, changes.get("recipe"))
    data = import_named(_COLUMNS_MODULE).input_columns(published.recipe, row)
    if data is None and not any(key.startswith("data.") for key in changes):
        known = import_named(_COLUMNS_MODULE).columns_of(published.recipe)
        raise UsageError(
            f"which column the model reads is not known: the file has {', '.join(row)}, and recipe "
            f"{published.recipe} reads {known}. Name it, as data.source_key=COLUMN; or rename it."
        )
    model = {"name_or_path": str(folder), "dtype": published.dtype}
    settings = {"settings": dict(published.settings)} if published.settings else {}
    read = ", ".join(f"{key} {value}" for key, value in (data or {}).items())
    return UseRecord(
        pipeline=re.sub(r"[^A-Za-z0-9]+", "-", folder.name).strip("-") or "model",
        source=f"the model in {folder}",
        preprocess={
            "recipe": published.recipe,
            "data": data or {},
            **published.lengths,
            **settings,
        },
        predict={},
        classes=published.classes,
        answer_length=published.answer_length,
        dataset=folder,
        model={"pretrained": {**model, **settings}},
        sections={"model": model},
        notes=(f"recipe {published.recipe}; {read or 'plain inputs'}", *published.notes),
    )


def _producer(workspace: Workspace, artifact: Artifact) -> StageResult | None:
    return read_result(workspace, str(artifact.produced_by.get("fingerprint", "")))


def _predict_settings(workspace: Workspace, run: str) -> dict[str, Any]:
    directory = RunDirectory(workspace.runs / run)
    results = run_results(workspace, directory) if directory.path.is_dir() else {}
    for result in results.values():
        if result.kind == "predict":
            settings = result.ingredients["settings"].items()
            return {key: one for key, one in settings if key not in _OF_DATASET and one is not None}
    return {}


def _answer_length(splits: Mapping[str, Mapping[str, int]]) -> int:
    """As `DatasetSummary.answer_length`, which predict uses where nothing is configured."""
    answers = max(counts.get("longest_answer", 0) for counts in splits.values())
    longest = answers or max(counts.get("longest_target", 0) for counts in splits.values())
    return -(-longest // 8) * 8
