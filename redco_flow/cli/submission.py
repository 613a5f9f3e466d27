"""Collect the pipeline, the profile and the code that `run` and `plan` send to a login node.

Everything that can be checked without the cluster is checked here, before anything is sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redco_flow.errors import UsageError
from redco_flow.launch.hosts.code_snapshot import CodeSnapshot, Source, take_user_snapshot
from redco_flow.orchestrate.prefect.server import home_directory
from redco_flow.orchestrate.run.ingredients import SUBMITTED_CODE, CodeState
from redco_flow.records import canonical_json, digest_json, read_json_if_present
from redco_flow.spec.find import find_file
from redco_flow.spec.load import PipelineFile, check_for_elsewhere
from redco_flow.spec.overrides import PROFILE_PREFIX, for_pipeline, for_profile
from redco_flow.spec.profile import Profile, load_profile, merged_layers
from redco_flow.spec.yaml import write_yaml
from redco_flow.tracking.run_directory import new_run_id

if TYPE_CHECKING:
    from redco_flow.spec.ssh import LoginNode

_FOLDER = Path(SUBMITTED_CODE).parent.as_posix()


@dataclass(frozen=True)
class Submission:
    """One command line of run or plan, ready to be sent.

    Args:
        words: of the command there, without the run's id and the workspace.
        own: the current directory's folder in the snapshot.
        run_id: of the run, if one is started.
        note: the file with the run's id, from before it is sent until the login node has answered.
    """

    words: list[str]
    snapshot: CodeSnapshot
    own: str
    run_id: str
    note: Path


def prepare(
    node: LoginNode, words: Sequence[str], options: argparse.Namespace, folder: Path
) -> Submission:
    """Check the command line and collect its files; nothing is written or sent.

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
    name = check_for_elsewhere(PipelineFile.read(path), options.overrides, profile)
    file, profile_file = _name_there(path), f"{_FOLDER}/cluster_profiles/{profile.name}.yaml"
    code = CodeState.read(Path.cwd())
    more: dict[str, Source] = {
        file: path,
        profile_file: _profile_there(options.profile, profile),
        SUBMITTED_CODE: canonical_json({"record": code.record, "patch": code.patch}),
    }
    snapshot, own = take_user_snapshot(more | dict(_sent(options.send)))
    there = [words[0], *(file if word == options.file else word for word in words[1:])]
    there += ["-p", profile_file]
    there += [word for one in _settings_there(options.overrides) for word in ("--set", one)]
    given = getattr(options, "run_id", "")
    identity = digest_json([node.model_dump(mode="json"), snapshot.digest, there, given])
    note = folder / f"{identity[:16]}.json"
    noted = read_json_if_present(note) or {}
    return Submission(there, snapshot, own, given or noted.get("run") or new_run_id(name), note)


def notes_folder() -> Path:
    """Return the folder of notes on submissions whose answer has not arrived."""
    return home_directory() / "submissions"


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


def _name_there(path: Path) -> str:
    """Return a pipeline's path below the current directory there."""
    here, found = Path.cwd(), path.absolute()
    if found.is_relative_to(here) and ".." not in found.parts:
        return found.relative_to(here).as_posix()
    return f"{_FOLDER}/pipelines/{found.name}"


def _sent(given: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files that `--send` names, by their path below the current directory."""
    here = Path.cwd().resolve()
    for text in given:
        path = (here / text).resolve()
        if not path.exists() or not path.is_relative_to(here):
            raise UsageError(f"--send {text}: there is no such file or folder below {here}.")
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and not file.is_symlink():
                yield file.relative_to(here).as_posix(), file
