"""The names on the Hugging Face hub in a stage's settings, as its kind declares them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from redco_flow.hub import Kind


class HubReference(Protocol):
    """One name in a Config that a repository of the hub, or a local directory, has."""

    @property
    def section(self) -> tuple[str, ...]:
        """The path of the mapping that has the name and its `revision`."""

    @property
    def key(self) -> str:
        """The name's own key in that mapping."""

    @property
    def kind(self) -> Kind:
        """A model or a dataset."""

    @property
    def name(self) -> str:
        """The repository, or the path of a directory."""

    @property
    def revision(self) -> str | None:
        """The branch, tag or commit; None means main."""

    @property
    def is_local(self) -> bool:
        """Whether the name is a path on this machine; nothing is asked of the hub."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The absolute paths of all files that a local model or tokenizer is read from.

        Where the stage's `data_files` has them all, their digests identify the model, and its
        directory's path is not part of the stage's fingerprint; empty: the path is a part.
        """

    @property
    def subset(self) -> str | None:
        """The part of a dataset that the stage reads; None: the only one, or a model."""

    def missing(self, files: frozenset[str], folder: Path | None) -> str:
        """Say what the stage needs that is not among the files; empty where nothing is missing.

        Args:
            files: names in the repository or directory.
            folder: of the hub's cache, where they are in it.
        """

    def model_problem(self, config: Any) -> str:
        """Say, by its config.json, why the stage cannot use a model; empty where it can."""

    def unread_splits(self, card: Mapping[str, Any]) -> str:
        """Say which splits the stage will not read, by a dataset's card; empty where it reads all.

        Raises:
            HubError: the pipeline names a split that is not there.
        """
