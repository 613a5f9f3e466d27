"""Collect the pipeline, the profile and the code that `run` and `plan` send to a login node.

Everything that can be checked without the cluster is checked here, before anything is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.cli.text import size
from redco_flow.errors import UsageError
from redco_flow.launch.hosts.code_snapshot import (
    LEFT_OUT,
    MAX_FILE_BYTES,
    CodeSnapshot,
    Source,
    take_user_snapshot,
)
from redco_flow.local_paths import is_file
from redco_flow.orchestrate.run.ingredients import SUBMITTED_CODE, CodeState, is_secret_file
from redco_flow.records import (
    canonical_json,
    digest_json,
    open_no_link,
    read_json_if_present,
    write_json,
)
from redco_flow.spec.document import leaves
from redco_flow.spec.find import find_file
from redco_flow.spec.load import PipelineFile, check_for_elsewhere
from redco_flow.spec.overrides import PROFILE_PREFIX, for_pipeline, for_profile
from redco_flow.spec.profile import Profile, load_profile, merged_layers
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now
from redco_flow.tracking.run_directory import new_run_id
from redco_flow.tracking.workspace import home_directory

if TYPE_CHECKING:
    from redco_flow.spec.ssh import LoginNode

_NUM_NAMED = 10
_FOLDER = Path(SUBMITTED_CODE).parent.as_posix()


@dataclass(frozen=True)
class RemoteCommand:
    """One command line of run or plan, ready to be sent.

    Args:
        words: of the command there, without the run's id and the workspace.
        own: the current directory's folder in the snapshot.
        run_id: of the run, if one is started.
        note: a file of this process's, from before the run's id is sent until the login node has
            answered; a later process with the same command finds the run by it.
        key: of the command: login node, workspace, directory and words.
        left: what an ended process noted whose answer did not arrive, or {}.
    """

    words: list[str]
    snapshot: CodeSnapshot
    own: str
    run_id: str
    note: Path
    key: str
    left: Mapping[str, Any]

    def write_note(self) -> None:
        """Write the note, unless it is that of an ended process.

        Raises:
            UsageError: another process submits this run now.
            OSError: it cannot be written; names the path.
        """
        if self.left:
            return
        process = ProcessIdentity.current().to_json()
        record = {"key": self.key, "run": self.run_id, "code": self.snapshot.digest}
        self.note.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.note, "x", opener=open_no_link) as file:
                json.dump({**record, "at": utc_now(), "process": process}, file)
        except FileExistsError as error:
            raise UsageError(
                f"{self.note}: another command submits run {self.run_id}, or was cut off: give "
                f"that one again, or choose another --run-id."
            ) from error


def prepare(
    node: LoginNode, words: Sequence[str], options: argparse.Namespace, folder: Path
) -> RemoteCommand:
    """Check the command line and collect its files; nothing is sent.

    The note of an ended process with the same command becomes that of this process.

    Args:
        words: the command line without the options that `options` are read for here: profile,
            overrides, files to send, and what is printed.
        folder: of the notes.

    Raises:
        UsageError: it cannot be run so.
        ConfigError: every mistake in the pipeline and the profile that shows here.
    """
    _refuse_what_stays_here(options)
    profile = load_profile(options.profile, options.overrides, is_elsewhere=True)
    path = find_file("pipelines", options.file)
    pipeline = PipelineFile.read(path)
    name = check_for_elsewhere(pipeline, options.overrides, profile)
    file = _name_there("pipelines", path)
    profile_file, profile_word = _profile_file(options.profile)
    code = CodeState.read(Path.cwd())
    more: dict[str, Source] = {
        file: path,
        profile_file: _profile_there(options.profile, profile),
        SUBMITTED_CODE: canonical_json({"record": code.record, "patch": code.patch}),
    }
    more |= dict(_sent(options.send))
    snapshot, own, left_out, large = take_user_snapshot(more, is_secret_file)
    if left_out:
        names = ", ".join(map(str, left_out))
        sys.stderr.write(f"not sent, as they may hold secrets: {names}\n")
    if large:
        sizes = [f"{os.path.relpath(path)} ({size(path.stat().st_size)})" for path in large]
        if len(sizes) > _NUM_NAMED:
            sizes[_NUM_NAMED:] = [f"{len(sizes) - _NUM_NAMED} more"]
        sys.stderr.write(
            f"not sent, as code is at most {size(MAX_FILE_BYTES)}: {', '.join(sizes)}; "
            "--send FILE takes one of this folder along\n"
        )
    _name_unsent_data(pipeline, {one.partition("/")[2] for one in snapshot.files})
    there = [words[0], *(file if word == options.file else word for word in words[1:])]
    there += ["-p", profile_word]
    there += [word for one in _settings_there(options.overrides) for word in ("--set", one)]
    given = getattr(options, "run_id", "")
    place = [node.user, node.address, node.port, node.workspace, str(Path.cwd())]
    key = digest_json([*place, there, given])
    left = _take_over(folder, key) if words[0] == "run" and not options.dry_run else {}
    run_id = left.get("run") or given or new_run_id(name)
    return RemoteCommand(there, snapshot, own, run_id, folder / f"{run_id}.json", key, left)


def _name_unsent_data(pipeline: PipelineFile, sent: Container[str]) -> None:
    """Print which relative paths of the pipeline are files here that are not sent."""
    document = pipeline.document
    for value in filter(None, map(document.get, leaves(document.values))):
        for text in value if isinstance(value, list) else [value]:
            is_own = isinstance(text, str) and not Path(text).is_absolute() and is_file(text)
            if is_own and Path(text).as_posix() not in sent:
                sys.stderr.write(f"not sent: {text}; --send {shlex.quote(text)} takes it along\n")


def notes_folder() -> Path:
    """Return the folder of notes on submissions whose answer has not arrived."""
    return home_directory() / "submissions"


def _take_over(folder: Path, key: str) -> dict[str, Any]:
    """Return the note of an ended process with this command, which is this process's from now on.

    {} where there is none: a process that still runs keeps its own.
    """
    if not folder.is_dir():
        return {}
    with exclusive(folder / "notes.lock"):
        for path in sorted(folder.glob("*.json")):
            try:
                note = read_json_if_present(path) or {}
                process = ProcessIdentity.from_json(note["process"])
            except (ValueError, KeyError):
                continue  # damaged: it was being written when its process ended
            if note["key"] == key and not process.is_alive():
                write_json(path, note | {"process": ProcessIdentity.current().to_json()})
                return dict(note)
    return {}


def _refuse_what_stays_here(options: argparse.Namespace) -> None:
    if getattr(options, "sweep", None) or getattr(options, "points", None):
        raise UsageError("a sweep cannot be started through --ssh: start it on the cluster.")
    if any(one.startswith("workspace=") for one in for_profile(options.overrides)):
        raise UsageError(
            "with --ssh the workspace is that of `ssh:`, or of --ssh [USER@]HOST:WORKSPACE; leave "
            "profile.workspace out."
        )


def _settings_there(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those of the way there."""
    of_profile = [one for one in for_profile(overrides) if not one.startswith("ssh.")]
    return [*for_pipeline(overrides), *(f"{PROFILE_PREFIX}{one}" for one in of_profile)]


def _profile_there(given: str, profile: Profile) -> bytes:
    """Return the profile as written, in one file, for the cluster: without the way there."""
    document = merged_layers(given).without(("ssh",))
    return write_yaml({**document.values, "name": profile.name}).encode()


def _profile_file(given: str) -> tuple[str, str]:
    """Return the profile's path below the current directory there, and the word for it."""
    path = find_file("cluster_profiles", given)
    file = _name_there("cluster_profiles", path)
    if not file.startswith(_FOLDER):
        return file, file if Path(given).is_absolute() else given
    if Path(given).name != given:
        return file, file
    return f"cluster_profiles/{path.name}", given  # one that comes with the package


def _name_there(folder: str, path: Path) -> str:
    """Return a pipeline's or profile's path below the current directory there."""
    here, found = Path.cwd(), path.absolute()
    if found.is_relative_to(here) and ".." not in found.parts:
        return found.relative_to(here).as_posix()
    return f"{_FOLDER}/{folder}/{found.name}"


def _sent(given: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files that `--send` names, by their path below the current directory."""
    here = Path.cwd().resolve()
    for text in given:
        path = (here / text).resolve()
        if not path.exists() or not path.is_relative_to(here):
            raise UsageError(f"--send {text}: there is no such file or folder below {here}.")
        for file in [path] if path.is_file() else _data_files(path):
            yield file.relative_to(here).as_posix(), file


def _data_files(root: Path) -> Iterator[Path]:
    """Yield a folder's files, without hidden folders, environments, caches, secrets and links."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in LEFT_OUT
            and not name.startswith(".")
            and not Path(folder, name, "pyvenv.cfg").exists()
        )
        for path in (Path(folder, name) for name in sorted(names)):
            if path.is_symlink() or is_secret_file(path.name):
                sys.stderr.write(f"not sent, as it is a link or may hold secrets: {path}\n")
            elif path.is_file():
                yield path
