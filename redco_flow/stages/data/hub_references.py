"""Which repositories of the hub a stage's `model` and `data` sections name, and their commits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.hub import HubError, Kind, is_commit, is_hub_name
from redco_flow.local_paths import expanded, is_folder
from redco_flow.recipes.find import find_recipe_if_any
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.spec.stage_kind import StageConfig
from redco_flow.stages.data.source import hub_dataset
from redco_flow.stages.data.splits import unread_splits


@dataclass(frozen=True)
class HubReference:
    """One name in a Config that the hub, or a local directory, answers to.

    Args:
        section: the path of the mapping that has the name and its `revision`.
        key: the name's own key there.
        is_local: the name is a path on this machine; nothing is asked of the hub.
        reads_weights: the stage loads a model's parameters.
        reads_tokenizer: the stage loads its tokenizer.
        recipe: whose model it is, where config.json is to say its family; else empty.
        data: the section that names a dataset.
    """

    section: tuple[str, ...]
    key: str
    kind: Kind
    name: str
    revision: str | None
    is_local: bool = False
    reads_weights: bool = False
    reads_tokenizer: bool = False
    recipe: str = ""
    data: DataSection | None = None

    def unread_splits(self, card: Mapping[str, Any]) -> str:
        """Say which splits the stage will not read, by a dataset's card; empty where it reads all.

        Raises:
            HubError: the pipeline names a split that is not there.
        """
        if self.data is None or not (there := splits_in_card(card, self.data.subset)):
            return ""
        try:
            return unread_splits(self.data, there) or ""
        except ValueError as error:
            raise HubError(str(error)) from error


def hub_references(config: StageConfig) -> Iterator[HubReference]:
    """Yield what a stage's `model` and `data` sections name, local directories of models too."""
    model, data = getattr(config, "model", None), getattr(config, "data", None)
    own_tokenizer = data.tokenizer if isinstance(data, DataSection) else None
    recipe = getattr(config, "recipe", "")
    if isinstance(model, ModelSection) and model.name_or_path is not None:
        yield HubReference(
            ("model",),
            "name_or_path",
            "model",
            model.name_or_path,
            model.revision,
            is_local=_is_local(model.name_or_path),
            reads_weights=model.reads_weights and not model.from_scratch,
            reads_tokenizer=not model.reads_weights
            and own_tokenizer is None
            and _has_tokenizer(recipe),
            recipe=recipe if model.reads_weights and model.family is None else "",
        )
    if own_tokenizer is not None and (name := own_tokenizer.name_or_path) is not None:
        yield HubReference(
            ("data", "tokenizer"),
            "name_or_path",
            "model",
            name,
            own_tokenizer.revision,
            is_local=_is_local(name),
            reads_tokenizer=True,
        )
    if isinstance(data, DataSection) and (dataset := hub_dataset(data)) is not None:
        yield HubReference(("data",), "dataset", "dataset", dataset, data.revision, data=data)


def _has_tokenizer(recipe: str) -> bool:
    found = find_recipe_if_any(recipe)
    return found is None or found.has_tokenizer


def splits_in_card(card: Mapping[str, Any], subset: str | None) -> list[str]:
    """Return the names of a subset's splits by a dataset's card; empty where it does not say.

    Args:
        card: the metadata at the top of README.md, which anyone may have written.
    """
    configs = _named(card.get("configs"), subset)
    files = configs.get("data_files")
    splits = files
    if not isinstance(files, list):
        splits = _named(card.get("dataset_info"), subset).get("splits")
    ones = (
        [one for one in splits or () if isinstance(one, dict)] if isinstance(splits, list) else []
    )
    found = [one.get("split", one.get("name")) for one in ones]
    return [str(name) for name in dict.fromkeys(found) if name is not None]


def _named(entries: Any, subset: str | None) -> dict[str, Any]:
    """The entry of a subset, or of the one that is read without a name."""
    listed = entries if isinstance(entries, list) else [entries]
    known = [one for one in listed if isinstance(one, dict)]
    if subset is not None:
        known = [one for one in known if one.get("config_name", "default") == subset]
    defaults = [one for one in known if one.get("default") or one.get("config_name") == "default"]
    return next(iter(defaults or known[: len(known) == 1]), {})


def hub_identities(config: StageConfig) -> dict[str, Any]:
    """Return, by a name for people, what identifies the repositories that a stage reads.

    Raises:
        UsageError: one of them is at no commit yet, so that it could change from stage to stage.
    """
    identities: dict[str, Any] = {}
    for one in hub_references(config):
        if one.is_local:
            continue
        if not is_commit(one.revision):
            raise UsageError(
                f"{one.kind} '{one.name}' of the hub is at no commit: pin the pipeline first "
                "(redco_flow.orchestrate.pins.hub.HubPins), or give its revision as a commit."
            )
        named = one.data and one.data.subset
        subset = {"subset": named} if named else {}
        identities[f"hub:{one.kind}s/{one.name}"] = {"commit": one.revision, **subset}
    return identities


def _is_local(name: str) -> bool:
    """Whether the name of a model is a path: what exists, or looks like one."""
    return not is_hub_name(name) or is_folder(expanded(name))
