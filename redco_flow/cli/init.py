"""The verb init: write a small project that runs, for an example or for the user's data."""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path

from redco_flow.cli.arguments import Verbs
from redco_flow.errors import UsageError
from redco_flow.spec.names import import_named, shown

_TEXTS = Path(__file__).parent / "project"
_FIRST_PIPELINE = "redco_flow.stages.preprocess.first_pipeline"  # loaded by name: it is a stage's
_NAME_LENGTH = 40
_FORMATS = ("%d %B %Y", "%B %d, %Y", "%d/%m/%Y", "%b %d %Y")
_MAX_CHARACTERS = 1000
_NUM_DATES = 4000
_FIRST_DAY = date(1970, 1, 1)
_NUM_DAYS = 365 * 60


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    init = verbs.add("init", _init)
    init.add_argument(
        "directory",
        nargs="?",
        metavar="DIRECTORY",
        help="new folder, or one without files of these names (with --data: the current one)",
    )
    init.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="your data: csv, tsv, jsonl, json, parquet, arrow, or a folder of files or images",
    )
    init.add_argument("--recipe", metavar="RECIPE", help="what to learn (default: recognise it)")
    init.add_argument(
        "--model",
        metavar="MODEL",
        help="a name on the hub, a folder, or `scratch`: a small model that needs no download",
    )
    init.add_argument(
        "--columns",
        type=lambda text: next(csv.reader([text]), None) or [""],
        metavar="A,B",
        help='use only these columns, the target last; quote (") a name with a comma',
    )
    init.add_argument(
        "--from", dest="ready", metavar="NAME", help="recipe and model of this ready configuration"
    )
    init.add_argument("--list", action="store_true", help="list the ready configurations and exit")


def _init(options: argparse.Namespace) -> int:
    if options.list:
        _print_ready()
        return 0
    given = "." if options.directory is None and options.data is not None else options.directory
    folder = _new_folder(given)
    if options.data is not None:
        project, name, notes = _project_of_data(options, folder)
    else:
        needed = {"--recipe": options.recipe, "--model": options.model, "--from": options.ready}
        for option, value in {**needed, "--columns": options.columns}.items():
            if value is not None:
                raise UsageError(f"{option} needs --data PATH: the file or folder to learn from.")
        project, name, notes = _project(), "dates", []
    files = {folder / path: text for path, text in project.items()}
    taken = {
        str(one)
        for path in files
        for one in (path, *path.parents)
        if one.exists() and (one == path or not one.is_dir())
    }
    if taken:
        raise UsageError(f"these exist, nothing was written: {', '.join(sorted(taken))}.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    print("\n".join([*notes, *([""] if notes else []), *map(str, files)]))
    enter = "" if given == "." else f"cd {shlex.quote(str(folder))} && "
    print(f"\n{enter}redco-flow run pipelines/{name}.yaml")
    return 0


def _new_folder(given: str | None) -> Path:
    if given is None:
        raise UsageError(
            "name the DIRECTORY to write, or --data PATH: your own data; or --list for the ready "
            "configurations."
        )
    if not given.isprintable() or not 0 < len(given) <= _MAX_CHARACTERS:
        raise UsageError(
            f"{shown(given)} is not a folder's name: give 1 to {_MAX_CHARACTERS} printable "
            "characters."
        )
    folder = Path(given)
    with suppress(FileNotFoundError, NotADirectoryError):
        folder.lstat()  # a name that is too long is refused before any folder is made
    return folder


def _print_ready() -> None:
    ready = import_named(_FIRST_PIPELINE).ready_configurations()
    for name, (model, recipe, task, _) in ready.items():
        print(f"{name:<18} {model:<36} {recipe:<21} {task}")
    print("\ncolumns of the data:")
    for recipe, columns in {one[1]: one[3] for one in ready.values()}.items():
        print(f"  {recipe}: {columns}")
    print("\nredco-flow init DIRECTORY --from NAME --data PATH")


def _project_of_data(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[str, str], str, list[str]]:
    """Return the files, the pipeline's name, and notes.

    Data in `folder` are named relative to it, where the pipeline is run.

    Raises:
        UsageError, ConfigError: no pipeline can be made that loads.
    """
    from redco_flow.cli.commented import commented_yaml
    from redco_flow.launch.host_facts import count_local_gpus, gpu_memory_gib
    from redco_flow.local_paths import expanded
    from redco_flow.spec.document import Document, Origin
    from redco_flow.spec.interpolation import escape
    from redco_flow.spec.load import PipelineFile, load_pipeline
    from redco_flow.spec.yaml import read_yaml

    name = re.sub(r"[^a-z0-9]+", "_", options.data.name.partition(".")[0].lower()).strip("_")
    name = name[:_NAME_LENGTH] if name[:1].isalpha() else f"data_{name}"[:_NAME_LENGTH].strip("_")
    num_gpus = count_local_gpus(os.environ) or 0
    values, notes = import_named(_FIRST_PIPELINE).first_pipeline(
        options.data,
        name=name,
        recipe=options.recipe,
        model=options.model,
        ready=options.ready,
        columns=options.columns,
        num_gpus=num_gpus,
        memory_gib=gpu_memory_gib() if num_gpus else None,
    )
    path = Path("pipelines", f"{name}.yaml")
    data, root = expanded(options.data).absolute(), folder.absolute()
    is_below = root in data.parents
    where = " (in this project's folder: paths are relative to the current one)" * is_below
    head = "".join(f"# {line}\n" for line in (f"redco-flow run {path}{where}", *notes))
    source = f"{path} (not written)"
    document = Document(read_yaml(commented_yaml(values), source).values, {(): Origin(source)})
    load_pipeline(PipelineFile(path, document, ()), looks_into_data=True)
    if is_below:
        values["data"]["dataset"] = escape(f"./{data.relative_to(root)}")
    text = head + commented_yaml(values)
    profile = (_TEXTS / "profile.yaml").read_text().replace("dates.yaml", path.name)
    files = {str(path): text, "cluster_profiles/mine.yaml": profile}
    return {**files, ".gitignore": (_TEXTS / "gitignore").read_text()}, name, notes


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
