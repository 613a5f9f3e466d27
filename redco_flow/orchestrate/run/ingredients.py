"""Collect what determines a stage's result: settings, input artifacts, raw data, code.

The one place where a pipeline's stage becomes `Ingredients`: `plan`, `run` and `resume` all ask
here, so that a plan cannot differ from the run. Knows nothing of what was computed before.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from redco_flow.errors import RedcoFlowError, UsageError
from redco_flow.hub import is_commit
from redco_flow.launch.redaction import redact_text
from redco_flow.local_paths import expanded, is_folder
from redco_flow.records import digest_json, read_json_if_present
from redco_flow.spec.hub_reference import HubReference
from redco_flow.spec.load import ResolvedPipeline, ResolvedStage
from redco_flow.spec.model import ContentOf, ContentOrName, marked
from redco_flow.spec.names import failure
from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.secrets import secret_values
from redco_flow.spec.stage_kind import StageConfig, StageKind, find_stage_kind
from redco_flow.tracking.code_digest import (
    code_record,
    git_state,
    module_digests,
    source_digests,
)
from redco_flow.tracking.file_digests import (
    NAMED_BY,
    digest_files,
    digest_named_files,
    digests_of_named_files,
)
from redco_flow.tracking.results import fingerprint
from redco_flow.tracking.workspace import Workspace

_Answer = TypeVar("_Answer")
_Keys = list[list[str]]  # of settings


@dataclass
class Sources:
    """Code and raw data as they are now, each looked at once: for what is planned in one go."""

    _code: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    _data: dict[tuple[str, str], tuple[dict[str, Any], _Keys]] = field(default_factory=dict)

    def code(self, kind: StageKind, stage: ResolvedStage) -> dict[str, str]:
        """The digests of a stage's source files, and of the modules that its code imports."""
        modules = (*kind.modules, *_ask(stage, kind.code_modules))
        if modules not in self._code:
            self._code[modules] = module_digests(modules)
        return {**self._code[modules], **source_digests(_ask(stage, kind.code_files))}

    def data(self, kind: StageKind, stage: ResolvedStage, workspace: Workspace) -> dict[str, Any]:
        """The ingredients `data` and, where there are any, `directories`."""
        key = (stage.kind, stage.config.model_dump_json())
        if key not in self._data:
            self._data[key] = _data(kind, stage, workspace)
        data, directories = self._data[key]
        return {"data": dict(data), **({"directories": directories} if directories else {})}


def stage_ingredients(
    stage: ResolvedStage,
    input_ids: Mapping[str, Sequence[str]],
    workspace: Workspace,
    sources: Sources | None = None,
) -> dict[str, Any]:
    """Return the stage's ingredients, ready for `tracking.results.fingerprint`.

    Args:
        stage: as the pipeline was resolved.
        input_ids: artifact ids by input slot, in the order of the pipeline's references.
        workspace: its cache remembers the digests of data files.
        sources: what was looked at before; None means that all is looked at now.

    Raises:
        WorkspaceError: a data file is missing or unreadable.
        UsageError: a module that the stage's code names does not exist or cannot be imported, or
            the stage kind's own functions fail.
    """
    kind = find_stage_kind(stage.kind)
    sources = sources or Sources()
    return {
        "kind": stage.kind,
        "settings": dict(stage.settings),
        "inputs": {slot: list(ids) for slot, ids in input_ids.items()},
        "code": sources.code(kind, stage),
        **sources.data(kind, stage, workspace),
    }


def identity_of(pipeline: ResolvedPipeline, workspace: Workspace, sources: Sources) -> str:
    """Return a digest of all settings, raw data and code: equal where nothing is new.

    What aliases name, and what stages make of each other, is no part of it.

    Raises:
        WorkspaceError, UsageError: as `stage_ingredients`.
    """
    stages = pipeline.stages.items()
    return digest_json(
        {name: fingerprint(stage_ingredients(one, {}, workspace, sources)) for name, one in stages}
    )


def _data(
    kind: StageKind, stage: ResolvedStage, workspace: Workspace
) -> tuple[dict[str, Any], _Keys]:
    """Digests of data files by name (`_data_names`), of the files that their rows name, one for
    each data file, and the identity of data that is not in files; and the settings of
    `digested_directories`.

    A folder's name is no part of it: the same file elsewhere is the same data.
    """
    paths = _ask(stage, kind.data_files)
    digests = digest_files(workspace, paths)
    names = list(_unique_names(_data_names(stage.config, paths)))
    named = {name: digests[path] for name, path in zip(names, paths, strict=True)}
    for path, files in _ask(stage, kind.named_files, workspace).items():
        found = digests_of_named_files(workspace, path, files)
        named[f"{NAMED_BY} {names[paths.index(path)]}"] = digest_named_files(files, found)
    references = list(_ask(stage, kind.hub_references))
    data = {**named, **_ask(stage, kind.data_identity), **hub_identities(references)}
    return data, digested_directories(references, paths)


def digested_directories(references: Iterable[HubReference], data_files: Iterable[Path]) -> _Keys:
    """Return the keys of the settings that hold the path of a model's directory and no more.

    All files that the model is read from are among the stage's data files, so that their digests
    identify it wherever it is.
    """
    digested = {path.absolute() for path in data_files}
    return [
        [*one.section, one.key]
        for one in references
        # A stage kind's own class may be without `files`.
        if one.is_local and (files := getattr(one, "files", ())) and digested.issuperset(files)
    ]


def hub_identities(references: Iterable[HubReference]) -> dict[str, Any]:
    """Return, by a name for people, what identifies the repositories that a stage reads.

    Raises:
        UsageError: one of them is at no commit yet, so that it could change from stage to stage.
    """
    identities: dict[str, Any] = {}
    for one in references:
        if one.is_local:
            continue
        if not is_commit(one.revision):
            raise UsageError(
                f"{one.kind} '{one.name}' of the hub is at no commit: pin the pipeline first "
                "(redco_flow.orchestrate.pins.hub.HubPins), or give its revision as a commit."
            )
        subset = {"subset": one.subset} if one.subset else {}
        identities[f"hub:{one.kind}s/{one.name}"] = {"commit": one.revision, **subset}
    return identities


def _ask(stage: ResolvedStage, function: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """Ask a stage kind about a stage."""
    try:
        return function(stage.config, *arguments)
    except RedcoFlowError:
        raise
    except (ValueError, OSError) as error:  # what kinds say of their data and modules
        raise UsageError(f"stage '{stage.name}': {error}") from error
    except Exception as error:
        name = f"{function.__module__}.{function.__name__}"
        raise UsageError(f"stage '{stage.name}': {name} failed{failure(error)}") from error


def _data_names(config: StageConfig, paths: Sequence[Path]) -> Iterator[str]:
    """Yield each file's name: in a folder that the settings name, the path below that folder.

    A folder inside of it may be a class or a split. Of several such folders, the setting's key
    comes first.
    """
    folders = _data_folders(config)
    for path in paths:
        text = str(path.absolute())
        key = next((key for key, folder in folders.items() if text.startswith(folder)), None)
        if key is None:
            yield path.name
        else:
            below = text.removeprefix(folders[key])
            yield below if len(folders) == 1 else f"{key}/{below}"


def _data_folders(config: StageConfig) -> dict[str, str]:
    """Return the folders of data that the settings name, by key, each ending in a slash."""
    found: dict[str, str] = {}
    names = {path for path, _ in marked(config, ContentOrName)}  # or files, but no folders
    for path, value in marked(config, ContentOf):
        if path in names:
            continue
        key = ".".join(path)
        if isinstance(value, dict):
            found |= {f"{key}.{name}": text for name, text in value.items()}
        elif isinstance(value, str):
            found[key] = value
    data = getattr(config, "data", None)
    if isinstance(data, DataSection):
        of_parts = {name: part.dataset for name, part in data.mixture.items()}
        found |= of_parts | ({"dataset": data.dataset} if data.dataset else {})
    folders = {key: expanded(text) for key, text in found.items()}
    return {key: f"{one.absolute()}/" for key, one in folders.items() if is_folder(one)}


def _unique_names(names: Iterable[str]) -> Iterator[str]:
    """Yield each name; the second of a name gets `#2`, the third `#3`."""
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        count = seen[name]
        yield f"{name}#{count}" if count > 1 else name


_FILE_BEGINS = re.compile(r"^(?=diff --git )", re.MULTILINE)
_SECRET_FILE = re.compile(
    r"\.env(?:\..*|rc)?|.*\.env|\.netrc|\.pgpass|\.my\.cnf|\.npmrc|\.pypirc|\.htpasswd|credentials(?:\.[a-z]+)?"
    r"|.*\.(?:pem|key|p12|pfx|jks|keystore)|id_(?:rsa|dsa|ecdsa|ed25519)|secrets?\.[a-z]+"
)
# A changed or an unchanged line of a hunk: a name and "=" or ":" stay, what follows goes.
_VALUE = re.compile(
    r"^(?P<kept>[ +-](?:[ \t]*(?:export[ \t]+)?[A-Za-z_][\w.-]*[ \t]*[=:])?)(?![ \t]*#)[ \t]*\S.*$",
    re.MULTILINE,
)


SUBMITTED_CODE = ".submission/code.json"
"""The code's state in a folder that was submitted from another machine, by its path there."""


@dataclass(frozen=True)
class CodeState:
    """The repository around a directory.

    Args:
        record: commit, dirty, patch_digest; empty where there is no commit.
        patch: what code.patch holds; empty where the code is the commit's.
    """

    record: dict[str, Any]
    patch: str

    @classmethod
    def read(cls, directory: Path) -> CodeState:
        """Ask git once, for all runs that one command starts.

        In a folder that was submitted from another machine, return the state that was read there.
        """
        if (submitted := read_json_if_present(directory / SUBMITTED_CODE)) is not None:
            return cls(submitted["record"], submitted["patch"])
        code = git_state(directory)
        patch = _without_secrets(code.get("patch", ""))
        return cls(code_record(code | {"patch": patch} if code else {}), patch)

    def write_patch(self, path: Path) -> None:
        """Write a run's code.patch, for its owner's eyes alone; nothing where there is none.

        Raises:
            OSError: names the path.
        """
        if not self.patch:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(self.patch)
            file.flush()
            os.fsync(file.fileno())


def _without_secrets(patch: str) -> str:
    """The patch without known secrets, what looks like one, and the values of `.env` files."""
    files = _FILE_BEGINS.split(patch)  # what stands before the first, then one each
    hidden = (_without_values(file) if _holds_secrets(file) else file for file in files)
    return redact_text("".join(hidden), secret_values(os.environ))


def _holds_secrets(file: str) -> bool:
    """Whether a file's part of a patch is of a kind of file whose every value may be a secret."""
    return any(map(is_secret_file, _names(file)))


def is_secret_file(name: str) -> bool:
    """Whether a file of this name is of a kind whose every value may be a secret."""
    return _SECRET_FILE.fullmatch(name) is not None


def _names(file: str) -> list[str]:
    header = file.partition("\n@@")[0].splitlines()
    paths = [line[4:] for line in header if line.startswith(("--- ", "+++ "))]
    return [path.strip('"\t').rpartition("/")[2] for path in paths]


def _without_values(file: str) -> str:
    hunks = file.find("\n@@") + 1
    # Behind its numbers a hunk's first line repeats a line of the file.
    shown = re.sub(r"^(@@ [^@\n]* @@).*$", r"\1", file[hunks:], flags=re.MULTILINE)
    return file[:hunks] + _VALUE.sub(r"\g<kept>[redacted]", shown) if hunks else file
