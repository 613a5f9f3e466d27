"""The curation artifact: rows of raw data to leave out, each with its reason.

`curation.json`, and `dropped.jsonl`: {"row_id", "reason", "like", "similarity"}: the row that it
repeats, and of a duplicate how alike they are. Rows are named and not copied, so
that whatever is made of them still says where in the raw data it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.errors import ArtifactError, RedcoFlowError
from redco_flow.records import digest_json, read_json, read_json_lines, write_json
from redco_flow.runtime.context import StageContext
from redco_flow.spec.pipeline import DataSection
from redco_flow.stages.data.source import data_files, data_identity, hub_dataset

FORMAT = 1
SUMMARY_FILE, DROPPED_FILE = "curation.json", "dropped.jsonl"
_MAX_SHOWN, _MAX_CHARACTERS = 3, 600


class WrongCuration(RedcoFlowError):
    """The rows that were curated are not those that are read."""


@dataclass(frozen=True)
class DroppedRow:
    """A row that is left out.

    Args:
        reason: a few words, the same for all rows dropped for it.
        text: as it was compared.
        like, like_text: the row that it repeats, and what of its text; empty where it repeats none.
        similarity: Jaccard's, of duplicates.
    """

    row_id: str
    reason: str
    text: str
    like: str = ""
    like_text: str = ""
    similarity: float | None = None

    def line(self) -> dict[str, Any]:
        """The row's line in the file."""
        named = {"row_id": self.row_id, "reason": self.reason}
        return {**named, "like": self.like, "similarity": self.similarity} if self.like else named

    def shown(self) -> dict[str, Any]:
        """The row's record for display, with the beginning of each text."""
        texts = {"text": self.text[:_MAX_CHARACTERS], "like_text": self.like_text[:_MAX_CHARACTERS]}
        return {**asdict(self), **texts}


@dataclass
class Curation:
    """`curation.json`, as it grows.

    Args:
        rows: digest of what decides which rows there are, and their splits.
        num_rows: usable rows by split.
        dropped: rows left out of training, by reason.
        examples: the first of each reason.
    """

    rows: str
    num_rows: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    format: int = FORMAT

    def write_rows(self, folder: Path, dropped: Iterable[DroppedRow]) -> None:
        """Write the file of rows, and count them meanwhile."""
        with (folder / DROPPED_FILE).open("w", encoding="utf-8") as file:
            for row in dropped:
                count = self.dropped[row.reason] = self.dropped.get(row.reason, 0) + 1
                if count <= _MAX_SHOWN:
                    self.examples.append(row.shown())
                file.write(json.dumps(row.line(), ensure_ascii=False) + "\n")

    def write_summary(self, folder: Path) -> None:
        """Write what tells whose rows the folder has: it is whole then."""
        write_json(folder / SUMMARY_FILE, asdict(self))


def digest_of_rows(data: DataSection, digests: Mapping[Path, str]) -> str:
    """Return what identifies the rows and splits that a section means, wherever the files lie.

    Args:
        digests: of the raw files.
    """
    settled = ("max_examples", "validation_fraction", "test_fraction", "format", "mixture")
    keys = ("text_key", "source_key", "pair_key", "target_key", "messages_key")
    values = data.model_dump(mode="json", include={*settled, *keys, "default_system_message"})
    values["mixture"] = sorted(data.mixture)
    reading = data.model_dump(mode="json", include={"csv", "splits"})
    values |= {key: value for key, value in reading.items() if value}
    hub = [data.dataset, data.subset, data.revision] if hub_dataset(data) else None
    files = [digests[path] for path in data_files(data)]
    return digest_json({**values, "files": files, "module": data_identity(data), "hub": hub})


def dropped_rows(
    context: StageContext, data: DataSection, digests: Mapping[Path, str]
) -> Mapping[str, str]:
    """Return by row id why a stage's input `curation` leaves rows out; none without that input.

    Args:
        digests: of the raw files that the stage reads.

    Raises:
        WrongCuration: other rows were curated.
        ArtifactError: it is no such artifact, or not a whole one.
    """
    if not context.inputs.get("curation"):
        return {}
    folder = context.input("curation").path
    try:
        curation = Curation(**read_json(folder / SUMMARY_FILE))
        lines: Sequence[Mapping[str, Any]] = list(read_json_lines(folder / DROPPED_FILE))
        found = {str(line["row_id"]): str(line["reason"]) for line in lines}
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder}: no curation of redco-flow: {error}") from error
    if len(lines) != sum(curation.dropped.values()):
        raise ArtifactError(f"{folder}: {DROPPED_FILE} is not whole.")
    if curation.rows != digest_of_rows(data, digests):
        raise WrongCuration(
            "the input `curation` is of other rows than this stage reads: let both stages have the "
            "same `data`, for its files, fields and splits decide which row is which."
        )
    return found
