"""Read the rows of a dataset of the hub, from the hub or its cache, at one commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redco_flow import hub
from redco_flow.stages.data.rows import FileRow

_HUB_BATCH_ROWS = 1000


def hub_class_names(split: Any) -> dict[str, list[str]]:
    """Return the names of the classes of a split's columns that `datasets` calls ClassLabel."""
    from datasets import ClassLabel

    features = split.features.items()
    return {name: list(kind.names) for name, kind in features if isinstance(kind, ClassLabel)}


def hub_rows(split: Any) -> Iterator[FileRow]:
    """Yield the rows of a split that `datasets` has loaded, images as their files."""
    split, line = _with_images_as_files(split), 0
    for batch in split.iter(batch_size=_HUB_BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            line += 1
            yield FileRow(line, dict(zip(batch, values, strict=True)))


def _with_images_as_files(split: Any) -> Any:
    """Leave images as the bytes of their files."""
    from datasets import Image

    features = split.features.items()
    for name in [name for name, kind in features if isinstance(kind, Image)]:
        split = split.cast_column(name, Image(decode=False))
    return split


def open_hub_dataset(name: str, subset: str | None, revision: str | None) -> Any:
    """Return the splits of a dataset, by name, ready to be read.

    Args:
        revision: of a run's stages the commit that the run is pinned to.

    Raises:
        HubError: neither the hub nor its cache gives that commit; says what to do.
    """
    if hub.is_commit(revision):
        commit = str(revision)
        cached = _open_prepared(name, subset, commit) or _open_downloaded(name, subset, commit)
        if cached is not None:
            return cached
    try:
        commit = hub.look_up("dataset", name, revision).commit
    except hub.HubUnreachable as error:
        raise hub.HubUnreachable(hub.not_cached("dataset", name, revision, error)) from error
    return _download(name, subset, commit)


def _download(name: str, subset: str | None, commit: str) -> Any:
    import datasets
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    try:
        builder = datasets.load_dataset_builder(name, subset, revision=commit)
        if builder.hash != commit:
            raise OSError("the hub no longer answers, and the cache has another commit")
        builder.download_and_prepare()
    except (httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and not _is_of_network(error):
            raise
        raise hub.HubError(
            f"the download of dataset '{name}' at {commit} broke off: {type(error).__name__}: "
            f"{error}. A new attempt (`redco-flow retry`) fetches the files that are not whole."
        ) from error
    return builder.as_dataset()


def _is_of_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError)


def _open_prepared(name: str, subset: str | None, commit: str) -> Any:
    """The Arrow files that `datasets` made of the subset before; None where it has not."""
    wanted = subset or _default_subset(name, commit)
    for folder in hub.prepared_datasets(commit):
        subset_found, version, _ = folder.parts[-3:]
        if subset_found == wanted:
            from datasets.packaged_modules.cache.cache import Cache

            builder = Cache(
                dataset_name=name.rpartition("/")[2],
                config_name=subset_found,
                version=version,
                hash=commit,
                repo_id=name,
            )
            if Path(builder.cache_dir).is_dir():  # a copy of a repository has the same commits
                return builder.as_dataset()
    return None


def _default_subset(name: str, commit: str) -> str:
    """The subset that a dataset's card makes the default, as `datasets` reads it."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, try_to_load_from_cache

    path = try_to_load_from_cache(name, "README.md", repo_type="dataset", revision=commit)
    if not isinstance(path, str):
        return "default"
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(Path(path)).data)
    return str(configs.get_default_config_name() or "default")


def _open_downloaded(name: str, subset: str | None, commit: str) -> Any:
    """The dataset from a whole download of its repository (`hf download`); None without one."""
    folder = hub.whole_download("dataset", name, commit)
    if folder is None:
        return None
    import datasets

    return datasets.load_dataset(str(folder), subset)
