"""List a call's input files, and rewrite its paths for another workspace.

Pure apart from digesting raw data files, which the workspace's cache remembers. The fingerprint,
the ingredients and everything else that decides the result stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.launch.call import Call
from redco_flow.launch.hosts.file_sets import FileSet, HashedFile, checkpoint_sets
from redco_flow.records import digest_json
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.file_digests import digest_files, digests_of_named_files
from redco_flow.tracking.workspace import SHORT_DIGITS, Workspace

_NUM_CHECKPOINTS = 2  # the newest, and one to fall back to


@dataclass(frozen=True)
class CallFiles:
    """The input files of a call.

    Args:
        sets: input artifacts, raw data, and the checkpoints from which the stage resumes.
        sources: where each file of the raw data is on this machine, by BLAKE3.
        data_name: the folder's name of the raw data; "" where there is none.
    """

    sets: list[FileSet]
    sources: dict[str, Path]
    data_name: str = ""

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints."""
        return [int(one.record["step"]) for one in self.sets if one.kind == "checkpoint"]


def collect_inputs(call: Call, workspace: Workspace) -> CallFiles:
    """Collect what the call reads.

    Raises:
        ArtifactError: an input has been deleted.
        WorkspaceError: a data file is missing, unreadable, or just being changed.
        UsageError: a row of the data names a file by an absolute path.
    """
    store = ArtifactStore(workspace)
    sets: list[FileSet] = []
    sources: dict[str, Path] = {}
    for references in call.inputs.values():
        for reference in references:
            sets.append(FileSet.of_artifact(store.get(reference.id).manifest))
    data = _data_set(call, workspace)
    if data is not None:
        one, sources = data
        sets.append(one)
    work = call.fingerprint[:SHORT_DIGITS]
    newest = workspace.committed_steps(work)[-_NUM_CHECKPOINTS:]
    sets += checkpoint_sets(workspace, work, newest)
    for one in sets:
        if one.kind != "data":
            folder = one.folder(workspace)
            sources |= {entry.blake3: folder / entry.path for entry in one.files}
    return CallFiles(sets, sources, data[0].name if data is not None else "")


def rewrite_paths(call: Call, files: CallFiles, workspace: Workspace) -> Call:
    """Return the call for another host.

    Args:
        workspace: the host's; its paths need not exist here.
    """
    store_paths = {
        str(one.record["id"]): str(one.folder(workspace))
        for one in files.sets
        if one.kind == "artifact"
    }
    inputs = {
        slot: [replace(reference, path=store_paths[reference.id]) for reference in references]
        for slot, references in call.inputs.items()
    }
    config = call.config
    if files.data_name:
        folder = workspace.cache / "data" / files.data_name
        config = _moved(config, _data_files(call), folder)
    return replace(call, inputs=inputs, config=config, workspace=str(workspace.root))


def _data_files(call: Call) -> list[Path]:
    """The raw data that the config names, and a script with the modules beside it.

    What a module finds by itself, it finds there too.
    """
    kind = find_stage_kind(call.kind)
    config = kind.config_type.from_json(call.config)
    named = list(_texts(call.config))
    data = [p for p in kind.data_files(config) if any(_names_data(*one, [p]) for one in named)]
    return [*data, *kind.code_files(config).values()]


def _named_files(call: Call, workspace: Workspace) -> tuple[dict[Path, Path], dict[Path, str]]:
    """The files that rows of the raw data name, by where they belong, and their digests."""
    kind = find_stage_kind(call.kind)
    places: dict[Path, Path] = {}
    digests: dict[Path, str] = {}
    for data_file, named in kind.named_files(
        kind.config_type.from_json(call.config), workspace
    ).items():
        found = {path: one for path, one in named.items() if one is not None}
        if absolute := next((path for path in found if Path(path).is_absolute()), None):
            raise UsageError(
                f"{data_file}: a row names {absolute}, and absolute paths do not exist on other "
                "hosts: write paths that are relative to the data file."
            )
        places |= {one.named: one.real for one in found.values()}
        digests |= digests_of_named_files(workspace, data_file, found)
    return places, digests


def _texts(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the texts of a config with their keys."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*keys, key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, keys)
    elif isinstance(value, str):
        yield value, keys


def _data_set(call: Call, workspace: Workspace) -> tuple[FileSet, dict[str, Path]] | None:
    paths = _data_files(call)
    if not paths:
        return None
    named, named_digests = _named_files(call, workspace)
    places = {path: path for path in paths} | named
    digests = named_digests | digest_files(workspace, paths)
    files = [
        HashedFile(_below_root(place), real.stat().st_size, digests[real])
        for place, real in sorted(places.items())
    ]
    name = digest_json([(entry.path, entry.blake3) for entry in files])[:SHORT_DIGITS]
    return FileSet("data", name, files), {digests[real]: real for real in places.values()}


def _below_root(path: Path) -> str:
    return path.absolute().as_posix().lstrip("/")


def _moved(value: Any, files: list[Path], folder: Path, keys: tuple[str, ...] = ()) -> Any:
    """Return the config with the path on the host of each data file, and folder of some."""
    if isinstance(value, Mapping):
        return {key: _moved(item, files, folder, (*keys, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, files, folder, keys) for item in value]
    if isinstance(value, str) and _names_data(value, keys, files):
        return str(folder / _below_root(Path(value).expanduser()))
    return value


def _names_data(text: str, keys: tuple[str, ...], files: list[Path]) -> bool:
    """Whether a text of the config is the path of a data file, or of a folder of some.

    A relative path of a folder is one only at the keys that take names of folders: other texts
    (a split, a delimiter) may be spelled like a folder.
    """
    path = Path(text).expanduser()
    if not text or not (path.is_absolute() or path.exists()):
        return False
    place = path.absolute()
    if any(place == file.absolute() for file in files):
        return True
    is_folder = path.is_absolute() or keys[-1:] == ("name_or_path",) or _is_dataset(keys)
    return (
        is_folder
        and len(place.parts) > 1
        and any(place in file.absolute().parents for file in files)
    )


def _is_dataset(keys: tuple[str, ...]) -> bool:
    is_part = len(keys) == 4 and keys[:2] == ("data", "mixture")
    return keys[-1:] == ("dataset",) and (is_part or keys == ("data", "dataset"))
