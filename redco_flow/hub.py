"""Ask the Hugging Face hub what a name means now, and get the files of one commit.

A commit never changes, so what the cache holds of it completely is taken without a request.
huggingface_hub, and with it the variables HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE, is read late.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from redco_flow.bounded import while_growing, within
from redco_flow.hub_guard import UnsafeHub, check_inside, guard_downloads
from redco_flow.records import read_json, read_json_if_present

Kind = Literal["model", "dataset"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS_TO_ANSWER = 10.0  # for one read
_SECONDS_FOR_ALL = 60.0
_LEAST_BYTES_PER_SECOND = 1024
_SECONDS_OF_SLOWNESS = 300.0
_CONFIG_FILE = "config.json"
_SHARED_BLOBS = "blobs"  # in the cache: files from Xet storage, which repositories link to


class HubError(ValueError):
    """The hub refuses or lacks what was asked for; the message says what to do."""


class HubUnreachable(HubError):
    """The hub does not answer, or is not to be asked."""


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository.

    Args:
        files: paths in it; of a cached one those that are in the cache.
        config: what is known of a model's config.json; None where nothing is.
        card: the metadata at the top of a dataset's README.md.
        folder: where a cached one's files are.
    """

    commit: str
    files: frozenset[str]
    config: Any = None
    card: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


class HubFailing(HubUnreachable):
    """The hub answers with an error of its own; of another repository it may not."""


def is_commit(revision: str | None) -> bool:
    """Tell whether a revision is a whole commit hash, which always means the same."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def is_hub_name(name_or_path: str) -> bool:
    """Tell whether a name that is no directory is a hub id rather than a path."""
    is_path = Path(name_or_path).is_absolute() or name_or_path.startswith((".", "~"))
    return not is_path and name_or_path.count("/") <= 1


def check_name(kind: Kind, name: str) -> None:
    """Refuse a name that no repository can have; nothing is asked of the hub.

    Raises:
        HubError: says what is wrong with the name.
    """
    from huggingface_hub.utils._validators import validate_repo_id

    with _explained(kind, name, None):
        validate_repo_id(name)


def look_up(kind: Kind, name: str, revision: str | None) -> Snapshot:
    """Ask the hub, once and without retries, which commit a revision is, and which files it has.

    Raises:
        HubUnreachable: no answer within seconds, or HF_HUB_OFFLINE.
        HubError: gated, gone, private, or without that revision.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    with _explained(kind, name, revision):
        ask: Callable[..., Any] = api.model_info if kind == "model" else api.dataset_info
        info = within(
            _SECONDS_FOR_ALL, lambda: ask(name, revision=revision, timeout=_SECONDS_TO_ANSWER)
        )
        if info.gated:  # what a repository holds is public; its files may not be
            _check_access(kind, name)
        if not is_commit(info.sha):
            raise ValueError(f"{info.sha!r:.80} is not a commit")
        files = frozenset(str(file.rfilename) for file in info.siblings or ())
        card = getattr(info, "card_data", None) if kind == "dataset" else None
        metadata = card.to_dict() if card else {}
    return Snapshot(info.sha, files, getattr(info, "config", None), metadata)


def config_in(folder: Path, file: str = _CONFIG_FILE) -> Any:
    """Return the content of a model directory's config.json; None where it cannot be read.

    Args:
        file: another one of JSON.
    """
    try:
        return read_json(folder / file)
    except (OSError, ValueError):
        return None


def endpoint() -> str:
    """Return the hub's address."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def cache_directory() -> Path:
    """Return where huggingface_hub keeps what it has downloaded."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_files(kind: Kind, name: str) -> tuple[Path, Path]:
    """Return where a repository's files are: its own cache, and the store that all share."""
    return _repository_cache(kind, name), cache_directory() / _SHARED_BLOBS


def cached_reference(kind: Kind, name: str, revision: str | None) -> tuple[float, str] | None:
    """Return when, and as which commit, other programs last downloaded a branch or tag."""
    path = _repository_cache(kind, name) / "refs" / (revision or "main")
    try:
        return path.stat().st_mtime, path.read_text().strip()
    except (OSError, ValueError):
        return None


def cached_snapshot(kind: Kind, name: str, commit: str) -> Snapshot | None:
    """Return what the cache holds of a commit; None where a dataset, or all of a model, is not."""
    folder = snapshot_folder(kind, name, commit)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if kind == "dataset":
        is_there = bool(files - {"README.md"}) or any(prepared_datasets(commit))
    else:
        is_there = bool(files)
    if not is_there:
        return None
    card = _card_in(folder) if kind == "dataset" else {}
    return Snapshot(commit, frozenset(files), config_in(folder), card, folder)


def _card_in(folder: Path) -> dict[str, Any]:
    """The metadata of a dataset's README.md; empty where there is none that can be read."""
    from huggingface_hub import DatasetCard

    try:
        return dict(DatasetCard.load(folder / "README.md").data.to_dict())
    except (OSError, ValueError, TypeError):
        return {}


def prepared_datasets(commit: str) -> Iterator[Path]:
    """Yield the directories of Arrow files that `datasets` has made of a commit's subsets."""
    from huggingface_hub import constants

    home = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    for info in sorted(Path(home).expanduser().glob(f"*/*/*/{commit}/dataset_info.json")):
        yield info.parent


def whole_download(
    kind: Kind, name: str, commit: str, patterns: Sequence[str] = ("*",)
) -> Path | None:
    """Return the cached files of a commit where all that fit the patterns are known to be there."""
    import huggingface_hub

    try:
        huggingface_hub.get_cached_repo_tree(name, repo_type=kind, revision=commit)
        folder = huggingface_hub.snapshot_download(
            name,
            repo_type=kind,
            revision=commit,
            allow_patterns=list(patterns),
            local_files_only=True,
        )
    except (huggingface_hub.errors.CachedRepoTreeNotFoundError, OSError, ValueError):
        return None
    return Path(folder)


def dataset_listing(name: str, commit: str, patterns: Sequence[str]) -> tuple[list[str], Path]:
    """Return the paths of a dataset's files, and a folder with those that fit the patterns.

    Raises:
        HubUnreachable: neither the hub nor its cache has the list.
        HubError: the hub refuses.
    """
    import huggingface_hub

    folder = download_dataset(name, commit, patterns)
    try:
        tree = huggingface_hub.get_cached_repo_tree(name, repo_type="dataset", revision=commit)
    except huggingface_hub.errors.CachedRepoTreeNotFoundError as error:
        raise HubUnreachable(f"the list of the files of {name} is not in the cache") from error
    return sorted(file.path for file in tree), folder


def download_dataset(name: str, commit: str, patterns: Sequence[str]) -> Path:
    """Return the folder with a dataset's files that fit the patterns, from the cache or the hub.

    Raises:
        HubUnreachable: neither has them.
        HubError: gated, gone, or broken off.
    """
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    if folder := whole_download("dataset", name, commit, patterns):
        return folder
    try:
        with _explained("dataset", name, commit):
            return _fetch("dataset", name, commit, patterns)
    except HubUnreachable as error:
        cause = error.__cause__
        if isinstance(cause, httpx.HTTPError) and not isinstance(cause, httpx.ConnectError):
            raise broken_off("dataset", name, commit, cause) from error
        raise


def broken_off(kind: Kind, name: str, commit: str, error: BaseException) -> HubError:
    """The error about a download that ended in the middle."""
    return HubError(
        f"the download of {kind} '{name}' at {commit} broke off: {type(error).__name__}: {error}. "
        "A new attempt (`redco-flow retry`) fetches the files that are not whole."
    )


def download_model(
    name: str, revision: str | None, patterns: Sequence[str], is_whole: Callable[[Path], bool]
) -> Path:
    """Return the directory of a model's files, from the cache or the hub.

    Args:
        patterns: which files.
        is_whole: tells of a directory whether all is there that is needed: what other programs
            have cached may be a part.

    Raises:
        HubError: gated, gone, broken off, or neither reachable nor cached.
    """
    if is_commit(revision) and (folder := whole_download("model", name, str(revision), patterns)):
        return folder
    try:
        commit = look_up("model", name, revision).commit
    except HubUnreachable as error:
        if is_commit(revision):
            folder = snapshot_folder("model", name, str(revision))
            if folder.is_dir() and is_whole(folder):
                return folder
        raise HubUnreachable(not_cached("model", name, revision, error)) from error
    try:
        with _explained("model", name, commit):
            folder = _fetch("model", name, commit, patterns)
    except HubUnreachable as error:
        raise HubError(
            f"the download of model '{name}' at {commit} broke off: {error}. A new "
            "attempt (`redco-flow retry`) fetches the files that are not whole."
        ) from error
    if not is_whole(folder):
        raise HubError(f"the download of model '{name}' at {commit} is not whole: {folder}.")
    return folder


def fetch_config(name: str, commit: str) -> None:
    """Get a model's config.json into the cache; leave it out where the hub does not give it."""
    if not (snapshot_folder("model", name, commit) / _CONFIG_FILE).is_file():
        with suppress(HubError), _explained("model", name, commit):
            _fetch("model", name, commit, (_CONFIG_FILE,))


def _fetch(kind: Kind, name: str, commit: str, patterns: Sequence[str]) -> Path:
    """Download files into the cache; refuse a download that stalls, or that leaves the cache."""
    import huggingface_hub

    cache, *_ = folders = cached_files(kind, name)
    folder = Path(
        while_growing(
            lambda: huggingface_hub.snapshot_download(
                name, repo_type=kind, revision=commit, allow_patterns=list(patterns)
            ),
            lambda: _num_bytes(cache),
            bytes_per_second=_LEAST_BYTES_PER_SECOND,
            seconds=_SECONDS_OF_SLOWNESS,
        )
    )
    check_inside(folder, *folders)
    return folder


def check_upload(name: str) -> None:
    """Refuse what no upload of a model could be made with, before any work is done.

    Raises:
        HubError: the name is none, there is no token, or HF_HUB_OFFLINE.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    with _explained("model", name, None):
        validate_repo_id(name)
        if name.count("/") != 1:
            raise HubError(f"'{name}' is no name of a repository to push to: ORG/NAME.")
        if constants.HF_HUB_OFFLINE:
            raise huggingface_hub.errors.OfflineModeIsEnabled
    if huggingface_hub.get_token() is None:
        raise HubError(
            f"to push to {endpoint()} needs a token that may write: set HF_TOKEN, or use "
            "`hf auth login`."
        )


_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
)


def other_weights(name: str, folder: Path, record: str) -> list[str]:
    """Return the files of weights of an earlier export, which a directory has not.

    transformers would load them in place of the directory's.

    Args:
        record: the file that every export has.

    Raises:
        HubUnreachable: it does not answer.
        HubError: the repository is no export and has weights, or it is the base of this adapter.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    with _explained("model", name, None):
        try:
            files = huggingface_hub.HfApi().list_repo_files(name)
        except RepositoryNotFoundError:
            return []
    kept = {path.name for path in folder.iterdir()}
    weights = [one for one in files if any(fnmatch(one, each) for each in _WEIGHT_FILES)]
    others = [one for one in weights if one not in kept]
    adapter = read_json_if_present(folder / "adapter_config.json") or {}
    is_base = adapter.get("base_model_name_or_path") == name
    if weights and (record not in files or is_base):
        raise HubError(
            f"{name} holds another model ({', '.join(weights[:3])}): push to another repository, "
            "or delete these files there."
        )
    return others


def upload_model(
    name: str, folder: Path, message: str, *, is_private: bool, deleted: Sequence[str] = ()
) -> str:
    """Make a directory's files a commit of a model repository, which is made where there is none.

    Files that the repository has already are not sent again.

    Args:
        deleted: files that the commit deletes.

    Returns:
        The address of the commit.

    Raises:
        HubUnreachable: it does not answer.
        HubError: it refuses.
    """
    import huggingface_hub
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    api = huggingface_hub.HfApi()
    with _explained("model", name, None):
        api.create_repo(name, private=is_private or None, exist_ok=True)
        try:
            done = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message=message,
                delete_patterns=list(deleted) or None,
            )
        except RuntimeError as error:  # of one file, around what the hub answered
            if isinstance(error.__cause__, OSError | httpx.HTTPError):
                raise error.__cause__ from error
            raise HubFailing(f"{endpoint()} did not take {name}: {error}") from error
    return str(done.commit_url)


def not_cached(kind: Kind, name: str, revision: str | None, error: Exception) -> str:
    """Say that a repository can be had neither from the hub nor from the cache, and what to do."""
    is_dataset = " --repo-type dataset" if kind == "dataset" else ""
    at = f" --revision {revision}" if revision else ""
    return (
        f"{error}, and {kind} '{name}' at {revision or 'main'} is not in the cache "
        f"({cache_directory()}). Where there is a network, `hf download{is_dataset} {name}{at}` "
        "fills it (HF_HOME says where it is); HF_ENDPOINT names a mirror; a local directory needs "
        "no hub."
    )


def snapshot_folder(kind: Kind, name: str, commit: str) -> Path:
    """Return where the cache has a commit's files, if it has some."""
    return _repository_cache(kind, name) / "snapshots" / commit


def _repository_cache(kind: Kind, name: str) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return cache_directory() / repo_folder_name(repo_id=name, repo_type=kind)


def _num_bytes(folder: Path) -> int:
    """Return a number that grows with the files below a folder, and those that it links to.

    A complete file may move to the shared store, and a file may be allocated before it is written.
    """
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            found = path.stat()
            total += found.st_size + found.st_blocks * 512
    return total


def guard() -> None:
    """Have answers of the hub checked before a library that asks it writes files of them.

    Raises:
        HubError: its address is not safe.
    """
    try:
        guard_downloads(endpoint())
    except UnsafeHub as error:
        raise HubError(str(error)) from error


def _check_access(kind: Kind, name: str) -> None:
    """Raise the hub's error where the token, if any, may not read a gated repository."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    address = f"{endpoint()}/api/{kind}s/{name}/auth-check"
    headers = build_hf_headers()
    hf_raise_for_status(get_session().get(address, headers=headers, timeout=_SECONDS_TO_ANSWER))


@contextmanager
def _explained(kind: Kind, name: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into errors that say what to do."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    at, what = endpoint(), f"{kind} '{name}'"
    page = f"{at}/datasets/{name}" if kind == "dataset" else f"{at}/{name}"
    guard()
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"{what} is gated: its owners grant access at {page}; then set HF_TOKEN, or use "
            "`hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what} has no revision '{revision}' at {at}.") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"there is no {what} at {at}, or it is private: then set HF_TOKEN, or use "
            "`hf auth login`."
        ) from error
    except errors.HFValidationError as error:
        raise HubError(f"{what} is no name of a repository on the hub: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise HubUnreachable("HF_HUB_OFFLINE forbids to ask the hub") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise HubError(
                f"{at} refuses {what} (HTTP {status}): is the token in HF_TOKEN still valid?"
            ) from error
        raise HubFailing(f"{at} answered HTTP {status} to {what}") from error
    except (httpx.HTTPError, OSError) as error:
        is_of_the_disk = isinstance(error, OSError) and error.errno is not None
        if is_of_the_disk and not isinstance(error, ConnectionError | TimeoutError):
            raise
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise HubUnreachable(f"{at} did not answer ({cause})") from error
    except UnsafeHub as error:
        raise HubError(str(error)) from error
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise HubError(
            f"{at} gave an answer about {what} that cannot be read ({cause[:200]}); is HF_ENDPOINT "
            "the address of a hub?"
        ) from error
