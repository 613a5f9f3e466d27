"""The verb init: a small project of one's own that runs."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path

from redco_flow.cli.arguments import Verbs
from redco_flow.errors import UsageError
from redco_flow.spec.names import shown

_TEXTS = Path(__file__).parent / "project"
_FORMATS = ("%d %B %Y", "%B %d, %Y", "%d/%m/%Y", "%b %d %Y")
_MAX_CHARACTERS = 1000
_NUM_DATES = 4000
_FIRST_DAY = date(1970, 1, 1)
_NUM_DAYS = 365 * 60


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    init = verbs.add("init", _init)
    init.add_argument(
        "directory", metavar="DIRECTORY", help="new folder, or one without files of these names"
    )


def _init(options: argparse.Namespace) -> int:
    given = options.directory
    if not given.isprintable() or not 0 < len(given) <= _MAX_CHARACTERS:
        raise UsageError(
            f"{shown(given)} is not a folder's name: give 1 to {_MAX_CHARACTERS} printable "
            "characters."
        )
    folder = Path(given)
    with suppress(FileNotFoundError, NotADirectoryError):
        folder.lstat()  # a name that is too long is refused before any folder is made
    files = {folder / name: text for name, text in _project().items()}
    there = [str(path) for path in files if path.exists()]
    if there:
        raise UsageError(f"already there, nothing was written: {', '.join(there)}.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    print("\n".join(str(path) for path in files))
    print(f"\ncd {folder} && redco-flow run pipelines/dates.yaml")
    return 0


def _project() -> dict[str, str]:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("written", "date"))
    writer.writerows(_dates())
    return {
        "pipelines/dates.yaml": (_TEXTS / "pipeline.yaml").read_text(),
        "cluster_profiles/mine.yaml": (_TEXTS / "profile.yaml").read_text(),
        "data/dates.csv": table.getvalue(),
        ".gitignore": (_TEXTS / "gitignore").read_text(),
    }


def _dates() -> Iterator[tuple[str, str]]:
    """Days of sixty years in steps that visit each once, written in turn in each way."""
    for index in range(_NUM_DATES):
        day = _FIRST_DAY + timedelta(days=index * 7919 % _NUM_DAYS)
        yield day.strftime(_FORMATS[index % len(_FORMATS)]), day.isoformat()
