"""The verb predict: a checkpoint's answers for the rows of a new file, by a run of its pipeline."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.cli.arguments import Verbs, add_checkpoint, add_json, add_profile
from redco_flow.cli.loading import Loader
from redco_flow.cli.run import follow_to_end, next_steps
from redco_flow.cli.status import DETACHED_EXIT_CODE, status_text
from redco_flow.cli.view import read_run_view
from redco_flow.errors import UsageError
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from redco_flow.orchestrate.checkpoints.new_file import NewFile

_ENDINGS = (".csv", ".jsonl", ".parquet")


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    predict = verbs.add("predict", _predict)
    add_checkpoint(predict, or_published=True)
    predict.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="csv, tsv, jsonl, json, parquet, arrow or image; - is standard input, a text or JSON "
        "a line",
    )
    predict.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help=f"file to write, {' or '.join(_ENDINGS)} (default: JSON lines on standard output)",
    )
    add_profile(predict)
    add_json(predict)


def _predict(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.run.start import spawn, write_run

    _take_settings(options)
    _check_output(options)
    with tempfile.TemporaryDirectory() as folder:
        new_file = _read(options, Path(folder) / "standard-input.jsonl")
        try:
            loaded = Loader(_of_run(options, new_file), file=new_file.pipeline).load()
            run = write_run(
                loaded.pipeline,
                loaded.profile,
                loaded.workspace,
                loaded.plan,
                profile_name=options.profile,
                overrides=options.overrides,
                argv=sys.argv,
            )
            spawn(run)
        except BaseException:
            new_file.discard()
            raise
        sys.stderr.write("".join(f"{note}\n" for note in new_file.notes))
        sys.stderr.write(f"{run.id} started; its files: {run.path}\n")
        code = follow_to_end(run)
        if code == DETACHED_EXIT_CODE:
            sys.stderr.write("the same command again writes the predictions\n")
            return code
        if code != 0:
            view = read_run_view(run)
            sys.stderr.write(f"{status_text(view)}\n{next_steps(view)}\n")
            return code
        return _write(options, new_file, loaded.workspace, run)


def _take_settings(options: argparse.Namespace) -> None:
    """Move the words KEY=VALUE from the files to the overrides."""
    files = [one for one in options.files if "=" not in one or Path(one).exists()]
    options.overrides = [*options.overrides, *(one for one in options.files if one not in files)]
    options.files = list(map(Path, files))
    if not files:
        raise UsageError("name a FILE to predict for, or - for standard input.")


def _check_output(options: argparse.Namespace) -> None:
    output: Path | None = options.output
    if output is None:
        return
    if output.suffix.lower() not in _ENDINGS:
        raise UsageError(f"-o {output}: the ending must be {' or '.join(_ENDINGS)}.")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"-o {output}: there is no directory {output.absolute().parent}.")
    if output.exists() and any(file.exists() and file.samefile(output) for file in options.files):
        raise UsageError(f"-o {output}: is one of the files to predict for.")


def _read(options: argparse.Namespace, spool: Path) -> NewFile:
    from redco_flow.local_paths import expanded
    from redco_flow.orchestrate.checkpoints.chat import find_model
    from redco_flow.orchestrate.checkpoints.new_file import read_new_files
    from redco_flow.spec.profile import load_own_profile

    profile = load_own_profile(options.profile, options.overrides)
    root = expanded(profile.workspace).absolute()
    model = find_model(Workspace(root), options.checkpoint)
    workspace = Workspace.open(root)
    return read_new_files(workspace, model, options.files, options.overrides, sys.stdin, spool)


def _of_run(options: argparse.Namespace, new_file: NewFile) -> argparse.Namespace:
    """Return the options with which `run` would start the pipeline, which has the overrides."""
    from redco_flow.spec.overrides import for_pipeline

    of_pipeline = for_pipeline(options.overrides)
    return argparse.Namespace(
        file=str(new_file.pipeline.path),
        profile=options.profile,
        overrides=[one for one in options.overrides if one not in of_pipeline],
        from_stage=None,
        until_stage=None,
        force=[],
    )


def _write(
    options: argparse.Namespace, new_file: NewFile, workspace: Workspace, run: RunDirectory
) -> int:
    made = read_run_view(run)["stages"]["predict"]["artifacts"]["predictions"]
    counts = {"rows": 0, "predicted": 0}

    def counted() -> Iterator[dict[str, Any]]:
        for row in new_file.answers(ArtifactStore(workspace).get(made).path):
            counts["rows"] += 1
            counts["predicted"] += "prediction_problem" not in row
            yield row

    if options.output is not None:
        write_answers(options.output, counted())
    elif options.json:
        for _ in counted():
            pass
    else:
        sys.stdout.writelines(map(_json_line, counted()))
    done = {"run": run.id, "predictions": made, **counts}
    if options.json:
        print(json.dumps({**done, "output": options.output and str(options.output)}))
        return 0
    left_out = counts["rows"] - counts["predicted"]
    why = f", {left_out} without a prediction (prediction_problem says why)" if left_out else ""
    where = f": {options.output}" if options.output else ""
    sys.stderr.write(f"{counts['rows']:,} rows{why}{where}\n")
    return 0


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def write_answers(output: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows and give the file its name, or leave what was there."""
    growing = output.with_name(f".{output.name}.growing")
    try:
        _WRITERS[output.suffix.lower()](growing, rows)
        growing.replace(output)
    finally:
        growing.unlink(missing_ok=True)


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(map(_json_line, rows))


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    import csv

    found = list(rows)
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, _columns(found), restval="")
        writer.writeheader()
        writer.writerows({key: _cell(one) for key, one in row.items()} for row in found)


def _cell(value: Any) -> Any:
    is_plain = value is None or isinstance(value, str | int | float)
    if is_plain and not isinstance(value, bool):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    found = list(rows)
    columns = {name: [row.get(name) for row in found] for name in _columns(found)}
    try:
        pyarrow.parquet.write_table(pa.table(columns), path)
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise UsageError(
            f"a column has texts or types that Parquet has not: {error}. Repeat the command with "
            "-o OUT.jsonl; the predictions are reused."
        ) from error


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return every row's columns in their order, the predictions' last."""
    from redco_flow.orchestrate.checkpoints.new_file import ANSWER_COLUMNS

    found = {name: None for row in rows for name in row}
    own = [name for name in found if name not in ANSWER_COLUMNS]
    return own + [name for name in ANSWER_COLUMNS if name in found]


_WRITERS = {".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
