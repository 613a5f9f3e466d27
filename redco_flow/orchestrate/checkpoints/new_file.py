"""Make a pipeline that predicts for new files, from the record of how a checkpoint was trained.

Lineage leads from the checkpoint to the settings of the preprocess stage behind it; of a published
model its own files say as much (`stages.artifacts.published`). The pipeline and the rows that it
reads are written to `<workspace>/predict/<digest>/`, so that the run can be resumed, traced and
repeated like any other.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.records import digest_json, read_json, write_text
from redco_flow.spec.document import Document, Origin
from redco_flow.spec.interpolation import escape
from redco_flow.spec.load import PipelineFile
from redco_flow.spec.names import import_named
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.problems import raise_if_any, validated
from redco_flow.spec.stages import with_overrides
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.lineage import run_results
from redco_flow.tracking.predictions_artifact import LINES_FILE
from redco_flow.tracking.results import StageResult, read_result
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_ROWS_MODULE = "redco_flow.stages.preprocess.new_rows"  # loaded by name: they are stages'
_COLUMNS_MODULE = "redco_flow.stages.preprocess.recognition"
_PUBLISHED_MODULE = "redco_flow.stages.artifacts.published"
_ROWS_FILE = "rows.jsonl"
_Source = tuple[Path, Path | None]
_PIPELINE_FILE = "pipeline.yaml"
_KEYS = (
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
class _Record:
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
    notes: Sequence[str] = ()

    @property
    def data(self) -> dict[str, Any]:
        """The keys of the data section that say what rows have."""
        data = self.preprocess["data"]
        return {key: data[key] for key in _KEYS if data.get(key) is not None}


def _record(workspace: Workspace, checkpoint: Artifact) -> _Record:
    """Raise UsageError where lineage does not lead to a preprocess stage."""
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
    return _Record(
        pipeline=trained.pipeline,
        source=f"checkpoint {checkpoint.short_id}",
        model={"checkpoint": checkpoint.id},
        tokenizer={"tokenizer_of": checkpoint.id},
        preprocess=made.ingredients["settings"],
        predict=_predict_settings(workspace, trained.run),
        classes=(model.get("settings") or {}).get("classes") or (),
        answer_length=_answer_length(dataset.metadata["splits"]),
        dataset=dataset.path,
        reference=_reference(workspace, trained),
    )


def _reference(workspace: Workspace, trained: StageResult) -> dict[str, Any] | None:
    """Return a stage that scores new rows as those of the training were; None without any."""
    ids = trained.ingredients["inputs"].get("reference_scores", [])
    scores = ArtifactStore(workspace).find(ids[0]) if ids else None
    made = _producer(workspace, scores) if scores else None
    if made is None:
        return None
    [checkpoint] = made.ingredients["inputs"].get("checkpoint") or [""]
    model = (
        {"checkpoint": checkpoint}
        if checkpoint
        else {"model": made.ingredients["settings"]["model"]}
    )
    return {"kind": "reference_scores", "dataset": "preprocess", **model}


def _for_prompts(record: _Record, row: Mapping[str, Any]) -> _Record:
    """Return the record by which a model that learnt preferences answers prompts, if it does."""
    found = import_named(_ROWS_MODULE).as_prompts(record.preprocess, record.dataset, row)
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
        answer_length=min(length, _MOST_ANSWER_TOKENS),
        notes=(note,),
    )


_MOST_ANSWER_TOKENS = 256


def _published_record(folder: Path, row: Mapping[str, Any], overrides: Sequence[str]) -> _Record:
    """Return the record of a published model.

    Args:
        row: the first of the new rows; empty where these are plain texts or images.

    Raises:
        UsageError: what the model predicts, or which columns it reads, is not known.
    """
    changes = dict(one.partition("=")[::2] for one in overrides)
    published = import_named(_PUBLISHED_MODULE).read_published(folder, changes.get("recipe"))
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
    return _Record(
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


@dataclass(frozen=True)
class NewFile:
    """New files, read for a checkpoint.

    Args:
        pipeline: predicts their usable rows; also a file in `folder`.
        files: the user's, each with the folder that image files are below which its rows name.
        folder: has the pipeline and its rows.
        is_new: whether the folder was made for this object.
        notes: what was found out about a published model.
    """

    pipeline: PipelineFile
    files: Sequence[_Source]
    folder: Path
    notes: Sequence[str]
    rows_digest: str
    is_new: bool
    _reader: Any

    def discard(self) -> None:
        """Delete the folder if it was made for this object."""
        if self.is_new:
            shutil.rmtree(self.folder, ignore_errors=True)

    def answers(self, predictions: Path) -> Iterator[dict[str, Any]]:
        """Yield each row's columns and its `prediction`, in the order of the files.

        A row without a prediction has None and `prediction_problem`.

        Args:
            predictions: the predictions artifact of the pipeline's run.

        Raises:
            UsageError: a file has changed since it was read for the run.
        """
        found = {}
        with (predictions / LINES_FILE).open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                found[int(line["row_id"].rpartition(":")[2])] = line
        digest, number = sha256(), 0
        for row in (row for source in self.files for row in self._reader.read(*source)):
            problem, line = row.problem, None
            if row.usable:
                number += 1
                digest.update(f"{row.usable}\n".encode())
                line = found.get(number)
                problem = (
                    "" if line else "no prediction was made: the logs of the run's stages say why"
                )
            yield {**row.fields, **_answer(line, problem)}
        if digest.hexdigest() != self.rows_digest:
            listed = ", ".join(str(file) for file, _ in self.files)
            raise UsageError(f"{listed}: changed while the run used it. Repeat the command.")


def _answer(line: Mapping[str, Any] | None, problem: str) -> dict[str, Any]:
    if line is None:
        return {"prediction": None, "prediction_problem": problem}
    return {name: line[name] for name in ANSWER_COLUMNS if line.get(name) or name == "prediction"}


ANSWER_COLUMNS = ("prediction", "predictions", "probabilities", "prediction_problem")


def read_new_files(
    workspace: Workspace,
    model: Artifact | Path,
    files: Sequence[Path],
    overrides: Sequence[str],
    lines: Iterable[str],
    spool: Path,
) -> NewFile:
    """Read files for a model, and write the pipeline that predicts their usable rows.

    Args:
        model: a checkpoint, or the directory of a published model.
        files: `-` is `lines`.
        overrides: the user's changes of the pipeline: `predict.num_beams=4`.
        lines: each a text or a JSON object.
        spool: a JSONL file to be written with the rows of `lines`.

    Raises:
        ConfigError: an override is wrong.
        UsageError: the checkpoint lacks what predicting needs, or a file does not fit it.
    """
    lines = [*lines] if Path("-") in files else []
    row = _first_row(files[0], lines)
    if isinstance(model, Artifact):
        record = _for_prompts(_record(workspace, model), row)
    else:
        record = _published_record(model, row, overrides)
    overridden = with_overrides(_document(record), overrides)
    data, problems = validated(DataSection, overridden.document.section(("data",)))
    raise_if_any([*overridden.problems, *problems])
    assert data is not None
    reader = _reader(record, data)
    if Path("-") in files:
        rows = (_row_of(line.rstrip("\r\n"), reader) for line in lines)
        spool.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    sources = [(spool, Path.cwd()) if file == Path("-") else (file, None) for file in files]
    written = overridden.document.values["data"]
    if "train" in written:
        raise UsageError("data.train would change nothing: FILE names what to predict for.")
    more = {key: one for key, one in written.items() if key not in _KEYS}
    values = {**overridden.document.values, "data": {**reader.data, **_OF_NEW_ROWS, **more}}
    folder = workspace.predict
    folder.mkdir(exist_ok=True)
    growing = Path(tempfile.mkdtemp(dir=folder, prefix=".growing-"))
    try:
        digest = _write_rows(growing / _ROWS_FILE, reader, sources)
        place = folder / digest_json([values, digest])[:SHORT_DIGITS]
        values["data"]["train"] = escape(str(place / _ROWS_FILE))
        write_text(growing / _PIPELINE_FILE, write_yaml(values))
        if is_new := not place.exists():
            growing.chmod(folder.stat().st_mode)
            growing.rename(place)
        else:
            os.utime(place)  # it is used again, for `redco-flow gc`
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    document = Document(values, overridden.document.origins)
    pipeline = PipelineFile(place / _PIPELINE_FILE, document, ())
    return NewFile(pipeline, sources, place, record.notes, digest, is_new, reader)


_OF_NEW_ROWS = {"validation_fraction": 0.0, "on_bad_row": "skip"}


def _first_row(file: Path, lines: Sequence[str]) -> dict[str, Any]:
    """Return the first row of a file, as far as it can be read; `-` is `lines`."""
    if file == Path("-"):
        is_row = bool(lines) and lines[0].lstrip().startswith("{")
        with suppress(ValueError):
            return dict(json.loads(lines[0])) if is_row else {}
        return {}
    row: dict[str, Any] = import_named(_ROWS_MODULE).first_row(file)
    return row


def _row_of(line: str, reader: Any) -> str:
    is_row = line.lstrip().startswith("{")  # what is wrong with it, its reader says
    return line if is_row else json.dumps(reader.row_of_text(line))


def _reader(record: _Record, data: DataSection) -> Any:
    reading = import_named(_ROWS_MODULE)
    given = (record.preprocess, data, record.classes, record.answer_length, record.dataset)
    return reading.new_rows(*given)


def _document(record: _Record) -> Document:
    """Return the pipeline before the user's overrides, with the columns of the training's data."""
    reader = _reader(record, DataSection.from_json(record.data))
    settings = dict(record.preprocess.get("settings") or {})
    if record.classes:
        settings["classes"] = list(record.classes)
    taken = record.tokenizer if reader.has_tokenizer else {}
    if reader.compares and record.reference is None:
        raise UsageError(
            f"{record.source} was trained to compare with a reference, whose record is gone, so "
            "pairs of answers have no rewards. Give prompts without answers, to be answered."
        )
    compared = {"reference": record.reference} if reader.compares else {}
    reference = {"reference_scores": "reference"} if reader.compares else {}
    values = {
        "name": f"{record.pipeline[:_NAME_LENGTH]}-predict",
        "description": f"Predictions of {record.source} for a new file.",
        "recipe": record.preprocess["recipe"],
        **({"settings": settings} if settings else {}),
        **record.sections,
        "data": record.data,
        "stages": {
            "preprocess": {**reader.preprocess, **taken},
            **compared,
            "predict": {
                **(reader.predict | (record.predict if reader.makes_texts else {})),
                **record.model,
                **reference,
                "split": "train",
            },
        },
    }
    origin = Origin(f"the record of {record.source}")
    return Document(escape(values), {(): origin})


_NAME_LENGTH = 56


def _write_images(folder: Path, images: Mapping[str, bytes]) -> None:
    for name, content in images.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _write_rows(path: Path, reader: Any, sources: Sequence[_Source]) -> str:
    """Write the usable rows; return their digest."""
    digest, problem = sha256(), ""
    left_out = () if reader.predict.get("probabilities") else ("probabilities",)
    written = [name for name in ANSWER_COLUMNS if name not in left_out]
    with path.open("w", encoding="utf-8") as rows:
        for file, image_folder in sources:
            for row in reader.read(file, image_folder):
                if taken := [name for name in written if name in row.fields]:
                    raise UsageError(f"{file}: has a column '{taken[0]}' already; rename it.")
                problem = problem or row.problem
                if row.usable:
                    line = f"{row.usable}\n"
                    rows.write(line)
                    digest.update(line.encode())
                    _write_images(path.parent, row.images)
        if not rows.tell():
            listed = ", ".join(str(file) for file, _ in sources)
            raise UsageError(f"{listed}: no row can be predicted; the first: {problem}.")
    return digest.hexdigest()
