"""Make a pipeline that predicts for new files, from the record of how a checkpoint was trained.

The pipeline and the rows that it reads are written to `<workspace>/predict/<digest>/`, so that the
run can be resumed, traced and repeated like any other.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.local_paths import expanded, is_folder
from redco_flow.orchestrate.checkpoints.use_record import (
    DATA_KEYS,
    ROWS_MODULE,
    UseRecord,
    record_of,
)
from redco_flow.records import digest_json, write_text
from redco_flow.spec.document import Document, Origin
from redco_flow.spec.interpolation import escape
from redco_flow.spec.load import PipelineFile
from redco_flow.spec.names import import_named
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.problems import raise_if_any, validated
from redco_flow.spec.stages import with_overrides
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.artifacts import Artifact
from redco_flow.tracking.metrics_artifact import PREDICTIONS_FILE
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_ROWS_FILE = "rows.jsonl"
_Source = tuple[Path, Path | None]
_PIPELINE_FILE = "pipeline.yaml"


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
        with (predictions / PREDICTIONS_FILE).open(encoding="utf-8") as lines:
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
    record = record_of(workspace, model, _first_row(files[0], lines), overrides)
    overridden = with_overrides(_document(record), overrides)
    data, problems = validated(DataSection, overridden.document.section(("data",)))
    raise_if_any([*overridden.problems, *problems])
    assert data is not None
    reader = _reader(record, data)
    if reader.compares:
        _check_reference(record, overridden.document)
    if Path("-") in files:
        rows = (_row_of(line.rstrip("\r\n"), reader) for line in lines)
        spool.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    sources = [(spool, Path.cwd()) if file == Path("-") else (file, None) for file in files]
    written = overridden.document.values["data"]
    if "train" in written:
        raise UsageError("data.train would change nothing: FILE names what to predict for.")
    more = {key: one for key, one in written.items() if key not in DATA_KEYS}
    values = {**overridden.document.values, "data": {**reader.data, **_OF_NEW_ROWS, **more}}
    digest, place, is_new = _write(workspace.predict, values, reader, sources)
    document = Document(values, overridden.document.origins)
    pipeline = PipelineFile(place / _PIPELINE_FILE, document, ())
    return NewFile(pipeline, sources, place, record.notes, digest, is_new, reader)


def _write(
    folder: Path, values: dict[str, Any], reader: Any, sources: Sequence[_Source]
) -> tuple[str, Path, bool]:
    """Write the rows and the pipeline, whose `data.train` is set to them.

    Returns:
        The rows' digest, their directory, and whether it is new.
    """
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
    return digest, place, is_new


_OF_NEW_ROWS = {"validation_fraction": 0.0, "on_bad_row": "skip"}


def _first_row(file: Path, lines: Sequence[str]) -> dict[str, Any]:
    """Return the first row of a file, as far as it can be read; `-` is `lines`."""
    if file == Path("-"):
        is_row = bool(lines) and lines[0].lstrip().startswith("{")
        with suppress(ValueError):
            return dict(json.loads(lines[0])) if is_row else {}
        return {}
    row: dict[str, Any] = import_named(ROWS_MODULE).first_row(file)
    return row


def _row_of(line: str, reader: Any) -> str:
    is_row = line.lstrip().startswith("{")  # what is wrong with it, its reader says
    return line if is_row else json.dumps(reader.row_of_text(line))


def _reader(record: UseRecord, data: DataSection) -> Any:
    reading = import_named(ROWS_MODULE)
    given = (record.preprocess, data, record.classes, record.answer_length, record.dataset)
    return reading.new_rows(*given)


def _document(record: UseRecord) -> Document:
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


def _check_reference(record: UseRecord, document: Document) -> None:
    """Raise where the directory of the model that the training compared with is gone."""
    reference = document.values["stages"]["reference"]
    name = (reference.get("model") or {}).get("name_or_path")
    if name and name == escape(record.reference_directory) and not is_folder(expanded(name)):
        raise UsageError(
            f"{record.source} was trained to compare with the model in {name}, which is gone. If "
            "it was moved, give its new path: `reference.model.name_or_path=DIRECTORY`."
        )


def _write_images(folder: Path, images: Mapping[str, bytes]) -> None:
    for name, content in images.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _write_rows(path: Path, reader: Any, sources: Sequence[_Source]) -> str:
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
