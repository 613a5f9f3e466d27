"""Notes and labels that people add to a run: notes.json in its directory, replaced as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from unicodedata import category

from redco_flow.errors import UsageError
from redco_flow.records import write_json
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record
from redco_flow.tracking.workspace import user_name

RECORD = "notes.json"
_LOCK = ".notes.lock"
_MAX_NOTE, _MAX_LABEL, _MAX_LABELS = 4000, 40, 20  # characters, characters, labels


@dataclass(frozen=True)
class RunNotes:
    """notes.json.

    Args:
        note: free text.
        labels: in the order in which they were added.
        edited_at, by: of the last change; empty before the first.
    """

    note: str = ""
    labels: list[str] = field(default_factory=list)
    edited_at: str = ""
    by: str = ""


def read_notes(run: RunDirectory) -> RunNotes:
    """Return a run's notes, which are empty before the first change.

    Raises:
        DamagedRecord: the record is damaged.
    """
    remedy = "Delete the file, or correct it by hand."
    return find_record(run.path / RECORD, RunNotes, remedy=remedy) or RunNotes()


class NotesChanged(UsageError):
    """Another edit was saved since the notes were read; `present` has it."""

    def __init__(self, present: RunNotes) -> None:
        super().__init__(f"{present.by} changed the note or the labels meanwhile.")
        self.present = present


def write_notes(
    run: RunDirectory,
    note: str,
    labels: Sequence[str],
    *,
    expected_edited_at: str | None = None,
) -> RunNotes:
    """Replace a run's note and labels; return the new record.

    Args:
        labels: spaces around them, empty ones and repeated ones are left out.
        expected_edited_at: of the notes that are replaced; None replaces any.

    Raises:
        UsageError: the note or a label is too long or has control characters, or a label has a
            comma.
        NotesChanged: the present notes are others than expected.
        DamagedRecord: the present record is damaged.
        OSError: the disk is full or read-only; names the path.
    """
    shown = [label for label in dict.fromkeys(map(str.strip, labels)) if label]
    wrong = [one for one in shown if len(one) > _MAX_LABEL or "," in one or not one.isprintable()]
    if wrong:
        raise UsageError(
            f"label {wrong[0][: 2 * _MAX_LABEL]!r}: use at most {_MAX_LABEL} printable characters, "
            "without a comma."
        )
    if len(shown) > _MAX_LABELS:
        raise UsageError(f"{len(shown)} labels: a run has at most {_MAX_LABELS}.")
    note = note.replace("\r\n", "\n").strip()
    if len(note) > _MAX_NOTE:
        raise UsageError(f"the note has {len(note):,} characters; at most {_MAX_NOTE:,} are kept.")
    # Control characters and halves of a character.
    if found := [one for one in note if category(one) in ("Cc", "Cs") and one not in "\n\t"]:
        raise UsageError(f"the note has the control character {found[0]!r}; leave it out.")
    with exclusive(run.path / _LOCK) as held:
        present = read_notes(run)
        if expected_edited_at not in (None, present.edited_at):
            raise NotesChanged(present)
        held.check()
        made = RunNotes(note, shown, utc_now(), user_name())
        write_json(run.path / RECORD, asdict(made))
    return made
